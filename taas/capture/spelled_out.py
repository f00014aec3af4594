"""Code with all the names it uses said: a cell as a program that uses the same names in the same order, and says each.

Much of what a cell uses stands in texts: in magics, in ``eval``, in ``globals()["x"]``, in annotations. Where such a text is
known, each word of it may be a name; where the code makes it, any name may be meant. Both become a lambda beside the
expression, whose body has these names: who compiles the program finds names alone, and what a lambda reads is read
*maybe*. Other things are said in simpler words, so that the compiler makes of them what is taken for granted: a ``with``
does not swallow exceptions, an assertion holds, ``__name__`` is ``"__main__"``, what is awaited comes.
"""

# ruff: noqa: N815  methods are named after the nodes they visit

from __future__ import annotations

import ast
import functools
import re
import sys
import types
import warnings
from collections.abc import Iterable, Mapping
from typing import Any

from taas.capture.of_ipython import python_of

ANY = "*"
"""Begins a name that stands for all of the notebook's; the code that may mean any of them follows."""

_IDENTIFIER = re.compile(r"[^\W\d]\w*")
_SHOWN = 60
_SWALLOWS = re.compile(r"suppress|raises|ignore", re.IGNORECASE)
_NOT_CALLING = {"property", "staticmethod", "classmethod"}
_LAZY_ANNOTATIONS = sys.version_info >= (3, 14)

_PYTHON_HERE = {"time", "capture", "prun", "memit", "mprun", "lprun", "debug"}
_PYTHON_APART = {"timeit"}
_NOT_PYTHON = {
    "bash", "sh", "script", "html", "HTML", "javascript", "js", "latex", "markdown", "svg", "SVG", "writefile",
    "file", "perl", "ruby", "pypy", "python", "python2", "python3", "system", "sx", "!",
}  # fmt: skip
_LIST_NAMES = {"who", "whos", "who_ls"}
_MAGICS = {"run_line_magic", "run_cell_magic", "system", "getoutput"}

_ALL_NAMES = {"globals", "locals", "vars", "dir"}
_RUN_TEXT = {"eval", "exec", "ex", "ev", "run_cell"}
_HOLD_TEXT = {"query", "timeit", "repeat", "Timer", "compile", *_MAGICS}


def _magic_of(node: ast.AST) -> tuple[str, list[str]] | None:
    """Return method and texts of what IPython makes of ``%magic`` and ``!command``."""
    match node:
        case ast.Call(func=ast.Attribute(value=ast.Call(func=ast.Name(id="get_ipython")), attr=method)):
            texts = [a.value for a in node.args if isinstance(a, ast.Constant) and isinstance(a.value, str)]
            return (method, texts) if method in _MAGICS and texts and len(texts) == len(node.args) else None
    return None


def _compiled(code: ast.Module | str) -> types.CodeType:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # who runs it shows them
        made: types.CodeType = compile(
            code, "<cell>", "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True
        )
    return made


def _maybe(names: Iterable[str]) -> ast.Lambda:
    """Return code that may use names."""
    return _later(ast.Tuple([ast.Name(name, ast.Load()) for name in sorted(names)], ast.Load()))


def _later(node: ast.expr) -> ast.Lambda:
    return ast.Lambda(ast.arguments([], [], None, [], [], None, []), node)


def _like(text: str, **fields: Any) -> ast.stmt:
    """Return a statement like another, but for some of its parts."""
    made = ast.parse(text).body[0]
    vars(made).update(fields)
    return made


def _words_of(*texts: str) -> set[str]:
    """Return everything in texts that may be a name."""
    return {word for text in texts for word in _IDENTIFIER.findall(text)} - {"None", "True", "False"}


def _words_in(node: ast.AST) -> set[str]:
    parts = (part.value for part in ast.walk(node) if isinstance(part, ast.Constant))
    return _words_of(*(part for part in parts if isinstance(part, str)))


