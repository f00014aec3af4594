"""Looking at ranks from outside: vital signs from /proc, stacks from what faulthandler writes when asked."""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Mapping
from pathlib import Path

import msgspec
import psutil

from taas.agent.processes import RankProcess
from taas.runs.events import FILES, STDERR
from taas.runs.stacks import COLLECTIVE, SIGNAL, STACKS, Frame, Preface, RankSeen, fold
from taas.wire import deadlines
from taas.wire.agents import LookAtRanks
from taas.wire.framing import pack
from taas.wire.ranks import RankRequest

_THREAD = re.compile(r"^(?:Current thread|Thread) 0x([0-9a-f]+)", re.MULTILINE)
_FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$', re.MULTILINE)
_RUNNING_CELL = re.compile(r"<ipython-input-(\d+)-")


class _StackQuery:
    """A rank that was asked for its stacks, and what it has written since."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._start = path.stat().st_size
        self._size = -1
        with path.open("rb") as file:
            self._preface = msgspec.json.decode(file.readline(), type=Preface)

    def answered(self) -> bool:
        """Whether the main thread's frames are there and nothing has come since the last call."""
        size = self._path.stat().st_size
        grew, self._size = size != self._size, size
        return not grew and self.frames() is not None

    def frames(self) -> tuple[Frame, ...] | None:
        """Return the main thread's frames, innermost first."""
        with self._path.open("rb") as file:
            file.seek(self._start)
            return main_frames(file.read().decode(errors="replace"), self._preface)


def main_frames(dump: str, preface: Preface) -> tuple[Frame, ...] | None:
    """Find the main thread in what faulthandler wrote; None if it is not there."""
    starts = list(_THREAD.finditer(dump))
    for number, start in enumerate(starts):
        if int(start[1], 16) == preface.main_thread:
            end = starts[number + 1].start() if number + 1 < len(starts) else len(dump)
            found = _FRAME.findall(dump, start.end(), end)
            return tuple(
                Frame(file, int(line), function, _cell(file, preface)) for file, line, function in found
            )
    return None


def _cell(file: str, preface: Preface) -> int | None:
    running = _RUNNING_CELL.match(file)
    return int(running[1]) if running else preface.cells.get(file)


def _catches(pid: int) -> bool:
    """Whether a process has a handler for the signal: it would be ended by it otherwise."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("SigCgt:"):
                return bool(int(line.split()[1], 16) >> (SIGNAL - 1) & 1)
    return False


def last_words(folder: Path, cell: str, execution_count: int) -> str:
    """Return where a rank stood when a fatal signal such as SIGABRT ended it, and what C++ said of it.

    Args:
        folder: the rank's output files.
        cell: text of the run's cell.
        execution_count: its ``In[n]``.
    """
    words = ""
    with contextlib.suppress(OSError, msgspec.MsgspecError):  # it died before it had got that far
        with (folder / STACKS).open("rb") as file:
            preface = msgspec.json.decode(file.readline(), type=Preface)
            _, fatal, dump = file.read().decode(errors="replace").rpartition("Fatal Python error")
        frames = main_frames(dump, preface) if fatal else None
        if frames:
            [place] = fold(
                [RankSeen(0, 0, "gone", 0.0, 0, frames)], cell=cell, execution_count=execution_count
            )
            words = f" in {place.where}"
        said = re.findall(r"what\(\):\s*(.+)", (folder / STDERR).read_text(errors="replace"))
        if said:
            words += f" ({said[-1].strip()[:200]})"
    return words


class Look:
    """One look at the ranks of a run.

    Args:
        ranks: their processes, by their numbers.
        folder: of their output.
        wanted: the question.
    """

    def __init__(self, ranks: Mapping[int, RankProcess], folder: Path, wanted: LookAtRanks) -> None:
        self.number = wanted.look
        self._ranks, self._folder = ranks, folder
        self._asked: dict[int, _StackQuery] = {}
        now = time.monotonic()
        self._next, self._deadline = now, now + deadlines.STACKS
        if wanted.stacks:
            for rank, process in ranks.items():
                self._ask(rank, process)

    def _ask(self, rank: int, process: RankProcess) -> None:
        if process.gone or not _catches(process.pid) or _status(process) in (psutil.STATUS_STOPPED, "gone"):
            return
        with contextlib.suppress(OSError, msgspec.MsgspecError):  # it is not that far yet
            asked = _StackQuery(self._folder / str(rank) / STACKS)
            (self._folder / str(rank) / COLLECTIVE).unlink(missing_ok=True)
            process.tell(pack(RankRequest(what="collective")))
            os.kill(process.pid, SIGNAL)  # its agent has not buried it: the id is still its own
            self._asked[rank] = asked

    def wait(self) -> float:
        """Return the seconds until :meth:`result` is worth another call."""
        return max(0.0, self._next - time.monotonic())

    def result(self) -> tuple[RankSeen, ...] | None:
        """Return what was seen; None as long as answers are on their way."""
        if self.wait() > 0:
            return None
        self._next = time.monotonic() + deadlines.STACKS_LOOK
        late = time.monotonic() >= self._deadline
        answered = [asked.answered() for asked in self._asked.values()]  # each notes its size
        if not late and not all(answered):
            return None
        return tuple(self._seen(rank, process) for rank, process in self._ranks.items())

    def _seen(self, rank: int, process: RankProcess) -> RankSeen:
        asked = self._asked.get(rank)
        cpu = 0.0
        with contextlib.suppress(psutil.NoSuchProcess):
            if not process.gone:
                times = psutil.Process(process.pid).cpu_times()
                cpu = times.user + times.system
        written = 0
        for name in FILES:
            with contextlib.suppress(FileNotFoundError):
                written += (self._folder / str(rank) / name).stat().st_size
        frames = asked.frames() if asked is not None else None
        collective = ""
        if frames is not None:
            with contextlib.suppress(OSError):  # it has not said it, or knows of none
                collective = (self._folder / str(rank) / COLLECTIVE).read_text()
        return RankSeen(rank, process.pid, _status(process), cpu, written, frames, collective)


def _status(process: RankProcess) -> str:
    with contextlib.suppress(psutil.NoSuchProcess):
        if not process.gone:
            return str(psutil.Process(process.pid).status())
    return "gone"
