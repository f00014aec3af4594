"""Attempts at elements, and the credit that each rank has for them: bytes, elements and room in its slab. Pure; no I/O.

An attempt is one lease of one element to one worker. It counts as work ahead until its rank has consumed the
element; what a rank holds on to afterwards never keeps it from getting more. Its slot of the rank's slab,
where rank and worker share memory, is taken until the rank says that nobody uses the memory any more, or until
it is certain that the rank will never see it. An element may have several attempts; its rank takes the first that
arrives. So a slot is never given to a second writer while a first one may still write.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial

from taas.delivery.config import DeliveryConfig
from taas.delivery.messages import Peer, Result, Ticket
from taas.delivery.plan import Plan, Work
from taas.delivery.planbook import PlanBook
from taas.delivery.slab import SlotTable, slot_size


@dataclass(frozen=True, slots=True)
class LeaseRules:
    """Numbers the ledger goes by."""

    window: float = 0.03  # seconds of work leased to a worker ahead of what it is on
    leases: int = 128  # most attempts leased to one worker
    ahead: int = 1024  # most elements under way or held for one rank and loader
    begin: int = 4 << 20  # bytes to begin working ahead with, before it shows that more is of use
    deaths: int = 3  # an element that killed so many workers is given up
    patience: float = 60.0  # seconds after which a lease twenty times as old as usual is given out again


@dataclass(slots=True)
class Usage:
    """Work ahead of one rank in one plan."""

    nbytes: int = 0
    count: int = 0


@dataclass(slots=True)
class RankState:
    """A rank: its slab, and how far ahead of it is worked."""

    slots: SlotTable
    shared: bool
    joined: bool = False
    usage: dict[int, Usage] = field(default_factory=dict)  # work ahead of it, by plan
    nbytes: int = 0  # of all plans
    waited: float = 0.0
    targets: dict[int, int] = field(default_factory=dict)  # by loader, how many ahead were enough so far
    blocked: set[int] = field(default_factory=set)  # plans whose target held an idle worker back

    def charge(self, plan: int, nbytes: int, count: int = 0) -> None:
        """Count so much more, or less, as work ahead."""
        usage = self.usage.setdefault(plan, Usage())
        usage.nbytes += nbytes
        usage.count += count
        self.nbytes += nbytes
        if not usage.count:
            del self.usage[plan]


class Pace:
    """Bytes and seconds of one loader's elements, as seen lately."""

    __slots__ = ("_count", "_previous", "_recent", "seconds", "size")

    def __init__(self) -> None:
        self.size = 0
        self.seconds = 0.0
        self._count = self._recent = self._previous = 0

    def see(self, nbytes: int, seconds: float) -> None:
        """Take in one element."""
        self._recent = max(self._recent, nbytes)
        self._count += 1
        if self._count % 256 == 0:
            self._previous, self._recent = self._recent, 0
        self.size = slot_size(max(self._recent, self._previous, nbytes))
        self.seconds = seconds if self._count == 1 else 0.9 * self.seconds + 0.1 * seconds


Reserve = Callable[[int, int], int]
"""Reserves memory of a rank's slab up to an offset; returns up to which there is some."""


