"""Setup cells: each process that starts for a run executes them, as the notebook did.

So the changes that they make to libraries are present in each process.

A library's registry (accessors, resolvers, representers, converters) cannot be sent. So the cell
that fills it is executed again, in the notebook's order, before the variables arrive, because these
may need the registry.

A kept rank executes new setup cells before its next cell. The notebook forgets cells only through
:func:`forget_all`. A setup cell that is executed again in the notebook, edited or not, replaces its
earlier version, and moves to the end of the order, as in the notebook.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import linecache
import traceback
from collections.abc import Iterable
from typing import Any, NamedTuple

from taas.errors import CaptureError


class SetupCell(NamedTuple):
    """One setup cell, as it was executed in the notebook."""

    run: int  # the number of this run among the notebook's runs of setup cells
    number: int  # the notebook's ``In[n]``
    text: str

    @property
    def file(self) -> str:
        """Its file name in tracebacks."""
        return f"Cell In[{self.number}]"

    @property
    def lines(self) -> list[str]:
        """Its source lines."""
        return self.text.splitlines(keepends=True)


# ---------------------------------------------------------------- in the notebook

_cells: dict[str, SetupCell] = {}
"""By the cell's identity in the notebook, in the order of their last runs."""
_runs = itertools.count(1)


def remember(identity: str, number: int, text: str) -> None:
    """Let processes that start from now on execute a cell, which has succeeded in the notebook."""
    forget(identity)
    _cells[identity] = SetupCell(next(_runs), number, text)


def forget(identity: str) -> None:
    """Forget a cell, if it was a setup cell."""
    _cells.pop(identity, None)


def forget_all() -> int:
    """Forget all setup cells; return how many there were."""
    count = len(_cells)
    _cells.clear()
    return count


def setup_cells() -> list[SetupCell]:
    """Return the cells that new processes execute, in order."""
    return [*_cells.values()]


# ---------------------------------------------------------------- in a rank, or a data process

_done: set[int] = set()


def run_setup_cells(cells: Iterable[SetupCell], namespace: dict[str, Any], flags: int) -> None:
    """Execute the setup cells that are new to this process, without showing their output.

    Raises:
        CaptureError: a cell failed here that succeeded in the notebook; its ``__cause__`` is the
            cell's exception.
    """
    for cell in cells:
        if cell.run in _done:
            continue
        linecache.cache[cell.file] = len(cell.text), None, cell.lines, cell.file
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                code = compile(cell.text, cell.file, "exec", flags, dont_inherit=True)
                exec(code, namespace)  # noqa: S102  the user's own
        except Exception as error:
            # without this frame: from the cell's line on
            error.__traceback__ = error.__traceback__ and error.__traceback__.tb_next
            raise _error_of(cell, error) from error
        # Only now, so that a kept rank executes a failed or interrupted cell again.
        _done.add(cell.run)


def _error_of(cell: SetupCell, error: Exception) -> CaptureError:
    lines = [
        frame.lineno
        for frame in traceback.extract_tb(error.__traceback__)
        if frame.filename == cell.file
    ]
    where = f", in its line {lines[0]}" if lines else ""
    return CaptureError(
        f"the setup cell In[{cell.number}] failed{where}: {type(error).__name__}: {error}. It runs"
        " in each new process before the names arrive, and without them. Mend it and run it again,"
        " or type %taas setup --clear."
    )
