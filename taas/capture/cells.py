"""Cells before they run: conversion to Python, IPython's own variables, and the ranks' shells."""

from __future__ import annotations

import ast
import contextlib
import functools
import re
import sys
import types
import warnings
from collections.abc import Collection, Container, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from taas.base.import_hooks import loaded
from taas.base.wording import shown
from taas.capture.environment import is_utf8

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

_BY_IPYTHON = re.compile(r"In|Out|_[iod]h|_{1,3}|_i{1,3}|_i?\d+|exit|quit|open|get_ipython")
"""Variables that IPython binds and rebinds."""
_MODULE = {
    "__name__", "__package__", "__loader__", "__spec__", "__builtins__", "__builtin__",
    "__cached__", "__warningregistry__",
}  # fmt: skip
_DOC = "Automatically created module for"
"""How the docstring begins that IPython gives to the notebook's namespace."""
_NOTHING = object()
_VALUE = re.compile(r"_{1,3}|_\d+")
_OUT = ("Out", "_oh")
_IMPORT = re.compile(r"(?:^|\\n|')[ \t]*(?:from|import)[ \t]+([\w.]+)", re.MULTILINE)
"""Matches imports, including those in the body of a cell magic, which is a string in the Python
code.
"""
MAGIC = "%"
OUT = "Out["
"""Prefixes of the keys for values that no variable holds: magics, and values of earlier cells."""


# ---------------------------------------------------------------- cells and names


@functools.cache
def _transformers() -> Any:
    from IPython.core.inputtransformer2 import TransformerManager

    return TransformerManager()


@functools.lru_cache(maxsize=16)  # called several times for one cell at a launch
def python_of(cell: str) -> str:
    """Convert a cell to Python code; line numbers stay the same.

    IPython recognises a cell magic only on the first line. The header is a comment in Python, so
    here the magic may also follow comments.
    """
    cell = magic_on_top(cell)
    text: str = _transformers().transform_cell(cell)
    missing = _leading_blank(cell) - _leading_blank(text)
    return "\n" * missing + text


def magic_on_top(cell: str) -> str:
    """Replace comments above a cell magic by blank lines; return other cells unchanged."""
    lines = cell.split("\n")
    first = next(
        (n for n, line in enumerate(lines) if line.strip() and not line.lstrip().startswith("#")), 0
    )
    return "\n" * first + "\n".join(lines[first:]) if lines[first].startswith("%%") else cell


def _leading_blank(text: str) -> int:
    return next((count for count, line in enumerate(text.splitlines()) if line.strip()), 0)


def check_syntax(cell: str, shell: InteractiveShell | None, number: int = 0) -> None:
    """Compile a cell as IPython would, to raise a :class:`SyntaxError` before anything starts.

    ``number`` is the cell's ``In[number]``; 0 stands for the next number.
    """
    source = python_of(cell)
    flags = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
    if shell is None:
        compile(source, "<cell>", "exec", flags, dont_inherit=True)
        return
    name = shell.compile.cache(source, number or shell.execution_count, raw_code=cell)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)  # rank 0 shows these warnings
        compile(source, name, "exec", flags | shell.compile.flags, dont_inherit=True)


def _current_shell() -> Any:
    ipython = loaded("IPython")
    return None if ipython is None else ipython.get_ipython()


def is_of_ipython(name: str, value: Any) -> bool:
    """Tell whether IPython or Python bound this value, and the user has not rebound it."""
    if name in _MODULE:
        return True
    if name == "__doc__":
        return value is None or (isinstance(value, str) and value.startswith(_DOC))
    if _BY_IPYTHON.fullmatch(name) is None or (shell := _current_shell()) is None:
        return False
    if name == "get_ipython":
        return isinstance(value, types.MethodType) and value.__self__ is shell
    if name == "open":
        # functools.wraps gave it the ``__module__`` of Python's ``open``
        home = getattr(value, "__globals__", {}).get("__name__")
        return home == "IPython.core.interactiveshell"
    bound = _bound_by(shell, name)
    return value is bound or (type(value) is str and value == bound)


def _bound_by(shell: Any, name: str) -> Any:
    """Return what a shell has bound to a history variable or ``exit``; a marker if nothing."""
    history = shell.history_manager
    if name in ("exit", "quit"):
        return shell.exiter
    if name in ("In", "_ih"):
        return history.input_hist_parsed
    if name in _OUT:
        return history.output_hist
    if name == "_dh":
        return history.dir_hist
    if not name.strip("_"):
        return getattr(shell.displayhook, name, _NOTHING)
    if not name.strip("_i"):
        return getattr(history, name, _NOTHING)
    number = name.lstrip("_i")
    if number != str(int(number)):  # ``_01``
        return _NOTHING
    if not name.startswith("_i"):
        return history.output_hist.get(int(number), _NOTHING)
    typed = history.input_hist_raw
    return typed[int(number)] if int(number) < len(typed) else _NOTHING


def is_name(key: Any) -> bool:
    """Tell whether a key of a namespace can be transferred: a plain ``str`` that is valid UTF-8."""
    return type(key) is str and (key.isascii() or is_utf8(key))


def users_names(namespace: Mapping[str, Any]) -> dict[str, Any]:
    """Return the variables, with values, that IPython does not bind (:func:`is_of_ipython`)."""
    return {
        name: value
        for name, value in namespace.items()
        if is_name(name) and not is_of_ipython(name, value)
    }


