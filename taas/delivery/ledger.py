"""Decides which worker makes which batch: leases, deaths, retries. Pure; no I/O.

If a worker is lost, those of its batches that ranks have not consumed are leased to other
workers. A batch has the same number in every lease, and its rank drops second copies. A loader
of an iterable dataset has one owner among the workers, which makes its batches in order.

If rank and worker share memory, a lease has a slot of the rank's slab. The slot is released when
the worker has finished with it, and the rank either no longer uses the batch's memory or will
never request the batch.
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from taas.delivery.headroom import Headroom, Reserve
from taas.delivery.plan import Lease, Plan, Work
from taas.delivery.plans import LoaderState, Plans
from taas.protocol.delivery_messages import Failed, Hello, Peer, Progress, Result, Ticket
from taas.protocol.delivery_orders import DeliveryConfig

_WINDOW = 0.03
"""Seconds of work that a worker has leased beyond its current batch."""
_LEASES = 128
"""The most batches that one worker has leased."""
_DEATHS = 3
"""A batch that has killed this many workers is abandoned."""


@dataclass(slots=True)
class WorkerState:
    """A data worker, the number of its leases, and the seconds that they will take."""

    name: Peer
    shared: bool
    backlog: int = 0
    backlog_seconds: float = 0.0

    def add_lease(self, lease: Lease) -> None:
        """Count one more batch that it has to make."""
        self.backlog += 1
        self.backlog_seconds += lease.expected

    def finish_lease(self, lease: Lease) -> None:
        """Count a batch as made."""
        self.backlog -= 1
        self.backlog_seconds -= lease.expected
        if self.backlog == 0:
            self.backlog_seconds = 0.0  # sums of floats drift


class Retry(NamedTuple):
    """A batch that waits to be leased again.

    Retries are ordered by their steps; no two of them are equal.
    """

    step: int
    seq: int
    plan: int
    work: Work


class Ledger:
    """Leases and recovery for all loaders of a run."""

    def __init__(self, config: DeliveryConfig, reserve: Reserve = lambda _, upto: upto) -> None:
        self.plans = Plans(config)
        self.outbox = self.plans.outbox
        self.room = Headroom(self.plans, config, reserve)
        self.workers: dict[Peer, WorkerState] = {}
        self.works: dict[int, Work] = {}  # leased work, by number, until its slots are free
        self._numbers = itertools.count(1)
        self.joined: dict[int, Hello] = {}  # the ranks that receive batches
        self._retries: list[Retry] = []  # a heap
        self._planner: Hello | None = None
        self._turn = 0
        self.failure = ""  # why no more batches will come

    # ── ranks ─────────────────────────────────────────────────────────────────────────────────────

    def add_rank(self, number: int, hello: Hello) -> None:
        """Add a rank, which receives batches from now on."""
        self.joined[number] = hello
        self.outbox += [(name, hello) for name in self.workers]
        if self.failure:
            self.plans.tell(number, Failed(self.failure))
        if self._planner is not None:
            self.plans.tell(number, self._planner)

    def open_plans(self, hello: Hello) -> None:
        """Plan the loaders' first iterations; the planner has the loaders now."""
        self._planner = hello
        self.plans.hello(hello.loaders)
        for rank in self.joined:
            self.plans.tell(rank, hello)

    def take_progress(self, rank: int, progress: Progress) -> None:
        """Record what a rank reports about its batches."""
        for of in progress.plans:
            self.plans.consume(rank, of.plan, of.consumed, of.asked)
        self.release(self.works[number] for number in progress.released if number in self.works)
        closed = [of.plan for of in progress.plans if of.closed]
        asked = [of.plan for of in progress.plans if not of.closed]
        self.room.take_progress(rank, progress.waited, asked)
        for plan in closed:
            self.plans.close(rank, plan)

    def release(self, works: Iterable[Work]) -> None:
        """Mark batches whose memory their ranks no longer use, and will not read again."""
        for work in works:
            work.over = work.released = True
            self._free(work)

    def _free(self, work: Work) -> None:
        """Release the slots of a released batch to which no worker writes any more."""
        slots = self.room.ranks[work.rank].slots
        for lease in work.leases:
            if lease.done and lease.capacity:
                slots.give(lease.offset, lease.capacity)
        work.leases = [lease for lease in work.leases if not lease.done]
        if not work.leases:
            self.works.pop(work.number, None)

    def fail(self, reason: str) -> None:
        """Tell every rank, and those that join later, that no more batches will come."""
        self.failure = reason
        for rank in range(self.plans.n):
            self.plans.tell(rank, Failed(reason))

    # ── workers ───────────────────────────────────────────────────────────────────────────────────

    def add_worker(self, name: Peer, shared: bool) -> None:
        """Add a worker, which receives tickets from now on."""
        self.workers[name] = WorkerState(name, shared)
        self.outbox += [(name, hello) for hello in self.joined.values()]

    def take_results(self, name: Peer, results: Iterable[Result]) -> None:
        """Record that a worker has finished these batches."""
        worker = self.workers.get(name)
        if worker is None:
            return  # the worker counts as lost, and others make its batches
        for result in results:
            work = self.works.get(result.number)
            lease = None if work is None else work.lease_of(name)
            if work is None or lease is None:
                continue  # this lease was taken from it
            worker.finish_lease(lease)
            lease.done = True
            if result.leaked:
                lease.capacity = 0  # user code holds memory of the slot: never lease it again
            if result.end >= 0:
                self._stream_ends(work, lease, result.end)
            else:
                self._was_made(work, lease, result)
            if work.released:
                self._free(work)

    def _was_made(self, work: Work, lease: Lease, result: Result) -> None:
        plan = work.plan
        self.room.paces[plan.loader].see(result.nbytes, result.seconds)
        if not plan.poison:
            plan.furthest = max(plan.furthest, work.seq + 1)
        in_slot = lease.capacity > 0
        if not (in_slot or work.over):  # without a slot, a batch counts with its size
            plan.weigh(work, result.nbytes)

    def _stream_ends(self, work: Work, lease: Lease, end: int) -> None:
        """End a plan whose stream has no such batch: it ended after ``end`` batches."""
        lease.lost = True
        if not work.plan.ended:
            work.plan.end_stream(end)
            self.plans.tell_end(work.plan)
        self._retry(work)  # with --uneven pad, it repeats a batch to fill the last row

    def worker_lost(self, name: Peer, current: int, cause: str) -> None:
        """Lease again the batches of a worker that is certainly dead.

        ``current`` is the batch that it was making, or a number that no batch has.
        """
        if self.workers.pop(name, None) is None:
            return
        self._blame(current, cause)
        for work in list(self.works.values()):
            for lease in work.leases:
                if lease.worker == name:
                    lease.done = lease.lost = True
            if work.released:
                self._free(work)
            else:
                self._retry(work)

    def _blame(self, current: int, cause: str) -> None:
        """Abandon a batch that has killed several workers in turn.

        A stream is abandoned from the first batch that no worker has made.
        """
        work = self.works.get(current)
        if work is None:
            return
        plan = work.plan
        if plan.streamed:
            furthest, deaths = plan.deaths
            plan.deaths = plan.furthest, deaths + 1 if furthest == plan.furthest else 1
            plan.poison = cause if plan.deaths[1] >= _DEATHS else ""
        else:
            work.deaths += 1
            work.poison = cause if work.deaths >= _DEATHS else ""

    def _retry(self, work: Work) -> None:
        if not (work.queued or work.over or work.is_coming):
            work.queued = True
            heapq.heappush(self._retries, Retry(work.step, work.seq, work.plan.ident, work))

    # ── leasing ───────────────────────────────────────────────────────────────────────────────────

    def pump(self) -> None:
        """Draw indices and lease batches, as far as possible now."""
        self.release(self.plans.dropped)
        self.plans.dropped.clear()
        self.plans.refill()
        leases: dict[Peer, list[Ticket]] = defaultdict(list)
        self._lease_retries(leases)
        self._lease_planned(leases)
        self.outbox += leases.items()

    def _lease_retries(self, leases: dict[Peer, list[Ticket]]) -> None:
        """Lease the batches of lost workers again, the earliest step first.

        Each retry is dropped, leased, or put back because it has to wait for a worker.
        """
        waiting: list[Retry] = []
        all_are_busy = False
        while self._retries and not all_are_busy:
            retry = heapq.heappop(self._retries)
            work = retry.work
            is_wanted = not (work.over or work.is_coming)
            worker = self._worker_for(work) if is_wanted else None
            if not is_wanted:
                work.queued = False
            elif worker is not None:
                work.queued = False
                leases[worker.name].append(self._lease(work, worker))
            else:
                waiting.append(retry)
                # A batch of a stream waits for the stream's own worker, and later retries may
                # find another one. For any other batch there is no worker at all, nor will there
                # be one for later retries.
                all_are_busy = not work.plan.streamed
        for retry in waiting:
            heapq.heappush(self._retries, retry)

    def _lease_planned(self, leases: dict[Peer, list[Ticket]]) -> None:
        """Lease planned batches, one of each loader in turn, until no loader has any to lease."""
        loaders = [loader for loader in self.plans.loaders if loader.plans]
        had_none = 0  # number of consecutive loaders without one
        while had_none < len(loaders):
            self._turn += 1
            loader = loaders[self._turn % len(loaders)]
            if self._lease_one(loader, leases):
                had_none = 0
            else:
                had_none += 1

    def _lease_one(self, loader: LoaderState, leases: dict[Peer, list[Ticket]]) -> bool:
        """Lease the most urgent batch of a loader for which there is room.

        Returns whether there was such a batch, and a worker for it.
        """
        head = self._head_with_room(loader)
        if head is None:
            return False
        plan, rank = head
        worker = self._worker_for(plan.ranks[rank].queue[0])
        if worker is None:
            return False  # all are busy enough, for any batch of this loader
        work = plan.take(rank, self.room.paces[loader.index].size)
        work.number = next(self._numbers)
        self.works[work.number] = work
        leases[worker.name].append(self._lease(work, worker))
        return True

    def _head_with_room(self, loader: LoaderState) -> tuple[Plan, int] | None:
        """Return plan and rank of the most urgent batch for which there is room, or None."""
        for plan, rank in self.plans.heads(loader):
            if self.room.is_left(rank, plan, len(self.workers)):
                return plan, rank
        return None

    def _lease(self, work: Work, worker: WorkerState) -> Ticket:
        """Lease a batch to a worker.

        It gets a slot if the size of such batches is known and there is room.
        """
        plan, pace = work.plan, self.room.paces[work.plan.loader]
        slot = None
        if pace.size and worker.shared:
            slot = self.room.ranks[work.rank].slots.take(pace.size)
        offset, capacity = (0, 0) if slot is None else (slot, pace.size)
        lease = Lease(worker.name, offset, capacity, pace.seconds)
        work.leases.append(lease)
        worker.add_lease(lease)
        floor = plan.lowest * self.plans.n if plan.streamed else 0
        return Ticket(
            work.number,
            plan.ident,
            plan.loader,
            work.seq,
            work.rank,
            work.seed,
            work.index,
            offset,
            capacity,
            floor,
            work.given_up,
        )

    def _worker_for(self, work: Work) -> WorkerState | None:
        """Return the worker that would make a batch soonest, if it may take more.

        A batch of a stream belongs to the stream's own worker.
        """
        if not work.plan.streamed or work.given_up:
            return self._least_busy(work)
        owner = self._owner(work.plan)
        return owner if owner and owner.backlog < _LEASES else None

    def _owner(self, plan: Plan) -> WorkerState | None:
        """Return a stream's owner: its worker so far, or the one that owns the fewest."""
        owners = self.plans.owners
        if owners.get(plan.loader) not in self.workers and self.workers:
            load = Counter(owners.values())
            owners[plan.loader] = min(self.workers, key=lambda name: load[name])
        return self.workers.get(owners[plan.loader]) if self.workers else None

    def _least_busy(self, work: Work) -> WorkerState | None:
        """Return an idle worker, or the one with the least work below ``_WINDOW`` seconds.

        The time for a batch is unknown until the first one is made; until then, only an idle
        worker takes one.
        """
        is_measured = self.room.paces[work.plan.loader].size > 0
        best, least = None, (_WINDOW, 0)
        for worker in self.workers.values():
            if worker.backlog == 0:
                return worker
            busy = worker.backlog_seconds, worker.backlog
            if is_measured and worker.backlog < _LEASES and busy < least:
                best, least = worker, busy
        return best

    # ── state ─────────────────────────────────────────────────────────────────────────────────────

    def is_full(self, loader: LoaderState) -> bool:
        """Return whether a loader has planned batches, but none may be made now.

        This lasts until a rank consumes some.
        """
        if not any(self.plans.heads(loader)):
            return False  # nothing is planned that may be leased
        for work in self.works.values():
            if work.plan.loader == loader.index and not all(lease.done for lease in work.leases):
                return False
        return self._head_with_room(loader) is None
