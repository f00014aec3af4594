"""What cells say before they run: their syntax on its way to Python, and names and modules in their texts; what shells have of them.

Ranks' shells have of the notebook's ``In``, ``Out`` and ``_``, its magics and extensions.

Much of what code uses stands in texts: in magics, ``eval``, ``query``, ``globals()["x"]``, ``__main__.x``, annotations. Each
word of a text may be a name, and where code makes the text, it may be any.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import linecache
import re
import sys
import types
import warnings
from collections.abc import Container, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from taas.capture.code_by_value import words_in

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
    """Turn a cell into Python.

    A cell magic (``%%time``) may stand below comments and blank lines, as the header of a taas cell is
    comments to Python; IPython itself knows it on the first line only. Line numbers stay right.
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
    """Compile a cell as IPython would, so that a typing error shows before anything starts.

    Args:
        cell: the cell as typed.
        shell: whose compiler flags (``from __future__`` of earlier cells) count.
        number: its ``In[n]``; 0 for the shell's count.

    Raises:
        SyntaxError: as IPython raises it for an ordinary cell, with the cell's lines.
    """
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


def magics_used(
    words: Iterable[str], namespace: dict[str, Any], shell: InteractiveShell | None
) -> dict[str, Any]:
    """Return the magics that are functions of the notebook, and among a cell's words, as ``%line name``."""
    return {
        name: magic
        for name, magic in _magics_of(words, shell).items()
        if isinstance(magic, types.FunctionType) and magic.__globals__ is namespace
    }


def extensions_with(words: Iterable[str], shell: InteractiveShell | None) -> list[str]:
    """Return the extensions that have magics among a cell's words."""
    loaded = set() if shell is None else shell.extension_manager.loaded
    homes = {
        getattr(magic, "__module__", "").partition(".")[0] for magic in _magics_of(words, shell).values()
    }
    return [name for name in loaded if name.partition(".")[0] in homes - {"IPython", "ipykernel", "taas"}]


def _magics_of(words: Iterable[str], shell: InteractiveShell | None) -> dict[str, Any]:
    magics = {} if shell is None else shell.magics_manager.magics
    return {f"{MAGIC}{kind} {w}": known[w] for kind, known in magics.items() for w in words if w in known}


