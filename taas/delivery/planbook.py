"""Which plans are open, how far they are planned, who has begun and closed them. Pure; no I/O.

The book talks with the planner (open an iteration, draw indices) and answers the ranks (this iteration is
that plan; it ends there). Messages for others are left in ``outbox`` as ``(peer, message)``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from taas.delivery.config import Place
from taas.delivery.messages import (
    Begin,
    Close,
    Draw,
    DropPlan,
    Ended,
    Forget,
    LoaderFacts,
    Opened,
    OpenPlan,
    Planned,
)
from taas.delivery.plan import Plan, StreamOrder, Uneven, Work, killer, pack_place, unpack_place

__all__ = ["LoaderBook", "PlanBook", "rank_peer"]

_BACKLOG = 100_000
"""Tickets planned for a slow rank while others run ahead; a ticket is some 300 bytes."""


def rank_peer(rank: int) -> str:
    """Name of a rank on the wire."""
    return f"r{rank}"


@dataclass(slots=True)
class LoaderBook:
    """One registered loader: its facts, its open plans by iteration, and what its units still allow."""

    index: int
    facts: LoaderFacts
    rows_allowed: int | None
    plans: dict[int, Plan] = field(default_factory=dict)
    orders: dict[int, StreamOrder] = field(default_factory=dict)
    base_seeds: dict[int, int] = field(default_factory=dict)
    rows_closed: int = 0
    rows_before: int = 0
    """Of these, the rows before the plan that was closed last."""
    begun_by: set[int] = field(default_factory=set)
    begun_at: tuple[int, int] | None = None
    """Iteration and step of the first one that this start of the run began."""
    last_begun: tuple[int, int | None] | None = None
    epoch_step: int = 1
    planned: int = 0
    prepared: int = 0
    delivered: int = 0

    @property
    def ready(self) -> int:
        """Elements made that no rank has consumed."""
        return sum(
            work.prepared for plan in self.plans.values() for view in plan.ranks for work in view.unconsumed
        )

    @property
    def planned_for_begun(self) -> int:
        """Elements planned, without iterations that are only prepared for."""
        return self.planned - sum(
            plan.rows * len(plan.ranks) for plan in self.plans.values() if not plan.begun
        )

    def rows_left(self, plan: Plan | None = None) -> int | None:
        """Rows that ``--units`` leaves for a plan (None: the next one); None without a limit.

        Ranks that are in it may take all that they have not taken elsewhere. Before, it has what is left when all
        other plans are taken whole.
        """
        if self.rows_allowed is None:
            return None
        others = [other for other in self.plans.values() if other is not plan]
        inside = [r for r, view in enumerate(plan.ranks) if view.begun and not view.closed] if plan else []
        if inside:
            taken = min(sum(other.ranks[rank].consumed for other in others) for rank in inside)
        else:
            taken = sum(other.rows for other in others)
        return max(0, self.rows_allowed - self.rows_closed - taken)

    def predicted_epoch(self, iteration: int) -> int | None:
        """Guess what ``set_epoch`` will be told: the step seen last, or one up."""
        if self.facts.epoch is None:
            return None
        if self.last_begun is None or self.last_begun[1] is None:
            return self.facts.epoch
        return self.last_begun[1] + self.epoch_step * (iteration - self.last_begun[0])

    @property
    def place(self) -> Place | None:
        """Where a run that is started again would go on; None where no rank has begun."""
        if self.last_begun is None:
            return None
        begun = [plan for plan in self.plans.values() if plan.begun]
        if begun:
            plan = min(begun, key=lambda plan: plan.iteration)
            iteration, taken, step = plan.iteration, self.rows_closed, min(view.asked for view in plan.ranks)
            over = plan.steps is not None and step >= plan.steps
        else:
            iteration, taken, over = self.last_begun[0], self.rows_before, True
            step = self.rows_closed - taken
        if over and not self.used_up(taken + step):
            return Place(iteration + 1, 0, taken + step)
        return Place(iteration, step, taken)

    def used_up(self, rows: int) -> bool:
        """Whether ``--units`` allows no more than so many rows: the iteration that took the last ends with it."""
        return self.rows_allowed is not None and rows >= self.rows_allowed

    def note_begun(self, iteration: int, epoch: int | None) -> None:
        """Remember the latest iteration a rank began, and by how much the epoch went up."""
        if self.last_begun is not None and iteration <= self.last_begun[0]:
            return
        if self.last_begun is not None and epoch is not None and self.last_begun[1] is not None:
            self.epoch_step = epoch - self.last_begun[1]
        self.last_begun = (iteration, epoch)


class PlanBook:
    """The plans of all loaders."""

    def __init__(self, ranks: int, uneven: Uneven, units: dict[str, int], prebuffer: int) -> None:
        self.n = ranks
        self.uneven = uneven
        self.units = units
        self.prebuffer_rows = max(1, -(-prebuffer // ranks))
        self.loaders: list[LoaderBook] = []
        self.plans: dict[int, Plan] = {}
        self.outbox: list[tuple[str, object]] = []
        self.newly_cancelled: list[tuple[Plan, int, list[Work]]] = []
        self.newly_consumed: list[Work] = []
        self._waiting: list[tuple[int, Begin]] = []
        self._idents = 0

    # ── planner ───────────────────────────────────────────────────────────────────────────────────

    def hello(self, facts: list[LoaderFacts]) -> None:
        """The planner has the loaders: open the first iteration of each."""
        for index, fact in enumerate(facts):
            units = self.units.get(fact.name, self.units.get("*"))
            self.loaders.append(LoaderBook(index, fact, None if units is None else units // self.n))
        for book in self.loaders:
            if not book.facts.error:
                self._open(book, 0, book.facts.epoch)
        waiting, self._waiting = self._waiting, []
        for rank, message in waiting:
            self.begin(rank, message)

    def planned(self, message: Planned) -> Plan | None:
        """Indices arrived. Return their plan, None if nobody wants it any more."""
        plan = self.plans.get(message.plan)
        if plan is None:
            return None
        book = self.loaders[plan.loader]
        plan.asked = False
        before = plan.rows
        if book.facts.streams:
            book.base_seeds[plan.ident] = message.base_seed
        plan.extend(message.indices, message.base_seed)
        if message.ended:
            plan.end(message.failure)
        self._cut(book, plan)
        book.planned += (plan.rows - before) * self.n
        self._tell_end(plan)
        return plan

    def announced(self, plan_id: int, stream: int, made: int, ended: bool) -> None:
        """A stream's owner holds more elements: those whose place is settled become work."""
        plan = self.plans.get(plan_id)
        if plan is None or plan.ended:
            return
        book = self.loaders[plan.loader]
        book.orders[plan_id].announce(stream, made, ended)
        self._settle(book, plan)

    def break_off(self, plan_id: int, stream: int, position: int, cause: str) -> list[Work]:
        """Whoever makes this element of a stream dies: the plan ends before it. Return what is not made from there on."""
        plan = self.plans.get(plan_id)
        if plan is None:
            return []
        book = self.loaders[plan.loader]
        book.orders[plan_id].break_off(stream, position)
        plan.broken = killer(f"element {position} of stream {stream}", cause)
        if not plan.ended:
            self._settle(book, plan)
        return [
            work
            for view in plan.ranks
            for work in (*view.unconsumed, *view.queue)
            if work.stream == stream
            and not (work.prepared or work.over)
            and unpack_place(work.index)[1] >= position
        ]

    def _settle(self, book: LoaderBook, plan: Plan) -> None:
        settled, over = book.orders[plan.ident].advance()
        before = plan.rows
        plan.extend(
            [pack_place(*place) for place in settled],
            book.base_seeds[plan.ident],
            [stream for stream, _ in settled],
        )
        if over:
            plan.end(refusal=plan.broken)
        book.planned += (plan.rows - before) * self.n
        self._tell_end(plan)

    def refill(self) -> None:
        """Ask the planner for what will be needed soon: more indices, or the next iteration."""
        for book in self.loaders:
            for plan in list(book.plans.values()):
                if not plan.ended and not plan.asked and not book.facts.streams:
                    self._draw(book, plan)
            latest = book.plans.get(max(book.plans)) if book.plans else None
            if (
                latest is not None
                and latest.ended
                and not (latest.failure or latest.broken)
                and latest.begun
                and latest.rows
                and not any(view.queue for view in latest.ranks)
                and book.rows_left() != 0
            ):
                self._open(book, latest.iteration + 1, book.predicted_epoch(latest.iteration + 1))

    def _draw(self, book: LoaderBook, plan: Plan) -> None:
        queues = [len(view.queue) for view in plan.ranks if not view.closed]
        if not queues or min(queues) > 128 or sum(queues) > _BACKLOG:
            return
        count = max(512, 64 * self.n) if plan.begun else 4 * self.prebuffer_rows * self.n
        left = book.rows_left(plan)
        if left is not None:
            count = min(count, left * self.n - plan.drawn)
        if count > 0:
            plan.asked = True
            self.outbox.append(("p", Draw(plan.ident, count)))

    def _open(self, book: LoaderBook, iteration: int, epoch: int | None, *, repeat: bool = False) -> Plan:
        self._idents += 1
        plan = Plan(self._idents, book.index, iteration, epoch, self.n, self.uneven)
        self.plans[plan.ident] = book.plans[iteration] = plan
        if book.facts.streams:
            book.orders[plan.ident] = StreamOrder(book.facts.streams)
        self.outbox.append(("p", OpenPlan(plan.ident, book.index, iteration, epoch, repeat)))
        return plan

    # ── ranks ─────────────────────────────────────────────────────────────────────────────────────

    def begin(self, rank: int, message: Begin) -> None:
        """A rank calls ``iter()``: tell it which plan that is."""
        if not self.loaders:
            self._waiting.append((rank, message))
            return
        book = self.loaders[message.loader]
        disagreement, refusal = self._disagreement(rank, book, message), self._refusal(book)
        if disagreement or refusal:
            opened = Opened(
                message.loader, message.iteration, -1, disagreement or refusal, bool(disagreement)
            )
            self.outbox.append((rank_peer(rank), opened))
            return
        plan = book.plans.get(message.iteration)
        if plan is not None and plan.epoch != message.epoch:
            self._drop(plan)  # planned ahead for another epoch than the ranks then chose
            plan = None
        if plan is None:
            repeat = not book.begun_by and message.iteration > 0
            plan = self._open(book, message.iteration, message.epoch, repeat=repeat)
        if not book.begun_by:
            self._go_on(book, plan, message)
        book.begun_by.add(rank)
        plan.ranks[rank].begun = True
        book.note_begun(message.iteration, plan.epoch)
        self.outbox.append((rank_peer(rank), Opened(message.loader, message.iteration, plan.ident)))
        self._tell_end(plan)

    def _go_on(self, book: LoaderBook, plan: Plan, message: Begin) -> None:
        """A loader is begun for the first time: after a restart, not always at its start."""
        book.begun_at = (message.iteration, message.start)
        for earlier in [other for other in book.plans.values() if other.iteration < plan.iteration]:
            self._drop(earlier)
        book.rows_closed = message.taken
        book.planned += message.taken * self.n
        book.delivered += (message.taken + message.start) * self.n
        self.newly_consumed += plan.skip(message.start)
        if book.used_up(message.taken + message.start):
            plan.last = book.rows_left(plan)
            self._cut(book, plan)

    def _cut(self, book: LoaderBook, plan: Plan) -> None:
        """A plan that is empty, its units having been taken by an earlier start, ends where its sampler was then."""
        if plan.last is not None and (book.facts.streams or plan.rows >= plan.last):
            plan.cut(plan.last)

    def _disagreement(self, rank: int, book: LoaderBook, message: Begin) -> str:
        here = (message.iteration, message.start)
        if rank not in book.begun_by and book.begun_at not in (None, here):
            assert book.begun_at is not None
            return (
                f"ranks disagree about where '{book.facts.name}' goes on: this rank begins at iteration {here[0]}, "
                f"step {here[1]}, another one began at iteration {book.begun_at[0]}, step {book.begun_at[1]}. Call "
                "taas.resume() in every rank, with the same places"
            )
        plan = book.plans.get(message.iteration)
        if plan is not None and plan.begun and plan.epoch != message.epoch:
            return (
                f"ranks disagree about the epoch of '{book.facts.name}': this rank called "
                f"set_epoch({message.epoch}), another one set_epoch({plan.epoch}), both for iteration "
                f"{message.iteration}. Call set_epoch with the same number in every rank"
            )
        return ""

    def _refusal(self, book: LoaderBook) -> str:
        if book.facts.error:
            return book.facts.error
        length = book.facts.length
        if self.uneven == "raise" and length is not None and not book.facts.per_rank and length % self.n:
            return (
                f"'{book.facts.name}' has {length} elements, which {self.n} ranks cannot share evenly. Use "
                f"--uneven drop (leaves out the last {length % self.n}) or --uneven pad (repeats the first ones), "
                "or choose a batch size that divides"
            )
        return ""

    def close(self, rank: int, message: Close) -> None:
        """A rank is through with a plan."""
        plan = self.plans.get(message.plan)
        if plan is None or plan.ranks[rank].closed:
            return
        self.consume(rank, message.plan, message.consumed, message.asked)
        under_way = plan.close(rank)
        self.newly_cancelled.append((plan, rank, under_way))
        if plan.closed:
            book = self.loaders[plan.loader]
            book.rows_before = book.rows_closed
            book.rows_closed += min(view.consumed for view in plan.ranks)
            self._forget(plan)

    def consume(self, rank: int, plan_id: int, consumed: int, asked: int | None = None) -> None:
        """A rank has consumed so many steps, and asked for the one after as many (or after ``asked``)."""
        plan = self.plans.get(plan_id)
        if plan is not None:
            view = plan.ranks[rank]
            view.asked = max(view.asked, consumed if asked is None else asked)
            below = plan.consume(rank, consumed)
            self.loaders[plan.loader].delivered += len(below)
            self.newly_consumed += below

    def _tell_end(self, plan: Plan) -> None:
        if plan.steps is None:
            return
        for rank, view in enumerate(plan.ranks):
            if view.begun and not view.closed and not view.told_end:
                view.told_end = True
                end = Ended(plan.ident, plan.steps, plan.failure, plan.refusal)
                self.outbox.append((rank_peer(rank), end))

    def _drop(self, plan: Plan) -> None:
        plan.undone = True
        for rank in range(self.n):
            self.newly_cancelled.append((plan, rank, plan.close(rank)))
            self.outbox.append((rank_peer(rank), Forget(plan.ident)))
        self.loaders[plan.loader].planned -= plan.rows * self.n
        self._forget(plan)

    def _forget(self, plan: Plan) -> None:
        book = self.loaders[plan.loader]
        del self.plans[plan.ident], book.plans[plan.iteration]
        book.orders.pop(plan.ident, None)
        book.base_seeds.pop(plan.ident, None)
        self.outbox.append(("p", DropPlan(plan.ident)))

    # ── leasing ───────────────────────────────────────────────────────────────────────────────────

    def heads(self, book: LoaderBook) -> Iterator[tuple[Plan, int]]:
        """Yield (plan, rank) whose next work may be leased, the most urgent first."""
        for iteration in sorted(book.plans):
            plan = book.plans[iteration]
            ready = [
                (view.queue[0].step, rank)
                for rank, view in enumerate(plan.ranks)
                if view.queue and (view.begun or view.queue[0].step < self.prebuffer_rows)
            ]
            for _, rank in sorted(ready):
                yield plan, rank
