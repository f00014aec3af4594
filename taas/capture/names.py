"""Which names of the notebook a cell needs.

The cell's syntax tree is read in the order of execution. A name that is surely bound before its first read
isn't needed: else the second run of a cell would ship the first run's model. What may or may not be read
(in a branch, in a function) may be needed. The body of a function counts where its name is read, as it can
run from there on; the same holds for functions and classes of earlier cells, whose code is looked through.

Scopes are CPython's own: names inside functions, classes and comprehensions are taken from the bytecode.

Two things go beyond the tree: the text of magics and shell commands, which is Python here and there
(``%timeit f(n)``, ``!ls {path}``), and strings where the cell looks names up by itself (``eval``,
``globals()``).

Assumed: a ``with`` block whose manager isn't called something with suppress, raises or ignore doesn't
swallow exceptions.
"""

# ruff: noqa: N802, N815  methods are named after the nodes they visit

from __future__ import annotations

import ast
import re
import types
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from taas.capture.cell_text import python_of
from taas.capture.code_by_value import global_names, own_names
from taas.capture.reads import ExpressionReader, Needs, code_of
from taas.capture.texts import LOOKS_UP, NOT_PYTHON, RUNS_APART, RUNS_HERE, magic_texts, strings_in, words_of

__all__ = ["Needs", "needs_of"]

_SWALLOWS = re.compile(r"suppress|raises|ignore", re.IGNORECASE)


def needs_of(cell: str, namespace: Mapping[str, Any]) -> Needs:
    """Find the names of ``namespace`` that ``cell`` needs.

    Args:
        cell: the cell as typed; magics and header comments allowed.
        namespace: the notebook's names; only functions and classes among them are looked into.

    Raises:
        SyntaxError: the cell is wrong.
    """
    tree = ast.parse(python_of(cell))
    reader = _Reader(namespace)
    reader.block(tree.body, sure=True)
    needs = reader.needs
    needs.words = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    needs.words |= {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    needs.maybe -= needs.sure
    needs.settled -= needs.sure | needs.maybe
    return needs


def _inner_names(code: types.CodeType) -> frozenset[str]:
    """Return the globals of the functions defined in a piece of code."""
    return frozenset().union(*(global_names(c) for c in code.co_consts if isinstance(c, types.CodeType)))


def _exits(node: ast.AST) -> bool:
    """Tell whether a statement can leave the block it stands in."""
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)):
        return False
    if isinstance(node, (ast.Break, ast.Continue, ast.Return, ast.Raise)):
        return True
    return any(
        _exits(child)
        for child in ast.iter_child_nodes(node)
        if isinstance(child, (ast.stmt, ast.excepthandler))
    )


def _is_main_test(test: ast.expr) -> bool:
    """Tell whether a condition is ``__name__ == "__main__"`` or a true constant."""
    if isinstance(test, ast.Constant):
        return bool(test.value)
    return isinstance(test, ast.Compare) and ast.unparse(test).replace('"', "'") == "__name__ == '__main__'"


