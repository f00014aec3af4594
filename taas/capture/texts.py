"""Names in texts: each word of a text may be one, and where code makes the text, it may be any.

Much of what code uses stands in texts: in magics, ``eval``, ``query``, ``globals()["x"]``, ``__main__.x``, annotations.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import linecache
import re
import types
from collections.abc import Mapping
from typing import Any

from taas.capture.code_by_value import words_in

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
