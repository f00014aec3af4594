"""Exceptions of user code in a data process, raised again in a rank with one traceback.

A traceback cannot be pickled. Therefore the positions of its frames are sent, and the rank creates
frames at these positions: its traceback leads from the cell's line to the dataset's, as it would
without data workers, and shows no frame of taas itself.
"""

from __future__ import annotations

import ast
import itertools
import pickle
import traceback
import types
from collections.abc import Iterator
from typing import Any, NamedTuple, NoReturn

import cloudpickle

from taas.base import own_code
from taas.errors import DeliveryError

_FETCHES = ("torch/utils/data/_utils/fetch.py", "torch/utils/data/_utils/worker.py")
"""torch's files between a data worker's frames and the user's."""


class _Line(NamedTuple):
    """A frame's position.

    It is a range of lines and of columns (in bytes) in a file, with the function's name and first
    line.
    """

    file: str
    function: str
    first: int
    line: int
    end_line: int
    column: int
    end_column: int


class _Raised(NamedTuple):
    """One exception of a chain."""

    pickled: bytes | None  # None if it cannot be pickled or rebuilt
    kind: str
    text: str
    lines: list[_Line]
    name: str | None  # of a NameError; pickle leaves it out
    # it is the __cause__ of the previous exception in the chain, not its __context__
    is_cause: bool


def pack_failure(error: BaseException, where: str) -> bytes:
    """Pack an exception with its causes and contexts; ``where`` describes where it was raised."""
    chain = [_pack(one, is_cause=is_cause) for one, is_cause in chain_of(error)]
    return pickle.dumps((where, chain))


def raise_remote(packed: bytes) -> NoReturn:
    """Raise the exception that user code raised on the data side.

    It unpickles, so the caller has authenticated ``packed``.
    """
    where, chain = pickle.loads(packed)
    first: BaseException | None = None
    holder: BaseException | None = None
    for raised in map(_Raised._make, chain):
        error = _rebuild(raised, is_first=first is None)
        error.__traceback__ = _traceback_at(raised.lines)
        if holder is None:
            first = error
        elif raised.is_cause:
            holder.__cause__ = error
        else:
            holder.__context__ = error
        holder = error
    assert first is not None, "a chain has its first exception"
    first.add_note(where)
    raise first


def chain_of(error: BaseException) -> Iterator[tuple[BaseException, bool]]:
    """Yield an exception with its causes and contexts, in the order in which Python shows them.

    Each comes with a flag that tells whether it is the cause of the previous one.
    """
    seen = set[int]()
    one: BaseException | None = error
    is_cause = False
    while one is not None and id(one) not in seen:
        yield one, is_cause
        seen.add(id(one))
        is_cause = one.__cause__ is not None
        one = one.__cause__ if is_cause or one.__suppress_context__ else one.__context__


def entries_of(tb: types.TracebackType | None) -> Iterator[types.TracebackType]:
    """Yield the entries of a traceback, the outermost first."""
    while tb is not None:
        yield tb
        tb = tb.tb_next


# ── on the data side ──────────────────────────────────────────────────────────────────────────────


def _pack(error: BaseException, *, is_cause: bool) -> _Raised:
    try:
        pickled: bytes | None = cloudpickle.dumps(error)
        pickle.loads(pickled)  # type: ignore[arg-type]
    except Exception:  # pickling an object of the user's own class may raise anything
        pickled = None
    name = error.name if isinstance(error, NameError) else None
    text = "".join(traceback.format_exception_only(error)).strip()
    return _Raised(pickled, type(error).__qualname__, text, _users_lines(error), name, is_cause)


def _users_lines(error: BaseException) -> list[_Line]:
    """Return the lines that an exception passed through, from the user's outermost line on."""
    lines = [_line_of(entry) for entry in entries_of(error.__traceback__)]
    lines = [line for line in lines if not line.file.startswith(own_code.FOLDER)]
    return [*itertools.dropwhile(lambda line: line.file.endswith(_FETCHES), lines)]


def _line_of(entry: types.TracebackType) -> _Line:
    code = entry.tb_frame.f_code
    at_instruction = itertools.islice(code.co_positions(), entry.tb_lasti // 2, None)
    line, end_line, column, end_column = next(at_instruction, (None,) * 4)
    # python -X no_debug_ranges
    if line is None or end_line is None or column is None or end_column is None:
        line = end_line = entry.tb_lineno
        column = end_column = 0
    return _Line(
        code.co_filename, code.co_name, code.co_firstlineno, line, end_line, column, end_column
    )


# ── in a rank ─────────────────────────────────────────────────────────────────────────────────────


def _rebuild(raised: _Raised, *, is_first: bool) -> BaseException:
    """Return the exception, or a DeliveryError that replaces it.

    The DeliveryError replaces exceptions that cannot be rebuilt, and those that would silently end
    a loop or the cell (StopIteration, SystemExit).
    """
    error: Any = None if raised.pickled is None else pickle.loads(raised.pickled)
    if isinstance(error, NameError):
        error.name = raised.name
    if error is None or (
        is_first and (not isinstance(error, Exception) or isinstance(error, StopIteration))
    ):
        return DeliveryError(f"the registered loader's own code raised {raised.text}")
    return error  # type: ignore[no-any-return]


def _traceback_at(lines: list[_Line]) -> types.TracebackType | None:
    """Return a traceback of frames at these lines, the outermost first."""
    tb: types.TracebackType | None = None
    for line in map(_Line._make, reversed(lines)):
        entry = _entry_at(line)
        tb = types.TracebackType(tb, entry.tb_frame, entry.tb_lasti, entry.tb_lineno)
    return tb


def _entry_at(line: _Line) -> types.TracebackType:
    """Return a traceback entry for a range of a file.

    It compiles code whose positions are this range, and lets it raise.
    """
    name = ast.Name("Exception", ast.Load())
    statement = ast.Raise(name)
    above = line.first - 1  # a code object counts lines from its first one
    for node in (name, statement):
        node.lineno, node.end_lineno = max(1, line.line - above), max(1, line.end_line - above)
        node.col_offset, node.end_col_offset = line.column, line.end_column
    code = compile(ast.Module([statement], []), line.file, "exec")
    code = code.replace(co_name=line.function, co_qualname=line.function, co_firstlineno=line.first)
    try:
        exec(code, {"__name__": "__main__", "__file__": line.file})  # noqa: S102  our own
    except Exception as error:
        assert error.__traceback__ is not None
        assert error.__traceback__.tb_next is not None, "the statement has run"
        return error.__traceback__.tb_next
    raise AssertionError("the statement raises")
