"""How trees of processes end: they are killed, and then what is left of them.

An agent is a child subreaper (prctl(2), PR_SET_CHILD_SUBREAPER): whatever a rank started stays below the agent,
also when it made a session of its own and its parent is gone. So a descendant of the agent that is neither the
forkserver nor below it is an orphan of a rank, and nothing else is ever signalled.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable
from multiprocessing.connection import wait

import psutil

from taas import _linux
from taas.wire import deadlines

_PR_SET_CHILD_SUBREAPER = 36
SWEEPS = 10
"""So often what is left is killed: while a tree is being killed, what is left of it is handed on."""


def become_subreaper() -> None:
    """Adopt the orphans of all descendants from now on."""
    _linux.prctl(_PR_SET_CHILD_SUBREAPER, 1)


def kill_tree(roots: Iterable[psutil.Process]) -> None:
    """SIGKILL processes and all their descendants, and wait until they are dead, two seconds at most.

    multiprocessing's resource tracker is left to itself: it removes named semaphores that the dead left
    behind, and ends when nobody holds its pipe.
    """
    poisoned = list(roots)
    for root in list(poisoned):
        with contextlib.suppress(psutil.NoSuchProcess):
            poisoned += root.children(recursive=True)
    dying: dict[int, int] = {}
    for process in poisoned:
        # AccessDenied: what a cell started by sudo is another user's
        with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError, psutil.AccessDenied):
            if not _tracks_resources(process):
                process.kill()
                dying[os.pidfd_open(process.pid)] = process.pid
    _await_death(dying)


def _tracks_resources(process: psutil.Process) -> bool:
    try:
        return any("multiprocessing.resource_tracker" in argument for argument in process.cmdline())
    except psutil.ZombieProcess:  # dying: some of its threads may be there still
        return False


def _await_death(handles: dict[int, int]) -> None:
    """Wait for processes, given by pidfd and pid, to die; bury those that are this process's children."""
    left, deadline = set(handles), time.monotonic() + deadlines.TREE_DIES
    while left and (seconds := deadline - time.monotonic()) > 0:
        for handle in left & set(wait(left, seconds)):
            left.discard(handle)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(handles[handle], os.WNOHANG)
    for handle in handles:
        os.close(handle)


def sweep_orphans(own: Iterable[int]) -> None:
    """End this process's adopted orphans: its children but those in ``own``.

    Again until there are none: while a tree is being killed, what is left of it is handed on to this process.
    """
    kept = set(own)
    for _ in range(SWEEPS):
        if not (left := orphans(kept)):
            return
        kill_tree(left)


def orphans(own: Iterable[int]) -> list[psutil.Process]:
    """Return this process's children but those in ``own``; those that have ended by themselves are buried."""
    kept = set(own)
    return [child for child in psutil.Process().children() if child.pid not in kept and not _ended(child)]


def _ended(child: psutil.Process) -> bool:
    """Whether nothing is left to end: it was buried here, or is a resource tracker at its last work."""
    try:
        if child.status() == psutil.STATUS_ZOMBIE:
            reaped, _ = os.waitpid(child.pid, os.WNOHANG)
            return bool(reaped == child.pid)
        return _tracks_resources(child)
    except (psutil.NoSuchProcess, ChildProcessError):
        return True
