"""What may take long is done beside the supervisor's one loop: files of any size, processes that end.

An interrupt of one run waits for nothing that another one has to have done.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any


class WorkThread:
    """A thread that does, one after the other, what it is given; all else of it is for the thread of the loop.

    Args:
        soon: lets the loop act; the thread calls it (:meth:`taas.wire.poll_loop.PollLoop.soon`).

    Attributes:
        pending: how much of it was not done yet, or its result not taken.

    Raises:
        RuntimeError: the system allows no more threads.
    """

    def __init__(self, soon: Callable[[Callable[[], object]], None]) -> None:
        self._soon = soon
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self.pending = 0
        threading.Thread(target=self._serve, name="taas-worker", daemon=True).start()

    def do(self, work: Callable[[], Any], then: Callable[[Future[Any]], object] = Future.result) -> None:
        """Do some work, after all that was given before; ``then``, in the loop, takes what came of it, or what it raised."""
        self.pending += 1
        self._work.put(partial(self._do, work, then))

    def after(self, action: Callable[[], object]) -> None:
        """Let the loop act so when all that was given before is done."""
        self.do(lambda: None, lambda _: action())

    def _do(self, work: Callable[[], Any], then: Callable[[Future[Any]], object]) -> None:
        done: Future[Any] = Future()
        try:
            done.set_result(work())
        except BaseException as error:
            done.set_exception(error)
        self._soon(partial(self._hand_back, then, done))

    def _hand_back(self, then: Callable[[Future[Any]], object], done: Future[Any]) -> None:
        self.pending -= 1
        then(done)

    def _serve(self) -> None:
        while (work := self._work.get()) is not None:
            work()

    def close(self) -> None:
        """Let the thread end when all is done."""
        self._work.put(None)
