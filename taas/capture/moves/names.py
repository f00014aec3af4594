"""Find the variables of the notebook that a cell needs.

One pass reads the cell's syntax tree in execution order. A variable that is certainly bound before
it is read is not needed; otherwise the second execution of a cell would send the model that the
first one made. A variable that is read in straight-line code at the cell's top level is *surely*
needed. A block (a branch, a loop, ``try``) may or may not run: what it reads is *maybe* needed, and
its bindings are valid only inside the block.

The body of a function is taken into account where the function's name is read, because the function
can be called from there on. The same applies to functions and classes of earlier cells, which are
found when the variables' values are described: the variables that they use are needed, unless they
are certainly bound when the function or class is read. The compiler determines which names are
local to functions and comprehensions.

The analysis assumes that only ``raise`` raises exceptions, and that ``__name__`` is ``"__main__"``.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import inspect
import linecache
import re
import sys
import types
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from taas.base.import_hooks import attributes_of
from taas.capture.cells import is_of_ipython, python_of, users_names
from taas.capture.describe.code_by_value import codes_in, global_names, names_of, words_in
from taas.capture.describe.reading import keeps_pickling_of_object, keeps_state_of_object

_BINDS_ANY = {"eval", "exec", "globals", "locals", "vars", "setattr", "__main__"}
"""With these, a cell may bind variables that its code does not mention."""
_RUN_HERE = {"time", "capture", "prun", "memit", "mprun", "lprun", "debug"}
"""Magics that run Python code which binds variables of the cell."""
_OPTIONS = re.compile(r"(?:\s*-\w+(?:\s+\d+)?)+\s")
_SWALLOWS = re.compile(r"suppress|raises|ignore", re.IGNORECASE)
_Names = frozenset[str]
_NONE: _Names = frozenset()


@dataclass
class Needs:
    """The variables of the namespace that a cell needs."""

    # variables read before they are bound, in straight-line code at the top level
    sure: set[str] = field(default_factory=set)
    maybe: set[str] = field(default_factory=set)  # variables that may be read before they are bound
    # for each variable: the variables that are certainly bound when it is read
    bound: dict[str, frozenset[str]] = field(default_factory=dict)
    # variables that the cell may mean, because it looks variables up by strings that it computes
    others: set[str] = field(default_factory=set)
    built: str = ""  # the code that computes these strings
    # all names, attributes and magics in the cell
    words: set[str] = field(default_factory=set)
    # variables that the cell may bind; None if it may bind any of them, because the code does not
    # show which ones (a star import, ``exec``)
    binds: set[str] | None = None


def needs_of(cell: str, namespace: Mapping[str, Any]) -> Needs:
    """Find the variables of ``namespace`` that a cell needs; ``cell`` is the text as typed.

    Variables that the values use in turn are found later, when the values are described.
    """
    reader = _Reader(namespace)
    reader.read(python_of(cell))
    needs = reader.needs
    tells = needs.words.isdisjoint({*_BINDS_ANY, ANY}) and not reader.shells
    needs.binds = reader.touched if tells else None
    needs.maybe -= needs.sure
    needs.others -= needs.sure | needs.maybe
    return needs


def names_bound_by(cell: str) -> set[str] | None:
    """Return the variables that a cell may bind; None for any; an empty set if it is not Python.

    ``cell`` is the text as typed, or its Python code.
    """
    try:
        return needs_of(cell, {}).binds
    except SyntaxError:
        return set()


class _Reader(ast.NodeVisitor):
    """Reads code in execution order; ``touched`` are the variables that it may have bound."""

    def __init__(self, namespace: Mapping[str, Any]) -> None:
        self.needs = Needs()
        self.touched: set[str] = set()
        self.shells = 0
        self._namespace = namespace
        self._unsure = 0  # number of enclosing blocks, and of earlier lines that may have raised
        self._bound = _NONE  # variables that are certainly bound so far
        # for each function and class of the cell: what it reads when it runs
        self._later: dict[str, _Names] = {}
        self._texts = _Texts()

    def read(self, code: str) -> None:
        """Read Python code of the notebook."""
        tree = ast.parse(code)
        later: list[tuple[str, Iterable[str]]] = [*_later_in(_compile(tree)).items()]
        for node in ast.walk(tree):
            match node:
                case ast.Name(id=word) | ast.Attribute(attr=word):
                    self.needs.words.add(word)
                    self.shells += word == "get_ipython"
                case ast.ImportFrom(module=str(module)) | ast.alias(name=module):
                    self.needs.words.update((module, *module.split(".")))
                case ast.Global(names=names):
                    self.touched.update(names)
                case (
                    ast.FunctionDef(name=name)
                    | ast.AsyncFunctionDef(name=name)
                    | ast.ClassDef(name=name)
                ):
                    later.append((name, self._texts.inside(node)))
        for name, used in later:
            self._later[name] = self._later.get(name, _NONE).union(used)
        for statement in tree.body:
            self.visit(statement)

    def _use(self, names: Iterable[str], *, here: bool = False) -> None:
        """Record names that are read, and the names that the functions of these names read.

        ``here``: whether they are read now, or only when the function that is defined here runs.
        """
        self.needs.words.update(names)
        waiting = [*names]
        own = len(waiting)
        for number, name in enumerate(waiting):  # the loop appends to it
            self._need(
                name, sure=here and number < own and not self._unsure and name not in self.touched
            )
            waiting += self._later.get(name, _NONE).difference(waiting)

    def _need(self, name: str, *, sure: bool) -> None:
        """Record that a variable is read."""
        needs, namespace = self.needs, self._namespace
        if attributes_of(namespace.get(name)) is namespace:  # import __main__ as m
            self._need(ANY + name, sure=False)
        if name.startswith(ANY):
            needs.built = needs.built or name.removeprefix(ANY)
            needs.others |= users_names(namespace).keys() - self._bound
        if (
            name in namespace
            and name not in self._bound
            and not is_of_ipython(name, namespace[name])
        ):
            (needs.sure if sure else needs.maybe).add(name)
            needs.bound[name] = self._bound & needs.bound.get(name, self._bound)

    # ---- code that runs, in execution order. A visitor first reads the parts of its node, then
    # applies the effect of the node itself.

    def visit(self, node: ast.AST) -> None:
        """Read a node: first the names in its strings, then its parts, then what it binds."""
        self._use(self._texts.of(node))
        super().visit(node)

    def _visit_all(self, nodes: Iterable[ast.AST]) -> None:
        for node in nodes:
            self.visit(node)

    def _perhaps(self, *blocks: Sequence[ast.AST]) -> None:
        """Read blocks that may run; afterwards, only what all of them bind counts as bound."""
        before = after = self._bound
        self._unsure += 1
        for block in blocks:
            self._bound = before
            self._visit_all(block)
            after &= self._bound
        self._unsure -= 1
        self._bound = after

    def _bind(self, name: str) -> None:
        self.touched.add(name)
        self._bound |= {name}

    def _bind_any(self) -> None:
        self.needs.words.add(ANY)
        self.touched.update(self._namespace)

    def visit_Expr(self, node: ast.Expr) -> None:
        """Read an expression statement: possibly a magic, which IPython has converted to a call."""
        magic = magic_of(node.value)
        if magic is None:
            self.generic_visit(node)
        else:
            self._magic(node, *magic)

    # ---- names

    def visit_Name(self, node: ast.Name) -> None:
        """Read, bind or delete a name."""
        if isinstance(node.ctx, ast.Store):
            self._bind(node.id)
            return
        self._use([node.id], here=True)
        if isinstance(node.ctx, ast.Del):
            self._bound -= {node.id}
            self._use([node.id])  # sent, so that its deletion can be sent back

    def visit_Assign(self, node: ast.Assign) -> None:
        """Read ``target = value``: the value first."""
        self.visit(node.value)
        self._visit_all(node.targets)

    def visit_NamedExpr(self, node: ast.NamedExpr) -> None:
        """Read ``(target := value)``: the value first."""
        self.visit(node.value)
        self.visit(node.target)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        """Read ``target += value``, which reads the target before it is bound."""
        if isinstance(node.target, ast.Name):
            self.visit(ast.Name(node.target.id, ast.Load()))
        self.visit(node.value)
        self.visit(node.target)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        """Read ``target: annotation = value``; without a value it binds nothing."""
        if node.value is not None:
            self.visit(node.value)
            self.visit(node.target)
        if isinstance(node.target, ast.Name):
            self._use(["__annotations__"])  # the statement changes this dict

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        """Read ``from module import names``; a star import may bind any name."""
        if any(alias.name == "*" for alias in node.names):
            self._bind_any()
        else:
            self.generic_visit(node)

    def visit_alias(self, node: ast.alias) -> None:
        """Read what an import binds: ``import a.b`` binds ``a``."""
        self._bind((node.asname or node.name).partition(".")[0])

    def visit_arg(self, node: ast.arg) -> None:
        """Read nothing: a parameter's annotation is read as text, and its name is local."""

    # ---- blocks that may run

    def visit_If(self, node: ast.If | ast.While) -> None:
        """Read a test, and the blocks that may run after it."""
        self.visit(node.test)
        self._perhaps(node.body, node.orelse)

    visit_While = visit_If

    def visit_IfExp(self, node: ast.IfExp) -> None:
        """Read ``body if test else orelse``."""
        self.visit(node.test)
        self._perhaps([node.body], [node.orelse])

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        """Read the operands of ``and`` and ``or``; evaluation may stop after each of them."""
        self._perhaps(node.values)

    def visit_Assert(self, node: ast.Assert) -> None:
        """Read a test, and the message, which may not be evaluated."""
        self.visit(node.test)
        self._perhaps([] if node.msg is None else [node.msg])

    def visit_For(self, node: ast.For | ast.AsyncFor) -> None:
        """Read a loop; a loop over an empty iterable does not even bind its target."""
        self.visit(node.iter)
        self._perhaps([node.target, *node.body], node.orelse)

    visit_AsyncFor = visit_For

    def visit_Match(self, node: ast.Match) -> None:
        """Read a subject and its cases, of which at most one runs."""
        self.visit(node.subject)
        self._perhaps(*([case] for case in node.cases))

    def visit_Try(self, node: ast.Try | ast.TryStar) -> None:
        """Read a ``try``; execution may leave its body after any line."""
        handlers = [[handler] for handler in node.handlers]
        self._perhaps([*node.body, *node.orelse], *handlers, node.finalbody)

    visit_TryStar = visit_Try

    def visit_ExceptHandler(self, node: ast.ExceptHandler) -> None:
        """Read ``except kind as name``, which deletes the name at its end."""
        if node.type is not None:
            self.visit(node.type)
        if node.name is not None:
            self.visit(ast.Name(node.name, ast.Store()))
        self._visit_all(node.body)
        if node.name is not None:
            self.visit(ast.Name(node.name, ast.Del()))

    def visit_With(self, node: ast.With | ast.AsyncWith) -> None:
        """Read a ``with``; if it suppresses exceptions, any line of it may be the last to run."""
        if _SWALLOWS.search(" ".join(map(ast.unparse, node.items))):
            self._visit_all(node.items)
            self._perhaps(node.body)
        else:
            self.generic_visit(node)

    visit_AsyncWith = visit_With

    def visit_Raise(self, node: ast.Raise) -> None:
        """Read a ``raise``; the lines below it may not run."""
        self.generic_visit(node)
        self._unsure += 1

    def visit_MatchMapping(self, node: ast.MatchMapping) -> None:
        """Read a pattern that binds the remaining items of a mapping."""
        self.generic_visit(node)
        if node.rest is not None:
            self._bind(node.rest)

    def visit_MatchAs(self, node: ast.MatchAs | ast.MatchStar) -> None:
        """Read a pattern that binds what it matches."""
        self.generic_visit(node)
        if node.name is not None:
            self._bind(node.name)

    visit_MatchStar = visit_MatchAs

    # ---- code with its own scope

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        """Read a function's decorators and defaults; its body counts where its name is read."""
        self._visit_all(node.decorator_list)
        self.visit(node.args)
        if node.decorator_list:
            self._use(self._later[node.name])  # a decorator may call the function at once
        self._bind(node.name)

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        """Read a class with its body, which runs here and binds no variable of the cell.

        A name that the body binds and then reads counts as *maybe* needed: a method that runs in
        between would read the notebook's variable.
        """
        self._visit_all([*node.decorator_list, *node.bases, *node.keywords])
        before, touched = self._bound, {*self.touched}
        for statement in node.body:
            self.visit(statement)
            self._bound &= before
        self._bound, self.touched = before, touched
        if node.decorator_list or node.keywords:
            # a decorator or a metaclass may call its methods at once
            self._use(self._later[node.name])
        self._bind(node.name)

    def visit_Lambda(self, node: ast.Lambda) -> None:
        """Read a lambda's defaults, and its body, since it may be called from here on."""
        self.visit(node.args)
        self._expression_with_scope(node)

    def visit_ListComp(
        self, node: ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp
    ) -> None:
        """Read a comprehension; only its first iterable is evaluated in the surrounding scope."""
        self.visit(node.generators[0].iter)
        self._expression_with_scope(node)

    visit_SetComp = visit_DictComp = visit_GeneratorExp = visit_ListComp

    def _expression_with_scope(self, node: ast.expr) -> None:
        for part in ast.walk(node):
            if isinstance(part, ast.NamedExpr):
                self.touched.add(part.target.id)  # ``:=`` in a comprehension binds outside of it
        self._use(self._inside(node))

    def _inside(self, node: ast.expr) -> _Names:
        """Return the names that an expression uses, except those that it binds itself."""
        return global_names(_compile(ast.Expression(node))) | self._texts.inside(node)

    def _magic(self, node: ast.Expr, method: str, texts: list[str]) -> None:
        """Read a magic: as Python if it binds the cell's variables; otherwise as possible names."""
        name, (*words, python) = texts[0], texts
        options = _OPTIONS.match(python) if method == "run_line_magic" else None
        said = options[0] if options else ""
        try:
            if name in _RUN_HERE:
                self.read(python_of(python.removeprefix(said)))
                self.shells -= 1
                python = said
        except SyntaxError:
            pass  # then it is not Python
        self._use(_words_of(*words, python))
        if name == "run":  # the script's variables become the notebook's
            self.needs.words.add("%run")
            self._use([_any_name(node)] if "-i" in python.split() else [])
            self._bind_any()