class SpelledOut(ast.NodeTransformer):
    """Says it.

    Args:
        tree: the code; it is changed.
        known: values that names have when it runs, if the code doesn't bind them.
        lazy: whether annotations are evaluated only when they are asked for.

    Attributes:
        code: what was made of it.
        magics: that were met.
        star: whether it binds names that are not in its text.
    """

    def __init__(self, tree: ast.Module, known: Mapping[str, Any], *, lazy: bool) -> None:
        self.magics: set[str] = set()
        self.star = False
        self._names = known
        self._tree = tree
        self._lazy = lazy or _LAZY_ANNOTATIONS
        self._above: list[ast.AST] = []
        self._in: type | None = None  # a function or a class
        self.visit(tree)
        tree.body.append(ast.Expr(_maybe(())))  # compilers copy the end of a program where it is short
        self.code = _compiled(ast.fix_missing_locations(tree))

    def visit(self, node: ast.AST) -> Any:
        """Visit a node; beside an expression, say which names it looks up."""
        if isinstance(node, ast.pattern) or not node._fields:  # a pattern has to stay one
            return node
        self._above.append(node)
        names = self._looked_up(node)
        made = super().visit(node)
        self._above.pop()
        return ast.Tuple([_maybe(names), made], ast.Load()) if names else made

    def _all(self, statements: Iterable[ast.stmt]) -> list[ast.stmt]:
        found: list[ast.stmt] = []
        for statement in statements:
            made = self.visit(statement)
            found += made if isinstance(made, list) else [made]
        return found

    @functools.cached_property
    def _bound(self) -> set[str]:
        """Names whose values are no longer those that are known."""
        names = [n for n in ast.walk(self._tree) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)]
        return {name.id for name in names} | {a.arg for a in ast.walk(self._tree) if isinstance(a, ast.arg)}

    @property
    def _in_function(self) -> bool:
        return self._in not in (None, ast.ClassDef)

    # ------------------------------------------------------------ definitions

    def visit_FunctionDef(self, node: Any) -> Any:
        """Who is given to a decorator, or a metaclass, may be called at once."""
        node.decorator_list = [d for d in node.decorator_list if getattr(d, "id", "") not in _NOT_CALLING]
        called = node.decorator_list or getattr(node, "keywords", ())
        if getattr(node, "returns", None) is not None:
            node.returns = self._annotation(node.returns)
        made = self.visit_Lambda(node)
        return [made, ast.Expr(ast.Name(node.name, ast.Load()))] if called else made

    visit_ClassDef = visit_AsyncFunctionDef = visit_FunctionDef

    def visit_Lambda(self, node: Any) -> Any:
        """Visit what is inside."""
        outer, self._in = self._in, type(node)
        self.generic_visit(node)
        self._in = outer
        return node

    def visit_arg(self, node: ast.arg) -> Any:
        """Visit its annotation."""
        node.annotation = self._annotation(node.annotation) if node.annotation else None
        return self.generic_visit(node)

    def visit_Assign(self, node: ast.Assign) -> Any:
        """A lambda with a name is a function with a name."""
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Lambda(args=arguments, body=body)):
                return self.visit(_like("def f(): pass", name=name, args=arguments, body=[ast.Return(body)]))
        return self.generic_visit(node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> Any:
        """Bound only where there is a value; the annotations of the notebook are a dict that each of them changes."""
        found: list[ast.stmt] = [] if node.value is None else [ast.Assign([node.target], node.value)]
        if not self._in_function:
            found.append(ast.Expr(self._annotation(node.annotation)))
            found += [ast.Expr(_maybe(["__annotations__"]))] if self._in is None else []
        return self._all(found) or ast.Pass()

    def _annotation(self, node: ast.expr) -> ast.expr:
        """Return what an annotation reads; one that is not evaluated may be asked for, as dataclasses do."""
        names = _maybe(_words_in(node))
        return ast.Tuple([_later(node) if self._lazy else node, names], ast.Load())

    # ------------------------------------------------------------ what is said in simpler words

    def visit_ListComp(self, node: ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp) -> Any:
        """Generators keep their names in all Pythons."""
        for part in node.generators:
            part.is_async = 0
        item = ast.Tuple([node.key, node.value], ast.Load()) if isinstance(node, ast.DictComp) else node.elt
        return self.generic_visit(ast.GeneratorExp(item, node.generators))

    visit_SetComp = visit_DictComp = visit_GeneratorExp = visit_ListComp

    def visit_Await(self, node: ast.Await) -> Any:
        """What is awaited comes."""
        return self.visit(node.value)

    def visit_AsyncFor(self, node: ast.AsyncFor) -> Any:
        """What is awaited comes."""
        return self.generic_visit(ast.For(node.target, node.iter, node.body, node.orelse))

    def visit_With(self, node: ast.With | ast.AsyncWith) -> Any:
        """Transparent, unless the manager swallows exceptions."""
        if any(_SWALLOWS.search(ast.unparse(item.context_expr)) for item in node.items):
            return self.generic_visit(ast.With(node.items, node.body))
        entered = ((item.optional_vars, item.context_expr) for item in node.items)
        said = [ast.Assign([target], value) if target else ast.Expr(value) for target, value in entered]
        return self._all([*said, *node.body])

    visit_AsyncWith = visit_With

    def visit_Assert(self, node: ast.Assert) -> Any:
        """An assertion holds."""
        return self._all([ast.Expr(node.test), *([ast.Expr(_later(node.msg))] if node.msg else [])])

    def visit_If(self, node: ast.If) -> Any:
        """It is the main program."""
        if ast.unparse(node.test) == "__name__ == '__main__'":
            node.test = ast.Constant(True)
        return self.generic_visit(node)

    # ------------------------------------------------------------ imports

    def visit_Import(self, node: ast.Import) -> Any:
        """A new name for all names."""
        if any(alias.name == "__main__" and alias.asname for alias in node.names):
            return [node, ast.Expr(_maybe([_any(node)]))]
        return node

    def visit_ImportFrom(self, node: ast.ImportFrom) -> Any:
        """A star may bind anything."""
        if node.module == "__future__":
            self._lazy |= any(alias.name == "annotations" for alias in node.names)
            return ast.Pass()
        if any(alias.name == "*" for alias in node.names):
            return self._any_bound()
        if node.module == "__main__":
            names = (
                (ast.Name(a.asname or a.name, ast.Store()), ast.Name(a.name, ast.Load())) for a in node.names
            )
            return [ast.Assign([target], value) for target, value in names]
        return node

    def _any_bound(self) -> ast.stmt:
        self.star = True
        names = ast.Tuple([ast.Name(name, ast.Store()) for name in self._names], ast.Store())
        return ast.For(names, ast.Tuple([], ast.Load()), [ast.Pass()], [])

    # ------------------------------------------------------------ magics

    def visit_Expr(self, node: ast.Expr) -> Any:
        """The Python in a magic is Python, and every word of the rest may be a name."""
        magic = _magic_of(node.value)
        if magic is None or self._in_function:
            return self.generic_visit(node)
        method, texts = magic
        name, python = texts[0], ""
        self.magics.add(name)
        if method == "run_cell_magic":
            python = texts.pop()
        elif name in _PYTHON_HERE | _PYTHON_APART:
            python = re.sub(r"^(\s*-\w+(\s+\d+)?)+\s+", "", texts[-1])
        found: list[ast.stmt] = [ast.Expr(_maybe(_words_of(*texts)))]
        if name == "run":  # the program's names become the notebook's
            self.magics.add("%run")
            found += [ast.Expr(_maybe([_any(node)]))] if "-i" in texts[-1].split() else []
            found.append(self._any_bound())
        return [*self._python("" if name in _NOT_PYTHON else python, here=name in _PYTHON_HERE), *found]

    def _python(self, text: str, *, here: bool) -> list[ast.stmt]:
        """Return the Python inside a magic, as part of the cell (``here``) or in a scope of its own."""
        try:
            text = python_of(text)
            _compiled(text)
        except SyntaxError:
            return [ast.Expr(_maybe(_words_of(text)))]
        found = self._all(ast.parse(text).body)
        if here or not found:
            return found
        return [_like("class C: pass", name="%", body=found)]  # it runs at once, and binds for itself

    # ------------------------------------------------------------ what is looked up by a text

    def _looked_up(self, node: ast.AST) -> set[str]:
        """Return the names that an expression may look up by its texts."""
        if isinstance(getattr(node, "ctx", None), (ast.Store, ast.Del)):
            return set()
        if self._is_main(node):
            return self._beside(main=True)
        match node:
            case ast.Attribute(attr="user_ns"):
                return self._beside()
            case ast.Call(func=ast.Name(id=name), args=[], keywords=[]) if name in _ALL_NAMES:
                return set() if name != "globals" and self._in_function else self._beside()
            case ast.Call(func=ast.Name(id=called), args=[text, *_]) if called in _RUN_TEXT:
                return self._text(text, node)
            case ast.Call(func=ast.Attribute(value=of, attr=called), args=[text, *_]) if called in _RUN_TEXT:
                return self._text(text, node) if "ipython" in ast.unparse(of) else _words_in(text)
            case ast.Call(func=ast.Attribute(attr=called) | ast.Name(id=called)) if called in _HOLD_TEXT:
                self.magics |= (magic := {texts[0] for _, texts in filter(None, [_magic_of(node)])})
                if not magic.isdisjoint(_LIST_NAMES):
                    return {_any(node)}
                texts = (*node.args, *(keyword.value for keyword in node.keywords))
                return set().union(*map(self._text, texts))
        return set()

    def _is_main(self, node: ast.AST) -> bool:
        match node:
            case ast.Name(id=name):
                value: Any = None if name in self._bound else self._names.get(name)
                is_module = isinstance(value, types.ModuleType)
                return name == "__main__" or (is_module and value.__name__ == "__main__")
            case ast.Subscript(value=ast.Attribute(attr="modules"), slice=which):
                return ast.unparse(which) in ("'__main__'", "__name__")
        return False

    def _text(self, text: ast.AST | None, shown: ast.AST | None = None) -> set[str]:
        """Return the words of a text; one that is not known, in code that is shown, may have any name in it."""
        value = getattr(text, "value", None)
        if isinstance(text, ast.Name) and text.id not in self._bound:
            value = self._names.get(text.id)
        if isinstance(value, str):  # all of it may be a name, too: ``globals()["0.weight"]``
            whole = value.isprintable() and not value.isidentifier() and value[:1] != ANY
            return _words_of(value) | ({value} if whole else set())
        return {_any(shown)} if shown is not None else _words_in(text or ast.Pass())

    def _beside(self, *, main: bool = False) -> set[str]:
        """Return what is looked up in the dict of all names, or in ``__main__``, by the text beside it."""
        *around, inner = self._above
        for above in reversed(around):
            match above:
                case ast.Attribute(attr=name) if main and name != "__dict__":
                    return {name}
                case ast.Subscript(ctx=ast.Store()) | ast.Attribute(attr="update" | "__setitem__"):
                    return set()
                case ast.Call(func=ast.Name(id="setattr" | "delattr")):
                    return set()
                case ast.Attribute() | ast.keyword() | ast.Call(func=ast.Name(id="vars")):
                    main, inner = False, above
                    continue
                case ast.Call(func=ast.Name(id="getattr" | "hasattr"), args=[_, text, *_]):
                    return self._text(text, above)
                case ast.Call(func=func) if isinstance(inner, ast.keyword) and inner.arg is None:
                    return self._text(getattr(func, "value", None), above)  # "{x}".format(**globals())
                case ast.Subscript(slice=text) | ast.Compare(left=text) | ast.BinOp(left=text):
                    return self._text(text if text is not inner else None, above)
                case ast.Call(args=[text, *_]) if text is not inner and not main:
                    return self._text(text, above)
            return {_any(above)}
        return set()


def _any(node: ast.AST) -> str:
    """Return the name that stands for all names, with the code that may mean them, cut to a line."""
    return ANY + ast.unparse(node).partition("\n")[0][:_SHOWN]
