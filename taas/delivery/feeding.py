"""Streams of iterable datasets: each has one owner among the workers, who makes it in its order, ahead of the ranks."""

from __future__ import annotations

from collections.abc import Callable, Collection

from taas.delivery.messages import Feed, Peer, StreamPlace
from taas.delivery.plan import Plan, PlanStream
from taas.delivery.planbook import LoaderBook, PlanBook


class StreamFeeder:
    """Who owns which stream, and how far each was told to make it.

    Args:
        workers: by name.
        prefetch_limit: how many elements of a loader an owner may hold for ranks that leave theirs.

    Attributes:
        held_up: loaders whose ranks wait for others, because no more may be held.
    """

    def __init__(
        self, book: PlanBook, workers: Collection[Peer], prefetch_limit: Callable[[int], int]
    ) -> None:
        self._book, self._workers, self._prefetch_limit = book, workers, prefetch_limit
        self.held_up: set[int] = set()
        self._owners: dict[tuple[int, int], Peer] = {}

    def disown(self, name: Peer) -> None:
        """A worker is dead: its streams get other owners."""
        for key in [key for key, owner in self._owners.items() if owner == name]:
            del self._owners[key]
        for plan in self._book.plans.values():
            for stream in plan.streams:
                if stream.told is not None and stream.told[0] == name:
                    stream.told = None

    def died(self, place: StreamPlace) -> int:
        """A stream's owner died of an element: return how many have by now, one after the other."""
        plan = self._book.plans.get(place.plan)
        if plan is None:
            return 0
        stream = plan.streams[place.stream]
        stream.deaths = stream.deaths + 1 if stream.died_at == place.position else 1
        stream.died_at = place.position
        return stream.deaths

    def feed(self) -> None:
        """Tell owners how far ahead of the ranks to make their streams."""
        for book in self._book.loaders:
            if not book.facts.streams or not self._workers:
                continue
            for plan in list(book.plans.values()):
                if plan.base_seed is not None and not plan.closed and (not plan.ended or self._unsent(plan)):
                    for stream in plan.streams:
                        self._feed(book, plan, stream)

    def owner(self, loader: int, stream: int) -> Peer | None:
        """Return a stream's owner."""
        return self._owners.get((loader, stream))

    @staticmethod
    def _unsent(plan: Plan) -> bool:
        return any(view.queue or view.unconsumed for view in plan.ranks)

    def _feed(self, book: LoaderBook, plan: Plan, stream: PlanStream) -> None:
        name = self._owner(book, stream.number)
        if name is None:
            return
        rows = self._book.prebuffer_rows if not plan.begun else max(2, self._book.prebuffer_rows)
        left = book.rows_left(plan)
        if left is not None:
            rows = min(rows, max(0, left - plan.rows) + 1)
        lookahead = max(2, -(-rows * self._book.n // book.facts.streams) + 1)
        upto = self._ahead(plan, stream, lookahead)
        if stream.told is not None and stream.told[0] == name and stream.told[1] >= upto:
            return
        stream.told = (name, upto)
        assert plan.order is not None
        floor = min(plan.waiting(stream.number), default=plan.order.round)
        upto = max(upto, floor + lookahead)
        if stream.broken_at is not None:
            upto = min(upto, stream.broken_at)
        assert plan.base_seed is not None
        number, seed = stream.number, plan.base_seed
        feed = Feed(plan.ident, book.index, plan.iteration, number, seed, floor, upto)
        self._book.outbox.append((name, feed))

    def _ahead(self, plan: Plan, stream: PlanStream, lookahead: int) -> int:
        """Up to which position to make a stream: a little ahead of what has left.

        Where a rank has nothing to come because others leave theirs, the owner holds theirs, up to a limit.
        """
        empty_handed = any(
            view.begun and not (view.closed or view.queue or view.unconsumed) for view in plan.ranks
        )
        if not (empty_handed and self._unsent(plan)):
            return stream.left + lookahead
        held, most = stream.made - stream.left, self._prefetch_limit(plan.loader)
        if held >= most:
            self.held_up.add(plan.loader)
        return stream.left + max(lookahead, min(held + lookahead, most))

    def _owner(self, book: LoaderBook, stream: int) -> Peer | None:
        """Return a stream's owner, or choose the worker with the fewest streams."""
        name = self._owners.get((book.index, stream))
        if name is not None:
            return name
        load = dict.fromkeys(self._workers, 0)
        for owner in self._owners.values():
            if owner in load:
                load[owner] += 1
        if not load:
            return None
        name = self._owners[book.index, stream] = min(load, key=lambda name: load[name])
        return name