def _compile(code: ast.Module | ast.Expression) -> types.CodeType:
    """Compile code without showing its warnings; the process that runs it shows them."""
    mode = "exec" if isinstance(code, ast.Module) else "eval"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made: types.CodeType = compile(code, "<cell>", mode, ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, True)
    return made


def _later_in(code: types.CodeType) -> dict[str, _Names]:
    """Return what functions and classes in a code object read when they or their methods run."""
    found: dict[str, _Names] = {}
    for inner in codes_in(code):
        is_function = inner.co_flags & inspect.CO_OPTIMIZED and not inner.co_name.startswith(
            "<generic"
        )
        methods = {} if is_function else _later_in(inner)
        used = global_names(inner) if is_function else _NONE.union(*methods.values())
        for name, names in (*methods.items(), (inner.co_name, used)):
            found[name] = found.get(name, _NONE) | names
    return found


# ----------------------------------------------------------- functions and classes of earlier cells


def names_used_by(values: Iterable[Any], namespace: Mapping[str, Any]) -> set[str]:
    """Return the variables that the notebook's functions and classes use, and their own names."""
    values, found = [*values], set[str]()
    kinds = {*filter(_uses_names, {*map(type, values)})}
    for value in values if kinds else ():
        if type(value) not in kinds:
            continue
        if isinstance(value, types.FunctionType):
            if value.__globals__ is namespace:
                found |= names_of(value) | _words_in_annotations(value)
                found |= _looked_up_by(value.__code__)
        elif isinstance(value, type):
            if value.__module__ == "__main__":
                found |= names_of(value) | _words_in_annotations(value)
        else:
            classes = (type(part) for part in attributes_of(value).values())
            found = found.union(*(names_of(cls) for cls in classes if cls.__module__ == "__main__"))
    return found


