"""Processes forked from the forkserver, and how trees of processes are ended.

An agent is a child subreaper (prctl(2), PR_SET_CHILD_SUBREAPER): whatever a rank started stays
below the agent, also when it made a session of its own and its parent is gone. So a descendant of
the agent that is neither the forkserver nor below it is an orphan of a rank, and nothing else is
ever signalled.
"""

from __future__ import annotations

import contextlib
import enum
import logging
import multiprocessing.process
import os
import signal
import socket
import time
from collections.abc import Collection, Iterable
from multiprocessing.connection import wait
from multiprocessing.forkserver import read_signed
from pathlib import Path
from typing import Any

import psutil

from taas.agent.forkserver import fork
from taas.base import linux
from taas.protocol import deadlines
from taas.protocol.framing import pack
from taas.protocol.ranks import (
    NOTICE,
    GetReady,
    Preparation,
    RankReady,
    RankRequest,
    RankSays,
    Readiness,
    hear,
    socket_pair,
    tell,
)

logger = logging.getLogger(__name__)

_PR_SET_CHILD_SUBREAPER = 36
SWEEPS = 10
"""So often what is left is killed: while a tree is being killed, what is left of it is handed on.
"""


class ForkedProcess:
    """A process that multiprocessing has started; its ``sentinel`` is readable when it is gone.

    Attributes:
        gone: whether its end was seen.
        recorded: it, as psutil knows it, which compares start times; None: it was gone at once.
    """

    def __init__(self, process: Any) -> None:
        self.pid: int = process.pid
        self.sentinel: int = process.sentinel
        self.gone = False
        self._process = process
        # else multiprocessing reads how it ended, whenever it starts another one, and makes 255 of
        # what was not told
        multiprocessing.process._children.discard(process)  # type: ignore[attr-defined]
        self.recorded: psutil.Process | None = None
        with contextlib.suppress(psutil.NoSuchProcess):  # gone already: its sentinel says so
            self.recorded = psutil.Process(self.pid)

    @property
    def alive(self) -> bool:
        """Whether it is there."""
        return not wait([self.sentinel], 0)

    @property
    def exitcode(self) -> int | None:
        """Its exit code as multiprocessing has it; None while it is there, or ``untold``.

        multiprocessing makes 255 of the latter, which a process may leave with as well.
        """
        popen = self._process._popen
        if popen.returncode is None and not self.alive:
            with contextlib.suppress(OSError, EOFError):
                popen.returncode = read_signed(self.sentinel)
        code: int | None = popen.returncode
        return code

    @property
    def untold(self) -> bool:
        """Whether it is gone, and its forkserver could not tell how: that is gone itself."""
        return self.exitcode is None and not self.alive

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


class MadeAhead(enum.Enum):
    """How far a spare is that may be made a rank ahead of its order."""

    NOT = "not told"
    IMPORTING = "importing"
    READY = "ready"


class RankProcess(ForkedProcess):
    """A process that prepares itself to be a rank, waits for an order, and carries it out.

    Attributes:
        writes_collective: whether it was asked which collective it waits in, and has not said that
            it wrote it down.
        expected: the order that it was made a rank for ahead of that, and ``ahead``, how far.
    """

    def __init__(self, preparation: Preparation) -> None:
        self.writes_collective = False
        self.ahead = MadeAhead.NOT
        self.expected: GetReady | None = None
        self._heard: list[RankSays] = []
        self._connection, its = socket_pair()
        with its:
            try:
                super().__init__(fork(_be_rank, its, preparation))
            except BaseException:
                self.disconnect()
                raise

    @property
    def source(self) -> int:
        """A descriptor that is readable when it says something, or no more; -1: disconnected."""
        return self._connection.fileno()

    def tell(self, message: bytes, *descriptors: int) -> None:
        """Send it a message, if it is connected, and with it descriptors of this process."""
        if self.source >= 0:
            tell(self._connection, message, *descriptors)

    def interrupt(self) -> None:
        """Send SIGINT, as a terminal does, to it and to the programs that it runs.

        While libc's system(3) waits for a program, the process ignores SIGINT. It is told so, and
        repeats it afterwards.
        """
        ignored = self._ignores(signal.SIGINT)
        self.send(signal.SIGINT)
        # at once: its except may wait for others by the time that it has the message
        self.send(NOTICE)
        self.tell(pack(RankRequest(what="notice", ignored=ignored)))
        for program in self._programs():
            # AccessDenied: what a cell started by sudo is another user's
            with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                program.send_signal(signal.SIGINT)

    def _ignores(self, number: signal.Signals) -> bool:
        """Whether it ignores a signal now (proc_pid_status(5))."""
        with contextlib.suppress(OSError):  # it is gone, or no descriptor is left
            for line in Path(f"/proc/{self.pid}/status").read_text(errors="replace").splitlines():
                if line.startswith("SigIgn:"):
                    return bool(int(line.split()[1], 16) >> (number - 1) & 1)
        return False

    def _programs(self) -> list[psutil.Process]:
        """Return the other programs that a Ctrl-C in a terminal would reach.

        What ``multiprocessing`` started is left alone, though it would be reached, too: a
        DataLoader's workers end at a SIGINT, and the cell's ``except`` and ``finally`` may go on
        with their loader.
        """
        if self.recorded is None or self.gone:
            return []
        found = []
        with contextlib.suppress(psutil.NoSuchProcess):
            own = self.recorded.cmdline()  # a child that is merely forked has it, too
            for child in self.recorded.children(recursive=True):
                with contextlib.suppress(
                    psutil.NoSuchProcess, ProcessLookupError, psutil.AccessDenied
                ):
                    command = child.cmdline()
                    of_python = command == own or any("multiprocessing" in word for word in command)
                    if os.getpgid(child.pid) == self.pid and not of_python:
                        found.append(child)
        return found

    def ask_collective(self) -> None:
        """Ask it to write down which collective it waits in, unless it has yet to answer."""
        if not self.writes_collective:
            self.writes_collective = True
            self.tell(pack(RankRequest(what="collective")))

    def hear(self) -> list[RankSays]:
        """Return what it has said; it is disconnected when it says no more."""
        before, self._heard = self._heard, []
        if self.source < 0:
            return before
        heard, closed = hear(self._connection)
        if closed:
            self.disconnect()
        return before + heard

    @property
    def local_rank(self) -> int | None:
        """Which rank of its VM it is already; None: it can be any."""
        return None if self.expected is None else self.expected.start.local_rank

    def get_ready(self, order: GetReady) -> None:
        """Let it be the rank that is expected next."""
        self.ahead, self.expected = MadeAhead.IMPORTING, order
        self.tell(pack(order))

    def takes_order(self, until: float) -> bool:
        """Wait until it says whether it takes its order; False: it does not, is gone, or late."""
        heard: list[RankSays] = []
        while True:
            said = self.hear()
            heard += said
            for state in [one.state for one in said if isinstance(one, RankReady)]:
                if state is not Readiness.IMPORTED:
                    self._heard = heard  # what it says of its cell may have come, too
                    return state is Readiness.TAKES
            rest = until - time.monotonic()
            if self.source < 0 or rest <= 0 or not wait([self.source], rest):
                return False

    def disconnect(self) -> None:
        """Close its connection."""
        self._connection.close()