def keys_without_a_name(namespace: Mapping[Any, Any]) -> dict[str, Any]:
    """Return the values whose keys are not valid names, by the code for access (``[5]``)."""
    return {
        f"globals()[{shown(repr(key))}]": value
        for key, value in namespace.items()
        if not is_name(key)
    }


# ---------------------------------------------------------------- shells


def values_of_cells(
    words: Collection[str], namespace: dict[str, Any]
) -> tuple[set[str], dict[str, Any]]:
    """Return the variables that hold earlier cells' values and are needed, and values without one.

    A cell that reads ``Out`` needs all values. A value has no variable if the user has rebound its
    ``_5``.
    """
    names, beside = {word for word in words if _VALUE.fullmatch(word)}, {}
    if any(name in words and is_of_ipython(name, namespace.get(name)) for name in _OUT):
        for number, value in _current_shell().history_manager.output_hist.items():
            if namespace.get(f"_{number}", _NOTHING) is value:
                names.add(f"_{number}")
            else:
                beside[f"{OUT}{number}]"] = value
    return names & namespace.keys(), beside


def magics_used(
    words: Iterable[str], shell: InteractiveShell | None
) -> tuple[dict[str, Any], list[str]]:
    """Return the notebook's own magics that a cell uses, and the extensions of other magics.

    The magics are functions, keyed by ``%line name`` or ``%cell name``.
    """
    if shell is None:
        return {}, []
    magics = shell.magics_manager.magics.items()
    used = {f"{MAGIC}{kind} {w}": known[w] for kind, known in magics for w in words if w in known}
    functions = {
        name: magic for name, magic in used.items() if isinstance(magic, types.FunctionType)
    }
    own = {name: magic for name, magic in functions.items() if magic.__globals__ is shell.user_ns}
    homes = {getattr(magic, "__module__", "").partition(".")[0] for magic in used.values()}
    homes -= {"IPython", "ipykernel", "taas"}
    return own, [name for name in shell.extension_manager.loaded if name.partition(".")[0] in homes]


def typed_cells() -> list[str]:
    """Return the cells so far as Python, the running one last, even if ``In`` was rebound."""
    shell = _current_shell()
    return [] if shell is None else shell.history_manager.input_hist_parsed


def history_of(shell: InteractiveShell | None) -> dict[str, Any]:
    """Return the notebook's history: ``In``, the cells as typed, and the shell's value variables.

    Value variables are ``_`` and ``_5``. Those that the user has rebound are not included.
    """
    if shell is None:
        return {}
    history = shell.history_manager
    earlier = max(1, len(history.input_hist_parsed) - 1)
    return {
        "In": list(history.input_hist_parsed[:earlier]),
        "typed": list(history.input_hist_raw[:earlier]),
        "own": [
            n for n, value in shell.user_ns.items() if _is_of_value(n) and is_of_ipython(n, value)
        ],
    }


def _is_of_value(key: Any) -> bool:
    return isinstance(key, str) and _VALUE.fullmatch(key) is not None


def cell_numbers(shell: InteractiveShell | None) -> dict[str, int]:
    """Return a shell's ``In[n]`` by file, for tracebacks; IPython 7 does not record them."""
    numbers: dict[str, int] = (
        {} if shell is None else vars(shell.compile).setdefault("_filename_map", {})
    )
    return numbers


def prepare_shell(
    shell: InteractiveShell,
    namespace: dict[str, Any],
    history: dict[str, Any],
    extensions: list[str],
    beside: dict[str, Any],
    own: Collection[str],
) -> None:
    """Give a rank's shell the notebook's history and magics, but keep the variables in ``own``."""
    for name in extensions:
        # a cell that uses a magic of a missing extension gets IPython's own error
        with contextlib.suppress(ImportError):
            shell.extension_manager.load_extension(name)
    for name, function in beside.items():
        if not name.startswith(MAGIC):
            continue
        kind, _, magic = name.removeprefix(MAGIC).partition(" ")
        shell.register_magic_function(function, kind, magic)
    if history:
        manager, typed = shell.history_manager, history["typed"]
        manager.input_hist_parsed[:] = history["In"]
        manager.input_hist_raw[:] = typed
        manager._iii, manager._ii, manager._i, manager._i00 = ["", "", "", *typed][-4:]
        texts = {f"_i{number}": text for number, text in enumerate(typed) if number}
        texts |= {"_i": manager._i00, "_ii": manager._i, "_iii": manager._ii}
        namespace.update({name: text for name, text in texts.items() if name not in own})
        for name in history["own"]:
            if not name.strip("_"):
                setattr(shell.displayhook, name, namespace.get(name, ""))
            elif name in namespace:
                manager.output_hist[int(name[1:])] = namespace[name]
        values = {name: value for name, value in beside.items() if name.startswith(OUT)}
        manager.output_hist.update(
            {int(name[len(OUT) : -1]): value for name, value in values.items()}
        )


# ------------------------------------------------------------------- imports of earlier cells


def modules_used(packages: Container[str]) -> list[str]:
    """Return the submodules of some packages that earlier cells imported, to be imported in a rank.

    After ``import concurrent.futures``, ``futures`` is an attribute of ``concurrent``. An import
    may also have changed classes of its package: ``import fastai.distributed`` adds methods to
    learners.
    """
    found = dict.fromkeys(module for cell in typed_cells() for module in _IMPORT.findall(cell))
    return [n for n in found if "." in n and n in sys.modules and n.partition(".")[0] in packages]


def imported_by(cell: str) -> Iterator[str]:
    """Yield the submodules that a cell imports; the notebook gets them as package attributes."""
    for node in ast.walk(ast.parse(python_of(cell))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if "." in alias.name)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module
