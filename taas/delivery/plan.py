"""Fixes the order of one iteration, and thus which batch is which, before any batch is made.

Pure; no I/O. Indices arrive in the order of the user's sampler, and become rows of one batch for
each rank: batch ``seq`` is step ``seq // ranks`` of rank ``seq % ranks``. Only complete rows are
used, so that all ranks have the same number of steps.
"""

from __future__ import annotations

import itertools
from collections import deque
from dataclasses import InitVar, dataclass, field

from taas.protocol.delivery_messages import Peer
from taas.protocol.delivery_orders import Uneven

_MASK = (1 << 64) - 1


def plan_number(loader: int, iteration: int, epoch: int | None) -> int:
    """Return the number of a plan; a rank computes it without a request."""
    return element_seed(loader, iteration, -1 if epoch is None else element_seed(epoch, 0, 0))


def element_seed(base_seed: int, iteration: int, seq: int) -> int:
    """Return the seed of one batch, which depends on the plan alone.

    This is the finaliser of splitmix64, so that the seeds of neighbours are independent.
    """
    z = (base_seed + (iteration << 40) + (seq + 1) * 0x9E3779B97F4A7C15) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return (z ^ (z >> 31)) & 0x7FFF_FFFF_FFFF_FFFF


def uneven_message(elements: int, ranks: int) -> str:
    """Describe, for the user, an iteration whose last row is incomplete."""
    return (
        f"has {elements} elements, which {ranks} ranks cannot share evenly. Use --uneven drop"
        f" (leaves out the last {elements % ranks}) or --uneven pad (repeats the first ones), or"
        " choose a batch size that divides"
    )


@dataclass(slots=True)
class Lease:
    """The assignment of a batch to one worker, which makes it."""

    worker: Peer
    offset: int  # of its slot
    capacity: int  # of its slot; 0 if it has none
    expected: float  # seconds it should take
    done: bool = False  # its worker has finished, and does not write any more
    # its worker is dead, or its stream has no such batch: the batch will not come from it
    lost: bool = False


@dataclass(slots=True, eq=False)
class Work:
    """One planned batch, until its rank has finished with it."""

    plan: Plan
    seq: int
    rank: int
    step: int
    seed: int
    index: bytes
    number: int = 0  # unique in the run, the same in every lease; 0 if it was never leased
    leases: list[Lease] = field(default_factory=list)
    nbytes: int = 0  # bytes that it counts for as work ahead of its rank
    deaths: int = 0
    poison: str = ""  # how the workers that made it died, if no worker is to make it again
    over: bool = False  # its rank has consumed it, or no rank needs it any more
    released: bool = False  # its rank neither uses its memory, nor will read it later
    queued: bool = False  # waits to be leased again

    @property
    def given_up(self) -> str:
        """Return how its workers died, if no worker is to make it again; otherwise ""."""
        return self.plan.poison if self.seq >= self.plan.furthest else self.poison

    @property
    def is_coming(self) -> bool:
        """Return whether a living worker has made it, or is making it."""
        return any(not lease.lost for lease in self.leases)

    @property
    def is_made(self) -> bool:
        """Return whether a living worker has made it."""
        return any(lease.done and not lease.lost for lease in self.leases)

    def lease_of(self, worker: Peer) -> Lease | None:
        """Return this worker's lease that is not done; None if it has none."""
        return next(
            (lease for lease in self.leases if lease.worker == worker and not lease.done), None
        )


@dataclass(slots=True)
class RankView:
    """How far one rank is in one plan."""

    begun: bool = False
    closed: bool = False
    consumed: int = 0
    # steps after which it has requested one more; a loop that the program leaves has consumed its
    # last step without requesting another one
    asked: int = 0
    queue: deque[Work] = field(default_factory=deque)  # planned, not leased yet, in order of steps
    unconsumed: deque[Work] = field(default_factory=deque)  # leased or made, in order of steps
    nbytes: int = 0  # of the unconsumed ones


@dataclass(slots=True, eq=False)
class Plan:
    """One iteration of one loader, with the state of each rank in it."""

    ident: int
    loader: int
    iteration: int
    epoch: int | None
    size: InitVar[int]  # world size
    uneven: Uneven
    # the dataset is iterable: the number of batches is unknown until the last one was made
    streamed: bool = False
    ranks: list[RankView] = field(init=False)
    furthest: int = 0  # of a stream: number of batches made
    # of a stream: its furthest batch, and how many workers in turn died without passing it
    deaths: tuple[int, int] = (0, 0)
    poison: str = ""  # of a stream: how its workers died, if no worker is to make further batches
    base_seed: int | None = None  # source of the batches' seeds; None until the planner sends it
    rows: int = 0  # complete rows, that is, steps planned for every rank
    asked: bool = False  # a request to the planner is open
    ended: bool = False  # the sampler has no more indices
    failure: bytes = b""  # packed exception of the user's sampler, raised after all rows
    refusal: str = ""  # why the plan ends early
    _row: list[tuple[bytes, int]] = field(default_factory=list)
    _first: list[tuple[bytes, int]] = field(default_factory=list)

    def __post_init__(self, size: int) -> None:
        self.ranks = [RankView() for _ in range(size)]

    @property
    def drawn(self) -> int:
        """Return the number of indices received from the sampler, until it has no more."""
        return self.rows * len(self.ranks) + len(self._row)

    @property
    def begun(self) -> bool:
        """Return whether a rank has begun this iteration."""
        return any(view.begun for view in self.ranks)

    @property
    def broken(self) -> bool:
        """Return whether it ends with an error."""
        return bool(self.failure or self.refusal)

    @property
    def closed(self) -> bool:
        """Return whether no rank will request more of it."""
        return all(view.closed for view in self.ranks)

    @property
    def lowest(self) -> int:
        """Return the lowest step that a rank may still request."""
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
        """End the plan: the sampler has no more indices, or raised ``failure``."""
        self.ended, self.failure = True, failure
        if self._row and not failure and self.uneven == "pad":
            missing = len(self.ranks) - len(self._row)
            self._row += itertools.islice(itertools.cycle(self._first), missing)
            self._release_row()
        elif self._row and not failure and self.uneven == "raise":
            self.refusal = f"this iteration {uneven_message(self.drawn, len(self.ranks))}"
        self._row.clear()

    def end_stream(self, elements: int) -> None:
        """End the plan of a stream that turned out to have this many batches.

        Planned work beyond them is over.

        With ``--uneven pad`` the missing batches of the last row repeat the first ones.
        """
        self.rows, rest = divmod(elements, len(self.ranks))
        if rest and self.uneven == "raise":
            self.refusal = f"this iteration {uneven_message(elements, len(self.ranks))}"
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
        """Raise a rank's watermark; return the work that is below it now."""
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
        """Begin at a step: earlier steps count as consumed by all ranks.

        Returns the skipped work that was leased.
        """
        below = [work for rank in range(len(self.ranks)) for work in self.consume(rank, start)]
        for view in self.ranks:
            view.asked = start
        return [work for work in below if work.leases]

    def close(self, rank: int) -> list[Work]:
        """Close the plan for a rank that needs no more; return leased work that nothing needs."""
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
        """Return the rank's next work, which counts as in progress with about ``nbytes`` bytes."""
        work = self.ranks[rank].queue.popleft()
        self.ranks[rank].unconsumed.append(work)
        self.weigh(work, nbytes)
        return work

    def weigh(self, work: Work, nbytes: int) -> None:
        """Set the bytes that a batch in progress counts for."""
        self.ranks[work.rank].nbytes += nbytes - work.nbytes
        work.nbytes = nbytes
