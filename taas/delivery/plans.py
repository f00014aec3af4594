"""Keeps the open plans: how far they are planned, and which ranks have begun and closed them.

Pure; no I/O. ``outbox`` collects the messages to send, as ``(peer, message)``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from taas.delivery.plan import Plan, Work, plan_number, uneven_message
from taas.protocol.delivery_messages import (
    PLANNER,
    Begin,
    Cancel,
    Draw,
    Ended,
    LoaderFacts,
    Peer,
    Planned,
    Ticket,
)
from taas.protocol.delivery_orders import DeliveryConfig, ResumePoint
from taas.protocol.framing import Message

_BACKLOG = 100_000
"""The most tickets that are planned while one rank is slow; a ticket takes about 300 bytes."""


@dataclass(slots=True)
class LoaderState:
    """A registered loader with its facts, its open plans by iteration, and its remaining units."""

    index: int
    facts: LoaderFacts
    ranks: int
    rows_allowed: int | None
    plans: dict[int, Plan] = field(default_factory=dict)
    rows_closed: int = 0  # taken by all ranks of closed plans, or by an earlier start of the run
    rows_before: int = 0  # those before the plan that was closed last
    begun_by: set[int] = field(default_factory=set)
    begun_at: tuple[int, int] | None = None  # first iteration and step of this start of the run
    last_begun: tuple[int, int | None] | None = None  # iteration and epoch
    delivered: int = 0  # batches consumed, in all ranks

    @property
    def units(self) -> int | None:
        """Return how many batches ``--units`` allows in total, or None without a limit."""
        return None if self.rows_allowed is None else self.rows_allowed * self.ranks

    @property
    def ready(self) -> int:
        """Count the batches that are made and not consumed.

        A batch whose worker died counts when it is made again.
        """
        return sum(
            work.is_made and not work.over
            for plan in self.plans.values()
            for view in plan.ranks
            for work in view.unconsumed
        )

    @property
    def is_over(self) -> bool:
        """Return whether ranks have consumed all that ``--units`` allows.

        A loader that cannot be delivered is over, too.
        """
        return bool(self.facts.error) or (self.units is not None and self.delivered >= self.units)

    def count_planned(self, *, begun: bool = False) -> int:
        """Return how many batches are planned or delivered.

        ``begun``: leave out iterations that are only prepared, and batches that a stream may turn
        out not to have.
        """
        count = self.delivered
        for plan in self.plans.values():
            if begun and not plan.begun:
                continue
            for view in plan.ranks:
                # Batches beyond a stream's end, leased before the end was known, are over.
                count += sum(not work.over for work in view.unconsumed)
                if not begun or not plan.streamed or plan.ended:
                    count += len(view.queue)
        return count

    def rows_left(self, plan: Plan | None = None) -> int | None:
        """Return the rows that ``--units`` leaves for a plan (None: the next one).

        Return None without a limit.
        """
        if self.rows_allowed is None:
            return None
        others = [other for other in self.plans.values() if other is not plan]
        inside = (
            [r for r, view in enumerate(plan.ranks) if view.begun and not view.closed]
            if plan
            else []
        )
        if inside:  # they may take all rows that they have not taken in other plans
            taken = min(sum(other.ranks[rank].consumed for other in others) for rank in inside)
        else:
            taken = sum(other.rows for other in others)
        return max(0, self.rows_allowed - self.rows_closed - taken)

    def predicted_epoch(self, iteration: int) -> int | None:
        """Predict the next argument of ``set_epoch``: it grows by one each time."""
        if self.last_begun is None or self.last_begun[1] is None:
            return self.facts.epoch
        return self.last_begun[1] + iteration - self.last_begun[0]

    @property
    def place(self) -> ResumePoint | None:
        """Return where a restarted run would continue, or None if no rank has begun."""
        if self.last_begun is None:
            return None
        begun = [plan for plan in self.plans.values() if plan.begun]
        if begun:
            plan = min(begun, key=lambda plan: plan.iteration)
            iteration, taken = plan.iteration, self.rows_closed
            step = min(view.asked for view in plan.ranks)
            over = plan.ended and step >= plan.rows
        else:
            iteration, taken, over = self.last_begun[0], self.rows_before, True
            step = self.rows_closed - taken
        if over and not self.used_up(taken + step):
            return ResumePoint(iteration + 1, 0, taken + step)
        return ResumePoint(iteration, step, taken)

    def used_up(self, rows: int) -> bool:
        """Return whether ``--units`` allows no more rows than these.

        If so, the iteration that took the last row ends with it.
        """
        return self.rows_allowed is not None and rows >= self.rows_allowed


class Plans:
    """The plans of all loaders."""

    def __init__(self, config: DeliveryConfig) -> None:
        self.n, self.uneven, self._config = config.ranks, config.uneven, config
        self.prebuffer_rows = (
            2 if config.prebuffer is None else max(1, -(-config.prebuffer // self.n))
        )
        self.loaders: list[LoaderState] = []
        self.by_number: dict[int, Plan] = {}
        self.outbox: list[tuple[Peer, Message | list[Ticket]]] = []
        self.dropped: list[Work] = []  # leased for ranks that will never request it
        self.owners: dict[int, Peer] = {}
        """The worker that makes a loader's batches, for loaders of iterable datasets."""

    def tell(self, rank: int, message: Message) -> None:
        """Put a message for a rank into the outbox."""
        self.outbox.append((Peer("rank", rank), message))

    @property
    def is_over(self) -> bool:
        """Return whether every unit was consumed, so that no more batches are made."""
        return bool(self.loaders) and all(loader.is_over for loader in self.loaders)

    # ── planner ───────────────────────────────────────────────────────────────────────────────────

    def hello(self, facts: Iterable[LoaderFacts]) -> None:
        """Open the first iteration of each loader."""
        for index, fact in enumerate(facts):
            units = self._config.units_of(fact.name)
            self.loaders.append(
                LoaderState(index, fact, self.n, None if units is None else units // self.n)
            )
        for loader in self.loaders:
            if not loader.facts.error:
                self._open(loader, 0, loader.facts.epoch)

    def take_planned(self, message: Planned) -> None:
        """Add indices from the planner to their plan, which may have been dropped."""
        plan = self.by_number.get(message.plan)
        if plan is None or plan.ended:
            return
        plan.asked, plan.base_seed = False, message.base_seed
        plan.extend(message.indices, message.base_seed)
        if message.ended:
            plan.end(message.failure)
        self.tell_end(plan)

    def refill(self) -> None:
        """Request what is needed soon from the planner: more indices, or the next iteration."""
        for loader in self.loaders:
            for plan in list(loader.plans.values()):
                self._draw(loader, plan)
            latest = loader.plans[max(loader.plans)] if loader.plans else None
            if (
                latest is not None
                and latest.ended
                and not latest.broken
                and latest.begun
                and latest.rows
                and not any(view.queue for view in latest.ranks)
                and loader.rows_left() != 0
            ):
                self._open(
                    loader, latest.iteration + 1, loader.predicted_epoch(latest.iteration + 1)
                )

    def _draw(self, loader: LoaderState, plan: Plan) -> None:
        """Request indices that are needed soon.

        The first request is always made, because its reply contains the plan's seed.
        """
        count = self._indices_wanted(loader, plan)
        if not (plan.ended or plan.asked) and (count > 0 or plan.base_seed is None):
            plan.asked = True
            goes_on = loader.begun_at is not None and plan.iteration == loader.begun_at[0] > 0
            draw = Draw(
                plan.ident, loader.index, plan.iteration, plan.epoch, max(count, 0), goes_on
            )
            self.outbox.append((PLANNER, draw))

    def _indices_wanted(self, loader: LoaderState, plan: Plan) -> int:
        queues = [len(view.queue) for view in plan.ranks if not view.closed]
        if not queues or min(queues) > 128 or sum(queues) > _BACKLOG:
            return 0
        count = max(512, 64 * self.n) if plan.begun else 4 * self.prebuffer_rows * self.n
        left = loader.rows_left(plan)
        return count if left is None else min(count, left * self.n - plan.drawn)

    def _open(self, loader: LoaderState, iteration: int, epoch: int | None) -> Plan:
        number = plan_number(loader.index, iteration, epoch)
        plan = Plan(
            number, loader.index, iteration, epoch, self.n, self.uneven, loader.facts.streamed
        )
        self.by_number[plan.ident] = loader.plans[iteration] = plan
        return plan

    # ── ranks ─────────────────────────────────────────────────────────────────────────────────────

    def begin(self, rank: int, message: Begin) -> None:
        """Begin an iteration for a rank, which calls ``iter()``."""
        loader = self.loaders[message.loader]
        disagreement = self._disagreement(rank, loader, message)
        refusal = disagreement or self._refusal(loader)
        number = plan_number(message.loader, message.iteration, message.epoch)
        if refusal:
            self.tell(rank, Ended(number, 0, refusal=refusal, disagree=bool(disagreement)))
            return
        if (ahead := loader.plans.get(message.iteration)) and ahead.epoch != message.epoch:
            self._drop(ahead)  # it was planned for another epoch than the rank's
        plan = self.by_number.get(number) or self._open(loader, message.iteration, message.epoch)
        if not loader.begun_by:
            self._go_on(loader, plan, message)
        loader.begun_by.add(rank)
        plan.ranks[rank].begun = True
        if loader.last_begun is None or message.iteration > loader.last_begun[0]:
            loader.last_begun = message.iteration, plan.epoch
        self._draw(loader, plan)
        self.tell_end(plan, rank)

    def _go_on(self, loader: LoaderState, plan: Plan, message: Begin) -> None:
        """Begin a loader for the first time; after a restart, possibly inside an iteration."""
        loader.begun_at = (message.iteration, message.start)
        opened_ahead = list(loader.plans.values())
        for earlier in opened_ahead:
            if earlier.iteration < plan.iteration:
                self._drop(earlier)
        loader.rows_closed = message.taken
        loader.delivered += (message.taken + message.start) * self.n
        self.dropped += plan.skip(message.start)

    def _disagreement(self, rank: int, loader: LoaderState, message: Begin) -> str:
        here = (message.iteration, message.start)
        if loader.begun_at is not None and rank not in loader.begun_by and loader.begun_at != here:
            return (
                f"ranks disagree about where '{loader.facts.name}' goes on: this rank begins at"
                f" iteration {here[0]}, step {here[1]}, another one began at iteration"
                f" {loader.begun_at[0]}, step {loader.begun_at[1]}. Call taas.resume() in every"
                " rank, with the same places"
            )
        plan = loader.plans.get(message.iteration)
        if plan is not None and plan.begun and plan.epoch != message.epoch:
            return (
                f"ranks disagree about the epoch of '{loader.facts.name}': this rank called"
                f" set_epoch({message.epoch}), another one set_epoch({plan.epoch}), both for"
                f" iteration {message.iteration}. Call set_epoch with the same number in every rank"
            )
        return ""

    def _refusal(self, loader: LoaderState) -> str:
        length = loader.facts.length
        if (
            self.uneven == "raise"
            and length is not None
            and not loader.facts.per_rank
            and length % self.n
        ):
            return f"'{loader.facts.name}' {uneven_message(length, self.n)}"
        return loader.facts.error

    def close(self, rank: int, plan_id: int) -> None:
        """Close a plan for a rank, which requests no more of it."""
        plan = self.by_number.get(plan_id)
        if plan is None or plan.ranks[rank].closed:
            return
        self.dropped += plan.close(rank)
        if plan.closed:
            loader = self.loaders[plan.loader]
            loader.rows_before = loader.rows_closed
            loader.rows_closed += min(view.consumed for view in plan.ranks)
            self._forget(plan)

    def consume(self, rank: int, plan_id: int, consumed: int, asked: int) -> None:
        """Record that a rank has consumed steps, and requested the one after ``asked``."""
        plan = self.by_number.get(plan_id)
        if plan is not None:
            view = plan.ranks[rank]
            view.asked = max(view.asked, asked)
            self.loaders[plan.loader].delivered += len(plan.consume(rank, consumed))

    def tell_end(self, plan: Plan, only: int | None = None) -> None:
        """Tell the ranks in a plan how it ends, once that is known; ``only``: only this rank."""
        if not plan.ended:
            return
        name = self.loaders[plan.loader].facts.name
        refusal = plan.refusal and f"'{name}': {plan.refusal}"
        ended = Ended(plan.ident, plan.rows, plan.failure, refusal)
        for rank, view in enumerate(plan.ranks):
            if view.begun and not view.closed and only in (None, rank):
                self.tell(rank, ended)

    def _drop(self, plan: Plan) -> None:
        for rank in range(self.n):
            self.dropped += plan.close(rank)
            self.tell(rank, Cancel(plan.ident, plan.loader, undone=True))
        self._forget(plan, undone=True)

    def _forget(self, plan: Plan, *, undone: bool = False) -> None:
        del self.by_number[plan.ident], self.loaders[plan.loader].plans[plan.iteration]
        peers = [PLANNER, *([self.owners[plan.loader]] if plan.loader in self.owners else [])]
        self.outbox += [(peer, Cancel(plan.ident, plan.loader, undone)) for peer in peers]

    # ── leasing ───────────────────────────────────────────────────────────────────────────────────

    def heads(self, loader: LoaderState) -> Iterator[tuple[Plan, int]]:
        """Yield (plan, rank) pairs whose next work may be leased, the most urgent first."""
        for _, plan in sorted(loader.plans.items()):
            ready = [
                (view.queue[0].step, rank)
                for rank, view in enumerate(plan.ranks)
                if view.queue and (view.begun or view.queue[0].step < self.prebuffer_rows)
            ]
            for _, rank in sorted(ready):
                yield plan, rank
