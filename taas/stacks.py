"""Where ranks stand: frames, folded over ranks that stand at the same place, the odd one named."""

from __future__ import annotations

import linecache
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import PurePath

import msgspec

__all__ = ["Frame", "Place", "RankSeen", "Trouble", "fold", "is_collective", "ranks_in_words"]

_SHOWN_FRAMES = 12
_SOURCE_WIDTH = 70


class Frame(msgspec.Struct, frozen=True, array_like=True):
    """One frame of a rank's main thread.

    Attributes:
        file: as Python names it.
        line: counted from 1.
        function: its name.
        cell: the ``In[n]`` that the file is, or None.
    """

    file: str
    line: int
    function: str
    cell: int | None = None


class RankSeen(msgspec.Struct, frozen=True, array_like=True):
    """A rank, looked at from outside.

    Attributes:
        rank: global rank.
        pid: its process id.
        status: as psutil names it (``sleeping``, ``running``, ``stopped``, …), or ``gone``.
        cpu: processor seconds it has used.
        written: bytes of output it has written.
        frames: innermost first; None if it was not asked or did not answer.
    """

    rank: int
    pid: int
    status: str
    cpu: float
    written: int
    frames: tuple[Frame, ...] | None = None


class Place(msgspec.Struct, frozen=True):
    """Ranks that stand at one place.

    Attributes:
        ranks: their numbers.
        where: the place in words.
        odd: it is these that differ from the rest.
        stack: a line for each frame, innermost last.
    """

    ranks: tuple[int, ...]
    where: str
    odd: bool = False
    stack: tuple[str, ...] = ()

    def __str__(self) -> str:
        mark = "   <- differs" if self.odd else ""
        return f"{ranks_in_words(self.ranks)}: {self.where}{mark}"


class Trouble(msgspec.Struct, frozen=True):
    """Something is wrong with a run that goes on.

    Attributes:
        headline: what, in one line.
        places: where the ranks stand.
    """

    headline: str
    places: tuple[Place, ...] = ()


def ranks_in_words(ranks: Iterable[int]) -> str:
    """Return ``rank 3``, or ``ranks 0–2, 5``."""
    numbers = sorted(ranks)
    parts: list[str] = []
    start = 0
    for end in range(1, len(numbers) + 1):
        if end == len(numbers) or numbers[end] != numbers[end - 1] + 1:
            first, last = numbers[start], numbers[end - 1]
            parts.append(str(first) if first == last else f"{first}–{last}")
            start = end
    return f"rank{'s' if len(numbers) > 1 else ''} {', '.join(parts)}"


def is_collective(frames: Sequence[Frame]) -> str | None:
    """Return the name of the torch.distributed function that the frames are in, or None."""
    found = None
    for frame in frames:  # innermost first
        if "/torch/distributed/" in frame.file and "/elastic/" not in frame.file:
            if frame.function not in ("wrapper", "<lambda>"):
                found = frame.function
        elif found or frame.cell is not None:
            break
    return found


def fold(
    seen: Iterable[RankSeen], *, cell: str, execution_count: int, ended: Iterable[int] = ()
) -> tuple[Place, ...]:
    """Put together the ranks that stand at the same place.

    Args:
        seen: the ranks that are there, with their frames.
        cell: text of the run's cell.
        execution_count: its ``In[n]``.
        ended: ranks that have ended the cell already.

    Returns:
        The places in the order of their ranks. Where there are several, all but the one with the most ranks
        are odd; if two have as many, the one whose ranks wait in a collective counts as the rest.
    """
    source = _Source(cell, execution_count)
    together: dict[str, list[RankSeen]] = defaultdict(list)
    for rank in seen:
        together[source.place_of(rank)].append(rank)
    places = [
        Place(tuple(sorted(r.rank for r in ranks)), where, False, source.stack_of(ranks[0]))
        for where, ranks in together.items()
    ]
    done = tuple(sorted(ended))
    if done:
        places.append(Place(done, "ended the cell"))
    waiting = {
        where for where, ranks in together.items() if ranks[0].frames and is_collective(ranks[0].frames)
    }
    usual = max(places, key=lambda place: (len(place.ranks), place.where in waiting), default=None)
    marked = [msgspec.structs.replace(place, odd=place is not usual) for place in places]
    return tuple(sorted(marked, key=lambda place: place.ranks))


class _Source:
    """The text of frames' lines."""

    def __init__(self, cell: str, execution_count: int) -> None:
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
        """Return the place of a rank in words: what it does, and the cell's line."""
        if rank.status == "stopped":
            return f"stopped by SIGSTOP (`kill -CONT {rank.pid}` lets it go on)"
        if not rank.frames:
            return "gave no answer" if rank.status != "gone" else "is gone"
        doing = is_collective(rank.frames)
        mine = next((frame for frame in rank.frames if frame.cell == self._count), None)
        mine = mine or next((frame for frame in rank.frames if frame.cell is not None), None)
        if mine is None:
            innermost = rank.frames[0]
            return f"{doing}, {self._name(innermost)}" if doing else self._name(innermost)
        at = self._name(mine)
        if doing:
            return f"{doing}, {at}"
        text = self._text(mine)
        return f"{at}: {text}" if text else at

    def stack_of(self, rank: RankSeen) -> tuple[str, ...]:
        """Return a rank's innermost frames as lines, from the cell inwards."""
        frames = list(rank.frames or ())
        outermost = max((n for n, frame in enumerate(frames) if frame.cell is not None), default=len(frames))
        lines = [
            f"{self._name(frame)}: {text}" if (text := self._text(frame)) else self._name(frame)
            for frame in reversed(frames[: outermost + 1])
        ]
        if len(lines) > _SHOWN_FRAMES:
            lines = [*lines[:2], f"… {len(lines) - _SHOWN_FRAMES} more", *lines[2 - _SHOWN_FRAMES :]]
        return tuple(lines)
