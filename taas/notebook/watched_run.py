"""A run as a view that goes on: its line, and folded below it a row for each rank, which opens what that rank wrote last."""

from __future__ import annotations

import html
import re
from collections.abc import Sequence
from pathlib import Path

from taas.notebook.tables import STAYS_OPEN, Shown, folded, line, table
from taas.runs.events import FILES, last_written, size_of
from taas.runs.records import RunRecord
from taas.wire.ranks import RankUse
from taas.wording import shown as on_one_line
from taas.wording import size_in_words, visible

_LINES, _WIDTH, _LAST_WIDTH = 20, 200, 70
_AT_WORK = ("starting", "running", "stopped")
_COLOURS = re.compile(r"\x1b\[[0-9;:]*m")
_BAR = re.compile(r"(?<!\d)(\d+)/(?!\1 )\d+ \[[^<\]]*<(?:(\d+):)?(\d+):(\d\d)")
"""How a bar of tqdm ends: ``12/100 [00:03<00:20, 4.20it/s]``."""


class WatchedRun:
    """What a person sees of one run, again and again; what ranks wrote last is read anew where their files have grown."""

    def __init__(self) -> None:
        self._last: dict[Path, tuple[list[int], list[str]]] = {}

    def of(self, record: RunRecord, now: float | None = None, *, kept: bool = False) -> Shown:
        """Show the run's line, with the time that is left if something tells it, and the folded rows; as :func:`line`."""
        ranks = self._written_by(record)
        above = line(record, now, kept=kept, left=_seconds_left(record, ranks[0]))
        if not record.use and not any(ranks):
            return above
        below = folded(record.id, f"{_use(record)}each rank's state and output", _rows(record, ranks).html)
        return Shown(above.text, f"{above.html}{below}{STAYS_OPEN}")

    def in_full(self, record: RunRecord) -> Shown:
        """Show the line and the rows, unfolded."""
        ranks = self._written_by(record)
        shown = line(record, left=_seconds_left(record, ranks[0])) + _rows(record, ranks)
        return Shown(shown.text, shown.html + STAYS_OPEN)

    def _written_by(self, record: RunRecord) -> list[list[str]]:
        """Return the last lines of each rank."""
        return [self._lines(folder) for folder in record.rank_folders()]

    def _lines(self, folder: Path) -> list[str]:
        sizes = [size_of(folder / name) for name in FILES]
        known, lines = self._last.get(folder, ([0] * len(sizes), []))
        if sizes != known and (found := last_written(folder, _LINES)) is not None:
            lines = [on_one_line(visible(_COLOURS.sub("", text)), _WIDTH) for text in found]
            self._last[folder] = sizes, lines
        return lines


def _seconds_left(record: RunRecord, lines: Sequence[str]) -> float | None:
    """Return what rank 0's registered loaders, or its last bar of tqdm, say of the time that is left."""
    delivered = record.delivered
    if delivered is not None and delivered.planned and delivered.rate > 0:
        return (delivered.planned - delivered.delivered) / delivered.rate
    for text in reversed(lines):
        for _, hours, minutes, seconds in _BAR.findall(text)[-1:]:
            return 3600 * int(hours or 0) + 60 * int(minutes) + int(seconds)
    return None


def _use(record: RunRecord) -> str:
    """Return what the ranks use in the mean, for the line that opens the rows."""
    share = record.busy
    kind = "GPU" if any(rank.gpu is not None for rank in record.use) else "CPU"
    return "" if share is None or not record.live else f"{kind} {share:.0f} % · "


def _rows(record: RunRecord, ranks: Sequence[Sequence[str]]) -> Shown:
    use = {one.rank: one for one in record.use}
    last = [on_one_line(lines[-1], _LAST_WIDTH) if lines else "" for lines in ranks]
    rows = [(str(rank), *_facts(record, rank, use.get(rank)), text) for rank, text in enumerate(last)]
    heads = ("rank", "state", "CPU", "memory", "GPU", "GPU memory", "last line")
    more = [html.escape("\n".join(lines)) if len(lines) > 1 else "" for lines in ranks]
    opened = {f"{record.id}-{rank}": text and f"<pre>{text}</pre>" for rank, text in enumerate(more)}
    return table(heads, rows, opened=opened)


def _facts(record: RunRecord, rank: int, use: RankUse | None) -> tuple[str, ...]:
    """Return a rank's state, and what it uses while it is there."""
    if use is None or (not record.live and use.state in _AT_WORK):  # its agent could not say more
        return (record.state if record.live else record.outcome, "", "", "", "")
    if use.state not in _AT_WORK:
        return (use.state, "", "", "", "")
    return (
        "asks" if any(asked.rank == rank for asked in record.questions) else use.state,
        f"{use.cpu} %",
        size_in_words(use.nbytes),
        "" if use.gpu is None else f"{use.gpu} %",
        size_in_words(use.gpu_nbytes) if use.gpu_nbytes else "",
    )
