"""What element i is: the order of one iteration, fixed before anybody makes it. Pure; no I/O.

A plan is one iteration of one loader. Its indices arrive in the order of the user's sampler and leave as
rows of one element a rank: element ``seq`` is step ``seq // ranks`` of rank ``seq % ranks``. Only whole rows
leave, so that all ranks have the same number of steps; what becomes of the last, incomplete row is the
run's ``uneven`` rule.
"""

from __future__ import annotations

import struct
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

__all__ = ["Plan", "StreamOrder", "Uneven", "Work", "element_seed", "killer", "pack_place", "unpack_place"]

Uneven = Literal["drop", "pad", "raise"]

_MASK = (1 << 64) - 1


def element_seed(base_seed: int, iteration: int, seq: int) -> int:
    """Return the seed of one element: a splitmix64 finaliser, so neighbours share nothing.

    It depends on the plan alone: not on how many workers there are, nor on which attempt it is.
    """
    z = (base_seed + (iteration << 40) + (seq + 1) * 0x9E3779B97F4A7C15) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return (z ^ (z >> 31)) & 0x7FFF_FFFF_FFFF_FFFF


_place = struct.Struct("<qq")


def pack_place(stream: int, position: int) -> bytes:
    """Return the index of an iterable dataset's element: which stream, and where in it."""
    return _place.pack(stream, position)


def unpack_place(index: bytes) -> tuple[int, int]:
    """Undo ``pack_place``."""
    stream, position = _place.unpack(index)
    return stream, position


def killer(place: str, cause: str) -> str:
    """Return the obituary of those who tried to make an element, for the user."""
    return (
        f"{place} killed the data worker that made it, again and again ({cause}). Look at what the dataset does there, "
        "or leave it out"
    )


@dataclass(slots=True, eq=False)
class Work:
    """One planned element that its rank has not consumed yet."""

    plan: int
    loader: int
    seq: int
    rank: int
    step: int
    seed: int
    index: bytes
    stream: int = -1
    attempts: set[int] = field(default_factory=set)
    deaths: int = 0
    over: bool = False
    """Consumed, or nobody wants it any more."""
    prepared: bool = False
    """Some worker has made it, or none needs to."""
    queued: bool = False
    """Waits to be leased again."""


@dataclass(slots=True)
class RankView:
    """How far one rank is in one plan."""

    begun: bool = False
    closed: bool = False
    consumed: int = 0
    asked: int = 0
    """Steps that it has asked beyond; a rank that leaves its loop has consumed the last one without asking on."""
    told_end: bool = False
    queue: deque[Work] = field(default_factory=deque)
    """Planned, leased to nobody yet, in order of steps."""
    unconsumed: deque[Work] = field(default_factory=deque)
    """Leased or made, in order of steps."""


