"""How a delivery stands: when the ranks may begin, what a person sees and is told."""

from __future__ import annotations

from collections.abc import Iterator

from taas.delivery.config import Delivered, DeliveryConfig
from taas.delivery.ledger import Ledger
from taas.delivery.messages import Note, ProgressReport, Report
from taas.delivery.planbook import LoaderBook

_RATE_SECONDS = 2.0
"""Rates are those of so long a time, at least."""


def notes_of_registration(book: LoaderBook, config: DeliveryConfig) -> Iterator[Note]:
    """Yield what is known of a loader before its first element is made."""
    if book.facts.note:
        yield Note(book.facts.note)
    ranks, units = config.ranks, config.units_of(book.facts.name)
    if units is not None and units % ranks:
        yield Note(
            f"'{book.facts.name}': {units} units over {ranks} ranks are {units // ranks} steps a rank; "
            f"{units % ranks} units are left over"
        )


class ProgressMeter:
    """Reads the ledger; says something only when it has changed."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._since: tuple[float, int] | None = None
        self._last: ProgressReport | None = None
        self._prebuffered = False
        self._held_up: set[int] = set()

    def read(self, now: float) -> Iterator[Report]:
        """Yield what is new at ``now`` (monotonic seconds)."""
        ledger = self._ledger
        if not self._prebuffered and self._is_prebuffered():
            self._prebuffered = True
            for book in ledger.plans.loaders:
                if self._lacks(book) > 0 and ledger.is_full(book):
                    yield Note(
                        f"'{book.facts.name}': the ranks began with {book.ready} elements made, not with "
                        f"{book.ready + self._lacks(book)}: the buffer holds no more ([delivery] buffer in taas.toml)"
                    )
        for loader in ledger.streams.held_up - self._held_up:
            self._held_up.add(loader)
            yield Note(
                f"'{ledger.plans.loaders[loader].facts.name}' is one stream for all ranks: some ranks wait for one that "
                "does not take its elements, as many as a rank's buffer holds. Let every rank iterate it, or make the "
                "buffer larger ([delivery] buffer in taas.toml)"
            )
        report = self.report(now)
        if report != self._last:
            self._last = report
            yield report

    def report(self, now: float) -> ProgressReport:
        """Return how far it is."""
        ledger = self._ledger
        books = ledger.plans.loaders
        waited = [rank.waited for rank in ledger.room.ranks]
        places = {book.facts.name: book.place for book in books}
        return ProgressReport(
            Delivered(
                ready=sum(book.ready for book in books),
                delivered=sum(book.delivered for book in books),
                planned=sum(book.planned(begun=True) if book.units is None else book.units for book in books),
                rate=self._rate(now, sum(book.delivered for book in books)),
                waited=round(sum(waited) / len(waited), 4),
            ),
            len(ledger.workers),
            self._prebuffered,
            ledger.plans.is_over,
            {name: place for name, place in places.items() if place is not None},
        )

    def _is_prebuffered(self) -> bool:
        books = self._ledger.plans.loaders
        return bool(books) and all(
            self._lacks(book) <= 0
            or book.facts.error
            or any(plan.ended and not plan.rows for plan in book.plans.values())
            or self._ledger.is_full(book)
            for book in books
        )

    def _lacks(self, book: LoaderBook) -> int:
        """Elements that are still to be made before the ranks begin."""
        asked = self._ledger.plans.prebuffer_rows * book.ranks
        return min(asked, book.planned() or 1) - book.ready

    def _rate(self, now: float, delivered: int) -> float:
        since, before = self._since or (now, delivered)
        if self._since is None or now - since > _RATE_SECONDS:
            self._since = now, delivered
        return round((delivered - before) / (now - since), 3) if now > since else 0.0
