"""The ranks that a notebook keeps: those of its last `--keep` cell, with their VMs, until the next one or their end."""

from __future__ import annotations

import dataclasses
import time

from taas.errors import EngineError, RanksGone
from taas.header.options import RunSpec
from taas.supervisor.fleet import Fleet
from taas.supervisor.runs import Run
from taas.supervisor.vms import Vm
from taas.wire.clients import Submit
from taas.wording import counted

_OF_ONE_CELL = (
    "collect", "data_vms", "hang_timeout", "keep", "name", "notify", "output", "post_mortem", "prebuffer", "returned", "uneven", "units",
)  # fmt: skip
"""Fields of a header that may be others in each cell."""
_IN_WORDS = {"world_size": "number", "instance": "instance type", "project": "project folder"}


class KeptRanks:
    """None at first; then those of one run that is over, each of which waits for the next order.

    Args:
        fleet: what has their VMs.
    """

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._run: Run | None = None
        self._why_gone = "their supervisor ended"
        self._until = float("inf")

    def keep(self, run: Run) -> None:
        """Keep the ranks of a run that is over."""
        self._fleet.keep(run.name, run.vms, run.submit.engine.idle)
        self._run, self._until = run, time.monotonic() + run.submit.keep_idle
        if run.ranks.lost:
            self.end(run.ranks.lost)

    def find(self, submit: Submit) -> Run | None:
        """Return the run whose ranks a cell has to run in, if it has to.

        Raises:
            RanksGone: it has left names to ranks that are not there any more.
            EngineError: it asks for others than are there.
        """
        run = self._run if submit.cell.spec.keep else None
        if submit.left_to and (run is None or run.recorder.record.id != submit.left_to):
            raise RanksGone(f"the ranks that this notebook kept are gone ({self._why_gone})")
        if run is not None:
            _check_alike(run, submit)
        return run

    def hand_over(self) -> None:
        """Another run has them now."""
        if self._run is not None:
            self._run.recorder.note(kept_ranks=None)
        self._run, self._until = None, float("inf")

    def end(self, why: str) -> int:
        """End them, if there are any; returns how many."""
        run = self._run
        if run is None:
            return 0
        self.hand_over()
        self._why_gone = why
        self._fleet.give_back(run.vms)
        return run.submit.cell.spec.world_size

    def lose(self, vm: Vm, run: Run | None, how: str) -> None:
        """End them as some of them died on a VM; those of a run whose names are still being taken will not be kept."""
        if self._run is not None and vm in self._run.vms:
            self.end(how)
        elif run is not None and run.state == "over":
            run.ranks.lost = how

    def wait(self) -> float | None:
        """Return the seconds until :meth:`step` has something to do; None: it has not."""
        return None if self._run is None else max(0.0, self._until - time.monotonic())

    def step(self) -> None:
        """End those that no cell has come for."""
        if time.monotonic() > self._until:
            self.end("no cell came for the time that [keep] idle in taas.toml gives")


def _check_alike(run: Run, submit: Submit) -> None:
    """See that a cell asks for ranks like those of a run.

    Raises:
        EngineError: it does not.
    """
    mine, asked = _lasting(run.submit), _lasting(submit)
    other = next((name for name in mine if mine[name] != asked[name]), None)
    if other is not None:
        what = _IN_WORDS.get(other, f"--{other.replace('_', '-')}")
        raise EngineError(
            f"--keep: {counted(run.submit.cell.spec.world_size, 'rank')} of this notebook, kept since {run.name}, have another "
            f"{what} ({_said(mine[other])}) than this cell asks for ({_said(asked[other])}). Type the header that made "
            "them, or %taas release, which ends them."
        )


def _lasting(submit: Submit) -> dict[str, object]:
    """Return what two cells must have in common to run in the same ranks."""
    fields = [field.name for field in dataclasses.fields(RunSpec) if field.name not in _OF_ONE_CELL]
    return {
        "world_size": submit.cell.spec.world_size,
        **{name: getattr(submit.cell.spec, name) for name in fields},
        "engine": f"{submit.engine.kind} {submit.engine.address}".rstrip(),
        "project": submit.workspace.project,
    }


def _said(value: object) -> str:
    return "none" if value in (None, (), "") else str(value)
