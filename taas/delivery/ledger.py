"""Who makes element i, and where its bytes go: leases, deaths, credits. Pure; no I/O.

An attempt is one lease of one element to one worker. It counts as work ahead until its rank has consumed the
element; what a rank holds on to afterwards never keeps it from getting more. Its slot of the rank's slab,
where rank and worker share memory, is taken until the rank says that nobody uses the memory any more, or until
it is certain that the rank will never see it. An element may have several attempts; its rank takes the first that
arrives. So a slot is never given to a second writer while a first one may still write.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Callable, Iterable

from taas.delivery.attempts import Attempt, LeaseRules, Pace, RankState, WorkerState
from taas.delivery.board import NOTHING_AHEAD
from taas.delivery.feeding import StreamFeeder
from taas.delivery.messages import (
    Announced,
    Cancel,
    Doomed,
    Lease,
    RankAddress,
    RankHello,
    Result,
    RunFailed,
    Ticket,
    Welcome,
    Which,
)
from taas.delivery.plan import Plan, Uneven, Work, unpack_place
from taas.delivery.planbook import LoaderBook, PlanBook, rank_peer
from taas.delivery.slots import SlotTable

__all__ = ["Ledger"]


class Ledger:
    """Leases, credits and recovery for all loaders of a run. ``outbox`` holds ``(peer, message)``."""

    def __init__(
        self,
        ranks: int,
        slab: int,
        *,
        shared: bool = True,
        uneven: Uneven = "drop",
        units: dict[str, int] | None = None,
        prebuffer: int | None = None,
        reserve: Callable[[int, int], int] | None = None,
        rules: LeaseRules | None = None,
    ) -> None:
        self.book = PlanBook(ranks, uneven, units or {}, 2 * ranks if prebuffer is None else prebuffer)
        self.outbox = self.book.outbox
        self.rules = rules or LeaseRules()
        self.slab = slab
        self.ranks = [
            RankState(
                SlotTable(
                    slab if shared else 0,
                    None if reserve is None else (lambda upto, rank=r: reserve(rank, upto)),  # type: ignore[misc]
                ),
                shared,
            )
            for r in range(ranks)
        ]
        self.workers: dict[str, WorkerState] = {}
        self.attempts: dict[int, Attempt] = {}
        self._addresses: dict[int, RankAddress] = {}
        self._paces: dict[int, Pace] = defaultdict(Pace)
        self._retries: list[tuple[int, int, int, Work]] = []
        self._streams = StreamFeeder(self.book, self.workers, self._hoard)
        self._idents = 0
        self._turn = 0
        self._failure = ""

    # ── ranks ─────────────────────────────────────────────────────────────────────────────────────

    def rank_joined(self, message: RankHello) -> None:
        """A rank takes elements from now on."""
        rank = self.ranks[message.rank]
        rank.joined = True
        if rank.shared and not message.shared:
            self._leave_slab(message.rank)
        self._addresses[message.rank] = RankAddress(message.rank, message.address, message.key)
        for name in self.workers:
            self.outbox.append((name, self._addresses[message.rank]))
        if self._failure:
            self.outbox.append((rank_peer(message.rank), RunFailed(self._failure)))
        self.welcome(message.rank)

    def welcome(self, rank: int) -> None:
        """Tell a rank the loaders, once both are there."""
        if self.ranks[rank].joined and self.book.loaders:
            facts = [book.facts for book in self.book.loaders]
            self.outbox.append((rank_peer(rank), Welcome(facts, self.slab)))
            for message in self.ranks[rank].mail:
                self.outbox.append((rank_peer(rank), message))
            self.ranks[rank].mail.clear()

    def _leave_slab(self, rank: int) -> None:
        """The rank cannot map its slab: what lies there is made again and sent on the socket."""
        self.ranks[rank].shared = False
        lost = [a.ident for a in self.attempts.values() if a.work.rank == rank and a.capacity]
        self._retry(self._give_up(lost))

    def progressed(self, rank: int, waited: float, asked: Iterable[int]) -> None:
        """A rank has waited so long in all, and asked of these plans.

        If workers were held back from working ahead in them: no longer.
        """
        state = self.ranks[rank]
        if waited - state.waited > 0.0005:
            for plan in state.blocked.intersection(asked) & self.book.plans.keys():
                loader = self.book.plans[plan].loader
                state.targets[loader] = min(2 * state.targets[loader], self.rules.ahead)
        state.waited = waited
        state.blocked.clear()

    def released(self, idents: Iterable[int]) -> None:
        """Nobody in the rank holds these attempts' memory any more."""
        for ident in idents:
            attempt = self._drop_attempt(ident)
            if attempt is not None:
                self._count_prepared(attempt.work)

    def spoilt(self, idents: Iterable[int]) -> None:
        """User code in a data worker holds on to these attempts' slots: nobody is given them again."""
        for ident in idents:
            attempt = self.attempts.get(ident)
            if attempt is not None:
                attempt.capacity = 0

    def lacking(self, asked: list[int], lacking: list[int]) -> None:
        """A rank says which attempts of a dead worker never arrived."""
        for ident in asked:
            attempt = self.attempts.get(ident)
            if attempt is not None:
                attempt.orphan = False
        self._retry(self._give_up(lacking))

    def _give_up(self, idents: list[int]) -> list[Work]:
        works = []
        for ident in idents:
            attempt = self._drop_attempt(ident)
            if attempt is not None:
                works.append(attempt.work)
        return works

    def _drop_attempt(self, ident: int) -> Attempt | None:
        attempt = self.attempts.pop(ident, None)
        if attempt is None:
            return None
        rank = self.ranks[attempt.work.rank]
        self._uncharge(attempt)
        if attempt.capacity:
            rank.slots.give(attempt.offset, attempt.capacity)
        attempt.work.attempts.discard(ident)
        worker = self.workers.get(attempt.worker)
        if worker is not None:
            self._settle(worker, attempt)
            worker.attempts.discard(ident)
        return attempt

    def _uncharge(self, attempt: Attempt) -> None:
        """Stop counting an attempt as work ahead: it was consumed, or will never be."""
        if attempt.charged:
            attempt.charged = False
            self.ranks[attempt.work.rank].charge(attempt.work.plan, -attempt.charge, -1)

    def _settle(self, worker: WorkerState, attempt: Attempt) -> None:
        if not attempt.made:
            attempt.made = True
            worker.backlog -= 1
            worker.backlog_seconds = 0.0 if worker.backlog <= 0 else worker.backlog_seconds - attempt.expected

    def _seconds(self, work: Work) -> float:
        return self._paces[work.loader].seconds

    # ── workers ───────────────────────────────────────────────────────────────────────────────────

    def worker_joined(self, name: str, host: str, shared: bool) -> None:
        """A worker takes tickets from now on."""
        self.workers[name] = WorkerState(name, host, shared)
        for address in self._addresses.values():
            self.outbox.append((name, address))

    def made(self, name: str, results: Iterable[Result]) -> None:
        """A worker is through with these attempts."""
        worker = self.workers.get(name)
        for result in results:
            if result.sent:
                self._paces[result.loader].see(result.nbytes, result.seconds)
            attempt = self.attempts.get(result.attempt)
            if attempt is None:
                continue  # its rank was quicker to consume and release it than this message
            if not result.sent:
                self._drop_attempt(result.attempt)
                continue
            if worker is not None:
                self._settle(worker, attempt)
            attempt.made = True
            work = attempt.work
            if not attempt.capacity and attempt.charged:
                self.ranks[work.rank].charge(work.plan, result.nbytes - attempt.charge)
                attempt.charge = result.nbytes
            self._count_prepared(work)

    def _count_prepared(self, work: Work) -> None:
        if not work.prepared:
            work.prepared = True
            self.book.loaders[work.loader].prepared += 1
            self._streams.sent(work)

    def worker_lost(
        self, name: str, current: int, cause: str, ahead: tuple[int, int, int] = NOTHING_AHEAD
    ) -> None:
        """A worker is dead, for certain. ``current`` and ``ahead``: what was on its board."""
        worker = self.workers.pop(name, None)
        if worker is None:
            return
        self._blame(current, cause)
        if current < 0 and ahead != NOTHING_AHEAD:
            self._blame_stream(*ahead, cause)
        self._streams.disown(name)
        asked: list[int] = []
        lost: list[int] = []
        again: list[Work] = []
        for ident in worker.attempts:
            attempt = self.attempts[ident]
            attempt.orphan = True
            (asked if self.ranks[attempt.work.rank].joined else lost).append(ident)
            if not attempt.made:
                again.append(attempt.work)
        self._retry(self._give_up(lost) + again)
        self._ask_for(asked)

    def _blame(self, current: int, cause: str) -> None:
        attempt = self.attempts.get(current)
        if attempt is None or attempt.made or attempt.work.over:
            return
        work = attempt.work
        work.deaths += 1
        if work.deaths >= self.rules.deaths:
            self._doom(work, cause)
            if work.stream >= 0:
                self._break_off(work.plan, *unpack_place(work.index), cause)

    def _blame_stream(self, plan: int, stream: int, position: int, cause: str) -> None:
        if self._streams.died(plan, stream) >= self.rules.deaths:
            self._break_off(plan, stream, position, cause)

    def _break_off(self, plan: int, stream: int, position: int, cause: str) -> None:
        for work in self.book.break_off(plan, stream, position, cause):
            self._doom(work, cause)

    def _doom(self, work: Work, cause: str) -> None:
        """Nobody is to make it again: its rank raises at its place."""
        work.over = True
        self._count_prepared(work)
        doomed = Doomed(work.plan, work.seq, work.index, cause)
        if self.ranks[work.rank].joined:
            self.outbox.append((rank_peer(work.rank), doomed))
        else:
            self.ranks[work.rank].mail.append(doomed)

    def suspect(self, names: set[str]) -> None:
        """These workers are stopped: what they have not made, or not sent, is leased again; they may still wake up."""
        for worker in self.workers.values():
            was, worker.suspect = worker.suspect, worker.name in names
            if worker.suspect and not was:
                self._streams.disown(worker.name)
                self._hedge([self.attempts[i] for i in worker.attempts])
                made = [i for i in worker.attempts if self.attempts[i].made]
                self._ask_for(i for i in made if self.ranks[self.attempts[i].work.rank].joined)

    def _ask_for(self, idents: Iterable[int]) -> None:
        """Ask ranks which of these attempts arrived: their worker can send them no more, or not now."""
        questions: dict[int, list[int]] = defaultdict(list)
        for ident in idents:
            questions[self.attempts[ident].work.rank].append(ident)
        for rank, asked in questions.items():
            self.outbox.append((rank_peer(rank), Which(asked)))

    def overdue(self, now: float) -> None:
        """Lease again what has been out for far longer than usual."""
        late = [
            attempt
            for attempt in self.attempts.values()
            if not attempt.made
            and attempt.work.stream < 0
            and now - attempt.since > max(self.rules.patience, 20 * self._seconds(attempt.work))
        ]
        self._hedge(late)

    def _hedge(self, attempts: list[Attempt]) -> None:
        again = [a for a in attempts if not a.made and not a.hedged]
        for attempt in again:
            attempt.hedged = True
        self._retry([a.work for a in again])

    def _retry(self, works: list[Work]) -> None:
        for work in works:
            if work.over or work.queued:
                continue
            others = [self.attempts[i] for i in work.attempts if i in self.attempts]
            if any(not (a.orphan or a.hedged) for a in others):
                continue
            work.queued = True
            heapq.heappush(self._retries, (work.step, work.seq, work.plan, work))

    def announced(self, name: str, message: Announced) -> None:
        """A stream's owner holds more elements; one that owns it no longer is not believed."""
        plan = self.book.plans.get(message.plan)
        if plan is not None and self._streams.owner(plan.loader, message.stream) == name:
            self._streams.keep(message.plan, message.stream, message.states)
            self.book.announced(message.plan, message.stream, message.made, message.ended)

    def fail(self, reason: str) -> None:
        """No element will come any more: whoever joins later hears it, too."""
        self._failure = reason

    # ── leasing ───────────────────────────────────────────────────────────────────────────────────

    def pump(self, now: float) -> None:
        """Do all that has become possible: draw, feed streams, cancel, lease."""
        for work in self.book.newly_consumed:
            for ident in work.attempts:
                self._uncharge(self.attempts[ident])
        self.book.newly_consumed.clear()
        self.book.refill()
        self._cancel()
        self._streams.feed()
        leases: dict[str, list[Ticket]] = defaultdict(list)
        self._lease_retries(leases, now)
        self._lease_planned(leases, now)
        for name, tickets in leases.items():
            self.outbox.append((name, Lease(tickets)))

    def _cancel(self) -> None:
        for plan, rank, works in self.book.newly_cancelled:
            names = {self.attempts[i].worker for w in works for i in w.attempts if not self.attempts[i].made}
            for name in names & self.workers.keys():
                self.outbox.append((name, Cancel(plan.ident, rank)))
            if plan.closed:
                for name in self._streams.owners_of(plan.ident) & self.workers.keys():
                    self.outbox.append((name, Cancel(plan.ident, -1, plan.undone)))
                self._streams.forget(plan.ident)
        self.book.newly_cancelled.clear()

    def _lease_retries(self, leases: dict[str, list[Ticket]], now: float) -> None:
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
            self._lease(work, worker, leases, now)
        for entry in blocked:
            heapq.heappush(self._retries, entry)

    def _lease_planned(self, leases: dict[str, list[Ticket]], now: float) -> None:
        books = [book for book in self.book.loaders if book.plans]
        idle = 0
        while books and idle < len(books):
            self._turn += 1
            idle = 0 if self._lease_one(books[self._turn % len(books)], leases, now) else idle + 1

    def _lease_one(self, book: LoaderBook, leases: dict[str, list[Ticket]], now: float) -> bool:
        for plan, rank in self.book.heads(book):
            if not self._room(rank, plan):
                continue
            if plan.ranks[rank].queue[0].over:
                plan.take(rank)  # doomed before it was leased
                return True
            worker = self._worker_for(plan.ranks[rank].queue[0])
            if worker is None:
                return False
            self._lease(plan.take(rank), worker, leases, now)
            return True
        return False

    def _worker_for(self, work: Work) -> WorkerState | None:
        """The least busy worker that may take this work now."""
        if work.stream >= 0:
            owner = self.workers.get(self._streams.owner(work.loader, work.stream))
            return owner if owner is not None and owner.backlog < self.rules.leases else None
        rules, sized = self.rules, self._paces[work.loader].size
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

    def _room(self, rank: int, plan: Plan) -> bool:
        """Whether one more element of a plan may be made for a rank.

        Two may be under way in every plan, whatever others hold: an iterator that is only kept open holds nobody up.
        """
        state = self.ranks[rank]
        nbytes, count = state.work_ahead(plan.ident)
        size = self._paces[plan.loader].size
        if count < 2:
            return True
        if not size:
            return count < -(-len(self.workers) // len(self.ranks))
        if count >= self._target(rank, plan.loader, size):
            state.blocked.add(plan.ident)
            return False
        if state.nbytes + size > self.slab:
            return False
        least_share = self.slab // len(self.book.plans)  # in most cases enough, and quicker known
        return nbytes + size <= least_share or nbytes + size <= self._share(rank, plan)

    def _target(self, rank: int, loader: int, size: int) -> int:
        """How many elements ahead: few, which stay in the caches, until ``progressed`` finds them too few."""
        targets, least = self.ranks[rank].targets, self.book.prebuffer_rows
        if loader not in targets:
            some = max(3 * len(self.workers) // len(self.ranks) + 2, least)
            targets[loader] = max(some, min(256, self.rules.begin // size))
        return min(targets[loader], max(self.rules.ahead, least))

    def _share(self, rank: int, plan: Plan) -> int:
        """The rank's slab, divided among the plans it is in just now, and this one."""
        views = ((other, other.ranks[rank]) for other in self.book.plans.values())
        active = sum(other is plan or (view.begun and not view.closed) for other, view in views)
        return self.slab // active

    def _hoard(self, loader: int) -> int:
        """How many elements of a stream its owner may hold for ranks that do not take them: a slab full."""
        return self.slab // max(self._paces[loader].size, 1 << 10)

    @property
    def held_up(self) -> set[int]:
        """Loaders whose ranks wait for a rank that does not take its elements."""
        return self._streams.held_up

    def is_full(self, book: LoaderBook) -> bool:
        """Whether elements of a loader are planned, and no more may be made before some are consumed."""
        heads = list(self.book.heads(book))
        under_way = any(a.work.loader == book.index and not a.made for a in self.attempts.values())
        return bool(heads) and not under_way and not any(self._room(rank, plan) for plan, rank in heads)

    def _lease(self, work: Work, worker: WorkerState, leases: dict[str, list[Ticket]], now: float) -> None:
        rank = self.ranks[work.rank]
        size = self._paces[work.loader].size
        offset: int | None = None
        if size and rank.shared and worker.shared:
            offset = rank.slots.take(size)
        self._idents += 1
        ident = self._idents
        capacity = 0 if offset is None else size
        expected = self._seconds(work)
        self.attempts[ident] = Attempt(ident, work, worker.name, size, offset or 0, capacity, now, expected)
        work.attempts.add(ident)
        worker.attempts.add(ident)
        worker.backlog += 1
        worker.backlog_seconds += expected
        rank.charge(work.plan, size, 1)
        leases[worker.name].append(
            Ticket(
                ident,
                work.plan,
                work.loader,
                work.seq,
                work.rank,
                work.seed,
                work.index,
                offset or 0,
                capacity,
            )
        )