def _uses_names(cls: type) -> bool:
    """Tell whether objects of a class use variables: code, or a protocol that pickles objects.

    Such a protocol may call ``torch.save`` in its ``__getstate__``.
    """
    own = cls.__module__ == "__main__" and not (
        keeps_pickling_of_object(cls) and keeps_state_of_object(cls)
    )
    return own or issubclass(cls, (type, types.FunctionType))


def _words_in_annotations(code: types.FunctionType | type) -> set[str]:
    """Return the words in annotations that are strings; ``get_type_hints`` looks them up."""
    is_class = isinstance(code, type)
    # annotations are computed by a function on first access, which leaves a trace in the class
    if sys.version_info >= (3, 14):
        by_class = vars(code).get("__annotate_func__")
        annotate = by_class if is_class else getattr(code, "__annotate__", None)
        if isinstance(annotate, types.FunctionType):
            said = {text for text in annotate.__code__.co_consts if isinstance(text, str)}
            named = (
                code.__code__.co_varnames if isinstance(code, types.FunctionType) else vars(code)
            )
            return _words_of(*said.difference(named))
    annotations = vars(code).get("__annotations__") if is_class else code.__annotations__
    return _words_of(*(text for text in (annotations or {}).values() if isinstance(text, str)))


# ---------------------------------------------------------------- names in strings
#
# Code often refers to variables by strings: in magics, ``eval``, ``query``, ``globals()["x"]``,
# ``__main__.x`` and annotations. Each word of such a string may be a name. If code computes the
# string, it may be any name.

