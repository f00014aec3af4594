"""The curves of a run: numbers that its cell prints behind words, and how busy its GPUs are.

The run's supervisor makes them from the file with a rank's output (supervisor/curve_watch.py), and
writes them into the run's folder. Everybody reads them there: the cell, ``%taas history`` and
``attach``, and ``taas.history``. So a background run has them, too, and a rank does nothing for
them.

:mod:`taas.runs.printed_numbers` says which numbers of a line are taken. A series of them is a curve
if it has two different values, or three; and whole numbers have to fall somewhere, since those that
never do count something. Three curves are kept: those with the most values, and of equally many
those that were printed first.
"""

from __future__ import annotations

import html
import math
import re
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec

from taas.base.places import write_private
from taas.protocol.framing import MessageReader, Unreadable
from taas.protocol.run_curves import Curve, Curves
from taas.runs.events import Output, read_arguments, widget_state
from taas.runs.printed_numbers import Number, numbers_in

_FILE = "curves"
_MOST_CURVES = 3
_MOST_NAMES = 64
_MOST_PARTS = 128
"""Of so many parts at most a series keeps the lowest and the highest value."""
_LONGEST_LINE = 4096
"""So many characters of a line are looked at."""
_LARGEST_MESSAGE = 1 << 14
"""Larger messages of widgets are not looked at."""
_COLOURS = re.compile(r"\x1b\[[0-9;:]*[A-Za-z]")
_TAG = re.compile(r"<[^>]*>")
Point = tuple[int, float]


class _Part:
    """A part of a series: its lowest value, its highest, and the ends of those not finite."""

    __slots__ = ("first_odd", "high", "last_odd", "low")

    def __init__(self) -> None:
        self.low: Point | None = None
        self.high: Point | None = None
        self.first_odd: Point | None = None
        self.last_odd: Point | None = None

    def add(self, point: Point) -> None:
        value = point[1]
        if not math.isfinite(value):
            self.first_odd = self.first_odd or point
            self.last_odd = point
            return
        if self.low is None or value < self.low[1]:
            self.low = point
        # of equal values the last, so that a part of equal values has two points like any other
        if self.high is None or value >= self.high[1]:
            self.high = point

    @property
    def points(self) -> list[Point]:
        kept = (self.low, self.high, self.first_odd, self.last_odd)
        return [point for point in kept if point is not None]


class Series:
    """Values in the order in which they come, in bounded memory.

    It keeps up to 256 values as they are. Of more it keeps the first and the last, and the lowest
    and the highest of each part; parts are equally long, and become longer as values come.
    """

    def __init__(self) -> None:
        self.count = 0
        self._length = 2  # of a part, in values: the two of it are its lowest and its highest
        self._parts: list[_Part] = []
        self._first = self._last = (0, math.nan)

    def add(self, value: float) -> None:
        """Add a value."""
        point = (self.count, value)
        if self.count == 0:
            self._first = point
        if self.count % self._length == 0:
            if len(self._parts) == _MOST_PARTS:
                self._lengthen()
            self._parts.append(_Part())
        self._parts[-1].add(point)
        self._last = point
        self.count += 1

    def _lengthen(self) -> None:
        """Join each two neighbouring parts."""
        joined = []
        for left, right in zip(self._parts[::2], self._parts[1::2], strict=True):
            part = _Part()
            for point in sorted((*left.points, *right.points), key=_number):
                part.add(point)
            joined.append(part)
        self._parts, self._length = joined, 2 * self._length

    def curve(self, *, percent: bool = False) -> Curve:
        """Return the values that are kept."""
        points = {self._first[0]: self._first, self._last[0]: self._last}
        for part in self._parts:
            points |= {point[0]: point for point in part.points}
        return Curve(self.count, tuple(sorted(points.values(), key=_number)), percent)


def _number(point: Point) -> int:
    return point[0]


class _Printed:
    """The numbers behind one word, and what tells measurements from counts."""

    def __init__(self) -> None:
        self.series = Series()
        self.last = math.nan
        self._percent = False
        self._measured = False  # a value was not a whole number, or one was lower than another
        self._differ = False

    def add(self, number: Number) -> None:
        value, count = number.value, self.series.count
        self._measured |= not number.whole or number.percent or value < self.last
        self._differ |= count > 0 and value != self.last
        self._percent, self.last = number.percent, value
        self.series.add(value)

    @property
    def is_curve(self) -> bool:
        return self._measured and (self._differ or self.series.count >= 3)

    def curve(self) -> Curve:
        return self.series.curve(percent=self._percent)


