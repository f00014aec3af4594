"""Decides how far ahead of the ranks workers may make elements. Pure; no I/O."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial

from taas.delivery.config import DeliveryConfig
from taas.delivery.plan import Plan
from taas.delivery.plans import Plans
from taas.delivery.slab import SlotTable, slot_size

_AHEAD = 1024
"""The most elements under way or ready for one rank and loader."""
_ALWAYS = 2
"""The number of elements of a plan that may always be under way or ready for a rank."""
_LEAST = 1 << 10
"""The least bytes that an element of a stream counts for."""
_BEGIN = 4 << 20
"""The bytes that workers make ahead at first, until a rank had to wait."""


@dataclass(slots=True)
class RankState:
    """A rank's slab, and how far workers may be ahead of it."""

    slots: SlotTable
    waited: float = 0.0
    targets: dict[int, int] = field(default_factory=dict)  # elements to make ahead, by loader
    blocked: set[int] = field(default_factory=set)  # plans whose target kept a worker idle


class Pace:
    """Bytes and seconds of one loader's recent elements."""

    __slots__ = ("_count", "_previous", "_recent", "seconds", "size")

    def __init__(self) -> None:
        self.size = 0
        self.seconds = 0.0
        self._count = self._recent = self._previous = 0

    def see(self, nbytes: int, seconds: float) -> None:
        """Take in the figures of one element."""
        self._recent = max(self._recent, nbytes)
        self._count += 1
        if self._count % 256 == 0:
            self._previous, self._recent = self._recent, 0
        self.size = slot_size(max(self._recent, self._previous, nbytes))
        self.seconds = seconds if self._count == 1 else 0.9 * self.seconds + 0.1 * seconds


Reserve = Callable[[int, int], int]
"""Reserves memory of a rank's slab up to an offset; returns the offset that was reached."""


class Headroom:
    """How far workers may make elements ahead for the ranks of a run."""

    def __init__(self, plans: Plans, config: DeliveryConfig, reserve: Reserve) -> None:
        self._plans, self._slab = plans, config.slab
        self.paces: dict[int, Pace] = defaultdict(Pace)  # by loader
        size = self._slab if config.folder else 0
        self.ranks = [
            RankState(SlotTable(size, partial(reserve, rank), rank * self._slab))
            for rank in range(plans.n)
        ]

    def take_progress(self, rank: int, waited: float, asked: Iterable[int]) -> None:
        """Record how long a rank has waited in all, and raise the targets that made it wait.

        ``asked`` are the plans that it has asked for.
        """
        state = self.ranks[rank]
        if waited - state.waited > 0.0005:
            for plan in state.blocked.intersection(asked) & self._plans.by_number.keys():
                loader = self._plans.by_number[plan].loader
                state.targets[loader] = min(2 * state.targets[loader], _AHEAD)
        state.waited = waited
        state.blocked.clear()

    def is_left(self, rank: int, plan: Plan, workers: int) -> bool:
        """Return whether ``workers`` workers may make one more element of a plan for a rank.

        Two may always be under way in each plan, whatever other plans hold, so that an iterator
        which is only kept open blocks no other. The owner of a stream keeps the elements that a
        slow rank has not taken: at most a slab full.
        """
        view = plan.ranks[rank]
        ahead, size = len(view.unconsumed), self.paces[plan.loader].size
        if plan.streamed:
            kept = view.queue[0].step - plan.lowest
            if kept > self._slab // max(size, _LEAST):
                return False
        if ahead < _ALWAYS:
            return True
        if size == 0:  # the size is not known yet: one element for each worker of this rank
            workers_of_rank = -(-workers // len(self.ranks))
            return ahead < workers_of_rank
        if ahead >= self._target(rank, plan.loader, size, workers):
            self.ranks[rank].blocked.add(plan.ident)
            return False
        return self._fits(rank, plan, size)

    def _fits(self, rank: int, plan: Plan, size: int) -> bool:
        """Return whether an element of this size fits into the rank's slab and the plan's share."""
        nbytes = sharers = 0
        for other in self._plans.by_number.values():
            view = other.ranks[rank]
            nbytes += view.nbytes
            sharers += other is plan or (view.begun and not view.closed)
        own = plan.ranks[rank].nbytes
        return nbytes + size <= self._slab and own + size <= self._slab // sharers

    def _target(self, rank: int, loader: int, size: int, workers: int) -> int:
        """Return how many elements to make ahead.

        They are few at first, because few stay in the caches; ``take_progress`` raises the number.
        """
        targets, least = self.ranks[rank].targets, self._plans.prebuffer_rows
        if loader not in targets:
            some = max(3 * workers // len(self.ranks) + 2, least)
            targets[loader] = max(some, min(256, _BEGIN // size))
        return min(targets[loader], max(_AHEAD, least))
