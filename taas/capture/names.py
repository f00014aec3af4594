"""Which names of the notebook a cell needs.

One pass over the cell's syntax tree, in the order in which it runs. A name that is surely bound before it is read is not
needed: else the second run of a cell would ship the first run's model. What is read in a straight line at the top of the cell
is *surely* needed. A block (a branch, a loop, ``try``) perhaps runs: what it reads is *maybe* needed, what it binds is bound in it
alone. The body of a function counts where its name is read, as it can run from there on; the same holds for functions and
classes of earlier cells, which are found as the values of names are described: what they use is needed unless it is surely bound when
the name is read. Scopes of functions and comprehensions are the compiler's.

Taken for granted: nothing raises but ``raise``, and ``__name__`` is ``"__main__"``.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import inspect
import linecache
import re
import types
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from taas.capture.cells import is_of_ipython, python_of, users_names
from taas.capture.code_by_value import codes_in, global_names, names_of, words_in
from taas.capture.reading import keeps_pickling_of_object, keeps_state_of_object

_BINDS_ANY = {"eval", "exec", "globals", "locals", "vars", "setattr", "__main__"}
"""What a cell may bind names with that its code does not say."""
_RUN_HERE = {"time", "capture", "prun", "memit", "mprun", "lprun", "debug"}
"""Magics whose Python binds names of the cell."""
_OPTIONS = re.compile(r"(?:\s*-\w+(?:\s+\d+)?)+\s")
_SWALLOWS = re.compile(r"suppress|raises|ignore", re.IGNORECASE)
_Names = frozenset[str]
_NONE: _Names = frozenset()


@dataclass
class Needs:
    """Names of the namespace that a cell needs."""

    sure: set[str] = field(default_factory=set)  # read before they are bound, in a straight line at the top
    maybe: set[str] = field(default_factory=set)  # possibly read before they are bound
    bound: dict[str, frozenset[str]] = field(default_factory=dict)  # by name: surely bound when it is read
    others: set[str] = field(default_factory=set)  # meant perhaps: the cell makes texts and looks them up
    built: str = ""  # where it does so
    words: set[str] = field(default_factory=set)  # names, attributes and magics that occur in the cell at all
    binds: set[str] | None = (
        None  # may be bound; None if any may be, as the code does not say (a star, ``exec``)
    )


def needs_of(cell: str, namespace: Mapping[str, Any]) -> Needs:
    """Find the names of ``namespace`` that a cell, as typed, needs; what its values use of it is found where they are described."""
    reader = _Reader(namespace)
    reader.read(python_of(cell))
    needs = reader.needs
    tells = needs.words.isdisjoint({*_BINDS_ANY, ANY}) and not reader.shells
    needs.binds = reader.touched if tells else None
    needs.maybe -= needs.sure
    needs.others -= needs.sure | needs.maybe
    return needs


class _Reader:
    """Reads code in the order in which it runs; knows which names it may have bound by now (``touched``)."""

    def __init__(self, namespace: Mapping[str, Any]) -> None:
        self.needs = Needs()
        self.touched: set[str] = set()
        self.shells = 0
        self._namespace = namespace
        self._unsure = 0  # blocks around, and places above that may have raised
        self._bound = _NONE  # surely, by now
        self._later: dict[str, _Names] = {}  # what functions and classes of the cell read when they run
        self._texts = _Texts()

    def read(self, code: str) -> None:
        """Read Python of the notebook."""
        tree = ast.parse(code)
        later: list[tuple[str, Iterable[str]]] = [*_later_in(_compiled(tree)).items()]
        for node in ast.walk(tree):
            match node:
                case ast.Name(id=word) | ast.Attribute(attr=word):
                    self.needs.words.add(word)
                    self.shells += word == "get_ipython"
                case ast.ImportFrom(module=str(module)) | ast.alias(name=module):
                    self.needs.words.update((module, *module.split(".")))
                case ast.Global(names=names):
                    self.touched.update(names)
                case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                    later.append((name, self._texts.inside(node)))
        for name, used in later:
            self._later[name] = self._later.get(name, _NONE).union(used)
        for statement in tree.body:
            self._run(statement)

    def _use(self, names: Iterable[str], *, here: bool = False) -> None:
        """Note names that are read, and what their functions read: right ``here``, or when what is made here runs."""
        self.needs.words.update(names)
        waiting = [*names]
        own = len(waiting)
        for number, name in enumerate(waiting):  # grows
            self._need(name, sure=here and number < own and not self._unsure and name not in self.touched)
            waiting += self._later.get(name, _NONE).difference(waiting)

    def _need(self, name: str, *, sure: bool) -> None:
        """Note that a name is read."""
        needs, namespace = self.needs, self._namespace
        if getattr(namespace.get(name), "__dict__", None) is namespace:  # import __main__ as m
            self._need(ANY + name, sure=False)
        if name.startswith(ANY):
            needs.built = needs.built or name.removeprefix(ANY)
            needs.others |= users_names(namespace).keys() - self._bound
        if name in namespace and name not in self._bound and not is_of_ipython(name, namespace[name]):
            (needs.sure if sure else needs.maybe).add(name)
            needs.bound[name] = self._bound & needs.bound.get(name, self._bound)

    def _run(self, node: ast.AST) -> None:
        self._use(self._texts.of(node))
        if isinstance(node, ast.Expr) and (magic := magic_of(node.value)) is not None:
            self._magic(node, *magic)
            return
        parts, blocks = _parts_of(node)
        for part in parts:
            self._run(part)
        self._perhaps(blocks)
        match node:
            case ast.ImportFrom(names=[ast.alias(name="*")]):
                self._bind_any()
            case ast.Name(id=name, ctx=ast.Load()):
                self._use([name], here=True)
            case ast.Name(id=name, ctx=ast.Del()):
                self._use([name], here=True)
                self._bound -= {name}
                self._use([name])  # so that its absence can come back
            case ast.Lambda() | ast.ListComp() | ast.SetComp() | ast.DictComp() | ast.GeneratorExp():
                self.touched.update(n.target.id for n in ast.walk(node) if isinstance(n, ast.NamedExpr))
                self._use(self._inside(node))
            case ast.AnnAssign(target=ast.Name()):
                self._use(["__annotations__"])  # each of them changes this dict
            case ast.FunctionDef(decorator_list=[_, *_]) | ast.AsyncFunctionDef(decorator_list=[_, *_]):
                self._use(self._later[node.name])  # who is given it may call it at once
            case ast.ClassDef():
                self._class(node)
            case ast.Raise():
                self._unsure += 1
        stored = _stored(node)
        self.touched.update(stored)
        self._bound |= stored

    def _class(self, node: ast.ClassDef) -> None:
        """Read the body of a class, which runs here and binds nothing here: a name of its own, read again, is perhaps not it."""
        before, touched = self._bound, {*self.touched}
        for statement in node.body:
            self._run(statement)
            self._bound &= before
        self._bound, self.touched = before, touched
        if node.decorator_list or node.keywords:
            self._use(self._later[node.name])

    def _perhaps(self, blocks: Sequence[Sequence[ast.AST]]) -> None:
        """Read blocks, each of which perhaps runs: what it binds is bound in it alone."""
        before = after = self._bound
        self._unsure += 1
        for block in blocks:
            self._bound = before
            for node in block:
                self._run(node)
            after &= self._bound
        self._unsure -= 1
        self._bound = after

    def _inside(self, node: ast.expr) -> _Names:
        """Return what an expression uses; names of its own are none for the compiler."""
        return global_names(_compiled(ast.Expression(node))) | self._texts.inside(node)

    def _magic(self, node: ast.Expr, method: str, texts: list[str]) -> None:
        """Read the Python in a magic that binds names of the cell; every word of others may be a name."""
        name, (*words, python) = texts[0], texts
        options = _OPTIONS.match(python) if method == "run_line_magic" else None
        said = options[0] if options else ""
        try:
            if name in _RUN_HERE:
                self.read(python_of(python.removeprefix(said)))
                self.shells -= 1
                python = said
        except SyntaxError:
            pass  # it is no Python, then
        self._use(_words_of(*words, python))
        if name == "run":  # the program's names become the notebook's
            self.needs.words.add("%run")
            self._use([_any_name(node)] if "-i" in python.split() else [])
            self._bind_any()

    def _bind_any(self) -> None:
        self.needs.words.add(ANY)
        self.touched.update(self._namespace)


_ORDER = {
    ast.ClassDef: "decorator_list bases keywords", ast.FunctionDef: "decorator_list args", ast.AsyncFunctionDef: "decorator_list args",
    ast.Lambda: "args", ast.arg: "", ast.Assign: "value targets", ast.AugAssign: "value target", ast.NamedExpr: "value target",
    ast.If: "test|body|orelse", ast.While: "test|body|orelse", ast.IfExp: "test|body|orelse", ast.BoolOp: "|values",
    ast.For: "iter|target body|orelse", ast.AsyncFor: "iter|target body|orelse", ast.Assert: "test|msg",
    ast.Match: "subject|*cases", ast.Try: "|body orelse|*handlers|finalbody", ast.TryStar: "|body orelse|*handlers|finalbody",
}  # fmt: skip
"""Where parts of a node run in another order than they stand in, or perhaps: its fields, and behind each ``|`` those of a block, which
perhaps runs (``*``: each of which does). Annotations are texts."""


def _parts_of(node: ast.AST) -> tuple[list[ast.AST], list[Sequence[ast.AST]]]:
    """Return the parts of a node that run, in their order, and then its blocks, each of which perhaps runs."""
    match node:
        case ast.AugAssign(target=ast.Name(id=name) as target, value=value):
            return [ast.Name(name, ast.Load()), value, target], []
        case ast.AnnAssign(value=value, target=target):
            return ([value, target] if value is not None else []), []
        case ast.ListComp() | ast.SetComp() | ast.DictComp() | ast.GeneratorExp():
            return [node.generators[0].iter], []
        case ast.ExceptHandler(type=kind, name=str(name), body=body):
            return [*filter(None, [kind]), ast.Name(name, ast.Store()), *body, ast.Name(name, ast.Del())], []
        case ast.With() | ast.AsyncWith() if _SWALLOWS.search(" ".join(map(ast.unparse, node.items))):
            return [*node.items], [node.body]
    order = _ORDER.get(type(node))
    if order is None:
        return [*ast.iter_child_nodes(node)], []
    first, *others = order.split("|")
    blocks: list[Sequence[ast.AST]] = []
    for fields in others:
        some = _in_fields(node, fields.removeprefix("*"))
        blocks += [[part] for part in some] if fields[:1] == "*" else [some]
    return _in_fields(node, first), blocks


def _in_fields(node: ast.AST, fields: str) -> list[ast.AST]:
    values = (getattr(node, field) for field in fields.split())
    return [part for value in values if value for part in (value if isinstance(value, list) else [value])]


def _stored(node: ast.AST) -> set[str]:
    match node:
        case ast.Name(id=name, ctx=ast.Store()) | ast.MatchMapping(rest=str(name)):
            return {name}
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
            return {name}
        case ast.MatchAs(name=str(name)) | ast.MatchStar(name=str(name)):
            return {name}
        case ast.alias(name=name, asname=new):
            return {(new or name).partition(".")[0]}
    return set()


def _compiled(code: ast.Module | ast.Expression) -> types.CodeType:
    """Compile code: who runs it shows the warnings."""
    mode = "exec" if isinstance(code, ast.Module) else "eval"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made: types.CodeType = compile(code, "<cell>", mode, ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, True)
    return made


def _later_in(code: types.CodeType) -> dict[str, _Names]:
    """Return what functions and classes in a code read when they, or their methods, run."""
    found: dict[str, _Names] = {}
    for inner in codes_in(code):
        is_function = inner.co_flags & inspect.CO_OPTIMIZED and not inner.co_name.startswith("<generic")
        methods = {} if is_function else _later_in(inner)
        used = global_names(inner) if is_function else _NONE.union(*methods.values())
        for name, names in (*methods.items(), (inner.co_name, used)):
            found[name] = found.get(name, _NONE) | names
    return found


# ---------------------------------------------------------------- functions and classes of earlier cells


def names_used_by(values: Iterable[Any], namespace: Mapping[str, Any]) -> set[str]:
    """Return the names that functions and classes of the notebook use, and that pickle finds them by."""
    values, found = [*values], set[str]()
    kinds = {*filter(_uses_names, {*map(type, values)})}
    for value in values if kinds else ():
        if type(value) not in kinds:
            continue
        if isinstance(value, types.FunctionType):
            own = value.__globals__ is namespace
            found |= (
                names_of(value) | _looked_up_by(value.__code__) | _words_in_annotations(value)
                if own
                else set()
            )
        elif isinstance(value, type):
            found |= (
                names_of(value) | _words_in_annotations(value) if value.__module__ == "__main__" else set()
            )
        else:
            classes = (type(part) for part in getattr(value, "__dict__", {}).values())
            found = found.union(*(names_of(cls) for cls in classes if cls.__module__ == "__main__"))
    return found


def _uses_names(cls: type) -> bool:
    """Tell whether objects of a class are code, or may pickle others by themselves (``torch.save`` in ``__getstate__``)."""
    own = cls.__module__ == "__main__" and not (keeps_pickling_of_object(cls) and keeps_state_of_object(cls))
    return own or issubclass(cls, (type, types.FunctionType))


def _words_in_annotations(code: types.FunctionType | type) -> set[str]:
    """Return the words of annotations that are texts: ``typing.get_type_hints`` looks them up as names."""
    if getattr(code, "__annotate__", None) is not None:  # made where somebody asks (Python 3.14), by code
        return set()
    annotations = vars(code).get("__annotations__") if isinstance(code, type) else code.__annotations__
    return _words_of(*(text for text in (annotations or {}).values() if isinstance(text, str)))


# ---------------------------------------------------------------- names in texts
#
# Much of what code uses stands in texts: in magics, ``eval``, ``query``, ``globals()["x"]``, ``__main__.x``, annotations. Each
# word of a text may be a name, and where code makes the text, it may be any.

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


class _Texts:
    """Finds the names in texts: the words of those that the code has, ``*`` for those that it makes."""

    def __init__(self) -> None:
        self._told: set[ast.AST] = set()  # stand for all names, and the code around them says which

    def inside(self, node: ast.AST) -> frozenset[str]:
        """Return the names in the texts of all code in a function, a class or an expression."""
        return frozenset[str]().union(*(self.of(part, inside=True) for part in ast.walk(node)))

    def of(self, node: ast.AST, *, inside: bool = False) -> set[str]:
        """Return the names that a node itself says by texts: in annotations, to what runs texts, among all names."""
        annotation = getattr(node, "annotation", None) or getattr(node, "returns", None)
        if annotation is not None:
            return _words_of(ast.unparse(annotation))
        match node:
            case ast.alias(name="__main__", asname=str()) | ast.ImportFrom(module="__main__"):
                return {_any_name(node)}
            case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name)) if name in _HOLD_TEXT:
                return _names_in_call(node, name)
        if _stands_for_all(node, inside=inside):
            return set() if node in self._told else {_any_name(node)}
        all_names, text = _looked_up(node)
        if all_names is None or not _stands_for_all(all_names, inside=inside):
            return set()
        self._told.add(all_names)
        if not isinstance(text, str):
            return {_any_name(node)}
        return _words_of(text) | {text}  # a whole text may be a name: globals()["0.weight"]


def _names_in_call(node: ast.Call, name: str) -> set[str]:
    """Return the names in what is given to a function that runs, or looks through, texts."""
    first = _text_of(node.args[0]) if node.args else ""
    runs = name in _RUN_TEXT and (isinstance(node.func, ast.Name) or "ipython" in ast.unparse(node.func))
    if first in _LIST_NAMES or (runs and first is None):
        return {_any_name(node)}
    return _words_in(node)


def _text_of(node: ast.AST) -> str | None:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None


def _looked_up(node: ast.AST) -> tuple[ast.AST | None, str | None]:
    """Return what code looks something up in, if it looks up one thing, and by which text: None for one that it makes."""
    match node:
        case ast.Attribute(value=ast.Name() | ast.Subscript() as where, attr=name) if name != "__dict__":
            return where, name  # __main__.x
        case ast.Subscript(value=where, slice=text) | ast.Compare(left=text, comparators=[where]):
            return where, _text_of(text)
        case ast.Call(func=ast.Attribute(value=where, attr="get"), args=[text, *_]):
            return where, _text_of(text)
    return None, None


def _stands_for_all(node: ast.AST, *, inside: bool) -> bool:
    match node:
        case ast.Call(func=ast.Name(id=name), args=[], keywords=[]) if name in _ALL_NAMES:
            return name == "globals" or not inside
        case ast.Subscript(value=ast.Attribute(attr="modules"), slice=which):
            return ast.unparse(which) in ("'__main__'", "__name__")
        case ast.Name(id="__main__") | ast.Attribute(attr="user_ns"):
            return True
    return False


def magic_of(node: ast.AST) -> tuple[str, list[str]] | None:
    """Return method and texts of what IPython makes of ``%magic`` and ``!command``."""
    match node:
        case ast.Call(func=ast.Attribute(value=ast.Call(func=ast.Name(id="get_ipython")), attr=method)):
            texts = [a.value for a in node.args if isinstance(a, ast.Constant) and isinstance(a.value, str)]
            return (method, texts) if method in _MAGICS and texts and len(texts) == len(node.args) else None
    return None


def _words_of(*texts: str) -> set[str]:
    """Return everything in texts that may be a name."""
    return {*re.findall(r"[^\W\d]\w*", " ".join(texts))}


def _words_in(node: ast.AST) -> set[str]:
    parts = (part.value for part in ast.walk(node) if isinstance(part, ast.Constant))
    return _words_of(*(part for part in parts if isinstance(part, str)))


def _any_name(node: ast.AST) -> str:
    """Return the name that stands for all names, with the code that may mean them, cut to a line."""
    return ANY + ast.unparse(node).partition("\n")[0][:_SHOWN]


def _looked_up_by(code: types.CodeType) -> frozenset[str]:
    """Return the names that a function looks up by texts; its own text IPython keeps for tracebacks."""
    if words_in(code).isdisjoint(_LOOKS_UP):
        return frozenset()
    text = "".join(linecache.cache.get(code.co_filename, (0, 0, [], ""))[2])  # type: ignore[misc]
    return _names_in_text(text, code.co_firstlineno, f"{ANY}{code.co_name}()")


@functools.lru_cache(maxsize=1024)
def _names_in_text(text: str, line: int, unknown: str) -> frozenset[str]:
    """Return the names that the function in a line of a text looks up; what is ``unknown`` if there is none."""
    with contextlib.suppress(SyntaxError):
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, _FUNCTION):
                first = min((d.lineno for d in getattr(node, "decorator_list", ())), default=node.lineno)
                if first == line:
                    return _Texts().inside(node)
    return frozenset({unknown})
