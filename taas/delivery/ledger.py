"""Who makes element i: leases, deaths, retries, over attempts, credit and plans. Pure; no I/O.

When a worker dies (``worker_lost``), what it had not made is queued again (``_retry``); of what it had made the rank is
asked whether it arrived (``ReceivedQuery``); what did not it releases, and that is queued as well. ``pump`` leases the
queue to others.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Collection, Iterable

from taas.delivery.attempts import Attempt, Attempts, Credit, LeaseRules, Reserve, WorkerState
from taas.delivery.config import DeliveryConfig
from taas.delivery.feeding import StreamFeeder
from taas.delivery.messages import (
    NOWHERE,
    Announced,
    Failed,
    Hello,
    Peer,
    Progress,
    ReceivedQuery,
    Result,
    StreamPlace,
    Ticket,
)
from taas.delivery.plan import Work, poisonous, unpack_place
from taas.delivery.planbook import LoaderBook, PlanBook


class Ledger:
    """Leases, credits and recovery for all loaders of a run.

    Attributes:
        outbox: messages with who gets them.
        streams: of iterable datasets.
        failure: why no element will come any more, or "".
    """

    def __init__(
        self, config: DeliveryConfig, reserve: Reserve | None = None, rules: LeaseRules | None = None
    ) -> None:
        self._rules = rules or LeaseRules()
        self.book = PlanBook(config)
        self.outbox = self.book.outbox
        self.credit = Credit(self.book, config, self._rules, reserve)
        self.attempts = Attempts(self.credit, self._rules)
        self.workers = self.attempts.workers
        self._ranks: dict[int, Hello] = {}
        self._retries: list[tuple[int, int, int, Work]] = []
        self.streams = StreamFeeder(self.book, self.workers, self.credit.prefetch_limit)
        self._planner: Hello | None = None
        self._turn = 0
        self.failure = ""

    # ── ranks ─────────────────────────────────────────────────────────────────────────────────────

    def rank_joined(self, number: int, hello: Hello) -> None:
        """A rank takes elements from now on."""
        rank = self.credit.ranks[number]
        if rank.shared and not hello.shared:  # it cannot map its slab: what lies there is made again and sent
            rank.shared = False
            self._doubt(
                [a for a in self.attempts.values() if a.work.rank == number and a.capacity], dead=True
            )
        rank.joined = True
        self._ranks[number] = hello
        for name in self.workers:
            self.outbox.append((name, hello))
        if self.failure:
            self.book.tell(number, Failed(self.failure))
        if self._planner is not None:
            self.book.tell(number, self._planner)

    def planner_joined(self, hello: Hello) -> None:
        """The planner has the loaders: plan their first iterations."""
        self._planner = hello
        self.book.hello(hello.loaders)
        for rank in self._ranks:
            self.book.tell(rank, hello)

    def progressed(self, rank: int, progress: Progress) -> None:
        """A rank says what it has done with its elements."""
        for of in progress.plans:
            self.book.consume(rank, of.plan, of.consumed, of.asked)
        self.released(progress.released)
        self.credit.progressed(rank, progress.waited, [of.plan for of in progress.plans if not of.closed])
        for of in progress.plans:
            if of.closed:
                self.book.close(rank, of.plan)

    def released(self, idents: Iterable[int]) -> None:
        """Nobody in the rank holds these attempts' memory; of a doubtful one, maybe because it never came there."""
        for ident in idents:
            attempt = self.attempts.drop(ident)
            if attempt is not None and attempt.doubtful and not attempt.work.over:
                self._retry(attempt.work)
            elif attempt is not None:
                self._count_prepared(attempt.work)

    def fail(self, reason: str) -> None:
        """No element will come any more: every rank hears it, also one that joins later."""
        self.failure = reason
        for rank in range(self.book.n):
            self.book.tell(rank, Failed(reason))

    # ── workers ───────────────────────────────────────────────────────────────────────────────────

    def worker_joined(self, name: Peer, shared: bool) -> None:
        """A worker takes tickets from now on."""
        self.workers[name] = WorkerState(name, shared)
        self.credit.workers = len(self.workers)
        for hello in self._ranks.values():
            self.outbox.append((name, hello))

    def made(self, results: Iterable[Result]) -> None:
        """A worker is through with these attempts."""
        for result in results:
            work = self.attempts.made(result)
            if work is not None:
                self._count_prepared(work)

    def _count_prepared(self, work: Work) -> None:
        if not work.prepared:
            work.prepared = True
            self.book.loaders[work.loader].prepared += 1
            plan = self.book.plans.get(work.plan)
            if plan is not None:
                plan.left(work.stream)

    def worker_lost(self, name: Peer, current: int, cause: str, ahead: StreamPlace = NOWHERE) -> None:
        """A worker is dead, for certain. ``current`` and ``ahead``: what was in its status slot."""
        worker = self.workers.pop(name, None)
        if worker is None:
            return
        self.credit.workers = len(self.workers)
        self._blame(current, cause)
        if current < 0 and ahead != NOWHERE and self.streams.died(ahead) >= self._rules.deaths:
            self.book.break_off(ahead, cause)
        self.streams.disown(name)
        self._doubt([self.attempts[ident] for ident in worker.attempts], dead=True)

    def _blame(self, current: int, cause: str) -> None:
        attempt = self.attempts.get(current)
        if attempt is None or attempt.made or attempt.work.over:
            return
        work = attempt.work
        work.deaths += 1
        if work.deaths >= self._rules.deaths:
            if work.stream >= 0:
                self.book.break_off(StreamPlace(work.plan, *unpack_place(work.index)), cause)
            else:
                self.book.cut(work.plan, work.step, poisonous(cause), work.index)

    def suspect(self, pool: Peer, stopped: Collection[int]) -> None:
        """These workers of a pool are stopped: what they have not made, or not sent, is leased again; they may wake up."""
        for worker in self.workers.values():
            was = worker.suspect
            if worker.name.pool == pool:
                worker.suspect = worker.name.serial in stopped
            if worker.suspect and not was:
                self.streams.disown(worker.name)
                self._doubt([self.attempts[ident] for ident in worker.attempts])

    def overdue(self, now: float) -> None:
        """Lease again what has been out for far longer than usual."""
        self._doubt(
            attempt
            for attempt in self.attempts.values()
            if not (attempt.made or attempt.doubtful)
            and attempt.work.stream < 0
            and now - attempt.since
            > max(self._rules.patience, 20 * self.credit.paces[attempt.work.loader].seconds)
        )

    def _doubt(self, attempts: Iterable[Attempt], *, dead: bool = False) -> None:
        """Nobody relies on these any more: what is not made is leased again.

        Of what their worker writes no more, as it has made it or is ``dead``, ranks release what they never got.
        """
        asked: dict[int, list[int]] = defaultdict(list)
        for attempt in attempts:
            attempt.doubtful = True
            if not self.credit.ranks[attempt.work.rank].joined:
                if dead:
                    self.released([attempt.ident])
            elif dead or attempt.made:
                asked[attempt.work.rank].append(attempt.ident)
            if not attempt.made:
                self._retry(attempt.work)
        for rank, idents in asked.items():
            self.book.tell(rank, ReceivedQuery(idents))

    def _retry(self, work: Work) -> None:
        if not work.queued and self.attempts.is_needed(work):
            work.queued = True
            heapq.heappush(self._retries, (work.step, work.seq, work.plan, work))

    def announced(self, name: Peer, message: Announced) -> None:
        """A stream's owner holds more elements; one that owns it no longer is not believed."""
        plan = self.book.plans.get(message.plan)
        if plan is not None and self.streams.owner(plan.loader, message.stream) == name:
            self.book.announced(message.plan, message.stream, message.made, message.ended)

    # ── leasing ───────────────────────────────────────────────────────────────────────────────────

    def pump(self, now: float) -> None:
        """Do all that has become possible: draw, feed streams, lease."""
        for work in self.book.newly_consumed:
            self.attempts.consumed(work)
        self.book.newly_consumed.clear()
        self.book.refill()
        self.streams.feed()
        leases: dict[Peer, list[Ticket]] = defaultdict(list)
        self._lease_retries(leases, now)
        self._lease_planned(leases, now)
        for name, tickets in leases.items():
            self.outbox.append((name, tickets))

    def _lease_retries(self, leases: dict[Peer, list[Ticket]], now: float) -> None:
        blocked = []
        while self._retries:
            entry = heapq.heappop(self._retries)
            work = entry[3]
            work.queued = not work.over
            if work.over:
                continue
            worker = self._worker_for(work)
            if worker is None:
                blocked.append(entry)
                if work.stream < 0:
                    break
                continue
            work.queued = False
            leases[worker.name].append(self.attempts.lease(work, worker, now))
        for entry in blocked:
            heapq.heappush(self._retries, entry)

    def _lease_planned(self, leases: dict[Peer, list[Ticket]], now: float) -> None:
        books = [book for book in self.book.loaders if book.plans]
        idle = 0
        while books and idle < len(books):
            self._turn += 1
            idle = 0 if self._lease_one(books[self._turn % len(books)], leases, now) else idle + 1

    def _lease_one(self, book: LoaderBook, leases: dict[Peer, list[Ticket]], now: float) -> bool:
        for plan, rank in self.book.heads(book):
            if not self.credit.has_room(rank, plan):
                continue
            worker = self._worker_for(plan.ranks[rank].queue[0])
            if worker is None:
                return False
            leases[worker.name].append(self.attempts.lease(plan.take(rank), worker, now))
            return True
        return False

    def _worker_for(self, work: Work) -> WorkerState | None:
        """A stream's own worker, else the least busy one that may take this work now."""
        if work.stream < 0:
            return self.attempts.least_busy(work)
        owner = self.streams.owner(work.loader, work.stream)
        worker = None if owner is None else self.workers.get(owner)
        return worker if worker is not None and worker.backlog < self._rules.leases else None

    # ── how it stands ─────────────────────────────────────────────────────────────────────────────

    def is_full(self, book: LoaderBook) -> bool:
        """Whether elements of a loader are planned, and no more may be made before some are consumed."""
        heads = list(self.book.heads(book))
        under_way = any(a.work.loader == book.index and not a.made for a in self.attempts.values())
        return (
            bool(heads)
            and not under_way
            and not any(self.credit.has_room(rank, plan) for plan, rank in heads)
        )
