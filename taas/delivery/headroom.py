"""Decides how far ahead of the ranks workers may make batches. Pure; no I/O."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial

from taas.delivery.plan import Plan
from taas.delivery.plans import Plans
from taas.delivery.slab import SlotTable, slot_size
from taas.protocol.delivery_orders import DeliveryConfig

_AHEAD = 1024
"""The most batches in progress or ready for one rank and loader."""
_ALWAYS = 2
"""The number of batches of a plan that may always be in progress or ready for a rank."""
_LEAST = 1 << 10
"""The fewest bytes that a batch of a stream counts for."""
_BEGIN = 4 << 20
"""How many bytes are made ahead at first, until a rank has had to wait."""
_WAITED = 0.0005
"""A rank that has waited for more seconds than this since its last report had too few ahead."""


@dataclass(slots=True)
class RankState:
    """A rank's slab, and how far workers may be ahead of it."""

    slots: SlotTable
    waited: float = 0.0
    targets: dict[int, int] = field(default_factory=dict)  # batches to make ahead, by loader
    blocked: set[int] = field(default_factory=set)  # plans whose target kept a worker idle


class Pace:
    """Bytes and seconds of one loader's recent batches."""

    __slots__ = ("_count", "_previous", "_recent", "seconds", "size")

    def __init__(self) -> None:
        self.size = 0
        self.seconds = 0.0
        self._count = self._recent = self._previous = 0

    def see(self, nbytes: int, seconds: float) -> None:
        """Record the figures of one batch."""
        self._recent = max(self._recent, nbytes)
        self._count += 1
        if self._count % 256 == 0:
            self._previous, self._recent = self._recent, 0
        self.size = slot_size(max(self._recent, self._previous, nbytes))
        self.seconds = seconds if self._count == 1 else 0.9 * self.seconds + 0.1 * seconds


Reserve = Callable[[int, int], int]
"""Reserves memory of a rank's slab up to an offset; returns the offset that was reached."""


class Headroom:
    """How far workers may make batches ahead for the ranks of a run."""

    def __init__(self, plans: Plans, config: DeliveryConfig, reserve: Reserve) -> None:
        self._plans, self._slab = plans, config.slab
        self.paces: dict[int, Pace] = defaultdict(Pace)  # by loader
        size = self._slab if config.folder else 0
        self.ranks = [
            RankState(SlotTable(size, partial(reserve, rank), rank * self._slab))
            for rank in range(plans.n)
        ]

    def take_progress(self, rank: int, waited: float, asked: Iterable[int]) -> None:
        """Record how long a rank has waited in total, and raise the targets that made it wait.

        ``asked`` are the open plans from which it requests batches.
        """
        state = self.ranks[rank]
        if waited - state.waited > _WAITED:
            for number in state.blocked.intersection(asked) & self._plans.by_number.keys():
                loader = self._plans.by_number[number].loader
                state.targets[loader] = min(2 * state.targets[loader], _AHEAD)
        state.waited = waited
        state.blocked.clear()

    def is_left(self, rank: int, plan: Plan, workers: int) -> bool:
        """Return whether ``workers`` workers may make one more batch of a plan for a rank.

        The first of these rules that applies decides. If it is the target, the plan is marked as
        blocked, so that ``take_progress`` raises the target if the rank has to wait.
        """
        view = plan.ranks[rank]
        ahead = len(view.unconsumed)
        size = self.paces[plan.loader].size

        # The owner of a stream keeps the batches that a slow rank has not taken, up to the size
        # of a slab.
        if plan.streamed:
            kept = view.queue[0].step - plan.lowest
            if kept > self._slab // max(size, _LEAST):
                return False

        # A few may be in progress in every plan, whatever other plans hold, so that an iterator
        # that is only kept open blocks no other.
        if ahead < _ALWAYS:
            return True

        # Their size is not known yet: one for each worker of this rank.
        if size == 0:
            workers_of_rank = -(-workers // len(self.ranks))
            return ahead < workers_of_rank

        if ahead >= self._target(rank, plan.loader, size, workers):
            self.ranks[rank].blocked.add(plan.ident)
            return False

        return self._fits(rank, plan, size)

    def _fits(self, rank: int, plan: Plan, size: int) -> bool:
        """Return whether a batch of this size fits into the rank's slab and the plan's share."""
        in_slab = 0  # bytes of all plans
        sharers = 0  # plans that the rank is in, and this one
        for other in self._plans.by_number.values():
            view = other.ranks[rank]
            in_slab += view.nbytes
            is_in_it = view.begun and not view.closed
            if is_in_it or other is plan:
                sharers += 1
        of_plan = plan.ranks[rank].nbytes
        share = self._slab // sharers
        return in_slab + size <= self._slab and of_plan + size <= share

    def _target(self, rank: int, loader: int, size: int, workers: int) -> int:
        """Return how many batches to make ahead.

        There are few at first, because few stay in the caches; ``take_progress`` raises the
        number.
        """
        targets = self.ranks[rank].targets
        prebuffered = self._plans.prebuffer_rows
        if loader not in targets:
            for_workers = 3 * workers // len(self.ranks) + 2
            by_size = min(256, _BEGIN // size)
            targets[loader] = max(for_workers, prebuffered, by_size)
        return min(targets[loader], max(_AHEAD, prebuffered))
