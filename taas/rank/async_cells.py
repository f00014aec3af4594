"""Cells with a top-level ``await``: an interrupt is raised in the code that awaits.

IPython runs such a cell as a coroutine in an event loop. A ``KeyboardInterrupt`` that is raised
while the loop waits leaves the loop, and the coroutine stays suspended for ever. So here the
handler of SIGINT cancels the cell's task instead, as ``asyncio.Runner`` does, and the loop runs
until the task has come to its end.

What the cell's code sees is both: a ``CancelledError``, as in a notebook's kernel (ipykernel
cancels the cell, too), and a ``KeyboardInterrupt``, as in any cell without ``await``. So either
``except`` takes it, and an error of the cell that nobody takes is an interrupt.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Coroutine, Generator, Iterator
from typing import Any

from IPython.core.interactiveshell import InteractiveShell


class _CellInterrupted(asyncio.CancelledError, KeyboardInterrupt):
    """What an interrupt raises where the cell awaits."""


# its readers know an interrupt by this name
_CellInterrupted.__name__ = _CellInterrupted.__qualname__ = KeyboardInterrupt.__name__


class _Cell(Coroutine[Any, Any, Any]):
    """A cell's coroutine, in which the cancellation that follows an interrupt is that interrupt."""

    def __init__(self, cell: Coroutine[Any, Any, Any]) -> None:
        self._cell = cell
        self._interrupted = False
        self.task: asyncio.Task[Any]

    def interrupt(self) -> None:
        """Cancel what the cell awaits; called in the loop's thread, outside the cell's own code."""
        self._interrupted = True
        self.task.cancel()

    def send(self, value: Any, /) -> Any:
        """Go on."""
        return self._cell.send(value)

    def throw(self, error: Any, value: Any = None, traceback: Any = None, /) -> Any:
        """Go on with an error."""
        if self._interrupted and isinstance(error, asyncio.CancelledError):
            self._interrupted = False
            self.task.uncancel()  # its except and finally may await: nothing else is cancelled
            error = _CellInterrupted()
        return self._cell.throw(error)

    def close(self) -> None:
        """Close it."""
        self._cell.close()

    def __await__(self) -> Generator[Any, Any, Any]:
        """Await the cell."""
        return self._cell.__await__()


def _run(cell: Coroutine[Any, Any, Any]) -> Any:
    """Run a cell in IPython's own loop, to its end."""
    loop = asyncio_loop()
    wrapped = _Cell(cell)
    task = wrapped.task = loop.create_task(wrapped)
    with _interrupts_cancel(wrapped, loop):
        while True:
            try:
                return loop.run_until_complete(task)
            except KeyboardInterrupt:
                # raised in a task beside the cell, or by a handler of the cell's own
                if task.done():
                    raise
                wrapped.interrupt()


@contextlib.contextmanager
def _interrupts_cancel(cell: _Cell, loop: asyncio.AbstractEventLoop) -> Iterator[None]:
    """Let SIGINT interrupt the cell while the loop runs; a handler that somebody has set stays."""

    def interrupt(number: int, frame: object) -> None:
        if asyncio.current_task(loop) is not None:
            raise KeyboardInterrupt  # in Python code of the cell, which runs
        cell.interrupt()
        loop.call_soon_threadsafe(lambda: None)  # the loop may wait in the system, and looks again

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
    """Return the loop in which IPython runs cells; before IPython 8 the thread's own."""
    try:
        from IPython.core.async_helpers import get_asyncio_loop
    except ImportError:
        return asyncio.get_event_loop()
    loop: asyncio.AbstractEventLoop = get_asyncio_loop()
    return loop


LOOP_RUNNERS = {**InteractiveShell.loop_runner_map, "asyncio": (_run, True)}
"""How IPython runs cells by the library that they are written for (``%autoawait``)."""