class Credit:
    """What may be made ahead for the ranks of a run.

    Attributes:
        paces: by loader.
        workers: how many there are just now.
    """

    def __init__(
        self, book: PlanBook, config: DeliveryConfig, rules: LeaseRules, reserve: Reserve | None
    ) -> None:
        self._book, self.slab, self._rules = book, config.slab, rules
        self.paces: dict[int, Pace] = defaultdict(Pace)
        self.workers = 0
        shared = bool(config.folder)

        def slots_of(rank: int) -> SlotTable:
            size = self.slab if shared else 0
            return SlotTable(size, reserve and partial(reserve, rank), rank * self.slab)

        self.ranks = [RankState(slots_of(rank), shared) for rank in range(book.n)]

    def progressed(self, rank: int, waited: float, asked: Iterable[int]) -> None:
        """A rank has waited so long in all, and asked of these plans.

        If workers were held back from working ahead in them: no longer.
        """
        state = self.ranks[rank]
        if waited - state.waited > 0.0005:
            for plan in state.blocked.intersection(asked) & self._book.plans.keys():
                loader = self._book.plans[plan].loader
                state.targets[loader] = min(2 * state.targets[loader], self._rules.ahead)
        state.waited = waited
        state.blocked.clear()

    def has_room(self, rank: int, plan: Plan) -> bool:
        """Whether one more element of a plan may be made for a rank.

        Two may be under way in every plan, whatever others hold: an iterator that is only kept open holds nobody up.
        """
        state = self.ranks[rank]
        usage = state.usage.get(plan.ident)
        if usage is None or usage.count < 2:
            return True
        size = self.paces[plan.loader].size
        if not size:
            return usage.count < -(-self.workers // len(self.ranks))
        if usage.count >= self._target(rank, plan.loader, size):
            state.blocked.add(plan.ident)
            return False
        if state.nbytes + size > self.slab:
            return False
        least_share = self.slab // len(self._book.plans)  # in most cases enough, and quicker known
        return usage.nbytes + size <= least_share or usage.nbytes + size <= self._share(rank, plan)

    def _target(self, rank: int, loader: int, size: int) -> int:
        """How many elements ahead: few, which stay in the caches, until ``progressed`` finds them too few."""
        targets, least = self.ranks[rank].targets, self._book.prebuffer_rows
        if loader not in targets:
            some = max(3 * self.workers // len(self.ranks) + 2, least)
            targets[loader] = max(some, min(256, self._rules.begin // size))
        return min(targets[loader], max(self._rules.ahead, least))

    def _share(self, rank: int, plan: Plan) -> int:
        """The rank's slab, divided among the plans it is in just now, and this one."""
        views = ((other, other.ranks[rank]) for other in self._book.plans.values())
        active = sum(other is plan or (view.begun and not view.closed) for other, view in views)
        return self.slab // active

    def prefetch_limit(self, loader: int) -> int:
        """How many elements of a stream its owner may hold for ranks that do not take them: a slab full."""
        return self.slab // max(self.paces[loader].size, 1 << 10)


# ── attempts ──────────────────────────────────────────────────────────────────────────────────────


@dataclass(slots=True)
class Attempt:
    """One lease of one element to one worker.

    ``doubtful``: its worker is dead, stopped or late, and it may not arrive: another attempt may be made.
    """

    ident: int
    work: Work
    worker: Peer
    charge: int  # bytes it counts for as work ahead, while ``charged``
    offset: int  # of its slot
    capacity: int  # of its slot; 0: it has none
    since: float  # when it was leased
    expected: float  # seconds it should take
    made: bool = False  # its worker is through with it
    doubtful: bool = False
    charged: bool = True


@dataclass(slots=True)
class WorkerState:
    """A data worker: what was leased to it, and how long that will take it."""

    name: Peer
    shared: bool
    attempts: set[int] = field(default_factory=set)
    backlog: int = 0
    backlog_seconds: float = 0.0
    suspect: bool = False


class Attempts(dict[int, Attempt]):
    """All that are under way or held by ranks, by their numbers.

    Attributes:
        workers: those that take tickets, by name.
    """

    def __init__(self, credit: Credit, rules: LeaseRules) -> None:
        super().__init__()
        self._credit, self._rules = credit, rules
        self.workers: dict[Peer, WorkerState] = {}
        self._idents = itertools.count(1)

    def lease(self, work: Work, worker: WorkerState, now: float) -> Ticket:
        """Begin an attempt: with a slot, where the size of such elements is known and there is room."""
        rank, pace = self._credit.ranks[work.rank], self._credit.paces[work.loader]
        size = pace.size
        slot = rank.slots.take(size) if size and rank.shared and worker.shared else None
        offset, capacity = (0, 0) if slot is None else (slot, size)
        ident = next(self._idents)
        self[ident] = Attempt(ident, work, worker.name, size, offset, capacity, now, pace.seconds)
        work.attempts.add(ident)
        worker.attempts.add(ident)
        worker.backlog += 1
        worker.backlog_seconds += pace.seconds
        rank.charge(work.plan, size, 1)
        return Ticket(
            ident, work.plan, work.loader, work.seq, work.rank, work.seed, work.index, offset, capacity
        )

    def made(self, result: Result) -> Work | None:
        """A worker is through with an attempt; return what it has made, if that is news."""
        self._credit.paces[result.loader].see(result.nbytes, result.seconds)
        attempt = self.get(result.attempt)
        if attempt is None:
            return None  # its rank was quicker to consume and release it than this message
        self._settle(attempt)
        work = attempt.work
        if not attempt.capacity and attempt.charged:
            self._credit.ranks[work.rank].charge(work.plan, result.nbytes - attempt.charge)
            attempt.charge = result.nbytes
        return work

    def drop(self, ident: int) -> Attempt | None:
        """Forget an attempt and give its room back; return it, if it was there."""
        attempt = self.pop(ident, None)
        if attempt is None:
            return None
        self._uncharge(attempt)
        if attempt.capacity:
            self._credit.ranks[attempt.work.rank].slots.give(attempt.offset, attempt.capacity)
        attempt.work.attempts.discard(ident)
        self._settle(attempt)
        worker = self.workers.get(attempt.worker)
        if worker is not None:
            worker.attempts.discard(ident)
        return attempt

    def consumed(self, work: Work) -> None:
        """The rank has asked for the element after this one: it counts as work ahead no more."""
        for ident in work.attempts:
            self._uncharge(self[ident])

    def _uncharge(self, attempt: Attempt) -> None:
        if attempt.charged:
            attempt.charged = False
            self._credit.ranks[attempt.work.rank].charge(attempt.work.plan, -attempt.charge, -1)

    def _settle(self, attempt: Attempt) -> None:
        """Its worker does not work on it any more."""
        worker = self.workers.get(attempt.worker)
        if worker is not None and not attempt.made:
            worker.backlog -= 1
            worker.backlog_seconds = 0.0 if worker.backlog <= 0 else worker.backlog_seconds - attempt.expected
        attempt.made = True

    def is_needed(self, work: Work) -> bool:
        """Whether nobody is at this work who can be relied on."""
        others = (self[ident] for ident in work.attempts if ident in self)
        return not work.over and all(attempt.doubtful for attempt in others)

    def least_busy(self, work: Work) -> WorkerState | None:
        """The worker that would begin soonest with this work, if one may take more now."""
        rules, sized = self._rules, self._credit.paces[work.loader].size
        best, least = None, rules.window
        for worker in self.workers.values():
            if worker.suspect or worker.backlog >= rules.leases:
                continue
            if not worker.backlog:
                return worker
            if sized and worker.backlog_seconds <= least:
                if worker.backlog_seconds == least and (best is None or worker.backlog >= best.backlog):
                    continue
                best, least = worker, worker.backlog_seconds
        return best