def history_of(shell: InteractiveShell | None) -> dict[str, Any]:
    """Return what was typed in earlier cells, ``In`` where that is something else, and which of ``_``, ``__`` and ``___`` are the shell's own."""
    if shell is None:
        return {}
    history, hook = shell.history_manager, shell.displayhook
    earlier = max(1, len(history.input_hist_parsed) - 1)
    typed = list(history.input_hist_raw[:earlier])
    both = enumerate(zip(history.input_hist_parsed[:earlier], typed, strict=True))
    return {
        "In": {number: python for number, (python, text) in both if python != text},
        "typed": typed,
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
        manager.input_hist_parsed[:] = [history["In"].get(number, text) for number, text in enumerate(typed)]
        manager.input_hist_raw[:] = typed
        manager._iii, manager._ii, manager._i, manager._i00 = ["", "", "", *typed][-4:]
        namespace.update({f"_i{number}": text for number, text in enumerate(typed) if number})
        namespace.update(_i=manager._i00, _ii=manager._i, _iii=manager._ii)
        for name in history["own"]:
            setattr(shell.displayhook, name, namespace.get(name, ""))
    values = [name for name in namespace if re.fullmatch(r"_\d+", name)]
    namespace.get("_oh", {}).update({int(name[1:]): namespace[name] for name in values})


# ---------------------------------------------------------------- what earlier cells imported


def modules_used(
    modules: Iterable[str], words: Iterable[str], found_in: Container[str], namespace: dict[str, Any]
) -> list[str]:
    """Return modules to import before names are rebuilt.

    They are those that are used as attributes of captured ones (``concurrent.futures`` of ``concurrent``), and those that
    earlier cells imported of packages that travel by reference: importing one may have changed the package's classes
    (``import fastai.distributed`` gives learners methods), and the cell may rely on it without a name of it.

    Args:
        modules: those that travel.
        words: of the cell, and of the functions that travel.
        found_in: the packages that something that travels is found in.
        namespace: the notebook's names.
    """
    waiting, found = [*modules], dict[str, None]()
    words = {*words}
    while waiting:
        parent = waiting.pop()
        if hasattr(sys.modules.get(parent), "__path__"):
            below = [f"{parent}.{word}" for word in words if f"{parent}.{word}" in sys.modules]
            found |= dict.fromkeys(below)
            waiting += below
    for module in (module for cell in namespace.get("In", ()) for module in _IMPORT.findall(cell)):
        if "." in module and module in sys.modules and module.partition(".")[0] in found_in:
            found[module] = None
    return list(found)


def imported_by(cell: str) -> Iterator[str]:
    """Yield the modules below others that a cell imports: the notebook's packages get them as attributes, too."""
    for node in ast.walk(ast.parse(python_of(cell))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if "." in alias.name)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module


# ---------------------------------------------------------------- names in texts

_ALL_NAMES = {"globals", "locals", "vars", "dir"}
_RUN_TEXT = {"eval", "exec", "ex", "ev", "run_cell"}
_MAGICS = {"run_line_magic", "run_cell_magic", "system", "getoutput"}
_HOLD_TEXT = {*_RUN_TEXT, *_MAGICS, "query", "timeit", "repeat", "Timer", "compile"}
_LOOKS_UP = {
    *_ALL_NAMES, *_HOLD_TEXT, "__main__", "modules", "user_ns", "get_ipython", "__import__", "import_module",
}  # fmt: skip
"""Functions without any of these names and attributes look nothing up."""
_LIST_NAMES = {"who", "whos", "who_ls"}
_FUNCTION = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
ANY = "*"
"""Begins a name that stands for all of the notebook's; the code that may mean any of them follows."""
_SHOWN = 60


class Texts:
    """Finds the names in texts: the words of those that are known, ``*`` for those that code makes."""

    def __init__(self, namespace: Mapping[str, Any]) -> None:
        self._namespace = namespace
        self._rebound: set[str] = set()  # what may have another value than the namespace has
        self._around: dict[ast.AST, ast.AST] = {}

    def add(self, tree: ast.AST) -> None:
        """Know the code round each node, and the names that are bound in it."""
        for node in ast.walk(tree):
            match node:
                case ast.Name(id=name, ctx=ast.Store()) | ast.arg(arg=name):
                    self._rebound.add(name)
            self._around.update(dict.fromkeys(ast.iter_child_nodes(node), node))

    def inside(self, node: ast.AST) -> frozenset[str]:
        """Return the names in the texts of all code in a node."""
        return frozenset[str]().union(*map(self.of, ast.walk(node)))

    def of(self, node: ast.AST) -> set[str]:
        """Return the names that a node itself says by texts: in annotations, to what runs texts, among all names."""
        annotation = getattr(node, "annotation", None) or getattr(node, "returns", None)
        if annotation is not None:
            return words_of(ast.unparse(annotation))
        match node:
            case ast.alias(name="__main__", asname=str()) | ast.ImportFrom(module="__main__"):
                return {any_name(node)}
            case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name)) if name in _HOLD_TEXT:
                return self._in_call(node, name)
        return self._beside(node) if self._stands_for_all(node) else set()

    def _in_call(self, node: ast.Call, name: str) -> set[str]:
        said = [*node.args, *(keyword.value for keyword in node.keywords)]
        first, *others = map(self._known, [*said, ast.Pass()])
        runs = name in _RUN_TEXT and (isinstance(node.func, ast.Name) or "ipython" in ast.unparse(node.func))
        if first in _LIST_NAMES or (runs and node.args and not first):
            return {any_name(node)}
        return words_of(first, *others) | _words_in(node)

    def _known(self, text: ast.AST | None) -> str:
        """Return a text that is known; else an empty one."""
        value = text.value if isinstance(text, ast.Constant) else None
        if isinstance(text, ast.Name) and text.id not in self._rebound:
            value = self._namespace.get(text.id)
        return value if isinstance(value, str) else ""

    def _beside(self, node: ast.AST) -> set[str]:
        """Return what is looked up in something that stands for all names, by the text beside it."""
        around = self._around.get(node, node)
        match node, around:
            case (ast.Name() | ast.Subscript(), ast.Attribute(attr=name)) if name != "__dict__":  # __main__.x
                return {name}
        while isinstance(around, (ast.Attribute, ast.keyword)):
            node, around = around, self._around[around]
        match around:
            case ast.Subscript(ctx=ast.Store()):
                return set()
            case ast.Call(func=ast.Attribute(attr="update" | "__setitem__") as func) if func is node:
                return set()
            case ast.Call(func=ast.Name(id="getattr" | "hasattr"), args=[_, text, *_]):
                texts = [text]
            case ast.Call(func=func, args=args):
                texts = [*args[:1], getattr(func, "value", func)]  # "{x}".format(**globals())
            case ast.Subscript(slice=text) | ast.Compare(left=text) | ast.BinOp(left=text):
                texts = [text]
            case _:
                texts = []
        known = {text for text in map(self._known, texts) if text}
        return words_of(*known) | known or {
            any_name(around)
        }  # a whole text may be a name: globals()["0.weight"]

    def _stands_for_all(self, node: ast.AST) -> bool:
        """Tell whether an expression is the dict of all names, their list, or ``__main__``."""
        match node:
            case ast.Call(func=ast.Name(id=name), args=[], keywords=[]) if name in _ALL_NAMES:
                return name == "globals" or not self._in_function(node)
            case ast.Name(id=name):
                value: Any = None if name in self._rebound else self._namespace.get(name)
                is_module = isinstance(value, types.ModuleType)
                return name == "__main__" or (is_module and value.__name__ == "__main__")
            case ast.Subscript(value=ast.Attribute(attr="modules"), slice=which):
                return ast.unparse(which) in ("'__main__'", "__name__")
        return isinstance(node, ast.Attribute) and node.attr == "user_ns"

    def _in_function(self, node: ast.AST) -> bool:
        while (around := self._around.get(node)) is not None and not isinstance(around, _FUNCTION):
            node = around
        return around is not None


