"""What element i is: the order of one iteration, fixed before anybody makes it. Pure; no I/O.

Indices arrive in the order of the user's sampler and leave as rows of one element a rank: element ``seq`` is step
``seq // ranks`` of rank ``seq % ranks``. Only whole rows leave, so that all ranks have the same number of steps.
"""

from __future__ import annotations

import itertools
import struct
from collections import deque
from collections.abc import Iterator
from dataclasses import InitVar, dataclass, field

from taas.delivery.config import Uneven
from taas.delivery.messages import Peer

_MASK = (1 << 64) - 1


def plan_number(loader: int, iteration: int, epoch: int | None) -> int:
    """Return the number of a plan, which a rank so knows without asking."""
    return element_seed(loader, iteration, -1 if epoch is None else element_seed(epoch, 0, 0))


def element_seed(base_seed: int, iteration: int, seq: int) -> int:
    """Return the seed of one element, which depends on the plan alone: a splitmix64 finaliser, so neighbours share nothing."""
    z = (base_seed + (iteration << 40) + (seq + 1) * 0x9E3779B97F4A7C15) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return (z ^ (z >> 31)) & 0x7FFF_FFFF_FFFF_FFFF


_place = struct.Struct("<qq")
pack_place, unpack_place = _place.pack, _place.unpack
"""The index of an iterable dataset's element: its stream, and where it is in that."""


def poisonous(cause: str) -> str:
    """Return what is said of an element that kills whoever makes it."""
    return (
        f"killed the data worker that made it, again and again ({cause}). Look at what the dataset does there, or leave "
        "it out"
    )


def unshared(elements: int, ranks: int) -> str:
    """Return what is said of an iteration whose last row is incomplete."""
    return (
        f"has {elements} elements, which {ranks} ranks cannot share evenly. Use --uneven drop (leaves out the last "
        f"{elements % ranks}) or --uneven pad (repeats the first ones), or choose a batch size that divides"
    )


@dataclass(slots=True)
class Lease:
    """One worker that makes an element."""

    worker: Peer
    offset: int  # of its slot
    capacity: int  # of its slot; 0: it has none
    since: float  # when it was given out
    expected: float  # seconds it should take
    done: bool = False  # its worker writes no more
    given_up: bool = False  # its worker is dead or late: the element may not come


@dataclass(slots=True, eq=False)
class Work:
    """One planned element, until its rank has done with it."""

    plan: Plan
    seq: int
    rank: int
    step: int
    seed: int
    index: bytes
    stream: int = -1
    number: int = 0  # unique over the run, the same in every lease; 0: it was never leased
    leases: list[Lease] = field(default_factory=list)
    nbytes: int = 0  # that it counts for as work ahead of its rank
    deaths: int = 0
    over: bool = False  # consumed, or nobody wants it any more
    released: bool = False  # its rank uses no memory of it, and looks at none that is still to come
    prepared: bool = False  # some worker has made it, or none needs to
    queued: bool = False  # waits to be leased again

    @property
    def is_coming(self) -> bool:
        """Whether somebody has made it, or is at it, who can be relied on."""
        return any(not lease.given_up for lease in self.leases)

    @property
    def is_made(self) -> bool:
        """Whether somebody has made it who lives."""
        return any(lease.done and not lease.given_up for lease in self.leases)

    def count_prepared(self) -> None:
        """Some worker has made it, or none needs to; its stream may go on."""
        if not self.prepared and self.stream >= 0:
            self.plan.order.streams[self.stream].left += 1
        self.prepared = True

    def lease_of(self, worker: Peer) -> Lease | None:
        """Return what this worker has yet to make, if it is to make it."""
        return next((lease for lease in self.leases if lease.worker == worker and not lease.done), None)


