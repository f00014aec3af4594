"""Views of runs: one model, shown as HTML in notebooks and as plain text everywhere else."""

from __future__ import annotations

import html
import json
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from taas.base.wording import counted, named, ranks_in_words, shown_path, size_in_words
from taas.base.wording import shown as on_one_line
from taas.capture.settings.setup_cells import SetupCell
from taas.header.catalog import Catalog
from taas.header.options import SETTINGS
from taas.notebook.view import drawing
from taas.notebook.view.shown import Shown
from taas.protocol.records import RunRecord, runs_root
from taas.protocol.stacks import StackGroup, Trouble
from taas.runs.curves import read_curves
from taas.runs.records import unique_name

_MARKS = {"done": "✓", "failed": "✗", "interrupted": "■", "lost": "✗", "live": "▸"}
_CELL_WIDTH, _WHERE_WIDTH = 44, 120
_GOOD, _BAD, _STOPPED = (
    "var(--jp-success-color1, #2e9e4f)",
    "var(--jp-error-color1, #e0453a)",
    "var(--jp-warn-color1, #d97706)",
)
_COLOURS = {"done": _GOOD, "failed": _BAD, "lost": _BAD, "interrupted": _STOPPED}
"""Of a run that has ended, by its outcome, on light and on dark pages."""
_NOTIFY_SECONDS = 60.0
_STALE_SECONDS = 90
"""A live line changes at least once a minute: its state, its time, or what its ranks use."""
STAYS_OPEN = (
    '<script>document.querySelectorAll("details[data-taas]").forEach(d=>{const'
    " o=window.taasOpen??={},k=d.dataset.taas;"
    "d.open=o[k]??d.open;d.ontoggle=()=>{o[k]=d.open}})</script>"
)
"""Follows :func:`fold` parts: a front end that runs scripts then keeps those open that the user
opened, when a newer view replaces this one.
"""
_NOTIFIES = (
    "<script>if(window.Notification){{const show=()=>{{{then}}};"
    "Notification.permission==='granted'?show():"
    "Notification.requestPermission().then(p=>p==='granted'&&show())}}</script>"
)


def span(seconds: float, *, whole: bool = False) -> str:
    """Return a length of time in words; ``whole``: in whole seconds, for views that are updated."""
    if seconds < 10:
        return f"{max(seconds, 0) // 1:.0f} s" if whole else f"{max(seconds, 0):.1f} s"
    minutes, left = divmod(int(seconds), 60)
    if not minutes:
        return f"{left} s"
    return (
        f"{minutes} min {left:02} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02} min"
    )


def _written(now: float) -> str:
    return time.strftime("at %H:%M", time.localtime(now))


def _moment(then: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(then))


def _state(record: RunRecord) -> str:
    return record.state if record.live else record.outcome


def _coloured_state(record: RunRecord) -> Shown:
    said, colour = _state(record), _COLOURS.get(record.outcome, "inherit")
    return Shown(said, f'<span style="color:{colour}">{html.escape(said)}</span>')


def _elapsed(record: RunRecord, now: float) -> str:
    return span((now if record.live else record.ended) - record.submitted, whole=record.live)


def _ranks(record: RunRecord) -> str:
    """Return the shape in words: ``8 ranks on g2.8``, ``16 ranks on 2 g2.8``."""
    spec = record.cell.spec
    where = f"{spec.vms} {spec.instance or 'VMs'}" if spec.vms > 1 else spec.instance
    return f"{counted(spec.world_size, 'rank')}{named('on', where or '')}"


def _delivery(record: RunRecord) -> str:
    d = record.delivered
    if d is None:
        return ""
    # after the end, these elements are for an iteration that no rank began
    ready = f"{d.ready:,} ready, " if record.live else ""
    return f"{d.delivered:,} of {d.planned:,} units, {ready}{d.rate:.0f}/s, waited {d.waited:.1f} s"


