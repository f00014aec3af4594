"""How far ahead of the ranks may be worked, in elements and in streams of iterable datasets. Pure; no I/O.

A stream has one owner among the workers, who makes it in its order.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from functools import partial

from taas.delivery.config import DeliveryConfig
from taas.delivery.messages import Feed, Peer, StreamPlace
from taas.delivery.plan import Plan, PlanStream
from taas.delivery.planbook import LoaderBook, Plans
from taas.delivery.slab import SlotTable, slot_size

_AHEAD = 1024
"""Most elements under way or ready for one rank and loader."""
_BEGIN = 4 << 20
"""Bytes to begin working ahead with, before it shows that more is of use."""


@dataclass(slots=True)
class RankState:
    """A rank: its slab, and how far ahead of it is worked."""

    slots: SlotTable
    waited: float = 0.0
    targets: dict[int, int] = field(default_factory=dict)  # by loader, how many ahead were enough so far
    blocked: set[int] = field(default_factory=set)  # plans whose target held an idle worker back


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


class Headroom:
    """What may be made ahead for the ranks of a run."""

    def __init__(self, plans: Plans, config: DeliveryConfig, reserve: Reserve) -> None:
        self._plans, self._slab = plans, config.slab
        self.paces: dict[int, Pace] = defaultdict(Pace)  # by loader
        size = self._slab if config.folder else 0
        self.ranks = [
            RankState(SlotTable(size, partial(reserve, rank), rank * self._slab)) for rank in range(plans.n)
        ]

    def progressed(self, rank: int, waited: float, asked: Iterable[int]) -> None:
        """A rank has waited so long in all, and asked of these plans: nobody is held back there any longer."""
        state = self.ranks[rank]
        if waited - state.waited > 0.0005:
            for plan in state.blocked.intersection(asked) & self._plans.by_number.keys():
                loader = self._plans.by_number[plan].loader
                state.targets[loader] = min(2 * state.targets[loader], _AHEAD)
        state.waited = waited
        state.blocked.clear()

    def is_left(self, rank: int, plan: Plan, workers: int) -> bool:
        """Whether one more element of a plan may be made for a rank, by so many workers as there are.

        Two may be under way in every plan, whatever others hold: an iterator that is only kept open holds nobody up.
        """
        view = plan.ranks[rank]
        ahead, size = len(view.unconsumed), self.paces[plan.loader].size
        if ahead < 2 or not size:
            return ahead < max(2, -(-workers // len(self.ranks)))
        if ahead >= self._target(rank, plan.loader, size, workers):
            self.ranks[rank].blocked.add(plan.ident)
            return False
        nbytes = sharers = 0
        for other in self._plans.by_number.values():
            there = other.ranks[rank]
            nbytes += there.nbytes
            sharers += other is plan or (there.begun and not there.closed)
        return nbytes + size <= self._slab and view.nbytes + size <= self._slab // sharers

    def _target(self, rank: int, loader: int, size: int, workers: int) -> int:
        """How many elements ahead: few, which stay in the caches, until ``progressed`` finds them too few."""
        targets, least = self.ranks[rank].targets, self._plans.prebuffer_rows
        if loader not in targets:
            some = max(3 * workers // len(self.ranks) + 2, least)
            targets[loader] = max(some, min(256, _BEGIN // size))
        return min(targets[loader], max(_AHEAD, least))

    def of_stream(self, loader: int) -> int:
        """How many elements of a stream its owner may hold for ranks that do not take them: a slab full."""
        return self._slab // max(self.paces[loader].size, 1 << 10)


# ── streams of iterable datasets ──────────────────────────────────────────────────────────────────────


class StreamFeeder:
    """Who owns which stream, and how far ahead of the ranks each was told to make it."""

    def __init__(self, plans: Plans, workers: Collection[Peer], prefetch_limit: Callable[[int], int]) -> None:
        self._plans, self._workers, self._prefetch_limit = plans, workers, prefetch_limit
        self.held_up: set[int] = set()  # loaders whose ranks wait for others, because no more may be held
        self.owners: dict[tuple[int, int], Peer] = {}  # by loader and stream

    def disown(self, name: Peer) -> None:
        """A worker is dead: its streams get other owners, who are not told anything yet."""
        self.owners = {key: owner for key, owner in self.owners.items() if owner != name}

    def died(self, place: StreamPlace) -> int:
        """A stream's owner died of an element: return how many have by now, one after the other."""
        plan = self._plans.by_number.get(place.plan)
        if plan is None:
            return 0
        stream = plan.order.streams[place.stream]
        stream.deaths = stream.deaths + 1 if stream.died_at == place.position else 1
        stream.died_at = place.position
        return stream.deaths

    def feed(self) -> None:
        """Tell owners how far ahead of the ranks to make their streams."""
        for plan in self._plans.by_number.values() if self._workers else ():
            if plan.base_seed is not None and not plan.closed and (not plan.ended or self._unsent(plan)):
                for stream in plan.order.streams:
                    self._feed(self._plans.loaders[plan.loader], plan, stream)

    @staticmethod
    def _unsent(plan: Plan) -> bool:
        return any(view.queue or view.unconsumed for view in plan.ranks)

    def _feed(self, book: LoaderBook, plan: Plan, stream: PlanStream) -> None:
        name = self._owner(book, stream.number)
        rows = self._plans.prebuffer_rows if not plan.begun else max(2, self._plans.prebuffer_rows)
        left = book.rows_left(plan)
        if left is not None:
            rows = min(rows, max(0, left - plan.rows) + 1)
        lookahead = max(2, -(-rows * self._plans.n // book.facts.streams) + 1)
        upto = self._ahead(plan, stream, lookahead)
        if stream.told is not None and stream.told[0] == name and stream.told[1] >= upto:
            return
        stream.told = (name, upto)
        floor = min(plan.waiting(stream.number), default=plan.order.round)
        upto = max(upto, floor + lookahead)
        if stream.broken_at is not None:
            upto = min(upto, stream.broken_at)
        assert plan.base_seed is not None
        number, seed = stream.number, plan.base_seed
        feed = Feed(plan.ident, book.index, plan.iteration, number, seed, floor, upto)
        self._plans.outbox.append((name, feed))

    def _ahead(self, plan: Plan, stream: PlanStream, lookahead: int) -> int:
        """Up to which position to make a stream: a little ahead of what has left.

        Where a rank has nothing to come because others leave theirs, the owner holds theirs, up to a limit.
        """
        if not self._unsent(plan) or all(
            view.closed or view.queue or view.unconsumed or not view.begun for view in plan.ranks
        ):
            return stream.left + lookahead
        held, most = stream.made - stream.left, self._prefetch_limit(plan.loader)
        if held >= most:
            self.held_up.add(plan.loader)
        return stream.left + max(lookahead, min(held + lookahead, most))

    def _owner(self, book: LoaderBook, stream: int) -> Peer:
        """Return a stream's owner, or choose the worker with the fewest streams."""
        key = (book.index, stream)
        if key not in self.owners:
            load = Counter(self.owners.values())
            self.owners[key] = min(self._workers, key=lambda name: load[name])
        return self.owners[key]
