"""A run as a view that goes on: its line, and folded below it a row for each rank, which opens what that rank wrote last."""

from __future__ import annotations

import html
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from taas.notebook.tables import STAYS_OPEN, Shown, folded, line, table
from taas.runs.events import last_written
from taas.runs.records import RunRecord
from taas.wire.ranks import RankUse
from taas.wording import shown as on_one_line
from taas.wording import size_in_words, visible

_LINES, _WIDTH, _LAST_WIDTH = 20, 200, 70
_DRAWN = 1 << 19
"""Characters of HTML, at most, that a rank's last figure or table may have in the row of a run that is over."""
_AT_WORK = ("starting", "running", "stopped")
_COLOURS = re.compile(r"\x1b\[[0-9;:]*m")
_BAR = re.compile(r"(?<!\d)(\d+)/(?!\1 )\d+ \[[^<\]]*<(?:(\d+):)?(\d+):(\d\d)")
"""How a bar of tqdm ends: ``12/100 [00:03<00:20, 4.20it/s]``."""


class _Written(NamedTuple):
    """What a rank wrote last: lines, and its last display by MIME type."""

    lines: Sequence[str] = ()
    display: Mapping[str, Any] = {}

    def opened(self, *, drawn: bool) -> str:
        """Return the HTML that its row opens, ``drawn``: with the display; empty where the row says it all."""
        picture, shown = self.display.get("image/png", ""), self.display.get("text/html", "")
        if picture:
            shown = f'<img src="data:image/png;base64,{picture}">'
        if not drawn or len(shown) > _DRAWN:
            shown = ""
        lines = html.escape("\n".join(self.lines))
        return f"<pre>{lines}</pre>{shown}" if shown or len(self.lines) > 1 else ""


def watched(record: RunRecord, now: float | None = None) -> Shown:
    """Show the run's line, with the time that is left if something tells it, and the folded rows; as :func:`line`."""
    ranks = _written_by(record)
    above = line(record, now, _seconds_left(record, ranks[0].lines))
    if not record.use and not any(written.lines for written in ranks):
        return above
    busy = f"{record.busy:.0f} % busy · " if record.live and record.busy is not None else ""
    below = folded(record.id, f"{busy}each rank's state, use and output", _rows(record, ranks).html)
    return Shown(above.text, f"{above.html}{below}{STAYS_OPEN}")


def in_full(record: RunRecord) -> Shown:
    """Show the line and the rows, unfolded."""
    ranks = _written_by(record)
    return line(record, left=_seconds_left(record, ranks[0].lines)) + _rows(record, ranks)


def _written_by(record: RunRecord) -> list[_Written]:
    found = [last_written(folder, _LINES) or ([], {}) for folder in record.rank_folders()]
    return [
        _Written([on_one_line(visible(_COLOURS.sub("", text)), _WIDTH) for text in lines], display)
        for lines, display in found
    ]


def _seconds_left(record: RunRecord, lines: Sequence[str]) -> float | None:
    """Return what rank 0's registered loaders, or its last bar of tqdm, say of the time that is left."""
    delivered = record.delivered
    if delivered is not None and delivered.planned and delivered.rate > 0:
        return (delivered.planned - delivered.delivered) / delivered.rate
    for text in reversed(lines):
        for _, hours, minutes, seconds in _BAR.findall(text)[-1:]:
            return 3600 * int(hours or 0) + 60 * int(minutes) + int(seconds)
    return None


def _rows(record: RunRecord, ranks: Sequence[_Written]) -> Shown:
    use = {one.rank: one for one in record.use}
    last = [on_one_line(written.lines[-1], _LAST_WIDTH) if written.lines else "" for written in ranks]
    rows = [(str(rank), *_facts(record, rank, use.get(rank)), text) for rank, text in enumerate(last)]
    heads = ("rank", "state", "CPU", "memory", "GPU", "GPU memory", "last line")
    shown = record.cell.spec.shown_ranks()  # what these draw stands in the cell
    opened = {
        f"{record.id}-{rank}": written.opened(drawn=not record.live and rank not in shown)
        for rank, written in enumerate(ranks)
    }
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