def _memory(record: RunRecord) -> str:
    ranks = record.kept_ranks or ()
    held = {
        "": sum(rank.host_bytes for rank in ranks),
        " of GPUs": sum(rank.gpu_bytes for rank in ranks),
    }
    return ", ".join(f"{size_in_words(size)}{what}" for what, size in held.items() if size)


def _cell(record: RunRecord) -> str:
    """Return the cell's number, and its first line that is not its header."""
    lines = (line.strip() for line in record.cell.text.splitlines())
    first = next((line for line in lines if line and not line.startswith(("#", "%"))), "")
    return f"In[{record.cell.execution_count}] {on_one_line(first, _CELL_WIDTH)}".rstrip()


def _stale(now: float) -> str:
    """Return HTML that becomes visible if its view was not replaced in time.

    A view is no longer replaced after the page was reloaded, or the kernel was restarted. CSS does
    this, because many front ends run no scripts.
    """
    said = (
        f" · may be stale: not updated since {time.strftime('%H:%M', time.localtime(now))}, %taas"
        " status knows"
    )
    return (
        "<style>@keyframes taas-stale{to{font-size:inherit}}</style>"
        f'<span style="font-size:0;animation:taas-stale 0s {_STALE_SECONDS}s'
        f' forwards">{html.escape(said)}</span>'
    )


def mendable(record: RunRecord, view: Shown) -> Shown:
    """Mark the view of a run that goes on, so that :func:`mending` can replace all of it."""
    if not record.live:
        return view
    return Shown(view.text, f'<div data-taas-run="{record.id}">{view.html}</div>')


def mending(views: Mapping[str, Shown]) -> dict[str, str]:
    """Return a script that replaces views of runs, by their ids, which nobody updates any more."""
    said = json.dumps({run: view.html for run, view in views.items()}).replace("<", "\\u003c")
    script = (
        f"for(const [id,view] of Object.entries({said}))"
        'document.querySelectorAll(`[data-taas-run="${id}"]`).forEach(e=>{e.outerHTML=view})'
    )
    return {"text/plain": "", "text/html": f"<script>{script}</script>"}


def why(record: RunRecord) -> str:
    """Return how a run ended, in words; empty if there is nothing to say."""
    trouble = "" if record.live or record.trouble is None else record.trouble.headline
    return "; ".join(filter(None, (_cause(record), trouble)))


def _cause(record: RunRecord) -> str:
    """Return what ended a run that did not end well, with the error that a rank raised."""
    first = record.first
    if record.outcome == "failed" and first is not None:
        said = f"{first.etype}: {first.message}" if first.outcome == "raised" else first.message
        clue = f"{record.message}; " if record.message else ""
        place = f"cell line {first.line}: " if first.line else ""
        return f"{clue}rank {first.rank}{named('on', record.vm)}: {place}{said}".splitlines()[0]
    return record.message


def notification(record: RunRecord) -> dict[str, str]:
    """Return a script that asks for the permission to notify, or notifies if the run is over.

    A front end that runs no scripts shows nothing.
    """
    said = json.dumps([f"{record.name} {record.outcome}", why(record)]).replace("<", "\\u003c")
    # the notebook keeps this script, and a page that opens the notebook later runs it again
    soon = f"Date.now()/1e3<{record.ended + _NOTIFY_SECONDS:.0f}"
    then = (
        "" if record.live else f"if({soon})new Notification(...(([t,b])=>[t,{{body:b}}])({said}))"
    )
    return {"text/plain": "", "text/html": _NOTIFIES.format(then=then)}


