"""Which names of the notebook a cell needs.

One pass over the cell's syntax tree, in the order in which it runs. A name that is surely bound before it is read is not
needed: else the second run of a cell would ship the first run's model. What is read in a straight line at the top of the cell
is *surely* needed. A block (a branch, a loop, ``try``) perhaps runs: what it reads is *maybe* needed, what it binds is bound in it
alone. The body of a function counts where its name is read, as it can run from there on; the same holds for functions and
classes of earlier cells. What an object holds of them has its name with it: pickle looks it up by that.

Scopes of functions and comprehensions are the compiler's; names in texts are found by :mod:`~taas.capture.cells`.

Taken for granted: nothing raises but ``raise``, and ``__name__`` is ``"__main__"``.
"""

from __future__ import annotations

import ast
import collections
import gc
import inspect
import re
import types
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from taas.capture.cells import (
    ANY,
    Texts,
    any_name,
    is_of_ipython,
    looked_up_by,
    magic_of,
    python_of,
    users_names,
    words_of,
)
from taas.capture.code_by_value import codes_in, global_names, names_of

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
    """Names of the namespace that a cell needs.

    Attributes:
        sure: read before they are bound, in a straight line at the top of the cell.
        maybe: possibly read before they are bound.
        settled: used by functions, and surely bound by the cell before.
        others: names that are meant perhaps, since the cell makes texts that it looks names up by.
        built: where it does so; empty if it does not.
        words: names, attributes and magics that occur in the cell at all.
        binds: names that the cell may bind; None if it may be any, as the code does not say (a star, ``exec``).
    """

    sure: set[str] = field(default_factory=set)
    maybe: set[str] = field(default_factory=set)
    settled: set[str] = field(default_factory=set)
    others: set[str] = field(default_factory=set)
    built: str = ""
    words: set[str] = field(default_factory=set)
    binds: set[str] | None = None


def needs_of(cell: str, namespace: Mapping[str, Any]) -> Needs:
    """Find the names of ``namespace`` that ``cell`` needs.

    Args:
        cell: the cell as typed; magics and header comments allowed.
        namespace: the notebook's names; only functions and classes among them are looked into.

    Raises:
        SyntaxError: the cell is wrong.
    """
    reader = _Reader(namespace)
    reader.read(python_of(cell))
    needs = reader.needs
    tells = needs.words.isdisjoint({*_BINDS_ANY, ANY}) and not reader.shells
    needs.binds = reader.touched if tells else None
    needs.maybe -= needs.sure
    needs.settled -= needs.sure | needs.maybe
    needs.others -= needs.sure | needs.maybe
    return needs


class _Reader:
    """Reads code in the order in which it runs.

    Attributes:
        needs: what was found.
        touched: names that the code may have bound by now.
        shells: how often it asks for IPython's shell, but for magics of which the Python is read.
    """

    def __init__(self, namespace: Mapping[str, Any]) -> None:
        self.needs = Needs()
        self.touched: set[str] = set()
        self.shells = 0
        self._namespace = namespace
        self._unsure = 0  # blocks around, and places above that may have raised
        self._bound = _NONE  # surely, by now
        self._later: dict[str, _Names] = {}  # what functions and classes of the cell read when they run
        self._of_earlier: dict[str, _Names] = {}
        self._texts = Texts(namespace)

    def read(self, code: str) -> None:
        """Read Python of the notebook.

        Raises:
            SyntaxError: it is wrong.
        """
        tree = ast.parse(code)
        self._texts.add(tree)
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
                case ast.Assign(targets=[ast.Name(id=name)], value=ast.Lambda() as function):
                    later.append((name, self._inside(function)))
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
            sure = here and number < own and not self._unsure and name not in self.touched
            used = self._need(name, sure=sure, by_function=number >= own) | self._later.get(name, _NONE)
            waiting += used.difference(waiting)

    def _need(self, name: str, *, sure: bool, by_function: bool) -> _Names:
        """Note that a name is read, and return the names that functions in its value use."""
        needs, namespace = self.needs, self._namespace
        if name.startswith(ANY):
            needs.built = needs.built or name.removeprefix(ANY)
            needs.others |= users_names(namespace).keys() - self._bound
        if name not in namespace or is_of_ipython(name, namespace[name]):
            return _NONE
        if name in self._bound:
            needs.settled |= {name} if by_function else _NONE
            return _NONE
        (needs.sure if sure else needs.maybe).add(name)
        if name not in self._of_earlier:
            self._of_earlier[name] = _names_used_by(namespace[name], namespace)
        return self._of_earlier[name]

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
        self._use(words_of(*words, python))
        if name == "run":  # the program's names become the notebook's
            self.needs.words.add("%run")
            self._use([any_name(node)] if "-i" in python.split() else [])
            self._bind_any()

    def _bind_any(self) -> None:
        self.needs.words.add(ANY)
        self.touched.update(self._namespace)


# ---------------------------------------------------------------- order


