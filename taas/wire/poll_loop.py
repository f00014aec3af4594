"""What the main thread of a process waits for: sockets and descriptors, each with what is done when it is readable.

What may take long is done beside that loop, by a thread: files of any size, processes that end. So
an interrupt of one run waits for nothing that another one has to have done. Children of it report
in lines of JSON.

Where peers connect to it, a process may have as many descriptors as the system lets it; what it
starts for others finds the limit as it was: a rank has the one that it would have under torchrun.
"""

from __future__ import annotations

import contextlib
import os
import queue
import resource
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any

import msgspec
import zmq

_AT_ONCE = 64
_READ_AT_ONCE = 1 << 16
"""As many bytes as a pipe holds."""


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
        asked = os.eventfd_read(self._bell)
        if asked > _AT_ONCE:  # first the other sources are looked at
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
    """Raise this process's soft limit of descriptors to the hard one."""
    global _found
    _found = resource.getrlimit(resource.RLIMIT_NOFILE)
    _set((_found[1], _found[1]))


def give_limit(pid: int) -> None:
    """Give a child of this process the limit that this one was started with, and so all that it starts later.

    Lowered here while the child is started, the limit would be too low for what other threads open
    meanwhile.
    """
    if _found is not None:
        with contextlib.suppress(ProcessLookupError):  # its end is seen elsewhere
            resource.prlimit(pid, resource.RLIMIT_NOFILE, _found)


def _set(limits: tuple[int, int]) -> None:
    # some systems refuse "unlimited": it stays as it is
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


class WorkThread:
    """A thread that does, one after the other, what it is given; all else of it is for the thread of the loop.

    ``soon`` is :meth:`PollLoop.soon`; ``pending`` says how much was not done yet, or its result not
    taken. A RuntimeError: the system allows no more threads.
    """

    def __init__(self, soon: Callable[[Callable[[], object]], None]) -> None:
        self._soon = soon
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self.pending = 0
        threading.Thread(target=self._serve, name="taas-worker", daemon=True).start()

    def do(
        self, work: Callable[[], Any], then: Callable[[Future[Any]], object] = Future.result
    ) -> None:
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


class Child:
    """A child of this process that is told things, and may report, in lines of JSON; it ends with its standard input.

    It runs Python with these arguments; ``reports`` is the union of what it may report.
    """

    def __init__(
        self,
        arguments: list[str],
        reports: Any = None,
        *,
        stdout: int = subprocess.PIPE,
        **options: Any,
    ) -> None:
        self.process = subprocess.Popen(
            [sys.executable, *arguments], stdin=subprocess.PIPE, stdout=stdout, **options
        )
        self._decode = msgspec.json.Decoder(reports).decode
        self._unread = b""  # the part of a line that is there

    def fileno(self) -> int:
        """Return the descriptor on which it reports."""
        assert self.process.stdout is not None
        return self.process.stdout.fileno()

    def send(self, line: msgspec.Struct) -> None:
        """Tell it something; a child that is gone reads nothing."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # its end is seen elsewhere
            self.process.stdin.write(msgspec.json.encode(line) + b"\n")
            self.process.stdin.flush()

    def read(self) -> list[Any] | None:
        """Return all reports that are there, None when it has ended. Waits where it has said nothing."""
        data = os.read(self.fileno(), _READ_AT_ONCE)
        return self._reports(data) if data else None

    def _reports(self, data: bytes) -> list[Any]:
        *lines, self._unread = (self._unread + data).split(b"\n")
        return [self._decode(line) for line in lines]

    def hang_up(self) -> None:
        """Tell it nothing more: it is to end."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()

    def close(self, patience: float = 5.0) -> list[Any]:
        """End it, kill what does not end; returns what it said last, whole lines of it."""
        assert self.process.stdout is not None
        self.hang_up()
        try:
            self.process.wait(patience)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        with self.process.stdout as rest:
            return self._reports(rest.read())