@dataclass(slots=True)
class RankView:
    """How far one rank is in one plan."""

    begun: bool = False
    closed: bool = False
    consumed: int = 0
    asked: int = 0  # steps it has asked beyond; who leaves its loop consumed the last without asking on
    queue: deque[Work] = field(default_factory=deque)  # planned, leased to nobody yet, in order of steps
    unconsumed: deque[Work] = field(default_factory=deque)  # leased or made, in order of steps
    nbytes: int = 0  # of these


@dataclass(slots=True, eq=False)
class Plan:
    """One iteration of one loader, and where each rank stands in it."""

    ident: int
    loader: int
    iteration: int
    epoch: int | None
    size: InitVar[int]  # of the world
    uneven: Uneven
    streams: InitVar[int] = 0  # of an iterable dataset
    ranks: list[RankView] = field(init=False)
    order: StreamOrder = field(init=False)  # in which the elements of streams leave
    base_seed: int | None = None  # what its elements' seeds come from; None while the planner has not said
    rows: int = 0  # rows that have left, that is, steps planned for every rank
    asked: bool = False  # the planner has yet to answer
    ended: bool = False  # the sampler has no more
    last: int | None = None  # rows after which it is cut, once they are drawn; None where its sampler ends it
    failure: bytes = b""  # packed exception of the user's sampler, raised after all rows
    refusal: str = ""  # why there is no more, though there should be
    index: bytes = b""  # of the element that it is about, if it kills whoever makes it
    _row: list[tuple[bytes, int, int]] = field(default_factory=list)
    _first: list[tuple[bytes, int, int]] = field(default_factory=list)

    def __post_init__(self, size: int, streams: int) -> None:
        self.ranks = [RankView() for _ in range(size)]
        self.order = StreamOrder(streams)

    @property
    def drawn(self) -> int:
        """Indices received from the sampler, until it has no more."""
        return self.rows * len(self.ranks) + len(self._row)

    @property
    def begun(self) -> bool:
        """Whether a rank has asked for this iteration."""
        return any(view.begun for view in self.ranks)

    @property
    def broken(self) -> bool:
        """Whether it ends with an error."""
        return bool(self.failure or self.refusal)

    @property
    def closed(self) -> bool:
        """Whether no rank will ask for more of it."""
        return all(view.closed for view in self.ranks)

    def extend(self, indices: list[bytes], base_seed: int, streams: list[int] | None = None) -> None:
        """Append the sampler's next indices; complete rows become work."""
        for at, index in enumerate(indices):
            seed = element_seed(base_seed, self.iteration, self.drawn)
            self._row.append((index, seed, streams[at] if streams else -1))
            if len(self._first) < len(self.ranks):
                self._first.append(self._row[-1])
            if len(self._row) == len(self.ranks):
                self._release_row()

    def end(self, failure: bytes = b"", refusal: str = "") -> None:
        """Close the plan: the sampler is at its end, or raised ``failure``, or no more can be made (``refusal``)."""
        self.ended, self.failure, self.refusal = True, failure, refusal
        if self._row and not self.broken and self.uneven == "pad":
            missing = len(self.ranks) - len(self._row)
            self._row += itertools.islice(itertools.cycle(self._first), missing)
            self._release_row()
        elif self._row and not self.broken and self.uneven == "raise":
            self.refusal = f"this iteration {unshared(self.drawn, len(self.ranks))}"
        self._row.clear()

    def cut(self, rows: int, refusal: str = "", index: bytes = b"") -> None:
        """Close the plan after so many rows, whatever its sampler has: what was planned beyond them is nobody's."""
        self._row.clear()
        self.end(refusal=refusal)
        self.rows, self.index = min(self.rows, rows), index
        for view in self.ranks:
            while view.queue and view.queue[-1].step >= rows:
                view.queue.pop().over = True
            for work in view.unconsumed:
                work.over = work.over or work.step >= rows

    def _release_row(self) -> None:
        for rank, (view, entry) in enumerate(zip(self.ranks, self._row, strict=True)):
            index, seed, stream = entry
            seq = self.rows * len(self.ranks) + rank
            work = Work(self, seq, rank, self.rows, seed, index, stream)
            if view.closed or self.rows < view.consumed:
                work.count_prepared()
            else:
                view.queue.append(work)
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
                view.nbytes -= below[-1].nbytes
        return below

    def skip(self, start: int) -> list[Work]:
        """Begin at a step: what is before counts as consumed by all ranks; return what of it was leased."""
        below = [work for rank in range(len(self.ranks)) for work in self.consume(rank, start)]
        for view in self.ranks:
            view.asked = start
        return self._unwanted(below)

    def close(self, rank: int) -> list[Work]:
        """The rank wants no more; return what workers make for it yet, which is made for nobody."""
        view = self.ranks[rank]
        view.begun = view.closed = True
        works = [*view.queue, *view.unconsumed]
        view.queue.clear()
        view.unconsumed.clear()
        view.nbytes = 0
        return self._unwanted(works)

    def _unwanted(self, works: list[Work]) -> list[Work]:
        for work in works:
            work.over = True
            work.count_prepared()
        return [work for work in works if work.leases]

    def waiting(self, stream: int) -> Iterator[int]:
        """Yield the positions of a stream that are planned and not consumed, also of a row that is not whole yet."""
        for view in self.ranks:
            for work in (*view.unconsumed, *view.queue):
                if work.stream == stream:
                    yield unpack_place(work.index)[1]
        for index, _, of in self._row:
            if of == stream:
                yield unpack_place(index)[1]

    def take(self, rank: int, nbytes: int) -> Work:
        """Return the rank's next work, which is under way from now on, with about so many bytes."""
        work = self.ranks[rank].queue.popleft()
        self.ranks[rank].unconsumed.append(work)
        self.weigh(work, nbytes)
        return work

    def weigh(self, work: Work, nbytes: int) -> None:
        """An element under way has so many bytes."""
        self.ranks[work.rank].nbytes += nbytes - work.nbytes
        work.nbytes = nbytes


