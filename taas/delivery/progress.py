"""How far a delivery is, in the numbers that a person sees."""

from __future__ import annotations

from taas.delivery.ledger import Ledger
from taas.delivery.planbook import LoaderBook
from taas.delivery.reports import LoaderProgress, ProgressReport

__all__ = ["ProgressMeter"]

_RATE_SECONDS = 2.0
"""Rates are those of so long a time, at least."""


class ProgressMeter:
    """Reads the ledger; says something only when it has changed."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._before: dict[int, tuple[float, int]] = {}
        self._last: ProgressReport | None = None

    def read(self, now: float) -> ProgressReport | None:
        """Return how far the delivery is at ``now`` (monotonic seconds); None if nothing has changed."""
        ledger = self._ledger
        loaders = [self._loader(book, now) for book in ledger.book.loaders]
        waited = [round(rank.waited, 4) for rank in ledger.ranks]
        report = ProgressReport(loaders, waited, len(ledger.workers))
        if report == self._last:
            return None
        self._last = report
        return report

    def _loader(self, book: LoaderBook, now: float) -> LoaderProgress:
        since, before = self._before.get(book.index, (now, book.delivered))
        rate = (book.delivered - before) / (now - since) if now > since else 0.0
        if now - since > _RATE_SECONDS or book.index not in self._before:
            self._before[book.index] = (now, book.delivered)
        units = None if book.rows_allowed is None else book.rows_allowed * len(self._ledger.ranks)
        return LoaderProgress(
            book.facts.name,
            book.prepared,
            book.ready,
            book.delivered,
            book.planned_for_begun,
            units,
            round(rate, 3),
        )