class Plan:
    """One iteration of one loader, and where each rank stands in it.

    Attributes:
        drawn: indices received from the sampler.
        rows: rows that have left, that is, steps planned for every rank.
        ended: the sampler has no more.
        steps: steps of this plan once that is known, else None.
        last: rows after which it is cut, once they are drawn; None where its sampler ends it.
        failure: packed exception of the user's sampler, raised after ``steps``.
        refusal: why there is no more, though there should be: ``uneven raise``, or an element that kills; or "".
        broken: which element of a stream ends it, because it kills whoever makes it, or "".
        skipped: elements of each stream that nobody is to make.
        undone: it was made for nothing, before any rank began it.
    """

    def __init__(
        self, ident: int, loader: int, iteration: int, epoch: int | None, ranks: int, uneven: Uneven
    ) -> None:
        self.ident, self.loader, self.iteration, self.epoch = ident, loader, iteration, epoch
        self.ranks = [RankView() for _ in range(ranks)]
        self.uneven = uneven
        self.drawn = self.rows = 0
        self.asked = False
        self.ended = False
        self.undone = False
        self.steps: int | None = None
        self.last: int | None = None
        self.failure = b""
        self.refusal = self.broken = ""
        self.skipped: Counter[int] = Counter()
        self._row: list[tuple[bytes, int, int]] = []
        self._first: list[tuple[bytes, int, int]] = []

    @property
    def begun(self) -> bool:
        """Whether a rank has asked for this iteration."""
        return any(view.begun for view in self.ranks)

    @property
    def closed(self) -> bool:
        """Whether no rank will ask for more of it."""
        return all(view.closed for view in self.ranks)

    def extend(self, indices: list[bytes], base_seed: int, streams: list[int] | None = None) -> None:
        """Append the sampler's next indices; complete rows become work."""
        n = len(self.ranks)
        for at, index in enumerate(indices):
            entry = (
                index,
                element_seed(base_seed, self.iteration, self.drawn),
                streams[at] if streams else -1,
            )
            self.drawn += 1
            if len(self._first) < n:
                self._first.append(entry)
            self._row.append(entry)
            if len(self._row) == n:
                self._release_row()

    def end(self, failure: bytes = b"", refusal: str = "") -> None:
        """Close the plan: the sampler is at its end, or raised ``failure``, or no more can be made (``refusal``)."""
        self.ended, self.failure, self.refusal = True, failure, refusal
        if failure or refusal:
            self._row.clear()
        if self._row and self.uneven == "pad":
            at = 0
            while len(self._row) < len(self.ranks):
                self._row.append(self._first[at % len(self._first)])
                at += 1
            self._release_row()
        elif self._row and self.uneven == "raise":
            self.refusal = (
                f"this iteration has {self.drawn} elements, which {len(self.ranks)} ranks cannot share "
                f"evenly. Use --uneven drop (leaves out the last {len(self._row)}) or --uneven pad "
                "(repeats the first ones), or choose a batch size that divides"
            )
        self._row.clear()
        self.steps = self.rows

    def cut(self, rows: int) -> None:
        """Close the plan after so many rows, whatever its sampler has."""
        self.ended, self.steps = True, min(self.rows, rows)
        self.failure, self.refusal = b"", ""
        self._row.clear()

    def _release_row(self) -> None:
        n = len(self.ranks)
        for rank, (index, seed, stream) in enumerate(self._row):
            seq = self.rows * n + rank
            view = self.ranks[rank]
            if view.closed or self.rows < view.consumed:
                self.skipped[stream] += 1
            else:
                view.queue.append(Work(self.ident, self.loader, seq, rank, self.rows, seed, index, stream))
        self.rows += 1
        self._row.clear()

    def consume(self, rank: int, consumed: int) -> list[Work]:
        """Move a rank's watermark; return the work that lies below it now."""
        view = self.ranks[rank]
        view.consumed = max(view.consumed, consumed)
        below = []
        for works in (view.unconsumed, view.queue):
            while works and works[0].step < view.consumed:
                below.append(works.popleft())
                below[-1].over = True
        return below

    def skip(self, start: int) -> list[Work]:
        """Begin at a step: what is before counts as consumed by all ranks; return such work as there is."""
        below = [work for rank in range(len(self.ranks)) for work in self.consume(rank, start)]
        self.skipped.update(work.stream for work in below if not (work.attempts or work.prepared))
        for view in self.ranks:
            view.asked = start
        return below

    def close(self, rank: int) -> list[Work]:
        """The rank wants no more; return the work that is under way for it."""
        view = self.ranks[rank]
        view.begun = view.closed = True
        under_way = list(view.unconsumed)
        for work in (*view.queue, *under_way):
            work.over = True
            if not work.prepared:
                work.prepared = True  # where some worker makes it yet, that changes nothing
                self.skipped[work.stream] += 1
        view.queue.clear()
        view.unconsumed.clear()
        return under_way

    def waiting(self, stream: int) -> Iterator[int]:
        """Yield the positions of a stream that are planned and not consumed, also of a row that is not whole yet."""
        for view in self.ranks:
            for work in (*view.unconsumed, *view.queue):
                if work.stream == stream:
                    yield unpack_place(work.index)[1]
        for index, _, of in self._row:
            if of == stream:
                yield unpack_place(index)[1]

    def take(self, rank: int) -> Work:
        """Remove and return the rank's next work; it counts as under way from now on."""
        view = self.ranks[rank]
        work = view.queue.popleft()
        view.unconsumed.append(work)
        return work


class StreamOrder:
    """The order of a DataLoader with workers over an IterableDataset, from what each stream announces.

    torch gives workers their turns in a circle and leaves out those at their end: round j yields the j-th
    element of every stream that has one.
    """

    def __init__(self, streams: int) -> None:
        self._made = [0] * streams
        self._ended: list[int | None] = [None] * streams
        self._broken: dict[int, int] = {}
        self._round = self._stream = 0

    def announce(self, stream: int, made: int, ended: bool) -> None:
        """``stream`` holds its positions below ``made``; if ``ended``, there are no more."""
        self._made[stream] = max(self._made[stream], made)
        if ended:
            self._ended[stream] = made

    def break_off(self, stream: int, position: int) -> None:
        """Nobody can make this stream's element at ``position``: the order ends before its place."""
        self._broken[stream] = position

    def makeable(self, stream: int, upto: int) -> int:
        """Return how many of a stream's first ``upto`` elements somebody may be told to make."""
        return min(upto, self._broken.get(stream, upto))

    def made(self, stream: int) -> int:
        """Return how many elements of a stream have been made, by whomever got furthest."""
        return self._made[stream]

    def floor(self) -> int:
        """Positions below this one have left in every stream."""
        return self._round

    def advance(self) -> tuple[list[tuple[int, int]], bool]:
        """Return the (stream, position) pairs whose place is now settled, and whether no more will be."""
        settled: list[tuple[int, int]] = []
        while True:
            if self._stream == len(self._made):
                self._stream = 0
                self._round += 1
            ends = [end for end in self._ended if end is not None]
            if len(ends) == len(self._made) and self._round >= max(ends):
                return settled, True
            if self._round >= self._broken.get(self._stream, self._round + 1):
                return settled, True
            end = self._ended[self._stream]
            if end is not None and self._round >= end:
                self._stream += 1
            elif self._round < self._made[self._stream]:
                settled.append((self._stream, self._round))
                self._stream += 1
            else:
                return settled, False