_ALL_NAMES = {"globals", "locals", "vars", "dir"}
_RUN_TEXT = {"eval", "exec", "ex", "ev", "run_cell"}
_MAGICS = {"run_line_magic", "run_cell_magic", "system", "getoutput"}
_HOLD_TEXT = {*_RUN_TEXT, *_MAGICS, "query", "timeit", "repeat", "Timer", "compile"}
_LOOKS_UP = {
    *_ALL_NAMES, *_HOLD_TEXT, "__main__", "modules", "user_ns", "get_ipython", "__import__",
    "import_module",
}  # fmt: skip
"""A function that uses none of these names and attributes does not look up variables by strings."""
_LIST_NAMES = {"who", "whos", "who_ls"}
_FUNCTION = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
ANY = "*"
"""Prefix of a pseudo-name that stands for all variables of the notebook, followed by the code that
may refer to any of them.
"""
_SHOWN = 60


class _Texts:
    """Finds the names in strings: their words, or ``*`` if code computes the string."""

    def __init__(self) -> None:
        # nodes that stand for all variables; the surrounding code shows which one is meant
        self._told: set[ast.AST] = set()

    def inside(self, node: ast.AST) -> frozenset[str]:
        """Return the names in all strings in the code of a function, a class or an expression."""
        return frozenset[str]().union(*(self.of(part, inside=True) for part in ast.walk(node)))

    def of(self, node: ast.AST, *, inside: bool = False) -> set[str]:
        """Return the names that a node gives by strings.

        Such strings are annotations, arguments of functions that run code from strings, and keys
        into the namespace (``globals()["x"]``).
        """
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
        return _words_of(text) | {text}  # a whole string may be a name: globals()["0.weight"]


