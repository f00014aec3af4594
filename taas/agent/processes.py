"""Processes forked from the forkserver, and how process trees are ended.

An agent is a child subreaper (prctl(2), PR_SET_CHILD_SUBREAPER): every process that a rank started
remains a descendant of the agent, even if it has made its own session and its parent is gone. So a
child of the agent other than the forkserver is an orphan of a rank. Apart from the forkserver and
its descendants, only such orphans and their descendants are ever signalled.
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
"""Maximum number of rounds in which remaining processes are killed: while a tree is being killed,
its orphans are reparented to this process.
"""


class ForkedProcess:
    """A process that multiprocessing has started; its ``sentinel`` is readable when it is gone.

    Attributes:
        gone: whether its end was noticed.
        recorded: its psutil.Process, which compares start times; None if the process was gone at
            once.
    """

    def __init__(self, process: Any) -> None:
        self.pid: int = process.pid
        self.sentinel: int = process.sentinel
        self.gone = False
        self._process = process
        # otherwise multiprocessing would read its exit status whenever it starts another process,
        # and would set 255 if the status was not reported
        multiprocessing.process._children.discard(process)  # type: ignore[attr-defined]
        self.recorded: psutil.Process | None = None
        # the process is gone already, which its sentinel shows
        with contextlib.suppress(psutil.NoSuchProcess):
            self.recorded = psutil.Process(self.pid)

    @property
    def alive(self) -> bool:
        """Whether the process exists."""
        return not wait([self.sentinel], 0)

    @property
    def exitcode(self) -> int | None:
        """The exit code, as in multiprocessing; None while the process exists, or if ``untold``.

        multiprocessing would return 255 if it is untold, but a process may also exit with status
        255.
        """
        popen = self._process._popen
        if popen.returncode is None and not self.alive:
            with contextlib.suppress(OSError, EOFError):
                popen.returncode = read_signed(self.sentinel)
        code: int | None = popen.returncode
        return code

    @property
    def untold(self) -> bool:
        """Whether the process is gone, but its forkserver, gone itself, did not report how."""
        return self.exitcode is None and not self.alive

    def send(self, number: int) -> None:
        """Send a signal to the process, if it is still the same; SIGKILL goes to its session."""
        if self.recorded is not None and not self.gone:
            logger.info("signal %d to process %d", number, self.pid)
            with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
                if number == signal.SIGKILL and self.recorded.is_running():
                    os.killpg(self.pid, number)
                else:
                    self.recorded.send_signal(number)

    def kill_tree(self) -> None:
        """Send SIGKILL to the process and all its descendants."""
        if self.recorded is not None and not self.gone:
            kill_tree([self.recorded])


class MadeAhead(enum.Enum):
    """The progress of a spare that may be turned into a rank before it gets its start message."""

    NOT = "not told"
    IMPORTING = "importing"
    READY = "ready"


class RankProcess(ForkedProcess):
    """A process that prepares itself to be a rank, waits for its start message, and runs a cell.

    Attributes:
        writes_collective: whether it was asked in which collective it waits, and has not yet
            reported that it wrote this down.
        ahead: how far it was turned into a rank before its start message.
        expected: the start message for which this was done; None if it can be any rank.
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
        """A descriptor, readable at a message or at the connection's end; -1: disconnected."""
        return self._connection.fileno()

    def tell(self, message: bytes, *descriptors: int) -> None:
        """Send a message, with descriptors of this process, if the rank is connected."""
        if self.source >= 0:
            tell(self._connection, message, *descriptors)

    def interrupt(self) -> None:
        """Send SIGINT, as a terminal does, to the process and to the programs that it runs.

        While libc's system(3) waits for a program, the process ignores SIGINT. The process is told
        that the signal was ignored, and raises it again afterwards.
        """
        ignored = self._ignores(signal.SIGINT)
        self.send(signal.SIGINT)
        # immediately, since its ``except`` block may wait for other ranks when it gets the message
        self.send(NOTICE)
        self.tell(pack(RankRequest(what="notice", ignored=ignored)))
        for program in self._programs():
            # AccessDenied: a process that the cell started by sudo belongs to another user
            with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                program.send_signal(signal.SIGINT)

    def _ignores(self, number: signal.Signals) -> bool:
        """Return whether the process ignores a signal at present (proc_pid_status(5))."""
        with contextlib.suppress(OSError):  # the process is gone, or no descriptor is left
            for line in Path(f"/proc/{self.pid}/status").read_text(errors="replace").splitlines():
                if line.startswith("SigIgn:"):
                    return bool(int(line.split()[1], 16) >> (number - 1) & 1)
        return False

    def _programs(self) -> list[psutil.Process]:
        """Return the other programs that a Ctrl-C in a terminal would reach.

        Processes that ``multiprocessing`` started are left out, although Ctrl-C would reach them,
        too: a DataLoader's workers end at a SIGINT, and the cell's ``except`` and ``finally``
        blocks may still use their loader.
        """
        if self.recorded is None or self.gone:
            return []
        found = []
        with contextlib.suppress(psutil.NoSuchProcess):
            own = self.recorded.cmdline()  # a child that was forked without exec has the same one
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
        """Ask it to write down in which collective it waits, unless a request is pending."""
        if not self.writes_collective:
            self.writes_collective = True
            self.tell(pack(RankRequest(what="collective")))

    def hear(self) -> list[RankSays]:
        """Return its messages; disconnect when it sends no more."""
        before, self._heard = self._heard, []
        if self.source < 0:
            return before
        heard, closed = hear(self._connection)
        if closed:
            self.disconnect()
        return before + heard

    @property
    def local_rank(self) -> int | None:
        """The local rank that the process already is; None if it can be any."""
        return None if self.expected is None else self.expected.start.local_rank

    def get_ready(self, order: GetReady) -> None:
        """Let the process become the rank that is expected next."""
        self.ahead, self.expected = MadeAhead.IMPORTING, order
        self.tell(pack(order))

    def takes_order(self, until: float) -> bool:
        """Wait until it accepts or rejects its job; False if rejected, if gone, or if late."""
        heard: list[RankSays] = []
        while True:
            said = self.hear()
            heard += said
            for state in [one.state for one in said if isinstance(one, RankReady)]:
                if state is not Readiness.IMPORTED:
                    self._heard = heard  # it may also have sent messages about its cell
                    return state is Readiness.TAKES
            rest = until - time.monotonic()
            if self.source < 0 or rest <= 0 or not wait([self.source], rest):
                return False

    def disconnect(self) -> None:
        """Close the connection."""
        self._connection.close()


