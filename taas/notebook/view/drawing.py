"""Draws curves: as SVG for notebooks, light or dark, and with block characters for terminals."""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Sequence

from taas.base.wording import counted
from taas.notebook.view.shown import Shown
from taas.protocol.run_curves import Curve, Curves

_BLOCKS = "▁▂▃▄▅▆▇█"
_GAP = "·"
"""It stands for values that are not finite."""
_SMALL_PARTS, _SMALL_SIZE = 12, (72, 14)
_WHOLE_PARTS, _WHOLE_SIZE = 60, (360, 56)
_INK = "var(--jp-brand-color1, #3f8fd9)"
"""JupyterLab has a colour for each theme; other front ends get one for both."""
_QUIET_INK = "currentColor"
_SHARES = (0.0, 100.0)


def in_digits(value: float, *, percent: bool = False) -> str:
    """Return a value in few characters: ``0.4312``, ``1e-05``, ``91.2%``, ``12,345``."""
    text = f"{value:.4g}"
    if math.isfinite(value) and abs(value) >= 1000:
        text = f"{value:,.0f}" if abs(value) < 1e9 else f"{value:.3g}"
    return f"{text}%" if percent else text


def sparkline(curve: Curve, parts: int, between: Sequence[float] = ()) -> str:
    """Draw a curve in one line of a terminal, from its lowest to its highest value.

    ``between``: two values that the blocks reach to, whatever the curve's own are.
    """
    values = _in_parts(curve, parts)
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return _GAP * len(values)
    low, high = min([*finite, *between]), max([*finite, *between])
    return "".join(_block(value, low, high) for value in values)


def _block(value: float, low: float, high: float) -> str:
    if not math.isfinite(value):
        return _GAP
    block = int(_share(value, low, high) * len(_BLOCKS))
    return _BLOCKS[min(max(block, 0), len(_BLOCKS) - 1)]


def _share(value: float, low: float, high: float) -> float:
    """Return where a value is between the lowest, 0, and the highest, 1; if they are equal, 0.5."""
    # halves, since the difference of two large numbers may not be finite
    spread = high / 2 - low / 2
    return 0.5 if spread <= 0 else (value / 2 - low / 2) / spread


