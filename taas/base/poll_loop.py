"""The loop of a process's main thread: sockets and descriptors, each with an action for its input.

A second thread does work that may take long, such as handling files of any size and processes that
are ending. So an interrupt of one run never has to wait for another run's work. Children of the
process report in lines of JSON.

A process to which peers connect may have as many descriptors as the system allows. The processes
that it starts get the original limit, so that a rank has the same limit as under torchrun.
"""

from __future__ import annotations

import contextlib
import os
import resource
import subprocess
import sys
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

import msgspec
import zmq

_AT_ONCE = 64
_READ_AT_ONCE = 1 << 16
"""The capacity of a pipe, in bytes."""


class PollLoop:
    """Watches sources, and runs their actions."""

    def __init__(self) -> None:
        self._poller = zmq.Poller()
        self._actions: dict[Any, Callable[[], object]] = {}
        self._soon: deque[Callable[[], object]] = deque()
        self._bell = os.eventfd(0, os.EFD_CLOEXEC)
        self.on(self._bell, self._act_soon)

    def __contains__(self, source: Any) -> bool:
        return source in self._actions

    def on(self, source: Any, action: Callable[[], object]) -> None:
        """Run an action whenever a source (a zmq socket or a descriptor) is readable."""
        self._actions[source] = action
        self._poller.register(source, zmq.POLLIN)

    def off(self, source: Any) -> None:
        """Stop watching a source; may be called twice."""
        if self._actions.pop(source, None) is not None:
            self._poller.unregister(source)

    def soon(self, action: Callable[[], object]) -> None:
        """Run an action in the next step; any thread may call this."""
        self._soon.append(action)
        os.eventfd_write(self._bell, 1)

    def _act_soon(self) -> None:
        asked = os.eventfd_read(self._bell)
        if asked > _AT_ONCE:  # let the other sources be served first
            os.eventfd_write(self._bell, asked - _AT_ONCE)
        for _ in range(min(asked, _AT_ONCE)):
            self._soon.popleft()()

    def step(self, wait: float | None) -> None:
        """Wait at most ``wait`` seconds for sources (None: without limit); run their actions."""
        for source, _ in self._poller.poll(None if wait is None else int(wait * 1000) + 1):
            action = self._actions.get(source)
            if action is not None:  # an earlier action of this round may have removed it
                action()


_found: tuple[int, int] | None = None


def raise_limit() -> None:
    """Raise this process's soft limit of descriptors to the hard limit."""
    global _found
    _found = resource.getrlimit(resource.RLIMIT_NOFILE)
    _set((_found[1], _found[1]))


def give_limit(pid: int) -> None:
    """Give a child, and all processes that it will start, the original limit of descriptors.

    It would be wrong to lower this process's limit while the child is started, because other
    threads open descriptors meanwhile.
    """
    if _found is not None:
        with contextlib.suppress(ProcessLookupError):  # the child's end is noticed elsewhere
            resource.prlimit(pid, resource.RLIMIT_NOFILE, _found)


def _set(limits: tuple[int, int]) -> None:
    # some systems reject "unlimited"; the limit stays unchanged then
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


class WorkThread:
    """A thread that does one piece of work after the other; call its methods in the loop's thread.

    ``soon`` is :meth:`PollLoop.soon`; ``pending`` counts pieces of work that are not done, or whose
    result was not handed over yet. The constructor raises a RuntimeError if the system allows no
    more threads. At its exit, Python waits for all such work, even if a file system is stuck;
    therefore a process with a work thread exits by ``os._exit``.
    """

    def __init__(self, soon: Callable[[Callable[[], object]], None]) -> None:
        self._soon = soon
        self._thread = ThreadPoolExecutor(1, "taas-worker")
        self._thread.submit(int)  # starts the thread now, rather than in the middle of a run
        self.pending = 0

    def do(
        self, work: Callable[[], Any], then: Callable[[Future[Any]], object] = Future.result
    ) -> None:
        """Do some work after all earlier work.

        Afterwards the loop calls ``then`` with a Future that has the result or the error.
        """
        self.pending += 1
        done = self._thread.submit(work)
        done.add_done_callback(lambda done: self._soon(partial(self._hand_back, then, done)))

    def after(self, action: Callable[[], object]) -> None:
        """Let the loop run an action when all earlier work is done."""
        self.do(lambda: None, lambda _: action())

    def _hand_back(self, then: Callable[[Future[Any]], object], done: Future[Any]) -> None:
        self.pending -= 1
        then(done)

    def close(self) -> None:
        """Let the thread end when all work is done."""
        self._thread.shutdown(wait=False)


class Child:
    """A child process that reads lines of JSON, and may report in such lines.

    It runs Python with ``arguments``, and ends when its standard input is closed. ``reports`` is
    the union type of its reports.
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
        self._unread = b""  # the beginning of an incomplete line

    def fileno(self) -> int:
        """Return the descriptor from which its reports are read."""
        assert self.process.stdout is not None
        return self.process.stdout.fileno()

    def send(self, line: msgspec.Struct) -> None:
        """Send the child a line; a child that has ended reads nothing."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # the child's end is noticed elsewhere
            self.process.stdin.write(msgspec.json.encode(line) + b"\n")
            self.process.stdin.flush()

    def read(self) -> list[Any] | None:
        """Return all waiting reports; None if the child has ended.

        If there are no reports, wait for one.
        """
        data = os.read(self.fileno(), _READ_AT_ONCE)
        return self._reports(data) if data else None

    def _reports(self, data: bytes) -> list[Any]:
        *lines, self._unread = (self._unread + data).split(b"\n")
        return [self._decode(line) for line in lines]

    def hang_up(self) -> None:
        """Close the child's standard input, so that it ends."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()

    def close(self, patience: float = 5.0) -> list[Any]:
        """End the child, by SIGKILL after ``patience`` seconds; return its last full reports."""
        assert self.process.stdout is not None
        self.hang_up()
        try:
            self.process.wait(patience)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        with self.process.stdout as rest:
            return self._reports(rest.read())
