"""How processes end: signals to recorded processes, then a sweep of what is left of the tree.

An agent is a child subreaper (prctl(2), PR_SET_CHILD_SUBREAPER): whatever a rank started stays below the agent,
also when it made a session of its own and its parent is gone. So a descendant of the agent that is neither the
forkserver nor below it is an orphan of a rank, and nothing else is ever signalled.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from collections.abc import Iterable

import psutil

from taas import _linux
from taas.wire import deadlines

_PR_SET_CHILD_SUBREAPER = 36
SWEEPS = 10
"""So often what is left is killed: while a tree is being killed, what is left of it is handed on."""


def become_subreaper() -> None:
    """Adopt the orphans of all descendants from now on."""
    _linux.prctl(_PR_SET_CHILD_SUBREAPER, 1)


def send(process: psutil.Process, number: int) -> None:
    """Signal a recorded process; SIGKILL goes to the whole session that it leads.

    psutil compares the process's start time first: a pid that was given to somebody else is left alone.
    """
    with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
        if number == signal.SIGKILL and process.is_running():
            os.killpg(process.pid, number)
        else:
            process.send_signal(number)


def kill_tree(roots: Iterable[psutil.Process]) -> None:
    """SIGKILL processes and all their descendants, and wait until they are dead, two seconds at most.

    multiprocessing's resource tracker is left to itself: it removes named semaphores that the dead left
    behind, and ends when nobody holds its pipe.
    """
    poisoned = list(roots)
    for root in list(poisoned):
        with contextlib.suppress(psutil.NoSuchProcess):
            poisoned += root.children(recursive=True)
    handles = {}
    for process in poisoned:
        with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
            if not _tracks_resources(process):
                handle = os.pidfd_open(process.pid)
                handles[handle] = process.pid
                if not _kill(process):
                    del handles[handle]
                    os.close(handle)
    _await_death(handles)


def _kill(process: psutil.Process) -> bool:
    """SIGKILL a process; returns whether that was allowed: what a cell started by sudo is another user's."""
    try:
        process.kill()
    except psutil.AccessDenied:
        return False
    return True


def reap_orphans(own: Iterable[int]) -> None:
    """Bury adopted orphans that have ended by themselves: a long run may have many."""
    kept = set(own)
    for child in psutil.Process().children():
        if child.pid not in kept:
            _ended(child)


def _tracks_resources(process: psutil.Process) -> bool:
    try:
        return any("multiprocessing.resource_tracker" in argument for argument in process.cmdline())
    except psutil.ZombieProcess:  # dying: some of its threads may be there still
        return False


def _await_death(handles: dict[int, int]) -> None:
    """Wait for processes, given by pidfd and pid, to die; bury those that are this process's children."""
    poll = select.poll()
    for handle in handles:
        poll.register(handle, select.POLLIN)
    left = set(handles)
    deadline = time.monotonic() + deadlines.TREE_DIES
    while left and time.monotonic() < deadline:
        for handle, _ in poll.poll(deadlines.TREE_DIES * 1000):
            poll.unregister(handle)
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
        left = orphans(kept)
        if not left:
            return
        kill_tree(left)


def orphans(own: Iterable[int]) -> list[psutil.Process]:
    """Return this process's children but those in ``own``, and those of which nothing is left to end."""
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
