"""What a cell with ``--background`` gives back at once."""

from __future__ import annotations

import html
from pathlib import Path

from taas.records import RunRecord, read_record
from taas.status import line

__all__ = ["RunHandle"]


class RunHandle:
    """A run that goes on by itself; shown, it says how it is doing now.

    Attributes:
        name: what ``%taas attach``, ``logs``, ``stop`` take.
        folder: where its record, its output and its names are kept.
    """

    def __init__(self, name: str, folder: Path) -> None:
        self.name, self.folder = name, folder

    @property
    def id(self) -> str:
        """What makes the run unique among all that have its name."""
        return self.folder.name.rpartition("-")[2]

    @property
    def record(self) -> RunRecord | None:
        """What is known of the run now; None once it was removed."""
        return read_record(self.folder)

    @property
    def state(self) -> str:
        """``acquiring``, ``starting``, ``running``, ``ending``; then ``done``, ``failed``, ``interrupted``, ``lost``."""
        record = self.record
        return "removed" if record is None else record.state if record.live else record.outcome

    def _lines(self) -> tuple[str, str]:
        record = self.record
        if record is None:
            return f"{self.name} was removed", ""
        name = record.name
        hints = [f"%taas attach {name} brings its output and its names"]
        if record.live:
            hints += [f"%taas logs {name} its output alone", f"%taas stop {name} ends it"]
        return line(record).text, "; ".join(hints)

    def __repr__(self) -> str:
        return "\n".join(filter(None, self._lines()))

    def _repr_html_(self) -> str:
        record = self.record
        shown = line(record).html if record is not None else html.escape(self._lines()[0])
        return f'{shown}<div style="opacity:.75">{html.escape(self._lines()[1])}</div>'