def _be_rank(agent: socket.socket, preparation: Preparation) -> None:
    from taas.rank import entry  # the forkserver has it; an agent never imports torch

    entry.main(agent, preparation)


# ---------------------------------------------------------------- trees of processes


def become_subreaper() -> None:
    """Adopt the orphans of all descendants from now on."""
    linux.prctl(_PR_SET_CHILD_SUBREAPER, 1)


def kill_tree(roots: Iterable[psutil.Process]) -> None:
    """SIGKILL processes and all their descendants; wait for their death, two seconds at most.

    Helpers that clean up behind the dead are left to themselves, and end then.
    """
    trees = list(roots)
    for root in [*trees]:
        with contextlib.suppress(psutil.NoSuchProcess):
            trees += root.children(recursive=True)
    dying: dict[int, int] = {}
    for process in trees:
        # AccessDenied: what a cell started by sudo is another user's
        with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError, psutil.AccessDenied):
            if not _cleans_up(process):
                process.kill()
                dying[os.pidfd_open(process.pid)] = process.pid
    wait_for_all(dying, deadlines.TREE_DIES)
    for handle, pid in dying.items():
        with contextlib.suppress(ChildProcessError):  # it is not for this process to bury
            os.waitpid(pid, os.WNOHANG)
        os.close(handle)


def _cleans_up(process: psutil.Process) -> bool:
    """Whether it removes what the dead left behind, and then ends by itself.

    multiprocessing's resource tracker removes named semaphores when nobody holds its pipe. torch's
    manager of shared memory, which a process of the strategy ``file_system`` has, removes that
    one's files in /dev/shm two seconds after its last connection has ended
    (torch/lib/libshm/manager.cpp); one that is stopped never would.
    """
    try:
        command = process.cmdline()
        if command[:1] == ["torch_shm_manager"]:
            return bool(process.status() != psutil.STATUS_STOPPED)
        return any("multiprocessing.resource_tracker" in argument for argument in command)
    except psutil.ZombieProcess:  # dying: some of its threads may be there still
        return False


def wait_for_all(handles: Iterable[int], seconds: float) -> None:
    """Wait until all of some descriptors are readable, so many seconds at most."""
    left, until = set(handles), time.monotonic() + seconds
    while left and (rest := until - time.monotonic()) > 0:
        left.difference_update(wait(left, rest))


def bury_orphans(own: Collection[int | None]) -> None:
    """Reap this process's orphans that have ended; end none, and leave those in ``own`` alone.

    One system call finds out whether there is one, so that a loop may ask at each turn: psutil
    reads all of /proc to find children. Behind one of ``own`` that has ended, others wait.
    """
    with contextlib.suppress(ChildProcessError):  # this process has no child
        while ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            if ended.si_pid in own:
                return
            os.waitpid(ended.si_pid, os.WNOHANG)


def sweep_orphans(own: Collection[int | None]) -> None:
    """End this process's orphans: its children but those in ``own``, until there are none."""
    for _ in range(SWEEPS):
        if not (left := orphans(own)):
            return
        kill_tree(left)


def orphans(own: Collection[int | None]) -> list[psutil.Process]:
    """Return this process's children but those in ``own``; reap those that have ended."""
    return [
        child for child in psutil.Process().children() if child.pid not in own and not _ended(child)
    ]


def _ended(child: psutil.Process) -> bool:
    """Whether nothing is left to end: it was buried here, or is a helper at its last work."""
    try:
        if child.status() == psutil.STATUS_ZOMBIE:
            reaped, _ = os.waitpid(child.pid, os.WNOHANG)
            return bool(reaped == child.pid)
        return _cleans_up(child)
    except (psutil.NoSuchProcess, ChildProcessError):
        return True
