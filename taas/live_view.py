"""The line in a cell that says how its run is going, updated in place."""

from __future__ import annotations

import time
from typing import Any

from taas.cell_output import say
from taas.messages.clients import Progressed, RunEnded, StartedAgain, StateChanged, Troubled
from taas.messages.wire import Message
from taas.records import RunRecord
from taas.status import line

__all__ = ["LiveView"]

_SHORTEST_SECONDS = 0.25


class LiveView:
    """One run's line.

    A front end shows it by one display that is updated, four times a second at most and only when its text
    differs; the finished notebook keeps the last one. Without a kernel (IPython in a terminal) an update would be
    one more line: there the run's beginning and what is wrong are printed.
    """

    def __init__(self, record: RunRecord, shell: Any) -> None:
        self.record = record
        self._publisher = shell.display_pub
        self._updates = hasattr(shell, "kernel")
        self._transient = {"display_id": f"taas-{record.id}-{time.monotonic_ns()}"}
        self._shown = ""
        self._at = 0.0
        if self._updates:
            self._publish(update=False)
        else:
            say(line(record).text)

    def note(self, message: Message) -> None:
        """Take in what the supervisor said."""
        match message:
            case StateChanged():
                self.record.state, self.record.waiting = message.state, message.detail
                self.record.device = message.device or self.record.device
                if message.detail and not self._updates:
                    say(*line(self.record).text.splitlines())
            case StartedAgain():
                self.record.restarts = message.restarts
            case Progressed():
                self.record.delivered = message.delivered
            case Troubled():
                self.record.trouble = message.trouble
                if message.trouble is not None and not self._updates:
                    say(*line(self.record).text.splitlines())
            case RunEnded():
                self.record.state, self.record.outcome, self.record.ended = (
                    "over",
                    message.outcome,
                    time.time(),
                )

    def replace(self, record: RunRecord) -> None:
        """Show what the record says now."""
        if record.trouble != self.record.trouble and record.trouble is not None and not self._updates:
            say(*line(record).text.splitlines())
        self.record = record

    def refresh(self, *, final: bool = False) -> None:
        """Update the line, if it is time and there is something new."""
        if self._updates and (final or time.monotonic() >= self._at + _SHORTEST_SECONDS):
            self._publish(update=True)

    def _publish(self, *, update: bool) -> None:
        shown = line(self.record)
        self._at = time.monotonic()
        if shown.text == self._shown:
            return
        self._shown = shown.text
        self._publisher.publish(
            shown._repr_mimebundle_(), metadata={}, transient=self._transient, update=update
        )
