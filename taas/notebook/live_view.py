"""What a cell shows of runs, updated in place: its own run's line, above what its ranks show and ask, and ``%taas status``."""

from __future__ import annotations

import getpass
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from IPython.core.error import StdinNotImplementedError

from taas.capture import NOTHING, Applied
from taas.capture.cells import cell_numbers
from taas.capture.collected import collect
from taas.notebook.cell_output import CellOutput, follow, say
from taas.notebook.tables import Shown, line, notification, status
from taas.notebook.watched_run import WatchedRun
from taas.runs.events import COLLECTED
from taas.runs.reader import RunReader
from taas.runs.records import RunRecord, read_records
from taas.wire.ranks import Answer, Asking

_DISPLAY_SECONDS = 1.0
"""Between two messages of a view, but where something is new that a person waits for."""
_TURN_SECONDS = 0.3
"""So long after an answer the next question is expected of the same rank: a debugger asks again and again."""


class _Updated:
    """A view that a front end replaces in place, when its text differs; the finished notebook keeps the last one."""

    def __init__(self, publisher: Any) -> None:
        self._publisher = publisher
        self._transient = {"display_id": f"taas-{time.monotonic_ns()}"}
        self._shown: Shown | None = None

    def show(self, view: Shown, *, below: bool = False) -> None:
        """Show it in place of the last one, or below what the cell shows now."""
        if below or view != self._shown:
            update, self._shown = self._shown is not None and not below, view
            self._publisher.publish(
                view._repr_mimebundle_(), metadata={}, transient=self._transient, update=update
            )


class _LiveLine:
    """One run's line, with its ranks folded below it, updated once a second, and when its state changes.

    Without a kernel (IPython in a terminal) an update would be one more line: there the run's beginning, what is
    wrong, and its end are printed.
    """

    def __init__(self, record: RunRecord, shell: Any) -> None:
        self.record = record
        self._display = _Updated(shell.display_pub) if hasattr(shell, "kernel") else None
        self._run, self._printed = WatchedRun(), ""
        self._at = 0.0
        if record.cell.spec.notify and self._display is not None:
            shell.display_pub.publish(notification(record))
        self.refresh(final=True)

    def show(self, record: RunRecord) -> None:
        before, self.record = self.record, record
        news = (
            (record.trouble is not None and record.trouble != before.trouble)
            or (record.waiting and record.waiting != before.waiting)
            or (record.state == "finishing" != before.state)
        )
        if self._display is None and news:
            say(*line(record).text.splitlines())
        elif self._display is not None:
            self.refresh(final=bool(news or record.state != before.state))

    def refresh(self, *, final: bool = False) -> None:
        if not final and time.monotonic() < self._at + _DISPLAY_SECONDS:
            return
        self._at = time.monotonic()
        if self._display is not None:
            self._display.show(self._run.of(self.record, kept=True))
        elif (text := line(self.record).text) != self._printed:
            self._printed = text
            say(*text.splitlines())

    def show_again(self) -> None:
        """Show the line below what the cell shows now: the cell has cleared its output, and the line with it."""
        if self._display is not None:
            self._display.show(self._run.of(self.record, kept=True), below=True)


