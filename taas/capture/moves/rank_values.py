"""Plain values that a cell computes from its rank: ``rank``, ``device``, ``files[rank::size]``.

Such a value is returned to the notebook as rank 0 has it, and the value itself does not show that.
In a later cell with a header, every rank would use rank 0's value: ``if rank == 0`` would be true
in all of them. So the notebook remembers the variables that a cell has bound by expressions that
depend on the rank. If a later cell with several ranks reads one of these variables, the user is
told.
"""

from __future__ import annotations

import ast
import contextlib
import re
import types
from collections.abc import Iterable, Iterator
from typing import Any

from taas.base.import_hooks import attribute_of
from taas.capture.cells import python_of, typed_cells
from taas.capture.describe.code_by_value import words_in
from taas.capture.moves.names import names_bound_by

_RANK = frozenset({
    "get_rank", "get_local_rank", "get_node_local_rank", "global_rank", "local_rank", "node_rank",
    "RANK", "LOCAL_RANK", "process_index", "local_process_index", "is_main_process",
    "is_local_main_process", "is_global_zero",
})  # fmt: skip
"""Names, attributes and environment variables that tell a process its rank."""
_CHOOSE = {
    "ConcatDataset", "DataLoader", "Subset", "TensorDataset", "enumerate", "get", "getenv", "int",
    "islice", "list", "range", "select", "shard", "slice", "sorted", "take", "tuple",
}  # fmt: skip
"""Functions that select parts of data, or return what they are given."""
_OF_DATA = re.compile(r"Dataset|Subset|Loader|Sampler")

_known: dict[str, tuple[int, int]] = {}
"""In a notebook, by variable: the id of a value that is rank 0's, and the last cell for which this
is true.

Only the id is stored, because the value may be a large part of the data and must not be kept alive.
If another object has this id by now, the only cost is an unnecessary message.
"""


def remember_rank_values(cell: str, namespace: dict[str, Any]) -> None:
    """Record, after a cell with several ranks, which of the notebook's variables are rank 0's."""
    with contextlib.suppress(SyntaxError):
        for name, is_part in names_of_rank(cell, namespace).items():
            if name in namespace and _may_be_of_rank(namespace[name], is_part=is_part):
                _known[name] = id(namespace[name]), len(typed_cells())


def rank_values(namespace: dict[str, Any]) -> Iterator[str]:
    """Yield the variables whose value is still rank 0's."""
    cells = typed_cells()
    running = max(len(cells) - 1, 0)
    # each cell is read once, however many variables it binds
    bound_by: dict[str, set[str] | None] = {}
    for name, (number, asked) in [*_known.items()]:
        holds = id(namespace.get(name, _known)) == number
        for cell in cells[asked:running]:
            if cell not in bound_by:
                bound_by[cell] = names_bound_by(cell)
            bound = bound_by[cell]
            holds = holds and bound is not None and name not in bound
        if holds:
            _known[name] = number, max(asked, running)
            yield name
        else:
            del _known[name]


def _may_be_of_rank(value: Any, *, is_part: bool) -> bool:
    """Tell whether a value may depend on the rank: it is the rank, or a part selected by it."""
    device = attribute_of("torch", "device", ())
    if isinstance(value, device):
        return value.index is not None
    if isinstance(value, (bool, int, str)):
        return True
    return is_part and (
        isinstance(value, (list, tuple, range)) or bool(_OF_DATA.search(type(value).__name__))
    )


def names_of_rank(cell: str, namespace: dict[str, Any]) -> dict[str, bool]:
    """Return the variables that a cell computes from the rank.

    True means that the value may itself be a part that was selected by the rank.
    """
    said = {
        name
        for name, value in namespace.items()
        if type(value) is types.FunctionType and not _RANK.isdisjoint(words_in(value.__code__))
    }
    found: dict[str, bool] = {}
    for targets, value in _assignments(ast.parse(python_of(cell)).body):
        mentions = _is_device_of(value) or not _words_of(value).isdisjoint({*_RANK, *said, *found})
        chooses = not _words_of(value, but_arguments=True).isdisjoint({*_RANK, *found})
        for name in targets:
            found.pop(name, None)
            if mentions:
                found[name] = chooses
    return found


def _is_device_of(node: ast.expr) -> bool:
    """Tell whether an expression is an object's own device (``accelerator.device``)."""
    match node:
        case ast.Attribute(value=ast.Name(id="torch"), attr="device"):
            return False
        case ast.Attribute(attr="device"):
            return True
    return False


def _words_of(node: ast.AST, *, but_arguments: bool = False) -> set[str]:
    """Return the names, attributes and strings in an expression.

    ``but_arguments``: leave out the arguments of calls, except of functions that select or return
    them.
    """
    found = set[str]()
    waiting = [node]
    while waiting:
        part = waiting.pop()
        match part:
            case ast.Name(id=word) | ast.Attribute(attr=word) | ast.Constant(value=str(word)):
                found.add(word)
            case ast.Call(func=function) if but_arguments and _words_of(function).isdisjoint(
                _CHOOSE
            ):
                waiting.append(function)
                continue
        waiting += ast.iter_child_nodes(part)
    return found


def _assignments(body: Iterable[ast.stmt]) -> Iterator[tuple[list[str], ast.expr]]:
    """Yield the names that statements outside functions bind, with the values, in order."""
    for node in body:
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                continue
            case ast.Assign(targets=targets, value=value):
                yield [name for target in targets for name in _names_in(target)], value
            case (
                ast.AnnAssign(target=target, value=ast.expr() as value)
                | ast.AugAssign(target=target, value=value)
            ):
                yield _names_in(target), value
        for inner in ("body", "orelse", "finalbody"):
            yield from _assignments(getattr(node, inner, ()))
        for handler in getattr(node, "handlers", ()):
            yield from _assignments(handler.body)


def _names_in(target: ast.expr) -> list[str]:
    return [
        node.id
        for node in ast.walk(target)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    ]
