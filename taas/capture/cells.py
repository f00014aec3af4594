"""Cells before they run: their syntax, which names are IPython's, and what ranks' shells have of the notebook's."""

from __future__ import annotations

import ast
import contextlib
import functools
import re
import sys
import types
import warnings
from collections.abc import Container, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

_HISTORY = re.compile(r"In|Out|_i{1,3}|_[iod]h|_i?\d+")
_MODULE = {
    *vars(type(re)("")), "__builtins__", "__builtin__", "__file__", "__cached__", "__warningregistry__",
}  # fmt: skip
_GIVEN = ("exit", "quit", "open", "get_ipython")
"""What IPython puts into every namespace, where the user may bind something else."""
_VALUE = re.compile(r"_{1,3}|_\d+")
_OUT = ("Out", "_oh")
_IMPORT = re.compile(r"(?:^|\\n|')[ \t]*(?:from|import)[ \t]+([\w.]+)", re.MULTILINE)
"""Found also in a body that a magic was given, as text."""
MAGIC = "%"


# ---------------------------------------------------------------- cells and names


@functools.cache
def _transformers() -> Any:
    from IPython.core.inputtransformer2 import TransformerManager

    return TransformerManager()


@functools.lru_cache(maxsize=16)  # a launch asks for it again and again
def python_of(cell: str) -> str:
    """Turn a cell into Python; line numbers stay right.

    A cell magic may stand below comments, as a header is one to Python; IPython knows it on the first line only.
    """
    cell = magic_on_top(cell)
    text: str = _transformers().transform_cell(cell)
    missing = _leading_blank(cell) - _leading_blank(text)
    return "\n" * missing + text


def magic_on_top(cell: str) -> str:
    """Blank the comments of a cell whose own first line is a cell magic."""
    lines = cell.split("\n")
    first = next((n for n, line in enumerate(lines) if line.strip() and not line.lstrip().startswith("#")), 0)
    return "\n" * first + "\n".join(lines[first:]) if lines[first].startswith("%%") else cell


def _leading_blank(text: str) -> int:
    return next((count for count, line in enumerate(text.splitlines()) if line.strip()), 0)


def check_syntax(cell: str, shell: InteractiveShell | None, number: int = 0) -> None:
    """Compile a cell, of ``In[number]`` or the next, as IPython would; so :class:`SyntaxError` shows before anything starts."""
    source = python_of(cell)
    flags = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
    if shell is None:
        compile(source, "<cell>", "exec", flags, dont_inherit=True)
        return
    name = shell.compile.cache(source, number or shell.execution_count, raw_code=cell)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)  # rank 0 shows them
        compile(source, name, "exec", flags | shell.compile.flags, dont_inherit=True)


def is_of_ipython(name: str, value: Any = None) -> bool:
    """Tell whether a name belongs to IPython or Python; a user's ``open``, or ``_`` of a loop, is the user's by its value."""
    if name in _GIVEN:
        home = getattr(value, "__globals__", {}).get("__name__", "")  # its ``open`` says that it is io's
        modules = (home, *(str(getattr(known, "__module__", "")) for known in (value, type(value))))
        return any(module.startswith(("IPython.", "ipykernel.")) for module in modules)
    if name in ("_", "__", "___"):
        shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
        return shell is None or getattr(shell.displayhook, name, value) is value
    return name in _MODULE or _HISTORY.fullmatch(name) is not None


def users_names(namespace: Mapping[str, Any]) -> dict[str, Any]:
    """Return the names that are not :func:`is_of_ipython`, with what is bound to them."""
    return {name: value for name, value in namespace.items() if not is_of_ipython(name, value)}


# ---------------------------------------------------------------- shells


def values_of_cells(words: Iterable[str], namespace: dict[str, Any]) -> set[str]:
    """Return the names of earlier cells' values among the words of a cell; all of them where it reads ``Out``."""
    found = {word for word in words if _VALUE.fullmatch(word)}
    if not found.isdisjoint(_OUT) or any(word in _OUT for word in words):
        found |= {f"_{number}" for number in namespace.get("_oh", ())}
    return found & namespace.keys()