def _parts_of(node: ast.AST) -> tuple[list[ast.AST], list[Sequence[ast.AST]]]:
    """Return the parts of a node that run, in their order, and then its blocks, each of which perhaps runs."""
    match node:
        case ast.ClassDef():
            return [*node.decorator_list, *node.bases, *node.keywords], []
        case ast.If() | ast.While():
            return [node.test], [node.body, node.orelse]
        case ast.IfExp():
            return [node.test], [[node.body], [node.orelse]]
        case ast.For() | ast.AsyncFor():
            return [node.iter], [[node.target, *node.body], node.orelse]
        case ast.BoolOp(values=[first, *others]):
            return [first], [others]
        case ast.Compare(comparators=[first, *others]):
            return [node.left, first], [others]
        case ast.Assert(test=test, msg=message):
            return [test], [[message]] if message is not None else []
        case ast.Match():
            return [node.subject], [[case] for case in node.cases]
        case ast.Try() | ast.TryStar():
            ways = [[handler] for handler in node.handlers]
            return [], [[*node.body, *node.orelse], *ways, node.finalbody]
        case ast.With() | ast.AsyncWith() if _SWALLOWS.search(" ".join(map(ast.unparse, node.items))):
            return [*node.items], [node.body]
    return _simple_parts_of(node), []


def _simple_parts_of(node: ast.AST) -> list[ast.AST]:
    """Return the parts of a node without blocks, in the order in which they run."""
    match node:
        case ast.Assign(targets=[ast.Name() as target], value=ast.Lambda(args=arguments)):
            return [arguments, target]  # a function with a name
        case ast.Assign(targets=targets, value=value):
            return [value, *targets]
        case ast.AugAssign(target=ast.Name(id=name) as target, value=value):
            return [ast.Name(name, ast.Load()), value, target]
        case ast.AnnAssign(value=None, simple=1) | ast.arg():  # annotations are texts
            return []
        case ast.AugAssign() | ast.NamedExpr() | ast.AnnAssign():
            return [*filter(None, [node.value]), node.target]
        case ast.FunctionDef() | ast.AsyncFunctionDef():
            return [*node.decorator_list, node.args]
        case ast.Lambda(args=arguments):
            return [arguments]
        case ast.ListComp() | ast.SetComp() | ast.DictComp() | ast.GeneratorExp():
            return [node.generators[0].iter]
        case ast.ExceptHandler(type=kind, name=str(name), body=body):
            return [*filter(None, [kind]), ast.Name(name, ast.Store()), *body, ast.Name(name, ast.Del())]
    return [*ast.iter_child_nodes(node)]


def _stored(node: ast.AST) -> set[str]:
    """Return the names that a node itself binds."""
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
        made: types.CodeType = compile(
            code, "<cell>", mode, ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True
        )
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

_PARTS = 1_000
"""How many objects are looked at for one name; what lies deeper is found as it is described."""
_ITEMS = 100
_NO_CODE = (types.ModuleType, types.CodeType, str, bytes, int, float, complex, type(None))


def _names_used_by(value: Any, namespace: Mapping[str, Any]) -> _Names:
    """Return the names that functions and classes of the notebook in a value use, and that pickle finds them by."""
    names: set[str] = set()
    seen = {id(namespace)}
    waiting = collections.deque([value])
    for _ in range(_PARTS):
        if not waiting:
            break
        part = waiting.popleft()
        if isinstance(part, _NO_CODE) or id(part) in seen:
            continue
        seen.add(id(part))
        if isinstance(part, type) and part.__module__ == "__main__":
            names |= names_of(part) | _words_in_annotations(part)
        if isinstance(part, types.FunctionType):
            if part.__globals__ is namespace:
                names |= names_of(part) | looked_up_by(part.__code__) | _words_in_annotations(part)
            waiting += (part.__closure__, part.__dict__, part.__defaults__, part.__kwdefaults__)
        else:
            waiting += _parts(part)
    return frozenset(names)


def _words_in_annotations(code: types.FunctionType | type) -> set[str]:
    """Return the words of annotations that are texts: ``typing.get_type_hints`` looks them up as names."""
    if getattr(code, "__annotate__", None) is not None:  # made where somebody asks (Python 3.14), by code
        return set()
    annotations = vars(code).get("__annotations__") if isinstance(code, type) else code.__annotations__
    texts = [text for text in (annotations or {}).values() if isinstance(text, str)]
    return {*re.findall(r"\w+", " ".join(texts))}


def _parts(value: Any) -> Iterable[Any]:
    if isinstance(value, type) and value.__module__ != "__main__":
        return ()
    own = (type(value),) if type(value).__module__ == "__main__" else ()
    if isinstance(value, dict):
        return (*own, *islice(value.values(), _ITEMS))
    if isinstance(value, (list, tuple, set, frozenset)):
        return (*own, *islice(value, _ITEMS))
    return gc.get_referents(value)
