"""Cells with a top-level ``await``: an interrupt is raised in the code that awaits.

IPython runs such a cell as a coroutine in an event loop. A ``KeyboardInterrupt`` that is raised
while the loop waits leaves the loop, and the coroutine stays suspended forever. Here, the SIGINT
handler instead cancels the cell's task, as ``asyncio.Runner`` does, and the loop runs until the
task has finished.

The exception that the cell's code sees is both a ``CancelledError``, as in a notebook's kernel
(ipykernel cancels the cell, too), and a ``KeyboardInterrupt``, as in any cell without ``await``.
Either ``except`` clause catches it, and if the cell does not catch it, the cell counts as
interrupted.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Coroutine, Generator, Iterator
from typing import Any

from IPython.core.interactiveshell import InteractiveShell


class _CellInterrupted(asyncio.CancelledError, KeyboardInterrupt):
    """Raised at the ``await`` of a cell that is interrupted."""


# Readers of the record recognize an interrupt by this class name.
_CellInterrupted.__name__ = _CellInterrupted.__qualname__ = KeyboardInterrupt.__name__


class _Cell(Coroutine[Any, Any, Any]):
    """A cell's coroutine, in which the cancellation by an interrupt becomes that interrupt."""

    def __init__(self, cell: Coroutine[Any, Any, Any]) -> None:
        self._cell = cell
        self._interrupted = False
        self.task: asyncio.Task[Any]

    def interrupt(self) -> None:
        """Cancel the awaited operation.

        Called in the loop's thread, outside the cell's own code.
        """
        self._interrupted = True
        self.task.cancel()

    def send(self, value: Any, /) -> Any:
        """Resume the cell."""
        return self._cell.send(value)

    def throw(self, error: Any, value: Any = None, traceback: Any = None, /) -> Any:
        """Resume the cell with an error."""
        if self._interrupted and isinstance(error, asyncio.CancelledError):
            self._interrupted = False
            # its except and finally clauses may await: nothing else is cancelled
            self.task.uncancel()
            error = _CellInterrupted()
        return self._cell.throw(error)

    def close(self) -> None:
        """Close the cell's coroutine."""
        self._cell.close()

    def __await__(self) -> Generator[Any, Any, Any]:
        """Await the cell."""
        return self._cell.__await__()


def _run(cell: Coroutine[Any, Any, Any]) -> Any:
    """Run a cell to its end in IPython's own event loop."""
    loop = asyncio_loop()
    wrapped = _Cell(cell)
    task = wrapped.task = loop.create_task(wrapped)
    with _interrupts_cancel(wrapped, loop):
        while True:
            try:
                return loop.run_until_complete(task)
            except KeyboardInterrupt:
                # raised in a task other than the cell's, or by a handler that the cell has set
                if task.done():
                    raise
                wrapped.interrupt()


@contextlib.contextmanager
def _interrupts_cancel(cell: _Cell, loop: asyncio.AbstractEventLoop) -> Iterator[None]:
    """Let SIGINT interrupt the cell while the loop runs, unless another handler has been set."""

    def interrupt(number: int, frame: object) -> None:
        if asyncio.current_task(loop) is not None:
            raise KeyboardInterrupt  # Python code of the cell is running
        cell.interrupt()
        loop.call_soon_threadsafe(lambda: None)  # wakes a loop that waits in a system call

    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGINT) is interrupt:  # the cell has set no other
            signal.signal(signal.SIGINT, signal.default_int_handler)


def asyncio_loop() -> asyncio.AbstractEventLoop:
    """Return the loop in which IPython runs cells; before IPython 8, the thread's own loop."""
    try:
        from IPython.core.async_helpers import get_asyncio_loop
    except ImportError:
        return asyncio.get_event_loop()
    loop: asyncio.AbstractEventLoop = get_asyncio_loop()
    return loop


LOOP_RUNNERS = {**InteractiveShell.loop_runner_map, "asyncio": (_run, True)}
"""How IPython runs cells for each async library (``%autoawait``)."""
