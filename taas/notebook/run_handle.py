"""The handle of a background run: of a ``--background`` cell, or of ``taas.submit``."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from IPython.core.getipython import get_ipython

from taas.base.wording import counted, shown_path
from taas.capture.moves.collected import values_of
from taas.errors import CaptureError, RunLost, RunStopped, TaasError
from taas.notebook.view.live_view import LiveDisplay, what_next
from taas.notebook.view.shown import Shown
from taas.notebook.view.tables import plain
from taas.notebook.view.watched_run import render_run
from taas.protocol.clients import RunRequest
from taas.protocol.records import RunRecord
from taas.runs.curves import read_curves
from taas.runs.events import RankEvents, plain_form, read_arguments
from taas.runs.reader import RunReader, finish
from taas.runs.records import read_record
from taas.supervisor import connections


class RunHandle:
    """A background run, with an interface like :class:`concurrent.futures.Future`.

    Its display shows the run's state; in a notebook, the display is kept up to date.

    Attributes:
        name: the name for ``%taas attach``, ``logs`` and ``stop``.
        folder: the folder with the run's record, output and variables.
    """

    def __init__(self, record: RunRecord, value: str = "", *, by_rank: bool = False) -> None:
        """Create the handle of a run.

        ``value``: the name of the variable in the ranks that holds the function's return value.
        """
        self.name, self.folder = record.name, record.folder
        self._record = record
        self._value, self._by_rank = value, by_rank

    # -------------------------------------------------------------------- state

    def done(self) -> bool:
        """Return whether the run has ended, successfully or not."""
        return not self._look().live or self._is_removed

    def result(self, timeout: float | None = None) -> Any:
        """Wait until the run has ended; return what its function returned in rank 0.

        With ``collect=True``, the result is a list with the value of each rank. For a
        ``--background`` cell it is None: use ``%taas attach`` to restore the variables. An
        interrupt ends the wait, and the run continues.

        Args:
            timeout: the maximum number of seconds to wait; None: no limit.

        Raises:
            TimeoutError: the run has not ended yet.
            CellFailed, RunLost: the run failed; the error is the one that its cell would have
                raised.
            RunStopped: a user stopped the run.
            RunLost: the run's folder was removed, and with it the return value.
            CaptureError: the return value cannot be pickled.
        """
        error = self.exception(timeout)
        if error is not None:
            raise error
        if not self._value:
            return None
        folders = self._record.rank_folders()
        found, lines = values_of([self._value], folders if self._by_rank else folders[:1])
        values = found[self._value]
        if lines:
            raise CaptureError(
                f"{'; '.join(lines)}. Return what pickle can carry, such as numbers, arrays,"
                " tensors or a state_dict."
            )
        return values if self._by_rank else values[0]

    def exception(self, timeout: float | None = None) -> TaasError | None:
        """Wait until the run has ended; return what :meth:`result` raises, or None.

        Raises:
            TimeoutError: the run has not ended yet.
        """
        self._wait(timeout)
        record = self._record
        if self._is_removed:
            removed = RunLost(
                f"{self.name} was removed: {shown_path(self.folder)} is not there any more, nor is"
                " what the run returned. `%taas history` lists the runs that are kept."
            )
            removed.run = self.name
            return removed
        if record.outcome == "interrupted":
            stopped = RunStopped(f"{record.name} was {record.message or 'stopped'}; {record.names}")
            stopped.run = record.name
            return stopped
        try:
            finish(record)
        except TaasError as error:
            return error
        return None

    def _wait(self, timeout: float | None) -> None:
        reader = RunReader(self._record, ())
        until = float("inf") if timeout is None else time.monotonic() + timeout
        while not reader.over:
            left = until - time.monotonic()
            if left <= 0:
                raise TimeoutError(f"{self.name} goes on: it has not ended within {timeout} s")
            reader.wait(left)
            reader.look()
        self._record = self._look()

    @property
    def _is_removed(self) -> bool:
        """Whether the run's folder is gone: removed by hand, or to make room for newer runs."""
        return not self.folder.is_dir()

    def _look(self) -> RunRecord:
        self._record = read_record(self.folder) or self._record
        return self._record

    # ------------------------------------------------------------------------ actions

    def stop(self, *, now: bool = False) -> None:
        """Stop the run as the interrupt button stops a cell: its ``except`` and ``finally`` run.

        ``now``: end the run at once.
        """
        if self.done():
            return
        with connections.Visit(connections.connection_of(self._record)) as visit:
            for _ in range(2 if now else 1):
                visit.say(RunRequest(run=self.name, what="interrupt", place="its handle"))

    def logs(self, rank: int = 0) -> str:
        """Return what a rank has written so far, with its displays as text."""
        return "".join(self._written(rank))

    def _written(self, rank: int) -> Iterator[str]:
        folders = self._look().rank_folders()
        if not 0 <= rank < len(folders):
            raise ValueError(
                f"{self.name} has no rank {rank}: its {counted(len(folders), 'rank')} are numbered"
                " from 0"
            )
        events = RankEvents(folders[rank], rank)
        while found := events.read():
            for output in found:
                yield (
                    plain_form(output.kind, read_arguments(output.body))
                    if output.body
                    else output.text
                )

    @property
    def curves(self) -> dict[str, list[float]]:
        """The labelled numbers that the cell has printed so far, such as ``loss 0.43``.

        A dict from label to values, with at most three labels. A series of more than 256 values is
        downsampled: it keeps its first and last value, and the minimum and maximum of each segment.
        """
        found = read_curves(self.folder).numbers
        return {name: curve.values for name, curve in found.items()}

    # -------------------------------------------------------------------- display

    def _shown(self) -> tuple[Shown, bool]:
        """Return the current view of the run, and whether the run is active."""
        record, name = read_record(self.folder), self.name
        if record is None:
            return plain(f"{name} was removed"), False
        hints = what_next(record)
        if self._value:
            ends = f"; .stop(), or %taas stop {name}, ends it" if record.live else ""
            hints = f".result() of this handle is what it returned{ends}"
        return render_run(record, hints=hints), record.live

    def __repr__(self) -> str:
        return self._shown()[0].text

    def _ipython_display_(self) -> None:
        shell = get_ipython()
        if not hasattr(shell, "kernel"):
            raise NotImplementedError  # then IPython shows its repr
        LiveDisplay(shell.display_pub, self._shown)