def magic_of(node: ast.AST) -> tuple[str, list[str]] | None:
    """Return method and texts of what IPython makes of ``%magic`` and ``!command``."""
    match node:
        case ast.Call(func=ast.Attribute(value=ast.Call(func=ast.Name(id="get_ipython")), attr=method)):
            texts = [a.value for a in node.args if isinstance(a, ast.Constant) and isinstance(a.value, str)]
            return (method, texts) if method in _MAGICS and texts and len(texts) == len(node.args) else None
    return None


def words_of(*texts: str) -> set[str]:
    """Return everything in texts that may be a name."""
    return {*re.findall(r"[^\W\d]\w*", " ".join(texts))}


def _words_in(node: ast.AST) -> set[str]:
    parts = (part.value for part in ast.walk(node) if isinstance(part, ast.Constant))
    return words_of(*(part for part in parts if isinstance(part, str)))


def any_name(node: ast.AST) -> str:
    """Return the name that stands for all names, with the code that may mean them, cut to a line."""
    return ANY + ast.unparse(node).partition("\n")[0][:_SHOWN]


def looked_up_by(code: types.CodeType) -> frozenset[str]:
    """Return the names that a function looks up by texts; its own text IPython keeps for tracebacks."""
    if words_in(code).isdisjoint(_LOOKS_UP):
        return frozenset()
    text = "".join(linecache.cache.get(code.co_filename, (0, 0, [], ""))[2])  # type: ignore[misc]
    return _names_in_text(text, code.co_firstlineno, f"{ANY}{code.co_name}()")


@functools.lru_cache(maxsize=1024)
def _names_in_text(text: str, line: int, unknown: str) -> frozenset[str]:
    """Return the names that the function in a line of a text looks up; what is ``unknown`` if there is none."""
    texts = Texts({})
    with contextlib.suppress(SyntaxError):
        texts.add(tree := ast.parse(text))
        for node in ast.walk(tree):
            if isinstance(node, _FUNCTION):
                first = min((d.lineno for d in getattr(node, "decorator_list", ())), default=node.lineno)
                if first == line:
                    return texts.inside(node)
    return frozenset({unknown})
