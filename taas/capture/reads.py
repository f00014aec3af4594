"""Reading code in the order of execution: what is surely bound so far, what is read before that."""

# ruff: noqa: N815  methods are named after the nodes they visit

from __future__ import annotations
import __future__

import ast
import contextlib
import types
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from taas.capture.code_by_value import global_names
from taas.capture.followed import names_used_by
from taas.capture.ipython_names import is_of_ipython
from taas.capture.texts import ALL_NAMES, LOOKS_UP, magic_of, strings_in, words_of

__all__ = ["ExpressionReader", "Needs", "code_of"]

_COMPILE_FLAGS = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT | __future__.annotations.compiler_flag


@dataclass
class Needs:
    """Names of the namespace that a cell needs.

    Attributes:
        sure: read before they are bound, whatever happens.
        maybe: possibly read before they are bound.
        settled: used by functions of earlier cells, and surely bound by the cell before.
        words: names and attributes that occur in the cell at all.
    """

    sure: set[str] = field(default_factory=set)
    maybe: set[str] = field(default_factory=set)
    settled: set[str] = field(default_factory=set)
    words: set[str] = field(default_factory=set)


def code_of(node: ast.AST) -> types.CodeType:
    """Compile one statement or expression by itself."""
    statement = ast.Expr(node) if isinstance(node, ast.expr) else node
    module = ast.fix_missing_locations(ast.Module([statement], []))  # type: ignore[list-item]
    code: types.CodeType = compile(module, "<cell>", "exec", _COMPILE_FLAGS, dont_inherit=True)
    return code