def _be_rank(agent: socket.socket, preparation: Preparation) -> None:
    from taas.rank import entry  # the forkserver has imported it; an agent never imports torch

    entry.main(agent, preparation)


# ---------------------------------------------------------------- trees of processes


def become_subreaper() -> None:
    """Adopt the orphans of all descendants from now on."""
    linux.prctl(_PR_SET_CHILD_SUBREAPER, 1)


def kill_tree(roots: Iterable[psutil.Process]) -> None:
    """Kill processes and all their descendants; wait at most two seconds for their death.

    Helpers that clean up after dead processes are left alone, and end by themselves then.
    """
    trees = list(roots)
    for root in [*trees]:
        with contextlib.suppress(psutil.NoSuchProcess):
            trees += root.children(recursive=True)
    dying: dict[int, int] = {}
    for process in trees:
        # AccessDenied: a process that the cell started by sudo belongs to another user
        with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError, psutil.AccessDenied):
            if not _cleans_up(process):
                process.kill()
                dying[os.pidfd_open(process.pid)] = process.pid
    wait_for_all(dying, deadlines.TREE_DIES)
    for handle, pid in dying.items():
        with contextlib.suppress(ChildProcessError):  # it is not a child of this process
            os.waitpid(pid, os.WNOHANG)
        os.close(handle)


def _cleans_up(process: psutil.Process) -> bool:
    """Return whether a process removes what dead processes left, and ends by itself then.

    multiprocessing's resource tracker removes named semaphores when no process holds its pipe any
    more. torch's shared memory manager, which is started by a process with the sharing strategy
    ``file_system``, removes that process's files in /dev/shm two seconds after its last connection
    has ended (torch/lib/libshm/manager.cpp); a manager that is stopped would never do so.
    """
    try:
        command = process.cmdline()
        if command[:1] == ["torch_shm_manager"]:
            return bool(process.status() != psutil.STATUS_STOPPED)
        return any("multiprocessing.resource_tracker" in argument for argument in command)
    except psutil.NoSuchProcess:  # it has ended, or is dying, and some of its threads still exist
        return False


def wait_for_all(handles: Iterable[int], seconds: float) -> None:
    """Wait until all these descriptors are readable, but at most for ``seconds``."""
    left, until = set(handles), time.monotonic() + seconds
    while left and (rest := until - time.monotonic()) > 0:
        left.difference_update(wait(left, rest))


def bury_orphans(own: Collection[int | None]) -> None:
    """Reap orphans of this process that have ended; end none, and ignore those in ``own``.

    A single system call determines whether there is one, so that a loop can call this in every
    turn: psutil would read all of /proc to find children. If a process in ``own`` has ended, the
    orphans behind it have to wait.
    """
    with contextlib.suppress(ChildProcessError):  # this process has no child
        while ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            if ended.si_pid in own:
                return
            os.waitpid(ended.si_pid, os.WNOHANG)


def sweep_orphans(own: Collection[int | None]) -> None:
    """End this process's orphans (its children except ``own``), until none is left."""
    for _ in range(SWEEPS):
        if not (left := orphans(own)):
            return
        kill_tree(left)


def orphans(own: Collection[int | None]) -> list[psutil.Process]:
    """Return this process's children, except ``own``; reap those that have ended."""
    while True:
        others = [child for child in psutil.Process().children() if child.pid not in own]
        reaped = [child for child in others if _reap(child)]
        if not reaped:
            return [child for child in others if not _cleans_up(child)]
        # One that died after the children were listed has handed on its own, which are not listed.


def _reap(child: psutil.Process) -> bool:
    """Reap a child, if it has ended; return whether it is gone."""
    try:
        if child.status() != psutil.STATUS_ZOMBIE:
            return False
        reaped, _ = os.waitpid(child.pid, os.WNOHANG)
        return bool(reaped == child.pid)  # not yet, while some of its threads are dying
    except (psutil.NoSuchProcess, ChildProcessError):  # another thread has reaped it
        return True