class _Reader(ExpressionReader):
    """Walks statements."""

    def block(self, body: list[ast.stmt], *, sure: bool) -> None:
        """Read statements one after the other."""
        outer = self._sure
        self._sure = outer and sure
        for statement in body:
            self.visit(statement)
            if _exits(statement):
                self._sure = False
        self._sure = outer

    def generic_visit(self, node: ast.AST) -> None:
        """Read the parts of whatever has no method of its own, in order."""
        super().generic_visit(node)

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        """The body counts later, the rest now."""
        for expression in (*node.decorator_list, *node.args.defaults, *filter(None, node.args.kw_defaults)):
            self.visit(expression)
        arguments = [
            *node.args.posonlyargs,
            *node.args.args,
            *node.args.kwonlyargs,
            node.args.vararg,
            node.args.kwarg,
        ]
        for annotation in [argument.annotation for argument in arguments if argument] + [node.returns]:
            if annotation is not None:
                self._annotation(annotation)
        bare = type(node)(**{**dict(ast.iter_fields(node)), "decorator_list": []})
        self._define(node.name, _inner_names(code_of(bare)), node, called=bool(node.decorator_list))

    visit_AsyncFunctionDef = visit_FunctionDef

    def _define(self, name: str, reads: frozenset[str], node: ast.AST, *, called: bool) -> None:
        self._perhaps |= {
            word for part in ast.walk(node) if isinstance(part, ast.Global) for word in part.names
        }
        texts = {word for text in magic_texts(node) for word in words_of(text)}
        if reads & LOOKS_UP:
            texts |= {word for text in strings_in(node) for word in words_of(text)}
        reads |= frozenset(texts & set(self._namespace))
        if called:  # before the name is bound, so its own name counts, too
            self._read(reads, sure=False)
        reads -= {name}
        if self._sure:
            self._bind([name])
            self._deferred[name] = reads
        else:
            self._deferred[name] = self._deferred.get(name, frozenset()) | reads

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        """The body runs now, the methods later."""
        for expression in (*node.decorator_list, *node.bases, *node.keywords):
            self.visit(expression)
        bare = ast.ClassDef(
            **{**dict(ast.iter_fields(node)), "decorator_list": [], "bases": [], "keywords": []}
        )
        outer = code_of(bare)
        body = next(
            (c for c in outer.co_consts if isinstance(c, types.CodeType) and c.co_name == node.name), outer
        )
        here = own_names(body)
        within = {
            n.id
            for s in node.body
            for n in ast.walk(s)
            if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)
        }
        within |= {
            s.name for s in node.body if isinstance(s, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))
        }
        loads = {
            n.id
            for s in node.body
            for n in ast.walk(s)
            if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)
        }
        for nested in (
            s for s in node.body if isinstance(s, (ast.If, ast.For, ast.While, ast.Try, ast.With))
        ):
            within |= {name for name in here if name not in loads} | {
                n.id for n in ast.walk(nested) if isinstance(n, ast.Name)
            }
        self._read(here & loads - within, sure=True)
        self._read(here & loads & within, sure=False)
        if here & LOOKS_UP:
            self._looked_up(node)
        calls = any(
            isinstance(n, ast.Call)
            for s in node.body
            if not isinstance(s, ast.FunctionDef)
            for n in ast.walk(s)
        )
        self._define(
            node.name,
            _inner_names(body),
            node,
            called=calls or bool(node.decorator_list or node.keywords),
        )

    def visit_If(self, node: ast.If) -> None:
        """What both branches bind is bound."""
        self.visit(node.test)
        if _is_main_test(node.test):
            self.block(node.body, sure=True)
            return
        before = set(self._bound)
        with self._maybe():
            self.block(node.body, sure=True)
            after_body = self._bound if not _always_exits(node.body) else None
            self._bound = set(before)
            self.block(node.orelse, sure=True)
            after_else = self._bound if not _always_exits(node.orelse) else None
        ends = [end for end in (after_body, after_else) if end is not None]
        self._bound |= set.intersection(*ends) if ends else set()

    def visit_For(self, node: ast.For | ast.AsyncFor) -> None:
        """The body is taken to run, but nothing it binds is sure afterwards."""
        self.visit(node.iter)
        with self._maybe(unsure=False):
            self.visit(node.target)
            self.block(node.body, sure=True)
        with self._maybe():
            self.block(node.orelse, sure=True)

    visit_AsyncFor = visit_For

    def visit_While(self, node: ast.While) -> None:
        """As a loop over nothing known."""
        self.visit(node.test)
        with self._maybe(unsure=not _is_main_test(node.test)):
            self.block(node.body, sure=True)
        with self._maybe():
            self.block(node.orelse, sure=True)

    def visit_With(self, node: ast.With | ast.AsyncWith) -> None:
        """Transparent, unless the manager swallows exceptions."""
        swallows = False
        for item in node.items:
            self.visit(item.context_expr)
            swallows |= _SWALLOWS.search(ast.unparse(item.context_expr)) is not None
            if item.optional_vars is not None:
                self.visit(item.optional_vars)
        if swallows:
            with self._maybe(unsure=False):
                self.block(node.body, sure=True)
        else:
            self.block(node.body, sure=True)

    visit_AsyncWith = visit_With

    def visit_Try(self, node: ast.Try | ast.TryStar) -> None:
        """What the body and every handler that goes on bind is bound."""
        before = set(self._bound)
        with self._maybe(unsure=False):
            self.block(node.body, sure=True)
            self.block(node.orelse, sure=True)
            ends = [self._bound] if not _always_exits(node.body) else []
            for handler in node.handlers:
                self._bound = set(before)
                with self._maybe():
                    if handler.type is not None:
                        self.visit(handler.type)
                    if handler.name:
                        self._bind([handler.name])
                    self.block(handler.body, sure=True)
                    if handler.name:
                        self._delete(handler.name)
                    end = set(self._bound)
                if not _always_exits(handler.body):
                    ends.append(end)
            self._bound = set(before)
        if ends:
            self._bound |= set.intersection(*ends)
        bound, self._bound = self._bound, before
        self.block(node.finalbody, sure=True)
        self._bound |= bound

    visit_TryStar = visit_Try

    def visit_Match(self, node: ast.Match) -> None:
        """Each case may be taken."""
        self.visit(node.subject)
        for case in node.cases:
            with self._maybe():
                self._bind(_captures(case.pattern))
                for part in ast.walk(case.pattern):
                    if isinstance(part, (ast.MatchValue, ast.MatchClass)):
                        self.visit(part.value if isinstance(part, ast.MatchValue) else part.cls)
                    elif isinstance(part, ast.MatchMapping):
                        for key in part.keys:
                            self.visit(key)
                if case.guard is not None:
                    self.visit(case.guard)
                self.block(case.body, sure=True)

    def visit_Assign(self, node: ast.Assign) -> None:
        """A lambda with a name is a function with a name."""
        names = [target.id for target in node.targets if isinstance(target, ast.Name)]
        if isinstance(node.value, ast.Lambda) and len(names) == len(node.targets) == 1:
            for default in (*node.value.args.defaults, *filter(None, node.value.args.kw_defaults)):
                self.visit(default)
            self._define(names[0], global_names(code_of(node.value)), node.value, called=False)
            return
        self.visit(node.value)
        for target in node.targets:
            self.visit(target)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        """Read, then bound."""
        if isinstance(node.target, ast.Name):
            self._read([node.target.id], sure=True)
        self.visit(node.value)
        self.visit(node.target)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        """Bound only where there is a value."""
        self._annotation(node.annotation)
        if node.value is not None:
            self.visit(node.value)
            self.visit(node.target)
        elif not isinstance(node.target, ast.Name):
            self.visit(node.target)

    def _annotation(self, node: ast.expr) -> None:
        with self._maybe():
            self.visit(node)

    def visit_Import(self, node: ast.Import) -> None:
        """Bind."""
        self._bind_here((alias.asname or alias.name.partition(".")[0]) for alias in node.names)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        """Bind; a star may bind anything, so nothing later is sure to be needed."""
        if any(alias.name == "*" for alias in node.names):
            self._star = True
            return
        if node.module == "__main__":
            self._read([alias.name for alias in node.names], sure=True)
        self._bind_here((alias.asname or alias.name) for alias in node.names)

    def visit_Delete(self, node: ast.Delete) -> None:
        """What is deleted has to be there, and is gone."""
        for target in node.targets:
            if isinstance(target, ast.Name):
                self._read([target.id], sure=True)
                self._delete(target.id)
            else:
                self.visit(target)

    def visit_Assert(self, node: ast.Assert) -> None:
        """The message is rarely needed."""
        self.visit(node.test)
        if node.msg is not None:
            with self._maybe():
                self.visit(node.msg)

    def _bind_here(self, names: Iterable[str]) -> None:
        self._bind(names)

    def read_magic(self, method: str, arguments: list[str]) -> None:
        """Read the Python in a magic as Python, the rest word by word."""
        if method == "run_cell_magic" and len(arguments) == 3:
            name, line, body = arguments
            self._scan(line)
            if name in NOT_PYTHON:
                return
            self._text(body, here=name in RUNS_HERE)
        elif method == "run_line_magic" and len(arguments) == 2 and arguments[0] in RUNS_HERE | RUNS_APART:
            self._text(re.sub(r"^(\s*-\w+(\s+\d+)?)+\s+", "", arguments[1]), here=arguments[0] in RUNS_HERE)
            self._scan(arguments[1])
        else:
            self._scan(" ".join(arguments))

    def _text(self, text: str, *, here: bool) -> None:
        """Read Python inside a magic, as part of the cell (``here``) or in a scope of its own."""
        try:
            body = ast.parse(python_of(text)).body
        except SyntaxError:
            self._scan(text)
            return
        if here:
            self.block(body, sure=True)
        else:
            with self._maybe(unsure=False):
                self.block(body, sure=True)


def _always_exits(body: list[ast.stmt]) -> bool:
    return bool(body) and isinstance(body[-1], (ast.Raise, ast.Return, ast.Break, ast.Continue))


def _captures(pattern: ast.pattern) -> Iterator[str]:
    for node in ast.walk(pattern):
        if isinstance(node, (ast.MatchAs, ast.MatchStar)) and node.name:
            yield node.name
        elif isinstance(node, ast.MatchMapping) and node.rest:
            yield node.rest