# ── streams of an iterable dataset ────────────────────────────────────────────────────────────────────


@dataclass(slots=True)
class PlanStream:
    """One stream in one plan: how far it is, and who makes it."""

    number: int
    made: int = 0  # elements, by whomever got furthest
    end: int | None = None  # how many there are, once that is known
    broken_at: int | None = None  # the position of an element that nobody can make
    left: int = 0  # elements made for their ranks, or that nobody is to make
    told: tuple[Peer, int] | None = None  # who makes it, and up to which position
    deaths: int = 0  # how many owners died of its element ``died_at``
    died_at: int = -1


class StreamOrder:
    """The order of a DataLoader with workers over an IterableDataset, from what each stream announces.

    torch gives workers their turns in a circle and leaves out those at their end: round j yields the j-th
    element of every stream that has one. Positions below ``round`` have left in every stream.
    """

    def __init__(self, streams: int) -> None:
        self.streams = [PlanStream(number) for number in range(streams)]
        self.broken = ""  # which element ends it, because it kills whoever makes it
        self.round = self._stream = 0

    def announce(self, stream: int, made: int, ended: bool) -> None:
        """``stream`` holds its positions below ``made``; if ``ended``, there are no more."""
        of = self.streams[stream]
        of.made = max(of.made, made)
        if ended:
            of.end = made

    def advance(self) -> tuple[list[tuple[int, int]], bool]:
        """Return the (stream, position) pairs whose place is now settled, and whether no more will be."""
        settled: list[tuple[int, int]] = []
        while True:
            if self._stream == len(self.streams):
                self._stream = 0
                self.round += 1
            if all(of.end is not None and self.round >= of.end for of in self.streams):
                return settled, True
            stream = self.streams[self._stream]
            if stream.broken_at is not None and self.round >= stream.broken_at:
                return settled, True
            if stream.end is None or self.round < stream.end:
                if self.round >= stream.made:
                    return settled, False
                settled.append((self._stream, self.round))
            self._stream += 1
