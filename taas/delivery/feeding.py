"""Streams of iterable datasets: each has one owner among the workers, who makes it in its order, ahead of the ranks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping

from taas.delivery.attempts import WorkerState
from taas.delivery.messages import Feed, StreamState
from taas.delivery.plan import Plan, Work
from taas.delivery.planbook import LoaderBook, PlanBook
from taas.delivery.states import States

__all__ = ["StreamFeeder"]


class StreamFeeder:
    """Who owns which stream, how far each was told to make it, and from which state another owner can go on.

    Args:
        hoard: how many elements of a loader an owner may hold for ranks that leave theirs.

    Attributes:
        held_up: loaders whose ranks wait for others, because no more may be held.
    """

    def __init__(
        self, book: PlanBook, workers: Mapping[str, WorkerState], hoard: Callable[[int], int]
    ) -> None:
        self._book, self._workers, self._hoard = book, workers, hoard
        self.held_up: set[int] = set()
        self._owners: dict[tuple[int, int], str] = {}
        self._fed: dict[tuple[int, int], tuple[str, int]] = {}
        self._sent: dict[tuple[int, int], int] = defaultdict(int)
        self._deaths: dict[tuple[int, int], tuple[int, int]] = {}
        self._states: dict[tuple[int, int], States] = defaultdict(States)

    def disown(self, name: str) -> None:
        """A worker is dead or stopped: its streams get other owners."""
        for key in [key for key, owner in self._owners.items() if owner == name]:
            del self._owners[key]
        for place in [place for place, (owner, _) in self._fed.items() if owner == name]:
            del self._fed[place]

    def died(self, plan: int, stream: int) -> int:
        """Its owner died while it made a stream: return how many have by now without any getting further."""
        open_plan = self._book.plans.get(plan)
        if open_plan is None:
            return 0
        made = self._book.loaders[open_plan.loader].orders[plan].made(stream)
        before, deaths = self._deaths.get((plan, stream), (made, 0))
        self._deaths[plan, stream] = made, (deaths + 1 if made == before else 1)
        return self._deaths[plan, stream][1]

    def feed(self) -> None:
        """Tell owners how far ahead of the ranks to make their streams."""
        for book in self._book.loaders:
            if not book.facts.streams or not self._workers:
                continue
            for plan in list(book.plans.values()):
                if (
                    plan.ident in book.base_seeds
                    and not plan.closed
                    and (not plan.ended or self._unsent(plan))
                ):
                    for stream in range(book.facts.streams):
                        self._feed(book, plan, stream)

    def owner(self, loader: int, stream: int) -> str:
        """Return the name of a stream's owner, or ""."""
        return self._owners.get((loader, stream), "")

    def keep(self, plan: int, stream: int, states: list[StreamState]) -> None:
        """A stream's owner has told states of it."""
        for state in states:
            self._states[plan, stream].add(state)

    def sent(self, work: Work) -> None:
        """An element of a stream was made for its rank."""
        if work.stream >= 0 and work.plan in self._book.plans:
            self._sent[work.plan, work.stream] += 1

    def owners_of(self, plan: int) -> set[str]:
        """Return who makes streams of a plan."""
        return {name for (fed, _), (name, _) in self._fed.items() if fed == plan}

    def forget(self, plan: int) -> None:
        """A plan is closed."""
        for table in (self._fed, self._sent, self._states, self._deaths):
            for key in [key for key in table if key[0] == plan]:
                del table[key]

    def _unsent(self, plan: Plan) -> bool:
        return any(view.queue or view.unconsumed for view in plan.ranks)

    def _feed(self, book: LoaderBook, plan: Plan, stream: int) -> None:
        name = self._owner(book, stream)
        if name is None:
            return
        rows = self._book.prebuffer_rows if not plan.begun else max(2, self._book.prebuffer_rows)
        left = book.rows_left(plan)
        if left is not None:
            rows = min(rows, max(0, left - plan.rows) + 1)
        lookahead = max(2, -(-rows * self._book.n // book.facts.streams) + 1)
        upto = self._ahead(plan, stream, lookahead)
        known, fed = self._fed.get((plan.ident, stream), ("", 0))
        if known == name and fed >= upto:
            return
        self._fed[plan.ident, stream] = (name, upto)
        base = book.base_seeds[plan.ident]
        floor = self._floor(plan, stream)
        states = self._states[plan.ident, stream]
        states.settle(floor)
        if known != name:
            states.forget_after(floor)
        begin = states.known if known != name else []
        upto = book.orders[plan.ident].makeable(stream, max(upto, floor + lookahead))
        message = Feed(plan.ident, book.index, plan.iteration, stream, base, floor, upto, begin)
        self._book.outbox.append((name, message))

    def _ahead(self, plan: Plan, stream: int, lookahead: int) -> int:
        """Up to which position to make a stream: a little ahead of what has left.

        Where a rank has nothing to come because others leave theirs, the owner holds theirs, up to a limit.
        """
        left = self._sent[plan.ident, stream] + plan.skipped[stream]
        empty_handed = any(
            view.begun and not (view.closed or view.queue or view.unconsumed) for view in plan.ranks
        )
        if not (empty_handed and self._unsent(plan)):
            return left + lookahead
        made, most = self._book.loaders[plan.loader].orders[plan.ident].made(stream), self._hoard(plan.loader)
        if made - left >= most:
            self.held_up.add(plan.loader)
        return left + max(lookahead, min(made - left + lookahead, most))

    def _floor(self, plan: Plan, stream: int) -> int:
        """The lowest position of a stream that may still be asked of its owner."""
        return min(plan.waiting(stream), default=self._book.loaders[plan.loader].orders[plan.ident].floor())

    def _owner(self, book: LoaderBook, stream: int) -> str | None:
        name = self._owners.get((book.index, stream))
        if name is not None:
            return name
        load: dict[str, int] = {w.name: 0 for w in self._workers.values() if not w.suspect}
        for owner in self._owners.values():
            if owner in load:
                load[owner] += 1
        if not load:
            return None
        name = min(load, key=lambda n: load[n])
        self._owners[book.index, stream] = name
        return name