def _names_in_call(node: ast.Call, name: str) -> set[str]:
    """Return the names in the arguments of a function that runs or searches strings."""
    first = _text_of(node.args[0]) if node.args else ""
    runs = name in _RUN_TEXT and (
        isinstance(node.func, ast.Name) or "ipython" in ast.unparse(node.func)
    )
    if first in _LIST_NAMES or (runs and first is None):
        return {_any_name(node)}
    return _words_in(node)


def _text_of(node: ast.AST) -> str | None:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None


def _looked_up(node: ast.AST) -> tuple[ast.AST | None, str | None]:
    """Return where a node looks up a name, and by which string; None for a computed string."""
    match node:
        case ast.Attribute(value=ast.Name() | ast.Subscript() as where, attr=name) if (
            name != "__dict__"
        ):
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
    """Return method and strings of the call that IPython makes of a magic or ``!command``."""
    match node:
        case ast.Call(
            func=ast.Attribute(value=ast.Call(func=ast.Name(id="get_ipython")), attr=method)
        ):
            texts = [text for part in node.args if (text := _text_of(part)) is not None]
            if method in _MAGICS and texts and len(texts) == len(node.args):
                return method, texts
    return None


def _words_of(*texts: str) -> set[str]:
    """Return each part of the strings that may be a name."""
    return {*re.findall(r"[^\W\d]\w*", " ".join(texts))}


def _words_in(node: ast.AST) -> set[str]:
    parts = (part.value for part in ast.walk(node) if isinstance(part, ast.Constant))
    return _words_of(*(part for part in parts if isinstance(part, str)))


def _any_name(node: ast.AST) -> str:
    """Return the pseudo-name for "any name", followed by one line of the code that means it."""
    return ANY + ast.unparse(node).partition("\n")[0][:_SHOWN]


def _looked_up_by(code: types.CodeType) -> frozenset[str]:
    """Return the names that a function looks up by strings, from its source in ``linecache``."""
    if words_in(code).isdisjoint(_LOOKS_UP):
        return frozenset()
    text = "".join(linecache.cache.get(code.co_filename, (0, 0, [], ""))[2])  # type: ignore[misc]
    return _names_in_text(text, code.co_firstlineno, f"{ANY}{code.co_name}()")


@functools.lru_cache(maxsize=1024)
def _names_in_text(text: str, line: int, unknown: str) -> frozenset[str]:
    """Return the names that the function at a line looks up; ``unknown`` if none is there."""
    with contextlib.suppress(SyntaxError):
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, _FUNCTION):
                first = min(
                    (d.lineno for d in getattr(node, "decorator_list", ())), default=node.lineno
                )
                if first == line:
                    return _Texts().inside(node)
    return frozenset({unknown})