class PrintedNumbers:
    """The numbers in a rank's output, which is given piece by piece."""

    def __init__(self) -> None:
        self._printed: dict[str, _Printed] = {}
        self._open: dict[str, str] = {}  # by stream, the text of its last line until now
        self._redrawn: dict[str, bool] = {}  # by stream, whether that line is written over another

    def take(self, outputs: Iterable[Output]) -> None:
        """Take in what the rank has written next."""
        for item in outputs:
            if item.kind in ("stdout", "stderr"):
                self._take_text(item.kind, item.text)
            elif item.kind == "comm" and len(item.body) <= _LARGEST_MESSAGE:
                text = _text_of_widget(read_arguments(item.body))
                if text:
                    self._take_line(text, redrawn=True)

    def end(self) -> None:
        """Take in lines that have no end, since the rank writes no more."""
        for stream, line in self._open.items():
            self._take_line(line, redrawn=self._redrawn.get(stream, False))
        self._open.clear()

    def curves(self) -> dict[str, Curve]:
        """Return the curves of the run until now."""
        found = [name for name, printed in self._printed.items() if printed.is_curve]
        found.sort(key=lambda name: -self._printed[name].series.count)
        return {name: self._printed[name].curve() for name in found[:_MOST_CURVES]}

    def _take_text(self, stream: str, text: str) -> None:
        """Take in the lines that end in this text; the last one waits for its end.

        A line ends at its line end, and where it is written over from its beginning.
        """
        text = (self._open.get(stream, "") + text).replace("\r\n", "\n")
        if "\x1b" in text:
            text = _COLOURS.sub("", text)
        lines = text.split("\n")
        redrawn = self._redrawn.get(stream, False)
        for line in lines[:-1]:
            if redrawn or "\r" in line:
                self._take_drawn(line.split("\r"), redrawn=redrawn)
                redrawn = False
            else:
                self._take_line(line, redrawn=False)
        *drawn, rest = lines[-1].split("\r")
        self._take_drawn(drawn, redrawn=redrawn)
        self._redrawn[stream] = redrawn or bool(drawn)
        self._open[stream] = rest[-_LONGEST_LINE:]

    def _take_drawn(self, versions: Iterable[str], *, redrawn: bool) -> None:
        """Take in the versions of a line, each written over the one before it."""
        for version in versions:
            self._take_line(version, redrawn=redrawn)
            redrawn = True

    def _take_line(self, line: str, *, redrawn: bool) -> None:
        """Take in a line; in one that is written over another, what has not changed is not new."""
        for number in numbers_in(line[:_LONGEST_LINE]):
            printed = self._printed.get(number.name)
            if printed is None:
                printed = self._make_room_for(number.name)
            elif redrawn and number.value == printed.last:
                continue
            printed.add(number)

    def _make_room_for(self, name: str) -> _Printed:
        if len(self._printed) == _MOST_NAMES:
            rarest = min(self._printed, key=lambda name: self._printed[name].series.count)
            del self._printed[rarest]
        made = self._printed[name] = _Printed()
        return made


def _text_of_widget(message: dict[str, Any]) -> str:
    """Return the text that a message gives to a widget, such as the right side of tqdm's bar."""
    value = widget_state(message).get("value")
    return html.unescape(_TAG.sub("", value)) if isinstance(value, str) else ""


# ---------------------------------------------------------------- the file

_read = MessageReader(Curves)
_encode = msgspec.msgpack.Encoder().encode


def write_curves(folder: Path, curves: Curves) -> None:
    """Replace the curves in a run's folder.

    Raises:
        OSError: for example, the disk is full.
    """
    write_private(folder / _FILE, _encode(curves))


def read_curves(folder: Path) -> Curves:
    """Return the curves of a run; none if it has none yet, or they cannot be read."""
    path = folder / _FILE
    try:
        file = path.stat()
        return _decode(path, file.st_ino, file.st_mtime_ns, file.st_size)
    except (OSError, Unreadable):  # removed meanwhile, or written by another version of taas
        return Curves()


@lru_cache(maxsize=256)
def _decode(path: Path, *_: int) -> Curves:
    """Decode the curves, once for each file that replaced them."""
    curves: Curves = _read(path.read_bytes())
    return curves
