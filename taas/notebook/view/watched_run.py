"""The view of a run that is updated while the run goes on: its line, and a row for each rank.

The rows are folded below the line, with the curves above them; each row opens what its rank wrote
last.
"""

from __future__ import annotations

import html
import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from taas.base.wording import ranks_in_words, size_in_words, visible
from taas.base.wording import shown as on_one_line
from taas.notebook.view import drawing
from taas.notebook.view.shown import Shown
from taas.notebook.view.tables import STAYS_OPEN, fold, line, mendable, plain, table
from taas.protocol.ranks import RankUse
from taas.protocol.records import RunRecord
from taas.runs.curves import read_curves
from taas.runs.events import last_written

_LINES, _WIDTH, _LAST_WIDTH = 20, 200, 70
_DRAWN = 1 << 19
"""The most characters of HTML that the row of a rank has for its last figure or table, once the run
is over.
"""
_MANY_RANKS = 32
"""From that many ranks on, a live view reads the output of some ranks only, fewer than these."""
_AT_WORK = ("starting", "running", "stopped")
_COLOURS = re.compile(r"\x1b\[[0-9;:]*m")
_BAR = re.compile(r"(?<!\d)(\d+)/(?!\1 )\d+ \[[^<\]]*<(?:(\d+):)?(\d+):(\d\d)")
"""The end of a tqdm bar: ``12/100 [00:03<00:20, 4.20it/s]``."""


class _Written(NamedTuple):
    """What a rank wrote last: lines, and its last display by MIME type."""

    lines: Sequence[str] = ()
    display: Mapping[str, Any] = {}

    def inner_html(self, *, drawn: bool) -> str:
        """Return the HTML that the rank's row opens; empty if the row shows it all.

        ``drawn``: with the rank's last display.
        """
        picture, shown = self.display.get("image/png", ""), self.display.get("text/html", "")
        if picture:
            shown = f'<img src="data:image/png;base64,{picture}">'
        if not drawn or len(shown) > _DRAWN:
            shown = ""
        lines = html.escape("\n".join(self.lines))
        return f"<pre>{lines}</pre>{shown}" if shown or len(self.lines) > 1 else ""


def render_run(record: RunRecord, now: float | None = None, *, hints: str = "") -> Shown:
    """Show the run's line, with the remaining time if it is known, and the folded rows.

    ``now``: as in :func:`line`. ``hints``: what a person can type, which stands below.

    For a live run of many ranks, this is called each second, and reads what only some of them
    wrote.
    """
    ranks = _written_by(record, _read_each_second(record))
    view = line(record, now, _seconds_left(record, ranks[0]))
    if record.use or any(written and written.lines for written in ranks):
        busy = f"{record.busy:.0f} % busy · " if record.live and record.busy is not None else ""
        curves = _whole_curves(record)
        inside = _rows(record, ranks).html
        what = "each rank's state, use and output"
        if curves is not None:
            inside, what = curves.html + inside, f"curves, and {what}"
        below = fold(record.id, f"{busy}{what}", inside)
        view = Shown(view.text, f"{view.html}{below}{STAYS_OPEN}")
    if hints:
        view += plain(hints)
    return mendable(record, view)


def in_full(record: RunRecord) -> Shown:
    """Show the line, the whole curves and the rows, unfolded."""
    ranks = _written_by(record, range(record.cell.spec.world_size))
    view, curves = line(record, left=_seconds_left(record, ranks[0])), _whole_curves(record)
    if curves is not None:
        view += curves
    return view + _rows(record, ranks)


def _whole_curves(record: RunRecord) -> Shown | None:
    of_gpus = any(one.gpu is not None for one in record.use)
    busy = "GPUs busy" if of_gpus else "processors busy"
    return drawing.whole(read_curves(record.folder), busy)


def _read_each_second(record: RunRecord) -> Collection[int]:
    """Return the ranks whose output the updated view reads.

    Of many ranks these are rank 0, the odd ones, and those whose output the cell shows.
    """
    everybody = range(record.cell.spec.world_size)
    if not record.live or len(everybody) < _MANY_RANKS:
        return everybody
    first_of_all = dict.fromkeys((0, *_odd(record), *record.cell.spec.shown_ranks()))
    return [rank for rank in first_of_all if rank in everybody][: _MANY_RANKS - 1]


def _odd(record: RunRecord) -> list[int]:
    """Return the odd ranks.

    An odd rank asks something, is stopped, or is elsewhere or in another state than most.
    """
    odd = [asked.rank for asked in record.questions]
    if record.trouble is not None:
        odd += [rank for place in record.trouble.places if place.odd for rank in place.ranks]
    states = Counter(one.state for one in record.use)
    usual = max(states, key=states.__getitem__, default="")
    return odd + [one.rank for one in record.use if one.state == "stopped" or one.state != usual]


def _written_by(record: RunRecord, which: Collection[int]) -> list[_Written | None]:
    """Return what each rank wrote last; None for a rank that is not read."""
    return [
        _last_of(folder) if rank in which else None
        for rank, folder in enumerate(record.rank_folders())
    ]


def _last_of(folder: Path) -> _Written:
    lines, display = last_written(folder, _LINES) or ([], {})
    return _Written(
        [on_one_line(visible(_COLOURS.sub("", text)), _WIDTH) for text in lines], display
    )


def _seconds_left(record: RunRecord, rank_0: _Written | None) -> float | None:
    """Return the remaining seconds, from the registered loaders or from rank 0's last tqdm bar."""
    delivered = record.delivered
    if delivered is not None and delivered.planned and delivered.rate > 0:
        return (delivered.planned - delivered.delivered) / delivered.rate
    for text in reversed(rank_0.lines if rank_0 is not None else ()):
        for _, hours, minutes, seconds in _BAR.findall(text)[-1:]:
            return 3600 * int(hours or 0) + 60 * int(minutes) + int(seconds)
    return None


def _rows(record: RunRecord, ranks: Sequence[_Written | None]) -> Shown:
    use = {one.rank: one for one in record.use}
    rows = [
        (str(rank), *_facts(record, rank, use.get(rank)), _last_line(written))
        for rank, written in enumerate(ranks)
    ]
    heads = ("rank", "state", "CPU", "memory", "GPU", "GPU memory", "last line")
    shown = record.cell.spec.shown_ranks()  # the cell shows their displays already
    opened = {
        f"{record.id}-{rank}": (
            written.inner_html(drawn=not record.live and rank not in shown) if written else ""
        )
        for rank, written in enumerate(ranks)
    }
    below = table(heads, rows, opened=opened)
    left_out = [rank for rank, written in enumerate(ranks) if written is None]
    return below + _not_read(record, left_out) if left_out else below


def _last_line(written: _Written | None) -> str:
    return (
        on_one_line(written.lines[-1], _LAST_WIDTH) if written is not None and written.lines else ""
    )


def _not_read(record: RunRecord, left_out: Sequence[int]) -> Shown:
    """Say which ranks' output the rows lack, and how to see it."""
    return plain(
        f"{ranks_in_words(left_out)}: state and use only, in a run of so many ranks; %taas status"
        f" {record.name} shows what they print, %taas logs {record.name} --rank {left_out[0]} all"
        " of it"
    )


def _facts(record: RunRecord, rank: int, use: RankUse | None) -> tuple[str, ...]:
    """Return a rank's state, and what it uses while it runs."""
    if use is None or (not record.live and use.state in _AT_WORK):  # its agent was lost with it
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