def facts(record: RunRecord) -> dict[str, Any]:
    """Return a run for programs (``--json``).

    Times are seconds since the epoch, sizes bytes, and shares percent. In curves, JSON has null for
    values that are not finite.
    """
    first, spec = record.first, record.cell.spec
    curves = read_curves(record.folder)
    plain_ones = (
        "name",
        "id",
        "state",
        "device",
        "submitted",
        "restarts",
        "delivered",
        "use",
        "project",
    )
    return {
        **{name: getattr(record, name) for name in plain_ones},
        "outcome": record.outcome or None,
        "why": why(record) or None,
        "first_rank": None if first is None else first.rank,
        "first_line": None if first is None else first.line or None,
        "curves": {name: curve.values for name, curve in curves.numbers.items()},
        "busy": None if curves.busy is None else curves.busy.values,
        "ranks": spec.world_size,
        "vms": spec.vms,
        "waiting": record.waiting or None,
        "trouble": None if record.trouble is None else record.trouble.headline,
        "asks": [asked.rank for asked in record.questions],
        "ended": record.ended or None,
        "kept_ranks": len(record.kept_ranks or ()),
        "cell": record.cell.text,
        "notebook": record.notebook or None,
        "folder": str(record.folder),
    }


# ---------------------------------------------------------------- one run, in its cell


def line(record: RunRecord, now: float | None = None, left: float | None = None) -> Shown:
    """Show one run in a compact line, with the time of the line; below it, what is wrong.

    The line contains the numbers that the cell prints, each with a small curve. ``left``: seconds
    until the run will be over.
    """
    now = time.time() if now is None else now
    head = f"{_MARKS[record.outcome or 'live']} {record.name} {_state(record)}"
    if record.outcome in ("failed", "lost") and (cause := _cause(record)):
        head += f": {on_one_line(cause, _WHERE_WIDTH)}"
    quiet = " · ".join(["", *filter(None, _details(record, now, left))])
    goes_on = record.live and not record.questions  # a question to a person stops the updates
    stale = _stale(now) if goes_on else ""
    colour = _COLOURS.get(record.outcome)
    opening = "<b>" if colour is None else f'<b style="color:{colour}">'
    bold = f"{opening}{html.escape(head)}</b>"
    dim = f'<span style="opacity:.75">{html.escape(quiet)}</span>'
    shown = Shown(head + quiet, f"<div>{bold}{dim}{stale}</div>")
    if (printed := drawing.numbers(read_curves(record.folder))).text:
        shown = Shown(
            f"{head} · {printed.text}{quiet}", f"<div>{bold} · {printed.html}{dim}{stale}</div>"
        )
    if note := _note(record):
        shown += Shown(f"  {note}", plain(note).html)
    return shown if record.trouble is None else _with_trouble(shown, record, record.trouble)


def _details(record: RunRecord, now: float, left: float | None) -> list[str]:
    """Return the less important parts of a run's line; empty ones are not shown."""
    elapsed = _elapsed(record, now)
    if record.state == "running" and left is not None and left >= 1:
        elapsed += f", about {span(left, whole=True)} left"
    again = ""
    if record.restarts:
        again = f"started again {'once' if record.restarts == 1 else f'{record.restarts} times'}"
    written = _written(now) if record.live else ""
    return [_ranks(record), elapsed, record.device, again, _delivery(record), written]


def _with_trouble(shown: Shown, record: RunRecord, trouble: Trouble) -> Shown:
    """Add to a run's view what is wrong with it, and where its ranks are, or were."""
    said = trouble.headline if record.live else f"before it ended: {trouble.headline}"
    whole = (
        shown
        + Shown(f"! {said}", f"<div><b>{html.escape(said)}</b></div>")
        + stacks(trouble.places)
    )
    if record.state == "running":
        whole += plain(
            f"The run goes on. To end it: interrupt the cell, or %taas stop {record.name}."
        )
    return Shown(
        whole.text, f'<div style="border-left:3px solid #c60;padding-left:.6em">{whole.html}</div>'
    )


def _note(record: RunRecord) -> str:
    """Say what a run waits for, if that is a person or a machine."""
    if record.state == "finishing":
        where = f" ({on_one_line(record.waiting, _WHERE_WIDTH)})" if record.waiting else ""
        return f"interrupted: the cell is finishing; press again to end it{where}"
    if record.live and record.waiting:
        if record.background:  # its cell has ended
            return f"waiting for {record.waiting}. %taas stop {record.name} gives up."
        return (
            f"waiting for {record.waiting}. Interrupt the cell, or %taas stop {record.name}, to"
            " give up."
        )
    if not record.questions:
        return ""
    ranks = [one.rank for one in record.questions]
    where = f": %taas attach {record.name} answers" if record.background else " in the cell"
    return f"{ranks_in_words(ranks)} asked for an answer{where}"


