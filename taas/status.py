"""Views of runs: one model, shown as HTML in notebooks and as plain text everywhere else."""

from __future__ import annotations

import html
import os
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from taas.records import RunRecord
from taas.retention import NOTICE_SECONDS
from taas.stacks import Place

__all__ = ["Shown", "history", "line", "span", "stacks", "status"]

_MARKS = {"done": "✓", "failed": "✗", "interrupted": "■", "lost": "✗", "live": "▸"}
_CELL_WIDTH = 44


@dataclass(frozen=True)
class Shown:
    """The same thing twice."""

    text: str
    html: str

    def _repr_mimebundle_(self, **_: Any) -> dict[str, str]:
        return {"text/plain": self.text, "text/html": self.html}

    def __str__(self) -> str:
        return self.text


def span(seconds: float) -> str:
    """Return a length of time in words."""
    if seconds < 10:
        return f"{max(seconds, 0):.1f} s"
    whole = int(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02} min"


def ago(then: float, now: float) -> str:
    """Return a moment in words."""
    days = int((now - then) // 86400)
    return time.strftime("%H:%M:%S" if days == 0 else "%Y-%m-%d %H:%M", time.localtime(then))


def _state(record: RunRecord) -> str:
    return record.state if record.live else record.outcome


def _elapsed(record: RunRecord, now: float) -> str:
    """Return how long it took, or has taken: whole seconds while it goes on, which is calmer to look at."""
    if record.live:
        return span(max(0.0, now - record.submitted) // 1).replace(".0 s", " s")
    return span(record.ended - record.submitted)


def _ranks(record: RunRecord) -> str:
    """Return the shape in words: ``8 ranks on g2.8``, ``16 ranks on 2 g2.8``."""
    many = f"{record.world_size} rank{'s' if record.world_size > 1 else ''}"
    if record.vms > 1:
        return f"{many} on {record.vms} {record.instance or 'VMs'}"
    return f"{many} on {record.instance}" if record.instance else many


def _delivery(record: RunRecord) -> str:
    d = record.delivered
    if d is None:
        return ""
    ready = f"{d.ready:,} ready, " if record.live else ""  # then they are of an iteration that nobody began
    return f"{d.delivered:,} of {d.planned:,} units, {ready}{d.rate:.0f}/s, waited {d.waited:.1f} s"


def _headline(record: RunRecord) -> str:
    """Return the cell's first line that is not its header."""
    lines = (line.strip() for line in record.cell.splitlines())
    first = next((line for line in lines if line and not line.startswith(("#", "%"))), "")
    return first if len(first) <= _CELL_WIDTH else first[: _CELL_WIDTH - 1] + "…"


def _cell(record: RunRecord) -> str:
    return f"In[{record.execution_count}] {_headline(record)}".rstrip()


def why(record: RunRecord) -> str:
    """Return how a run ended, in words; empty if there is nothing to say."""
    first = record.first
    if record.outcome == "failed" and first is not None:
        said = f"{first.etype}: {first.message}" if first.outcome == "raised" else first.message
        return f"rank {first.rank} on {record.vm}: {said}".splitlines()[0]
    return record.message


# ---------------------------------------------------------------- one run, in its cell


def line(record: RunRecord, now: float | None = None) -> Shown:
    """Show one run: a compact line, with what is wrong below it."""
    now = time.time() if now is None else now
    state, elapsed = _state(record), _elapsed(record, now)
    parts = [_ranks(record), elapsed, record.device]
    if record.restarts:
        parts.append(f"started again {'once' if record.restarts == 1 else f'{record.restarts} times'}")
    if delivery := _delivery(record):
        parts.append(delivery)
    mark = _MARKS.get(record.outcome or "live", "")
    head = f"{mark} {record.name} {state}"
    text = " · ".join([head, *parts])
    quiet = html.escape(" · ".join(["", *parts]))
    shown = f'<div><b>{html.escape(head)}</b><span style="opacity:.75">{quiet}</span></div>'
    trouble = record.trouble
    if record.live and record.waiting:
        waits = f"waiting for {record.waiting}. Interrupt the cell, or %taas stop {record.name}, to give up."
        return Shown(f"{text}\n  {waits}", f"{shown}<div>{html.escape(waits)}</div>")
    if trouble is None or not record.live:
        return Shown(text, shown)
    advice = f"The run goes on. To end it: interrupt the cell, or %taas stop {record.name}."
    where = stacks(trouble.places)
    return Shown(
        f"{text}\n! {trouble.headline}\n{where.text}\n{advice}",
        f'<div style="border-left:3px solid #c60;padding-left:.6em">{shown}'
        f"<div><b>{html.escape(trouble.headline)}</b></div>{where.html}<div>{advice}</div></div>",
    )


def stacks(places: Iterable[Place]) -> Shown:
    """Show where ranks stand, with each place's stack."""
    text: list[str] = []
    marked: list[str] = []
    for place in places:
        text += [f"  {place}", *(f"      {frame}" for frame in place.stack)]
        summary = html.escape(str(place))
        frames = html.escape("\n".join(place.stack))
        marked.append(
            f"<details><summary>{summary}</summary><pre>{frames}</pre></details>"
            if frames
            else f"<div>{summary}</div>"
        )
    return Shown("\n".join(text), "".join(marked))


# ---------------------------------------------------------------- many runs


def status(records: Sequence[RunRecord], now: float | None = None) -> Shown:
    """Show the runs that go on, and the last one that ended."""
    now = time.time() if now is None else now
    live = [record for record in records if record.live]
    ended = [record for record in records if not record.live][-1:]
    if not live and not ended:
        return _plain(
            "no run yet: start one by a cell with `#pragma taas --gpus 8` on top (%%taas? has the options)"
        )
    rows = [
        (
            record.name,
            _state(record),
            _ranks(record),
            _elapsed(record, now),
            record.device,
            _delivery(record),
            _cell(record),
            "this kernel" if record.kernel.pid == os.getpid() else f"kernel {record.kernel.pid}",
        )
        for record in (*live, *ended)
    ]
    heads = ("run", "state", "ranks", "time", "device", "delivered", "cell", "of")
    used = [column for column in range(len(heads)) if any(row[column] for row in rows)]
    shown = _table([heads[c] for c in used], [[row[c] for c in used] for row in rows])
    troubled = [line(record, now) for record in live if record.trouble is not None]
    return Shown(
        "\n".join([shown.text, *(view.text for view in troubled)]),
        "".join([shown.html, *(view.html for view in troubled)]),
    )


def history(records: Sequence[RunRecord], now: float | None = None) -> Shown:
    """Show all runs that are kept, how they ended and why."""
    now = time.time() if now is None else now
    if not records:
        return _plain("no run yet")
    rows = [
        (
            record.name,
            ago(record.submitted, now),
            _state(record),
            _ranks(record),
            _elapsed(record, now),
            _cell(record),
            why(record),
        )
        for record in records
    ]
    shown = _table(("run", "started", "outcome", "ranks", "time", "cell", "why"), rows)
    doomed = [record for record in records if record.announced]
    if not doomed:
        return shown
    when = time.strftime("%Y-%m-%d %H:%M", time.localtime(doomed[0].announced + NOTICE_SECONDS))
    names = ", ".join(record.name for record in doomed[:8]) + (" …" if len(doomed) > 8 else "")
    note = (
        f"To make room, logs and names of {len(doomed)} old run{'s' if len(doomed) > 1 else ''} ({names}) will be "
        f"removed after {when}. Copy what you need from {doomed[0].folder.parent}."
    )
    return Shown(f"{shown.text}\n{note}", f"{shown.html}<div>{html.escape(note)}</div>")


def _plain(text: str) -> Shown:
    return Shown(text, f"<div>{html.escape(text)}</div>")


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> Shown:
    widths = [max(len(row[column]) for row in (heads, *rows)) for column in range(len(heads))]
    text = "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in (heads, *rows)
    )
    head = "".join(f'<th style="text-align:left">{html.escape(cell)}</th>' for cell in heads)
    body = "".join(
        "<tr>" + "".join(f'<td style="text-align:left">{html.escape(cell)}</td>' for cell in row) + "</tr>"
        for row in rows
    )
    return Shown(text, f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>")