def magics_used(words: Iterable[str], shell: InteractiveShell | None) -> tuple[dict[str, Any], list[str]]:
    """Return of the magics among a cell's words the notebook's functions, as ``%line name``, and the extensions of others."""
    if shell is None:
        return {}, []
    magics = shell.magics_manager.magics.items()
    used = {f"{MAGIC}{kind} {w}": known[w] for kind, known in magics for w in words if w in known}
    functions = {name: magic for name, magic in used.items() if isinstance(magic, types.FunctionType)}
    own = {name: magic for name, magic in functions.items() if magic.__globals__ is shell.user_ns}
    homes = {getattr(magic, "__module__", "").partition(".")[0] for magic in used.values()}
    homes -= {"IPython", "ipykernel", "taas"}
    return own, [name for name in shell.extension_manager.loaded if name.partition(".")[0] in homes]


def history_of(shell: InteractiveShell | None) -> dict[str, Any]:
    """Return what was typed in earlier cells, ``In``, and which of ``_``, ``__`` and ``___`` are the shell's own."""
    if shell is None:
        return {}
    history, hook = shell.history_manager, shell.displayhook
    earlier = max(1, len(history.input_hist_parsed) - 1)
    return {
        "In": list(history.input_hist_parsed[:earlier]),
        "typed": list(history.input_hist_raw[:earlier]),
        "own": [name for name in ("_", "__", "___") if shell.user_ns.get(name) is getattr(hook, name, None)],
    }


def cell_numbers(shell: InteractiveShell | None) -> dict[str, int]:
    """Return ``In[n]`` of a shell's cells by file, which tracebacks show; IPython 7 has no numbers there."""
    numbers: dict[str, int] = {} if shell is None else vars(shell.compile).setdefault("_filename_map", {})
    return numbers


def dress(
    shell: InteractiveShell,
    namespace: dict[str, Any],
    history: dict[str, Any],
    extensions: list[str],
    magics: dict[str, Any],
) -> None:
    """Give a rank's shell what the notebook's has."""
    for name in extensions:
        with contextlib.suppress(ImportError):  # its magic is not found, which is said where it is used
            shell.extension_manager.load_extension(name)
    for name, function in magics.items():
        kind, _, magic = name.removeprefix(MAGIC).partition(" ")
        shell.register_magic_function(function, kind, magic)
    if history:
        manager, typed = shell.history_manager, history["typed"]
        manager.input_hist_parsed[:] = history["In"]
        manager.input_hist_raw[:] = typed
        manager._iii, manager._ii, manager._i, manager._i00 = ["", "", "", *typed][-4:]
        namespace.update({f"_i{number}": text for number, text in enumerate(typed) if number})
        namespace.update(_i=manager._i00, _ii=manager._i, _iii=manager._ii)
        for name in history["own"]:
            setattr(shell.displayhook, name, namespace.get(name, ""))
    values = [name for name in namespace if re.fullmatch(r"_\d+", name)]
    namespace.get("_oh", {}).update({int(name[1:]): namespace[name] for name in values})


# ---------------------------------------------------------------- what earlier cells imported


def modules_used(packages: Container[str], namespace: dict[str, Any]) -> list[str]:
    """Return the modules of some packages that earlier cells imported, to be imported before names are rebuilt.

    ``concurrent.futures`` is an attribute of ``concurrent`` then, and importing one may have changed its package's classes
    (``import fastai.distributed`` gives learners methods).
    """
    found = dict.fromkeys(module for cell in namespace.get("In", ()) for module in _IMPORT.findall(cell))
    return [n for n in found if "." in n and n in sys.modules and n.partition(".")[0] in packages]


def imported_by(cell: str) -> Iterator[str]:
    """Yield the modules below others that a cell imports: the notebook's packages get them as attributes, too."""
    for node in ast.walk(ast.parse(python_of(cell))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if "." in alias.name)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module