def stacks(places: Iterable[StackGroup]) -> Shown:
    """Show where ranks are, with the stack of each place."""
    text, marked = list[str](), ""
    for place in places:
        text += [f"  {place}", *(f"      {frame}" for frame in place.stack)]
        frames = html.escape("\n".join(place.stack))
        opens = fold(f"stack-{place.ranks}", str(place), f"<pre>{frames}</pre>")
        marked += opens if frames else plain(str(place)).html
    return Shown("\n".join(text), marked)


# ---------------------------------------------------------------- many runs


def status(records: Sequence[RunRecord], now: float | None = None) -> Shown:
    """Show the live runs, the runs whose ranks are kept, and the last one that ended."""
    now = time.time() if now is None else now
    live = [record for record in records if record.live]
    ended = [record for record in records if not record.live]
    shown = live + [record for record in ended if record.kept_ranks or record is ended[-1]]
    if not shown:
        return plain(
            "no run yet: start one by a cell with `#pragma taas --gpus 8` on top (%%taas? has the"
            " options)"
        )
    rows = [(unique_name(record, shown), *_standing(record, now)) for record in shown]
    heads = (
        "run",
        "state",
        "numbers",
        "ranks",
        "time",
        "device",
        "memory",
        "delivered",
        "cell",
        "notebook",
    )
    view = sum(
        (line(record, now) for record in live if record.trouble is not None), table(heads, rows)
    )
    if not live:
        return view
    written = _written(now)
    return view + Shown(written, f"<div>{html.escape(written)}{_stale(now)}</div>")


def _standing(record: RunRecord, now: float) -> tuple[str | Shown, ...]:
    state, elapsed = _state(record), _elapsed(record, now)
    if record.kept_ranks:
        state, elapsed = f"{state}, ranks kept", f"idle {span(now - record.ended, whole=True)}"
    notebook = f"{record.owner} (this one)" if record.kernel.pid == os.getpid() else record.owner
    held = (record.device, _memory(record), _delivery(record))
    printed = drawing.numbers(read_curves(record.folder))
    return (state, printed, _ranks(record), elapsed, *held, _cell(record), notebook)


def history(records: Sequence[RunRecord], now: float | None = None) -> Shown:
    """Show all runs that still have a folder: how they ended, why, their curves, and the folder."""
    now = time.time() if now is None else now
    if not records:
        return plain("no run yet")
    rows = []
    for record in records:
        curves = read_curves(record.folder)
        rows.append(
            (
                unique_name(record, records),
                _moment(record.submitted),
                _coloured_state(record),
                drawing.numbers(curves),
                _ranks(record),
                _elapsed(record, now),
                drawing.busy(curves),
                _cell(record),
                record.owner,
            )
        )
    heads = ("run", "started", "outcome", "numbers", "ranks", "time", "busy", "cell", "notebook")
    view = table(heads, rows, [why(record) for record in records])
    return view + plain(f"their folders, RUN-ID each, are in {shown_path(runs_root())}")


def settings(catalog: Catalog) -> dict[str, Any]:
    """Return each setting and the file that sets it, for programs (``--json``)."""
    said = {key: str(path) for key, path in catalog.said_in.items()}
    return {
        key: {"value": value, "set_in": said.get(key)} for key, value in catalog.in_force().items()
    }


def config(catalog: Catalog) -> Shown:
    """Show the settings, where each was set, and the header's option for it."""
    rows = [
        (
            f"{key} = {_as_in_toml(value)}",
            str(catalog.said_in.get(key, "default")),
            f"--{SETTINGS[key].name}" if key in SETTINGS else "",
        )
        for key, value in catalog.in_force().items()
    ]
    return table(("setting", "set in", "for one cell"), rows)