class RunView:
    """A run as its cell shows it: the cell that launched it, or one that came back to it. A context manager.

    Args:
        record: the run.
        shell: the notebook's.
        send: sends a person's answer to the run's supervisor.
        live: it is shown as it is written.

    Attributes:
        reader: reads it.
        line: says how it is going.
        output: what its ranks show.
    """

    def __init__(
        self, record: RunRecord, shell: Any, send: Callable[[Answer], None], *, live: bool = False
    ) -> None:
        self._shell, self._send, self.reader = shell, send, RunReader(record)
        self.line, self.output = _LiveLine(record, shell), CellOutput(shell, live=live)
        self.output.above = self.line.show_again
        self._answered: set[tuple[int, int, int]] = set()
        """By start of the run, rank and number: the questions that were answered here."""
        self._turn, self._turn_until = -1, 0.0

    def follow(
        self,
        look: Callable[[], None] = lambda: None,
        wait: Callable[[float], None] | None = None,
        ask: Callable[[RunRecord], bool] | None = None,
    ) -> RunRecord:
        """Show what there is and what comes, until the run is over; returns its last record.

        Args:
            look: called several times a second.
            wait: as in :func:`~taas.notebook.cell_output.follow`.
            ask: calls :meth:`ask`, if this is the time for it.
        """

        def look_round(record: RunRecord) -> None:
            if record.live:  # its end is shown below all that it has printed
                self.line.show(record)
                for question in record.questions:
                    self.output.show(self.reader.include(question.rank))
            look()

        return follow(self.reader, self.output, look_round, wait, ask or self.ask)

    def ask(self, record: RunRecord) -> bool:
        """Ask the person what a rank wants to know next; returns whether there was something.

        A rank keeps its turn as long as it asks on.

        Raises:
            KeyboardInterrupt: the person did not answer.
        """
        start = record.restarts
        found = [one for one in record.questions if (start, one.rank, one.number) not in self._answered]
        asked = next((one for one in found if one.rank == self._turn), None)
        if asked is None and time.monotonic() >= self._turn_until:
            asked = next(iter(found), None)
        if asked is None:
            return False
        self.output.send()
        self.line.refresh(final=True)  # it stands still until there is an answer
        text, refused = self._read(asked, record)
        self._answered.add((start, asked.rank, asked.number))
        self._turn, self._turn_until = asked.rank, time.monotonic() + _TURN_SECONDS
        self._send(Answer(run=record.name, rank=asked.rank, number=asked.number, text=text, refused=refused))
        return True

    def _read(self, asked: Asking, record: RunRecord) -> tuple[str, str]:
        prompt = asked.prompt if record.cell.spec.world_size == 1 else f"[rank {asked.rank}] {asked.prompt}"
        kernel = getattr(self._shell, "kernel", None)
        try:
            if kernel is None:
                return (getpass.getpass(prompt) if asked.hidden else input(prompt)), ""
            return (kernel.getpass(prompt) if asked.hidden else kernel.raw_input(prompt)), ""
        except EOFError:
            return "", "the person at the keyboard closed the input"
        except StdinNotImplementedError as error:
            return "", str(error)

    def take(self, applied: Applied, *, numbered: bool = True) -> None:
        """Show what came with the names: ``Out[n]`` and ``_``, widgets, and what could not come.

        Args:
            applied: what became of the answer.
            numbered: tracebacks may name the cells of its functions by their numbers, which are this notebook's.
        """
        if applied.value is not NOTHING:
            self._shell.displayhook.update_user_ns(applied.value)
        self.output.names_came()
        if numbered:
            cell_numbers(self._shell).update(applied.cells)
        if applied.lost:
            say(f"did not come back: {'; '.join(applied.lost)}")

    def collect(self) -> None:
        """Let :data:`taas.collected` have what the header asked of each rank, once the names have come."""
        record = self.reader.record
        if record.cell.spec.collect:
            say(*collect(record.cell.spec.collect, record.rank_folders()))
            for folder in record.rank_folders() if not record.background else ():
                (folder / COLLECTED).unlink(missing_ok=True)  # as the names of such a run, it comes once

    def end(self) -> None:
        """Show how the run ended."""
        record = self.reader.record
        if record.cell.spec.notify:
            self._notify(record)
        if record.notices or record.outcome != "done":
            self.output.settle()  # there is more to be shown
        self.line.record = record
        self.line.refresh(final=True)
        say(*record.notices)

    def _notify(self, record: RunRecord) -> None:
        if hasattr(self._shell, "kernel"):
            self._shell.display_pub.publish(notification(record))
        else:
            sys.stdout.write("\a")

    def __enter__(self) -> RunView:
        return self

    def __exit__(self, *_: object) -> None:
        self.line.show(self.reader.look(at_once=True))  # if the cell leaves it early, it may have been lost
        self.line.refresh(final=True)
        self.reader.close()


class LiveDisplay:
    """What goes on, in the cell that asked: updated once a second by a thread of the kernel, until it is over.

    Args:
        publisher: the shell's.
        look: returns what there is to be shown now, and whether it goes on.
    """

    def __init__(self, publisher: Any, look: Callable[[], tuple[Shown, bool]]) -> None:
        self._display, self._look = _Updated(publisher), look
        self._superseded = threading.Event()
        if self._show():
            threading.Thread(target=self._follow, name="taas-display", daemon=True).start()

    def _show(self) -> bool:
        shown, goes_on = self._look()
        self._display.show(shown)
        return goes_on

    def _follow(self) -> None:
        while not self._superseded.wait(_DISPLAY_SECONDS) and self._show():
            pass


class LiveTable(LiveDisplay):
    """The table of runs; a newer one takes its place, and the older one stays as it was last."""

    _newest: LiveTable | None = None

    def __init__(self, publisher: Any, own: Callable[[list[RunRecord]], list[RunRecord]]) -> None:
        def look() -> tuple[Shown, bool]:
            records = read_records()
            return status(records, own=own(records), kept=True), any(record.live for record in records)

        super().__init__(publisher, look)
        if LiveTable._newest is not None:
            LiveTable._newest._superseded.set()
        LiveTable._newest = self
