"""A run's curves, as stored in its folder: the numbers that its cell printed, and its utilization.

``runs/curves`` makes them and reads them.
"""

from __future__ import annotations

import msgspec


class Curve(msgspec.Struct, frozen=True):
    """Values in the order in which they came, thinned out.

    Attributes:
        count: how many values there were.
        points: some hundred of them, each with its number from 0: the first and the last, the
            lowest and the highest, and those of each part of the curve.
        percent: they were printed with a percent sign.
    """

    count: int
    points: tuple[tuple[int, float], ...]
    percent: bool = False

    @property
    def values(self) -> list[float]:
        """Return the values of the points."""
        return [value for _, value in self.points]

    @property
    def last(self) -> float:
        """Return the last value."""
        return self.points[-1][1]


class Curves(msgspec.Struct, frozen=True):
    """The curves of one run.

    Attributes:
        numbers: by the words behind which the numbers stand, the most frequent ones first.
        busy: how busy its GPUs were, in percent, at equal intervals; without GPUs, its processors.
            None: that is not known.
    """

    numbers: dict[str, Curve] = {}
    busy: Curve | None = None