class ExpressionReader(ast.NodeVisitor):
    """Walks expressions in order of execution, knowing what is surely bound so far."""

    def __init__(self, namespace: Mapping[str, Any]) -> None:
        self.needs = Needs()
        self._namespace = namespace
        self._bound: set[str] = set()
        self._perhaps: set[str] = set()  # bound somewhere: what is read then need not be the notebook's
        self._deferred: dict[str, frozenset[str]] = {}
        self._sure = True
        self._star = False

    # ------------------------------------------------------------ reads and binds

    def _read(self, names: Iterable[str], *, sure: bool, through_function: bool = False) -> None:
        """Note that names are read now, and with them what their functions read."""
        waiting = [(name, sure and self._sure, through_function) for name in names]
        seen = set()
        while waiting:
            name, certain, inside = waiting.pop()
            if name in seen:
                continue
            seen.add(name)
            waiting += [(inner, False, True) for inner in self._deferred.get(name, ())]
            if name in self._bound:
                if inside and name in self._namespace:
                    self.needs.settled.add(name)
                continue
            if name not in self._namespace or is_of_ipython(name):
                continue
            certain = certain and not self._star and name not in self._perhaps
            (self.needs.sure if certain else self.needs.maybe).add(name)
            waiting += [
                (inner, False, True) for inner in names_used_by(self._namespace[name], self._namespace)
            ]

    def _bind(self, names: Iterable[str]) -> None:
        for name in names:
            self._deferred.pop(name, None)
            self._bound.add(name)
            self._perhaps.add(name)

    def _delete(self, name: str) -> None:
        """Note that a name is gone; it travels, bound before or not, so that its absence can come back."""
        self._bound.discard(name)
        self._read([name], sure=False)

    @contextlib.contextmanager
    def _maybe(self, *, unsure: bool = True) -> Iterator[None]:
        """Statements that may not run: what they bind isn't sure afterwards."""
        before, deferred, sure = set(self._bound), dict(self._deferred), self._sure
        self._sure = sure and not unsure
        yield
        self._bound, self._sure = before & self._bound, sure
        for name, names in deferred.items():
            self._deferred[name] = self._deferred.get(name, frozenset()) | names

    def _scan(self, text: str) -> None:
        """Take every word of a text for a name that may be read."""
        self._read(words_of(text), sure=False)

    # ------------------------------------------------------------ expressions

    def visit_Name(self, node: ast.Name) -> None:
        """Read or bind."""
        if isinstance(node.ctx, ast.Store):
            self._bind([node.id])
        else:
            self._read([node.id], sure=True)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        """Only the first operand is sure."""
        self.visit(node.values[0])
        with self._maybe():
            for value in node.values[1:]:
                self.visit(value)

    def visit_IfExp(self, node: ast.IfExp) -> None:
        """Only the condition is sure."""
        self.visit(node.test)
        for branch in (node.body, node.orelse):
            with self._maybe():
                self.visit(branch)

    def visit_Compare(self, node: ast.Compare) -> None:
        """A chain may end early; ``"name" in globals()`` asks for a name."""
        if any(isinstance(operator, (ast.In, ast.NotIn)) for operator in node.ops):
            self._asked_of(node, [part for other in node.comparators for part in ast.walk(other)])
        self.visit(node.left)
        self.visit(node.comparators[0])
        with self._maybe():
            for comparator in node.comparators[1:]:
                self.visit(comparator)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        """``"%(name)s" % vars()`` reads a name."""
        self._asked_of(node, [node.right])
        self.generic_visit(node)

    def visit_NamedExpr(self, node: ast.NamedExpr) -> None:
        """The value first."""
        self.visit(node.value)
        self.visit(node.target)

    def visit_Lambda(self, node: ast.Lambda) -> None:
        """Without a name it may run from now on."""
        for default in (*node.args.defaults, *filter(None, node.args.kw_defaults)):
            self.visit(default)
        self._read(global_names(code_of(node)), sure=False)
        self._looked_up(node)

    def _comprehension(self, node: ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp) -> None:
        self.visit(node.generators[0].iter)
        self._perhaps |= {part.target.id for part in ast.walk(node) if isinstance(part, ast.NamedExpr)}
        self._read(global_names(code_of(node)), sure=False)
        self._looked_up(node)

    visit_ListComp = visit_SetComp = visit_DictComp = visit_GeneratorExp = _comprehension

    def _looked_up(self, node: ast.AST) -> None:
        """Read the strings of a piece of code in which names are looked up."""
        if any(isinstance(part, ast.Name) and part.id in LOOKS_UP for part in ast.walk(node)):
            for text in strings_in(node):
                self._scan(text)

    def visit_Call(self, node: ast.Call) -> None:
        """Magics run text; some functions look names up."""
        magic = magic_of(node)
        if magic is not None:
            self.read_magic(*magic)
            return
        function = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        if function in LOOKS_UP:
            for text in (*strings_in(node), *self._texts_named_in(node.args)):
                self._scan(text)
        self._asked_of(node, [*node.args, *(keyword.value for keyword in node.keywords)])
        self.generic_visit(node)

    def _texts_named_in(self, arguments: Iterable[ast.expr]) -> Iterator[str]:
        """Yield the notebook's texts among the arguments of a call (``exec(code)``)."""
        for argument in arguments:
            value = self._namespace.get(argument.id) if isinstance(argument, ast.Name) else None
            if isinstance(value, str):
                yield value

    def _asked_of(self, node: ast.expr, parts: Iterable[ast.AST]) -> None:
        """Read the strings of an expression, one of whose parts is all names (``"{name}".format(**globals())``)."""
        if any(isinstance(part, ast.Call) and getattr(part.func, "id", "") in ALL_NAMES for part in parts):
            for text in strings_in(node):
                self._scan(text)

    def visit_Subscript(self, node: ast.Subscript) -> None:
        """``globals()["name"]`` reads a name."""
        if isinstance(node.value, ast.Call) and getattr(node.value.func, "id", "") in LOOKS_UP:
            for text in strings_in(node):
                self._scan(text)
        self.generic_visit(node)

    def read_magic(self, method: str, arguments: list[str]) -> None:
        """Read the text of a magic or of a shell command; here, every word of it."""
        del method
        self._scan(" ".join(arguments))
