"""Processes forked from the forkserver, signalled by their record, and how trees of processes end: killed, then what is left.

An agent is a child subreaper (prctl(2), PR_SET_CHILD_SUBREAPER): whatever a rank started stays below the agent,
also when it made a session of its own and its parent is gone. So a descendant of the agent that is neither the
forkserver nor below it is an orphan of a rank, and nothing else is ever signalled.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import time
from collections.abc import Collection, Iterable
from multiprocessing.connection import wait
from typing import Any

import psutil

from taas import _linux
from taas.agent.forkserver import fork
from taas.wire import deadlines
from taas.wire.ranks import Preparation, RankSays, hear, socket_pair, tell

logger = logging.getLogger(__name__)

_PR_SET_CHILD_SUBREAPER = 36
SWEEPS = 10
"""So often what is left is killed: while a tree is being killed, what is left of it is handed on."""


class ForkedProcess:
    """One process that multiprocessing has started; its ``sentinel`` becomes readable when it is gone.

    Attributes:
        gone: whether its end was seen.
        recorded: it, as psutil knows it, which compares start times; None: it was gone at once.
    """

    def __init__(self, process: Any) -> None:
        self.pid: int = process.pid
        self.sentinel: int = process.sentinel
        self.gone = False
        self._process = process
        self.recorded: psutil.Process | None = None
        with contextlib.suppress(psutil.NoSuchProcess):  # gone already: its sentinel says so
            self.recorded = psutil.Process(self.pid)

    @property
    def alive(self) -> bool:
        """Whether it is there."""
        return not wait([self.sentinel], 0)

    @property
    def exitcode(self) -> int | None:
        """As multiprocessing has it; 255 also for a process whose forkserver is gone. It is reaped then."""
        code: int | None = self._process.exitcode
        return code

    def send(self, number: int) -> None:
        """Signal it, if it is the process that was started here; SIGKILL goes to its session."""
        if self.recorded is not None and not self.gone:
            logger.info("signal %d to process %d", number, self.pid)
            with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
                if number == signal.SIGKILL and self.recorded.is_running():
                    os.killpg(self.pid, number)
                else:
                    self.recorded.send_signal(number)

    def kill_tree(self) -> None:
        """SIGKILL it and all its descendants."""
        if self.recorded is not None and not self.gone:
            kill_tree([self.recorded])


class RankProcess(ForkedProcess):
    """A process that prepares itself to be a rank, waits for an order, and carries it out."""

    def __init__(self, preparation: Preparation) -> None:
        self._connection, its = socket_pair()
        with its:
            try:
                super().__init__(fork(_be_rank, its, preparation))
            except BaseException:
                self.disconnect()
                raise

    @property
    def source(self) -> int:
        """A descriptor that becomes readable when it has said something, or says no more; -1 once it is disconnected."""
        return self._connection.fileno()

    def tell(self, message: bytes, *descriptors: int) -> None:
        """Send it a message, if it is connected, and with it descriptors of this process."""
        if self.source >= 0:
            tell(self._connection, message, *descriptors)

    def hear(self) -> list[RankSays]:
        """Return what it has said; it is disconnected when it says no more."""
        heard, closed = hear(self._connection)
        if closed:
            self.disconnect()
        return heard

    def disconnect(self) -> None:
        """Close its connection."""
        self._connection.close()


def _be_rank(agent: socket.socket, preparation: Preparation) -> None:
    from taas.rank import entry  # the forkserver has it; an agent never imports torch

    entry.main(agent, preparation)


# ---------------------------------------------------------------- trees of processes


def become_subreaper() -> None:
    """Adopt the orphans of all descendants from now on."""
    _linux.prctl(_PR_SET_CHILD_SUBREAPER, 1)


def kill_tree(roots: Iterable[psutil.Process]) -> None:
    """SIGKILL processes and all their descendants, and wait until they are dead, two seconds at most.

    multiprocessing's resource tracker is left to itself: it removes named semaphores that the dead left
    behind, and ends when nobody holds its pipe.
    """
    trees = list(roots)
    for root in [*trees]:
        with contextlib.suppress(psutil.NoSuchProcess):
            trees += root.children(recursive=True)
    dying: dict[int, int] = {}
    for process in trees:
        # AccessDenied: what a cell started by sudo is another user's
        with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError, psutil.AccessDenied):
            if not _tracks_resources(process):
                process.kill()
                dying[os.pidfd_open(process.pid)] = process.pid
    wait_for_all(dying, deadlines.TREE_DIES)
    for handle, pid in dying.items():
        with contextlib.suppress(ChildProcessError):  # it is not for this process to bury
            os.waitpid(pid, os.WNOHANG)
        os.close(handle)


def _tracks_resources(process: psutil.Process) -> bool:
    try:
        return any("multiprocessing.resource_tracker" in argument for argument in process.cmdline())
    except psutil.ZombieProcess:  # dying: some of its threads may be there still
        return False


def wait_for_all(handles: Iterable[int], seconds: float) -> None:
    """Wait until all of some descriptors are readable, so many seconds at most."""
    left, until = set(handles), time.monotonic() + seconds
    while left and (rest := until - time.monotonic()) > 0:
        left.difference_update(wait(left, rest))


def sweep_orphans(own: Collection[int | None]) -> None:
    """End this process's adopted orphans: its children but those in ``own``; again until there are none."""
    for _ in range(SWEEPS):
        if not (left := orphans(own)):
            return
        kill_tree(left)


def orphans(own: Collection[int | None]) -> list[psutil.Process]:
    """Return this process's children but those in ``own``; those that have ended by themselves are buried."""
    return [child for child in psutil.Process().children() if child.pid not in own and not _ended(child)]


def _ended(child: psutil.Process) -> bool:
    """Whether nothing is left to end: it was buried here, or is a resource tracker at its last work."""
    try:
        if child.status() == psutil.STATUS_ZOMBIE:
            reaped, _ = os.waitpid(child.pid, os.WNOHANG)
            return bool(reaped == child.pid)
        return _tracks_resources(child)
    except (psutil.NoSuchProcess, ChildProcessError):
        return True