def setup(cells: Sequence[SetupCell]) -> Shown:
    """Show the setup cells, in the order in which each new process runs them."""
    if not cells:
        return plain("no setup cell: #pragma taas --setup above a cell makes it one")
    rows = [
        (f"In[{cell.number}]", on_one_line(" ".join(_code_of(cell)), _WHERE_WIDTH))
        for cell in cells
    ]
    return table(("setup cell", "what each new process runs before names arrive"), rows)


def _code_of(cell: SetupCell) -> list[str]:
    return [
        line.strip() for line in cell.lines if line.strip() and not line.lstrip().startswith("#")
    ]


def _as_in_toml(value: object) -> str:
    if isinstance(value, tuple):
        return f"[{', '.join(map(_as_in_toml, value))}]"
    return f'"{value}"' if isinstance(value, str) else str(value).lower()


def types(catalog: Catalog) -> Shown:
    """Show the instance types: a VM's resources, and how many ranks a run may have on it."""
    rows = [
        (
            f"#!{kind.name}",
            f"{kind.gpus} {kind.gpu_model}".rstrip() if kind.gpus else "",
            str(kind.vcpus),
            ", ".join(str(kind.gpus * vms) for vms in sorted(kind.vms)) if kind.gpus else "",
        )
        for kind in catalog.instances.values()
    ]
    return table(("type", "GPUs of a VM", "vCPUs", "--gpus"), rows)


def plain(text: str) -> Shown:
    """Return a sentence as a view."""
    return Shown(text, f"<div>{html.escape(text)}</div>")


def fold(key: str, summary: str, inside: str) -> str:
    """Return HTML that a click opens; ``key`` identifies it in this view and in newer ones."""
    return f'<details data-taas="{key}"><summary>{html.escape(summary)}</summary>{inside}</details>'


def _row_in_html(tag: str, row: Sequence[str], more: str = "") -> str:
    style = 'style="text-align:left;vertical-align:top"'
    cells = "".join(f"<{tag}{more} {style}>{cell}</{tag}>" for cell in row)
    return f'<tr style="background:none">{cells}</tr>'


def _cell_view(cell: str | Shown) -> Shown:
    return Shown(cell, html.escape(cell)) if isinstance(cell, str) else cell


def _without_empty(
    heads: Sequence[str], rows: list[list[Shown]]
) -> tuple[list[str], list[list[Shown]]]:
    """Return heads and rows without the columns in which all cells are empty."""
    used = [column for column in range(len(heads)) if any(row[column].text for row in rows)]
    return [heads[column] for column in used], [[row[column] for column in used] for row in rows]


def _in_columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return a line of text for each row, with the cells of each column below each other."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


def table(
    heads: Sequence[str],
    rows: Sequence[Sequence[str | Shown]],
    remarks: Sequence[str] = (),
    opened: Mapping[str, str] | None = None,
) -> Shown:
    """Show rows of short cells, without columns that are empty.

    Args:
        heads: of the columns.
        rows: their cells: texts, or small views; the last one is a text.
        remarks: for each row, a text of any length to show below it.
        opened: for each row, by the key of :func:`fold`, the HTML that its last cell opens, if
            there is some.
    """
    heads, views = _without_empty(heads, [[_cell_view(cell) for cell in row] for row in rows])
    first, *lines = _in_columns([heads, *([cell.text for cell in row] for row in views)])
    text, body = [first], ""
    below = remarks or [""] * len(rows)
    inner = opened.items() if opened else [("", "")] * len(rows)
    for row, in_text, remark, (key, more) in zip(views, lines, below, inner, strict=True):
        *cells, last = (cell.html for cell in row)
        text.append(in_text)
        body += _row_in_html("td", [*cells, fold(key, row[-1].text, more) if more else last])
        if remark:
            text.append(f"    {remark}")
            body += _row_in_html("td", [html.escape(remark)], f' colspan="{len(heads)}"')
    head = _row_in_html("th", [*map(html.escape, heads)])
    return Shown("\n".join(text), f"<table><thead>{head}</thead><tbody>{body}</tbody></table>")
