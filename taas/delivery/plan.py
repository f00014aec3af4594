"""What element i is: the order of one iteration, fixed before anybody makes it. Pure; no I/O.

Indices arrive in the order of the user's sampler and leave as rows of one element a rank: element
``seq`` is step ``seq // ranks`` of rank ``seq % ranks``. Only whole rows leave, so that all ranks
have the same number of steps.
"""

from __future__ import annotations

import itertools
from collections import deque
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


def unshared(elements: int, ranks: int) -> str:
    """Return what is said of an iteration whose last row is incomplete."""
    return (
        f"has {elements} elements, which {ranks} ranks cannot share evenly. Use --uneven drop"
        f" (leaves out the last {elements % ranks}) or --uneven pad (repeats the first ones), or"
        " choose a batch size that divides"
    )


@dataclass(slots=True)
class Lease:
    """One worker that makes an element."""

    worker: Peer
    offset: int  # of its slot
    capacity: int  # of its slot; 0: it has none
    expected: float  # seconds it should take
    done: bool = False  # its worker writes no more
    # its worker is dead, or has found no such element in its stream: the element may not come
    lost: bool = False


@dataclass(slots=True, eq=False)
class Work:
    """One planned element, until its rank has done with it."""

    plan: Plan
    seq: int
    rank: int
    step: int
    seed: int
    index: bytes
    number: int = 0  # unique over the run, the same in every lease; 0: it was never leased
    leases: list[Lease] = field(default_factory=list)
    nbytes: int = 0  # that it counts for as work ahead of its rank
    deaths: int = 0
    poison: str = ""  # how those died who made it: nobody is to make it again
    over: bool = False  # consumed, or nobody wants it any more
    released: bool = False  # its rank uses no memory of it, and looks at none that is still to come
    queued: bool = False  # waits to be leased again

    @property
    def is_coming(self) -> bool:
        """Whether somebody has made it, or is at it, who lives."""
        return any(not lease.lost for lease in self.leases)

    @property
    def is_made(self) -> bool:
        """Whether somebody has made it who lives."""
        return any(lease.done and not lease.lost for lease in self.leases)

    def lease_of(self, worker: Peer) -> Lease | None:
        """Return what this worker has yet to make, if it is to make it."""
        return next(
            (lease for lease in self.leases if lease.worker == worker and not lease.done), None
        )


@dataclass(slots=True)
class RankView:
    """How far one rank is in one plan."""

    begun: bool = False
    closed: bool = False
    consumed: int = 0
    asked: int = (
        0  # steps it has asked beyond; who leaves its loop consumed the last without asking on
    )
    queue: deque[Work] = field(
        default_factory=deque
    )  # planned, leased to nobody yet, in order of steps
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
    # its elements are those of an iterable dataset: nobody knows how many before the last is made
    streamed: bool = False
    ranks: list[RankView] = field(init=False)
    furthest: int = 0  # of a stream: elements that anybody has made
    deaths: tuple[int, int] = (
        0,
        0,
    )  # of a stream: how far it was, and how many in turn died without getting further
    poison: str = ""  # of a stream: how they died, once nobody is to make what is beyond
    base_seed: int | None = (
        None  # what its elements' seeds come from; None while the planner has not said
    )
    rows: int = 0  # rows that have left, that is, steps planned for every rank
    asked: bool = False  # the planner has yet to answer
    ended: bool = False  # the sampler has no more
    failure: bytes = b""  # packed exception of the user's sampler, raised after all rows
    refusal: str = ""  # why there is no more, though there should be
    _row: list[tuple[bytes, int]] = field(default_factory=list)
    _first: list[tuple[bytes, int]] = field(default_factory=list)

    def __post_init__(self, size: int) -> None:
        self.ranks = [RankView() for _ in range(size)]

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

    @property
    def lowest(self) -> int:
        """The lowest step that a rank may still ask for."""
        return min((view.consumed for view in self.ranks if not view.closed), default=self.rows)

    def extend(self, indices: list[bytes], base_seed: int) -> None:
        """Append the sampler's next indices; complete rows become work."""
        for index in indices:
            self._row.append((index, element_seed(base_seed, self.iteration, self.drawn)))
            if len(self._first) < len(self.ranks):
                self._first.append(self._row[-1])
            if len(self._row) == len(self.ranks):
                self._release_row()

    def end(self, failure: bytes = b"") -> None:
        """Close the plan: the sampler is at its end, or raised ``failure``."""
        self.ended, self.failure = True, failure
        if self._row and not failure and self.uneven == "pad":
            missing = len(self.ranks) - len(self._row)
            self._row += itertools.islice(itertools.cycle(self._first), missing)
            self._release_row()
        elif self._row and not failure and self.uneven == "raise":
            self.refusal = f"this iteration {unshared(self.drawn, len(self.ranks))}"
        self._row.clear()

    def end_stream(self, elements: int) -> None:
        """Close the plan of a stream that has so many elements: what was planned beyond them is nobody's.

        To pad, those of the last row are its first ones instead.
        """
        self.rows, rest = divmod(elements, len(self.ranks))
        if rest and self.uneven == "raise":
            self.refusal = f"this iteration {unshared(elements, len(self.ranks))}"
        if rest and self.uneven == "pad":
            for rank, view in enumerate(self.ranks[rest:]):
                for work in (*view.queue, *view.unconsumed):
                    if work.step == self.rows:
                        work.index = self._first[rank % elements][0]
            self.rows += 1
        self.ended = True
        self._row.clear()
        for view in self.ranks:
            while view.queue and view.queue[-1].step >= self.rows:
                view.queue.pop().over = True
            for work in view.unconsumed:
                work.over = work.over or work.step >= self.rows

    def _release_row(self) -> None:
        for rank, (view, (index, seed)) in enumerate(zip(self.ranks, self._row, strict=True)):
            if not view.closed and self.rows >= view.consumed:
                seq = self.rows * len(self.ranks) + rank
                view.queue.append(Work(self, seq, rank, self.rows, seed, index))
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
        return [work for work in below if work.leases]

    def close(self, rank: int) -> list[Work]:
        """The rank wants no more; return what workers make for it yet, which is made for nobody."""
        view = self.ranks[rank]
        view.begun = view.closed = True
        works = [*view.queue, *view.unconsumed]
        view.queue.clear()
        view.unconsumed.clear()
        view.nbytes = 0
        for work in works:
            work.over = True
        return [work for work in works if work.leases]

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
