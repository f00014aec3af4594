"""The table of ``%taas status``, updated in place while runs go on."""

from __future__ import annotations

import threading
from typing import Any

from taas.records import read_records
from taas.status import Shown, status

__all__ = ["LiveTable"]

_SECONDS = 1.0


class LiveTable:
    """What goes on, in the cell that asked: its display is updated once a second, until no run goes on.

    A newer table takes its place; the older one stays as it was last. The updates come from a thread of the
    kernel, which ends with the last run.
    """

    _newest: LiveTable | None = None

    def __init__(self, publisher: Any) -> None:
        self._publisher = publisher
        self._transient = {"display_id": f"taas-status-{id(self)}"}
        self._superseded = threading.Event()
        if LiveTable._newest is not None:
            LiveTable._newest._superseded.set()
        LiveTable._newest = self
        self._shown, live = self._look()
        self._publish(update=False)
        if live:
            threading.Thread(target=self._follow, name="taas-status", daemon=True).start()

    def _look(self) -> tuple[Shown, bool]:
        records = read_records()
        return status(records), any(record.live for record in records)

    def _publish(self, *, update: bool) -> None:
        bundle = self._shown._repr_mimebundle_()
        self._publisher.publish(bundle, metadata={}, transient=self._transient, update=update)

    def _follow(self) -> None:
        live = True
        while live and not self._superseded.wait(_SECONDS):
            shown, live = self._look()
            if shown != self._shown:
                self._shown = shown
                self._publish(update=True)