def _in_parts(curve: Curve, parts: int) -> list[float]:
    """Return the mean of each part of a curve, at most so many.

    A part in which no value is finite is NaN; one without a value is as the part before it.
    """
    parts = min(parts, curve.count)
    found: list[list[float]] = [[] for _ in range(parts)]
    for number, value in curve.points:
        found[number * parts // curve.count].append(value)
    means = list[float]()
    for values in found:
        finite = [value for value in values if math.isfinite(value)]
        if finite:
            means.append(sum(value / len(finite) for value in finite))
        else:
            means.append(math.nan if values or not means else means[-1])
    return means


def _svg(
    curve: Curve, size: tuple[int, int], ink: str, about: str, between: Sequence[float] = ()
) -> str:
    """Draw a curve as SVG: a line, with gaps where values are not finite.

    ``between``: two values that the picture reaches to, whatever the curve's own are. ``about``:
    what a reader without pictures is told, and a mouse that rests on it.
    """
    width, height = size
    finite = [value for value in curve.values if math.isfinite(value)]
    low, high = min([*finite, *between], default=0.0), max([*finite, *between], default=0.0)
    drawn = ""
    for piece in _pieces(curve.points):
        at = [
            (_along(number, curve.count, width), _above(value, low, high, height))
            for number, value in piece
        ]
        if len(at) == 1:
            drawn += f'<circle cx="{at[0][0]:.1f}" cy="{at[0][1]:.1f}" r="1.5" fill="{ink}"/>'
            continue
        points = " ".join(f"{x:.1f},{y:.1f}" for x, y in at)
        drawn += (
            f'<polyline points="{points}" fill="none" stroke="{ink}" stroke-width="1.5"'
            ' stroke-linejoin="round" stroke-linecap="round"/>'
        )
    return (
        f'<svg role="img" width="{width}" height="{height}" viewBox="0 0 {width} {height}"'
        f' style="vertical-align:middle"><title>{html.escape(about)}</title>{drawn}</svg>'
    )


def _pieces(points: Iterable[tuple[int, float]]) -> list[list[tuple[int, float]]]:
    """Divide points where values are not finite."""
    pieces: list[list[tuple[int, float]]] = [[]]
    for point in points:
        if math.isfinite(point[1]):
            pieces[-1].append(point)
        elif pieces[-1]:
            pieces.append([])
    return [piece for piece in pieces if piece]


def _along(number: int, count: int, width: int) -> float:
    return 2 + (width - 4) * number / max(count - 1, 1)


def _above(value: float, low: float, high: float, height: int) -> float:
    """Return how far from the upper edge a value is."""
    return height - 2 - (height - 4) * _share(value, low, high)


def numbers(curves: Curves) -> Shown:
    """Show each number's word, its last value and a small curve, in one line; empty if none."""
    texts, marked = list[str](), list[str]()
    for name, curve in curves.numbers.items():
        last = in_digits(curve.last, percent=curve.percent)
        texts.append(f"{name} {last} {sparkline(curve, _SMALL_PARTS)}")
        picture = _svg(curve, _SMALL_SIZE, _INK, _about(name, curve))
        marked.append(
            '<span style="display:inline-block;white-space:nowrap;margin-right:.6em">'
            f"{html.escape(name)} <b>{html.escape(last)}</b>"
            f" {picture}</span>"
        )
    return Shown(" · ".join(texts), " ".join(marked))


def busy(curves: Curves) -> Shown:
    """Show how busy the GPUs, or the processors, were, as a small curve; empty if not known."""
    if curves.busy is None:
        return Shown("", "")
    return Shown(
        sparkline(curves.busy, _SMALL_PARTS, _SHARES),
        _svg(curves.busy, _SMALL_SIZE, _QUIET_INK, _about("busy", curves.busy), _SHARES),
    )


def whole(curves: Curves, busy_name: str) -> Shown | None:
    """Show the whole curves, one below the other; None if there is none.

    ``busy_name``: what the curve of the use is of.
    """
    texts, marked = list[str](), ""
    drawn: list[tuple[str, Curve, str, Sequence[float]]] = [
        (name, curve, _INK, ()) for name, curve in curves.numbers.items()
    ]
    if curves.busy is not None:
        drawn.append((busy_name, curves.busy, _QUIET_INK, _SHARES))
    width = max((len(name) for name, *_ in drawn), default=0)
    for name, curve, ink, between in drawn:
        about = _about(name, curve)
        blocks = sparkline(curve, _WHOLE_PARTS, between)
        texts.append(f"{name:{width}}  {blocks}  {_range_of(curve)}")
        picture = _svg(curve, _WHOLE_SIZE, ink, about, between)
        marked += (
            '<figure style="display:inline-block;margin:.3em 1.5em .3em 0"><figcaption>'
            f"{html.escape(name)} · {html.escape(_range_of(curve))}</figcaption>{picture}</figure>"
        )
    return Shown("\n".join(texts), f"<div>{marked}</div>") if drawn else None


def _about(name: str, curve: Curve) -> str:
    return f"{name}: {_range_of(curve)}"


def _range_of(curve: Curve) -> str:
    """Return the first and the last value of a curve, its range and its length, in words."""

    def said(value: float) -> str:
        return in_digits(value, percent=curve.percent)

    finite = [value for value in curve.values if math.isfinite(value)]
    ends: Sequence[float] = (curve.values[0], curve.last)
    text = f"{said(ends[0])} → {said(ends[1])}"
    if finite:
        text += f", lowest {said(min(finite))}, highest {said(max(finite))}"
    return f"{text}, {counted(curve.count, 'value')}"
