"""Read everything about a run from its folder (runs/records.py).

The launching cell, ``attach``, ``logs`` and the command line use this reader, each with its own
display. The reader needs no supervisor, and no rank waits for it; unread output stays in the files.
``finish`` raises the run's error in its cell.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable

from taas import errors
from taas.base.wording import counted, named
from taas.errors import CellFailed, RunLost
from taas.protocol.records import RunRecord, output_folder
from taas.runs.events import Output, RankEvents
from taas.runs.records import read_record

POLL_SECONDS = 0.015  # between two checks for new output
LOOK_SECONDS = 0.1  # between two checks of the record
# length of a rank's unseen output that is shown when the rank asks a question
_LAST_CHARACTERS = 1000
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")


class RunReader:
    """Reads one run: its current record, and the output of its ranks over all its starts, once.

    Args:
        record: the record of the run, as it was when it was found.
        ranks: the ranks whose output is read; None for those that the run shows.
    """

    def __init__(self, record: RunRecord, ranks: Iterable[int] | None = None) -> None:
        self.record, self.removed = record, False
        self._folder = record.folder
        self._ranks = tuple(record.cell.spec.shown_ranks() if ranks is None else ranks)
        self._told = False
        self._look_at = 0.0
        self._open(0)

    def _open(self, start: int) -> None:
        self._start, self._output = start, output_folder(self._folder, start)
        self._files: dict[int, RankEvents] = {}
        for rank in self._ranks:
            self._files[rank] = RankEvents(self._output / str(rank), rank)

    def include(self, rank: int) -> list[Output]:
        """Read this rank's output, too, because the rank asks a question.

        Return the last part of its earlier output.
        """
        if rank in self._ranks:
            return []
        self._ranks = (*self._ranks, rank)
        file, last = RankEvents(self._output / str(rank), rank), list[Output]()
        self._files[rank] = file
        while found := file.read():
            last = [item._replace(text=item.text[-_LAST_CHARACTERS:]) for item in found[-1:]]
        return last

    @property
    def over(self) -> bool:
        """Return whether the run is over, as far as is known.

        If it is, :meth:`read` returns all remaining output.
        """
        return self.removed or not self.record.live

    def wait(self, seconds: float) -> None:
        """Wait at most ``seconds``, until it is time to check for new output."""
        time.sleep(min(seconds, POLL_SECONDS))

    def look(self, *, at_once: bool = False) -> RunRecord:
        """Read the record if it may have changed, or in any case if ``at_once``."""
        if not self._told and (at_once or time.monotonic() >= self._look_at):
            self._look_at = time.monotonic() + LOOK_SECONDS
            record = read_record(self._folder)
            self.removed = record is None
            self.record = record or self.record
        return self.record

    def read(self) -> list[Output]:
        """Return the next output, at most some hundred KiB; nothing if there is none at present.

        Each start of the run is read to its end before the next start, which the record announces.
        """
        while True:
            for rank, file in list(self._files.items()):
                if found := file.read():
                    # the other ranks have their turn first
                    self._files[rank] = self._files.pop(rank)
                    return found
            if self._start >= self.record.restarts:
                return []
            self._open(self._start + 1)
            if note := "".join(self.record.losses[self._start - 1 : self._start]):
                return [Output(0, "note", note)]

    def end(self, record: RunRecord) -> None:
        """Take the last record from the supervisor: on a full disk, the folder may lack it."""
        self.record, self._told = record, True

    def skip(self) -> bool:
        """Leave unread output in the files; return whether output was still being read."""
        wanted = bool(self._files)
        self._files, self._start = {}, self.record.restarts
        return wanted


def finish(record: RunRecord) -> None:
    """Raise the error of a run that did not end well."""
    if record.outcome == "interrupted":
        fate = "all its ranks stay" if record.kept_ranks else "all its ranks have ended"
        raise build_interrupt(
            f"{record.name} was {record.message or 'interrupted'}: {fate}; {record.names}"
        )
    if record.outcome == "lost":
        if record.error != RunLost.__name__:  # the run never began
            raise getattr(errors, record.error)(record.message)
        error = RunLost(f"{record.message}; {record.names}. The next cell starts anew.")
        error.run = record.name
        raise error
    if record.outcome == "failed":
        raise build_cell_failed(record)


def build_interrupt(fact: str) -> KeyboardInterrupt:
    """Build a KeyboardInterrupt that IPython displays as one line.

    The kernel's own traceback contains nothing about the run.
    """
    error = KeyboardInterrupt(fact)
    vars(error)["_render_traceback_"] = lambda: [f"KeyboardInterrupt: {fact}"]
    return error


def _others_in_words(record: RunRecord) -> str:
    """Describe what happened to the other ranks after one had failed."""
    said = ""
    if record.waited:
        all_others = record.waited == record.cell.spec.world_size - 1
        who = f"other {record.waited} were" if record.waited > 1 else "other one was"
        some = f"{counted(record.waited, 'other')} {'was' if record.waited == 1 else 'were'}"
        said = f" {f'The {who}' if all_others else some} waiting for it."
    if record.others:
        said += f" {counted(record.others, 'more rank')} failed after it."
    return said


def build_cell_failed(record: RunRecord) -> CellFailed:
    """Build the error that displays the failing rank's own traceback."""
    first = record.first
    assert first is not None
    raised = f"raised {first.etype}: {first.message}"
    how = {"raised": raised, "interrupted": raised, "exited": f"called sys.exit({first.message})"}
    fact = how.get(first.outcome, first.message)
    clue = f"{record.message} before " if record.message else ""
    others = _others_in_words(record)
    fate = "All ranks stay" if record.kept_ranks else "All ranks were ended"

    def told(fact: str) -> str:
        fact = fact.removesuffix(".")
        return (
            f"{clue}rank {first.rank}{named('on', record.vm)} {fact}.{others} {fate};"
            f" {record.names}."
        )

    error = CellFailed(told(fact))
    shown = _COLOURS.sub("", "\n".join(first.traceback)).rstrip()
    words, said = f"{first.etype}: {first.message}", shown[shown.rfind(f"\n{first.etype}: ") + 1 :]
    if said and words.startswith(said):
        more = words[len(said) :].lstrip(": ")
        error.below_traceback = told(f"raised the {first.etype} above{': ' if more else ''}{more}")
    error.run, error.rank, error.vm = record.name, first.rank, record.vm
    error.others = record.others + record.waited
    error.etype, error.traceback_lines = first.etype, first.traceback
    return error
