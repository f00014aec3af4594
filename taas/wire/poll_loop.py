"""What the main thread of a process waits for: sockets and descriptors, each with what is done when it is readable.

What may take long is done beside that loop, by a thread: files of any size, processes that end. So an interrupt of one run
waits for nothing that another one has to have done.

Where peers connect to it, a process may have as many descriptors as the system lets it; what it starts for others
finds the limit as it was: a rank has the one that it would have under torchrun.
"""

from __future__ import annotations

import contextlib
import os
import queue
import resource
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from functools import partial
from typing import Any

import zmq

_AT_ONCE = 64


class PollLoop:
    """Sources and their actions."""

    def __init__(self) -> None:
        self._poller = zmq.Poller()
        self._actions: dict[Any, Callable[[], object]] = {}
        self._soon: deque[Callable[[], object]] = deque()
        self._bell = os.eventfd(0, os.EFD_CLOEXEC)
        self.on(self._bell, self._act_soon)

    def __contains__(self, source: Any) -> bool:
        return source in self._actions

    def on(self, source: Any, action: Callable[[], object]) -> None:
        """Begin to watch a source: a zmq socket, or a descriptor."""
        self._actions[source] = action
        self._poller.register(source, zmq.POLLIN)

    def off(self, source: Any) -> None:
        """Watch it no more. Twice is harmless."""
        if self._actions.pop(source, None) is not None:
            self._poller.unregister(source)

    def soon(self, action: Callable[[], object]) -> None:
        """Act so in the next step; any thread may ask for that."""
        self._soon.append(action)
        os.eventfd_write(self._bell, 1)

    def _act_soon(self) -> None:
        """Act, up to a number of times: then the other sources are looked at."""
        asked = os.eventfd_read(self._bell)
        if asked > _AT_ONCE:
            os.eventfd_write(self._bell, asked - _AT_ONCE)
        for _ in range(min(asked, _AT_ONCE)):
            self._soon.popleft()()

    def step(self, wait: float | None) -> None:
        """Wait until something is readable, ``wait`` seconds at most, and act on all that is; None: for ever."""
        for source, _ in self._poller.poll(None if wait is None else int(wait * 1000) + 1):
            action = self._actions.get(source)
            if action is not None:  # an earlier action of this round may have removed it
                action()


_found: tuple[int, int] | None = None


def raise_limit() -> None:
    """Raise this process's soft limit to the hard one."""
    global _found
    _found = resource.getrlimit(resource.RLIMIT_NOFILE)
    _set((_found[1], _found[1]))


@contextlib.contextmanager
def as_found() -> Iterator[None]:
    """Start processes with the limit that this one was started with."""
    raised = resource.getrlimit(resource.RLIMIT_NOFILE)
    if _found is not None:
        _set(_found)
    try:
        yield
    finally:
        _set(raised)


def _set(limits: tuple[int, int]) -> None:
    with contextlib.suppress(ValueError, OSError):  # some systems refuse "unlimited": it stays as it is
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


class WorkThread:
    """A thread that does, one after the other, what it is given; all else of it is for the thread of the loop.

    Args:
        soon: lets the loop act; the thread calls it (:meth:`PollLoop.soon`).

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
