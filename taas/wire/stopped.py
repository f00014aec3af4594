"""Processes of this machine that are stopped (SIGSTOP): they are told to go on.

A stopped process does nothing, not even its end: whoever waits for it waits for ever. So all processes of taas are looked
at once a second of a run: by the supervisor those of its machine, by an agent elsewhere those below it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

LOOK_SECONDS = 1.0
"""Looks are at least so far apart."""
_OWN_NAME = "taas-"
"""Processes that are forked from a forkserver call themselves so, but ranks (rank/lifeline.py)."""
_PROGRAMS = {
    "taas.agent": "the agent",
    "taas.delivery.coordinator": "the coordinator of the data workers",
    "taas.engines.ray_driver": "the Ray driver",
    "multiprocessing.forkserver": "the forkserver",
}


class Process(NamedTuple):
    """A line of /proc/PID/stat (proc_pid_stat(5)); ``born`` tells it from another one that has its id later."""

    pid: int
    name: str
    state: str
    parent: int
    born: int

    @property
    def stopped(self) -> bool:
        """Whether it was stopped by a signal; one that a debugger holds is not meant."""
        return self.state == "T"


def process(pid: int) -> Process | None:
    """Return the process with this id; None if there is none.

    Raises:
        OSError: there is no descriptor left to read that with.
    """
    try:
        front, _, back = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = back.split()
    return Process(pid, front.partition("(")[2], fields[0], int(fields[1]), int(fields[19]))


def below(root: int) -> Iterator[Process]:
    """Return all descendants of a process, parents first."""
    children: dict[int, list[Process]] = {}
    for entry in os.listdir("/proc"):  # noqa: PTH208  names are all that is needed
        if entry.isdigit() and (found := process(int(entry))) is not None:
            children.setdefault(found.parent, []).append(found)
    parents = [root]
    for parent in parents:
        for child in children.get(parent, ()):
            parents.append(child.pid)
            yield child


def let_go_on(processes: Iterable[Process]) -> list[Process]:
    """Send SIGCONT to those that are stopped, and return them."""
    return [one for one in processes if one.stopped and _continued(one)]


def _continued(one: Process) -> bool:
    now = process(one.pid)
    if now is None or now.born != one.born:
        return False
    with contextlib.suppress(ProcessLookupError):
        os.kill(one.pid, signal.SIGCONT)
    return True


class StoppedHelpers:
    """Ranks are left alone, and what they started: a cell's own process may be stopped on purpose.

    Args:
        parent: the name of this process's parent, if that is to be looked at, too.
    """

    def __init__(self, parent: str = "") -> None:
        self._parent = parent
        self._next = 0.0

    def wait(self) -> float:
        """Return the seconds until the next look is due."""
        return max(0.0, self._next - time.monotonic())

    def look(self) -> list[str]:
        """Look, if it is time; returns lines for the user."""
        if self.wait() > 0:
            return []
        self._next = time.monotonic() + LOOK_SECONDS
        try:
            helpers = dict(self._helpers())
        except OSError:  # no descriptor is left: another look may have one
            return []
        names = {one.pid: name for one, name in helpers.items()}
        return [
            f"{names[one.pid]} (process {one.pid}) was stopped (SIGSTOP); it was told to go on"
            for one in let_go_on(helpers)
        ]

    def _helpers(self) -> Iterator[tuple[Process, str]]:
        parent = process(os.getppid())
        if parent is not None and parent.name == self._parent:
            yield parent, f"the process {parent.name}"
        known = {os.getpid(): ""}
        for one in below(os.getpid()):
            if one.parent not in known:
                continue
            if one.name.startswith(_OWN_NAME):
                name = f"the process {one.name}"
            elif known[one.parent] in ("", _PROGRAMS["taas.agent"]):
                name = _program(one.pid)  # each time: before its exec it is still its parent's
            else:
                continue
            if name != "other":
                known[one.pid] = name
                yield one, name


def _program(pid: int) -> str:
    try:
        arguments = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
    except OSError:
        return "other"
    return next((name for program, name in _PROGRAMS.items() if program in arguments), "other")
