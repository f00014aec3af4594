"""The state of ranks, their use of resources, and their stacks from faulthandler."""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
import psutil

from taas.agent.gpu_watch import GpuUse, GpuWatch
from taas.agent.processes import RankProcess
from taas.agent.rank_endings import Rank
from taas.protocol import deadlines
from taas.protocol.agents import LookAtRanks
from taas.protocol.framing import MessageReader, Unreadable
from taas.protocol.ranks import RankUse
from taas.protocol.stacks import Frame, RankSeen
from taas.runs.events import FILES, STDERR, size_of
from taas.runs.stacks import COLLECTIVE, SIGNAL, STACKS, Preface, fold

_STEP_PERCENT = 5
"""A smaller change is not reported."""
_THREAD = re.compile(r"^(?:Current thread|Thread) 0x([0-9a-f]+)", re.MULTILINE)
_FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$', re.MULTILINE)
_read_preface = MessageReader(Preface, msgspec.json)
_RUNNING_CELL = re.compile(r"<ipython-input-(\d+)-")


class _StackQuery:
    """A rank that was asked for its stacks, and what it has written since then."""

    def __init__(self, path: Path) -> None:
        self._path, self._size = path, -1
        self._start = path.stat().st_size
        with path.open("rb") as file:
            self._preface = _read_preface(file.readline())

    def answered(self) -> bool:
        """Return whether the main thread's frames are there and no text is still coming."""
        before, self._size = self._size, self._path.stat().st_size
        return self._size == before and self.frames() is not None

    def frames(self) -> tuple[Frame, ...] | None:
        with self._path.open("rb") as file:
            file.seek(self._start)
            return main_frames(file.read().decode(errors="replace"), self._preface)


def main_frames(dump: str, preface: Preface) -> tuple[Frame, ...] | None:
    """Find the main thread's frames in faulthandler's text, innermost first; None if not found."""
    starts = list(_THREAD.finditer(dump))
    for number, start in enumerate(starts):
        if int(start[1], 16) == preface.main_thread:
            end = starts[number + 1].start() if number + 1 < len(starts) else len(dump)
            found = _FRAME.findall(dump, start.end(), end)
            return tuple(
                Frame(file, int(line), function, _cell(file, preface))
                for file, line, function in found
            )
    return None


def _cell(file: str, preface: Preface) -> int | None:
    running = _RUNNING_CELL.match(file)
    return int(running[1]) if running else preface.cells.get(file)


def last_words(folder: Path, cell: str, execution_count: int) -> str:
    """Return where a fatal signal ended a rank, and C++'s message, both from the rank's output."""
    words = ""
    with contextlib.suppress(OSError, Unreadable):  # the rank died before it had written them
        with (folder / STACKS).open("rb") as file:
            preface = _read_preface(file.readline())
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
    """One look at the ranks of a run; ``ranks`` is by number, ``folder`` has their output."""

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
        if process.gone or _status(process) in (psutil.STATUS_STOPPED, "gone"):
            return
        # its file shows that it has a handler for the signal
        with contextlib.suppress(OSError, Unreadable):
            asked = _StackQuery(self._folder / str(rank) / STACKS)
            (self._folder / str(rank) / COLLECTIVE).unlink(missing_ok=True)
            process.ask_collective()
            # the agent has not reaped the process, so the process id is still valid
            os.kill(process.pid, SIGNAL)
            self._asked[rank] = asked

    def result(self) -> tuple[RankSeen, ...] | None:
        """Return what was seen; None while replies are still expected."""
        now = time.monotonic()
        if now < self._next:
            return None
        self._next, late = now + deadlines.TICK, now >= self._deadline
        # each call notes the size of a file
        answered = [asked.answered() for asked in self._asked.values()]
        if not late and not all(answered):
            return None
        return tuple(self._seen(rank, process) for rank, process in self._ranks.items())

    def _seen(self, rank: int, process: RankProcess) -> RankSeen:
        folder, cpu, collective = self._folder / str(rank), 0.0, ""
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.recorded is not None and not process.gone:
                cpu = sum(process.recorded.cpu_times()[:2])
        written = sum(size_of(folder / name) for name in FILES)
        frames = self._asked[rank].frames() if rank in self._asked else None
        if frames is not None:
            with contextlib.suppress(OSError):  # it has not written it yet, or is in no collective
                collective = (folder / COLLECTIVE).read_text()
        return RankSeen(rank, process.pid, _status(process), cpu, written, frames, collective)


def _status(process: RankProcess) -> str:
    with contextlib.suppress(psutil.NoSuchProcess):
        if process.recorded is not None and not process.gone:
            return str(process.recorded.status())
    return "gone"


class RankUsage:
    """The resources that the ranks of a run use, queried every two seconds.

    Args:
        gpus: the GPUs of each rank, as named by CUDA_VISIBLE_DEVICES, by local rank.
    """

    def __init__(self, gpus: Sequence[Sequence[str]]) -> None:
        self._next = time.monotonic() + deadlines.USAGE_FIRST
        self._told: tuple[RankUse, ...] = ()
        self._gpus = gpus
        self._watch: GpuWatch | None = None

    @property
    def due(self) -> bool:
        """Whether it is time for the next look."""
        return time.monotonic() >= self._next

    def look(self, ranks: Sequence[Rank], environ: Mapping[str, str]) -> tuple[RankUse, ...]:
        """Return the ranks' usage, or () if it has not changed; ``environ`` is the notebook's."""
        self._next = time.monotonic() + deadlines.USAGE_LOOK
        if self._watch is None and any(self._gpus) and any(rank.ended is None for rank in ranks):
            self._watch = GpuWatch(self._gpus, [rank.process.pid for rank in ranks], environ)
        on_gpus = (GpuUse(),) * len(ranks) if self._watch is None else self._watch.now()
        seen = tuple(_use(rank, on_gpu) for rank, on_gpu in zip(ranks, on_gpus, strict=False))
        before, self._told = self._told, seen
        return () if seen == before else seen

    def end(self) -> None:
        """End the watch: the last rank is gone, or is kept. It may be called twice."""
        if self._watch is not None:
            self._watch.end()


def _use(rank: Rank, on_gpu: GpuUse) -> RankUse:
    if rank.ended is not None:
        return RankUse(rank.number, rank.ended.outcome)
    state, share, nbytes = "running" if rank.started else "starting", 0.0, 0
    process = rank.process.recorded
    with contextlib.suppress(psutil.NoSuchProcess):
        if process is not None:
            if process.status() == psutil.STATUS_STOPPED:
                state = "stopped"
            share = process.cpu_percent()  # of the time since the last look
            memory = process.memory_info()
            nbytes = (memory.rss - memory.shared) >> 20 << 20
    gpu = None if on_gpu.percent is None else _rounded(on_gpu.percent)
    return RankUse(rank.number, state, _rounded(share), nbytes, gpu, on_gpu.nbytes >> 20 << 20)


def _rounded(percent: float) -> int:
    return round(percent / _STEP_PERCENT) * _STEP_PERCENT
