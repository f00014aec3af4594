"""The positions of ranks in their code: ranks write their stacks; equal stacks are shown together.

A rank writes its stacks on request, even while C code holds the GIL, and when a fatal signal ends
it: faulthandler's signal handler writes the frames of all threads without running any Python code
(https://docs.python.org/3/library/faulthandler.html#faulthandler.register). The file begins with a
line of JSON, the :class:`Preface`; each dump is appended. System calls continue after the signal,
except those that the system never restarts (signal(7)). Python restarts these itself; in C code, a
``sleep()`` returns early.
"""

from __future__ import annotations

import contextlib
import faulthandler
import linecache
import os
import signal
import threading
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path, PurePath

import msgspec

from taas.protocol.stacks import Frame, RankSeen, StackGroup

_SHOWN_FRAMES = 12
_SOURCE_WIDTH = 70
STACKS, COLLECTIVE = "stacks", "collective"
SIGNAL = signal.SIGRTMIN + 11
"""A real-time signal that glibc, CUDA and profilers do not use."""
_fd = -1
_folder = Path()


def is_collective(frames: Sequence[Frame]) -> str | None:
    """Return the name of the torch.distributed function that the frames are in, or None."""
    found = None
    for frame in frames:  # innermost first
        if "/torch/distributed/" in frame.file and "/elastic/" not in frame.file:
            if frame.function not in ("wrapper", "<lambda>"):
                found = frame.function
        elif "/taas/adopt/" not in frame.file and (found or frame.cell is not None):
            break
    return found


def fold(
    seen: Iterable[RankSeen], *, cell: str, execution_count: int, ended: Iterable[int] = ()
) -> tuple[StackGroup, ...]:
    """Group the ranks that are at the same position, and those that have ended the cell.

    The groups are in the order of their ranks.

    If there are several groups, all except the largest are odd. If two are equally large, the group
    whose ranks wait in a collective is not odd.
    """
    seen = list(seen)
    differ = len({rank.collective for rank in seen if rank.collective}) > 1
    source = _Source(cell, execution_count, collectives=differ)
    together: dict[str, list[RankSeen]] = defaultdict(list)
    for rank in seen:
        together[source.place_of(rank)].append(rank)
    places = [
        StackGroup(tuple(sorted(r.rank for r in ranks)), where, False, source.stack_of(ranks[0]))
        for where, ranks in together.items()
    ]
    if done := tuple(sorted(ended)):
        places.append(StackGroup(done, "ended the cell"))
    waiting = {where for where, ranks in together.items() if is_collective(ranks[0].frames or ())}
    usual = max(places, key=lambda place: (len(place.ranks), place.where in waiting), default=None)
    marked = [msgspec.structs.replace(place, odd=place is not usual) for place in places]
    return tuple(sorted(marked, key=lambda place: place.ranks))


class _Source:
    def __init__(self, cell: str, execution_count: int, *, collectives: bool) -> None:
        self._collectives = collectives
        self._lines = cell.splitlines()
        self._count = execution_count

    def _text(self, frame: Frame) -> str:
        if frame.cell == self._count and frame.line <= len(self._lines):
            text = self._lines[frame.line - 1].strip()
        else:
            text = linecache.getline(frame.file, frame.line).strip()
        return text if len(text) <= _SOURCE_WIDTH else text[: _SOURCE_WIDTH - 1] + "…"

    def _name(self, frame: Frame) -> str:
        if frame.cell == self._count:
            return f"cell line {frame.line}"
        if frame.cell is not None:
            return f"Cell In[{frame.cell}], line {frame.line}, in {frame.function}"
        return f"{PurePath(frame.file).name}:{frame.line}, in {frame.function}"

    def place_of(self, rank: RankSeen) -> str:
        if rank.status == "stopped":
            return f"stopped by SIGSTOP (`kill -CONT {rank.pid}` lets it go on)"
        if not rank.frames:
            return "gave no answer" if rank.status != "gone" else "is gone"
        doing = is_collective(rank.frames)
        if doing and self._collectives and rank.collective:
            doing = rank.collective
        of_cells = [frame for frame in rank.frames if frame.cell is not None]
        mine = [frame for frame in of_cells if frame.cell == self._count]
        at = (mine or of_cells or rank.frames)[0]
        if doing:
            return f"{doing}, {self._name(at)}"
        return self._line(at) if of_cells else self._name(at)

    def _line(self, frame: Frame) -> str:
        text = self._text(frame)
        return f"{self._name(frame)}: {text}" if text else self._name(frame)

    def stack_of(self, rank: RankSeen) -> tuple[str, ...]:
        """Return a rank's innermost frames as lines, from the cell inwards."""
        frames = list(rank.frames or ())
        outermost = max(
            (n for n, frame in enumerate(frames) if frame.cell is not None), default=len(frames)
        )
        lines = [self._line(frame) for frame in reversed(frames[: outermost + 1])]
        if len(lines) > _SHOWN_FRAMES:
            lines = [
                *lines[:2],
                f"… {len(lines) - _SHOWN_FRAMES} more",
                *lines[2 - _SHOWN_FRAMES :],
            ]
        return tuple(lines)


class Preface(msgspec.Struct, frozen=True):
    """The data needed to read the dumps.

    These are the main thread's identifier and, by file name, the number n of ``In[n]`` for frames
    of earlier cells.
    """

    main_thread: int
    cells: dict[str, int]


def answer_requests(folder: Path, cells: dict[str, int]) -> None:
    """Write this process's stacks into the folder at each request, and at a fatal signal.

    Nothing more is written into the folder of an earlier call.
    """
    global _fd, _folder
    _folder = folder
    before = _fd
    _fd = os.open(folder / STACKS, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    faulthandler.enable(file=_fd, all_threads=True)
    faulthandler.register(SIGNAL, file=_fd, all_threads=True, chain=False)
    preface = Preface(threading.main_thread().ident or 0, cells)
    # if the disk is full, the cell still runs, but the position of this rank remains unknown
    with contextlib.suppress(OSError):
        os.write(_fd, msgspec.json.encode(preface) + b"\n")  # from now on the rank may be asked
    if before >= 0:
        os.close(before)


def note_collective(what: str) -> None:
    """Record the collective in which this process waits, for the agent that asked."""
    with contextlib.suppress(OSError):  # the disk is full
        (_folder / COLLECTIVE).write_text(what)
