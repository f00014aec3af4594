"""Reads the numbers that a run's cell prints, from the file with a rank's output, as it grows.

The run's worker thread does this, so that an interrupt never waits for it. It spends at
most about a tenth of its time reading. If a cell prints faster than that, the reader falls behind,
and at the end of the run it reads only the last part of the rest. This leaves the processors to the
ranks and to the kernel. If output has to be skipped, the gap is before the end of the curve.

If there are several ranks, only one is read: rank 0, or the first rank that the cell shows
(``--output 3``).
"""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Protocol

from taas.base.poll_loop import WorkThread
from taas.header.options import RunSpec
from taas.protocol.run_curves import Curves
from taas.runs.curves import PrintedNumbers, Series, write_curves
from taas.runs.events import RankEvents
from taas.supervisor.recorder import Recorder
from taas.supervisor.stages import Stage

logger = logging.getLogger(__name__)

_LOOK_SECONDS = 1.0
_BUSY_SECONDS = 2.0
"""Between two points of the curve of the GPUs' use."""
_READ_SECONDS, _REST = 0.03, 9
"""So long a look reads at most, and so many times as long it rests before the next one."""
_LAST_READ_BYTES = 128 << 10
"""If more than that is left when the run ends, only the end of it is read.

To read 100,000 lines with numbers takes half a second, for which the cell would wait.
"""


class PrintingRun(Protocol):
    """What the watch needs of its run (supervisor/runs.py)."""

    recorder: Recorder
    worker: WorkThread
    output: Path

    @property
    def stage(self) -> Stage:
        """Return where the run stands."""


class CurveWatch:
    """Makes the curves of one run: over all its starts, since a restart goes on with the training.

    ``before`` is the watch of the start before this one. The methods are for the loop's thread,
    except :meth:`finish`. The worker looks while the loop waits for it (``pending``), so that what
    one of the two changes the other does not read at the same time.
    """

    def __init__(self, run: PrintingRun, before: CurveWatch | None = None) -> None:
        self._run = run
        rank = _rank_of(run.recorder.record.cell.spec)
        self._events = RankEvents(run.output / str(rank), rank)
        self._numbers: PrintedNumbers = PrintedNumbers() if before is None else before._numbers
        self._busy: Series = Series() if before is None else before._busy
        self._written = Curves()
        self._next = self._next_busy = 0.0
        self._failed = False

    def step(self) -> None:
        """Look, if it is time, and if the worker has nothing else to do."""
        now = time.monotonic()
        is_at_work = self._run.stage in (Stage.RUNNING, Stage.FINISHING)
        if not is_at_work or now < self._next or self._run.worker.pending or self._failed:
            return
        self._next = now + _LOOK_SECONDS  # unless the look has more to read
        busy = None
        if now >= self._next_busy and any(
            one.state == "running" for one in self._run.recorder.record.use
        ):
            busy, self._next_busy = self._run.recorder.record.busy, now + _BUSY_SECONDS
        self._run.worker.do(partial(self._try, partial(self._look, busy)))

    def _look(self, busy: float | None) -> None:
        """Read what the rank has written, as much as fits, and write the curves; in the worker."""
        if busy is not None:
            self._busy.add(busy)
        began = time.monotonic()
        if not self._read(_READ_SECONDS):
            self._next = time.monotonic() + _REST * (time.monotonic() - began)
        self._write()

    def finish(self) -> None:
        """Read the rest, now that the rank writes no more; in the worker's thread."""
        if not self._failed:
            self._try(self._read_rest)

    def _try(self, work: Callable[[], None]) -> None:
        """Do some work; if it raises an error, the run goes on without curves from then on."""
        try:
            work()
        except Exception:
            self._failed = True
            logger.exception("%s has no more curves", self._run.recorder.record.name)

    def _read_rest(self) -> None:
        if self._events.unread > _LAST_READ_BYTES:
            self._events.skip()
        self._read(math.inf)
        self._numbers.end()
        self._write()

    def _read(self, seconds: float) -> bool:
        """Read for so long; return whether all was read that is there."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            found = self._events.read()
            if not found:
                return True
            self._numbers.take(found)
        return False

    def _write(self) -> None:
        busy = self._busy.curve(percent=True) if self._busy.count else None
        curves = Curves(self._numbers.curves(), busy)
        if curves != self._written:
            self._written = curves
            # on a full disk the run goes on without them
            with contextlib.suppress(OSError):
                write_curves(self._run.recorder.record.folder, curves)


def _rank_of(spec: RunSpec) -> int:
    shown = spec.shown_ranks()
    return 0 if not shown or 0 in shown else shown[0]
