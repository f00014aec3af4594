"""The queue of ``taas.submit``: runs that wait for devices, in the order of their submission.

A queued run has a record and holds its payload, but it has no VM. It can be stopped and, like any
background run, it outlives the kernel.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

from taas.base.wording import counted
from taas.errors import EngineError, NotEnoughDevices
from taas.protocol.clients import Submit
from taas.protocol.records import Verdict
from taas.supervisor.recorder import Recorder

_MOST = 256
"""Maximum number of queued runs: each holds its payload in memory."""
_LOOK_SECONDS = 1.0
"""Time between two checks for free devices, which may also be released by runs of other notebooks.
"""


class Waiting(NamedTuple):
    """A run that waits for devices."""

    submit: Submit
    recorder: Recorder


class RunQueue:
    """The queued runs, in their order."""

    def __init__(self) -> None:
        self._runs: deque[Waiting] = deque()
        self._look_at = 0.0
        self._kept_hold_gpus = False

    @property
    def names(self) -> set[str]:
        """The names of the queued runs."""
        return {run.recorder.record.name for run in self._runs}

    def check_room(self) -> None:
        """Raise an EngineError if the queue is full."""
        if len(self._runs) >= _MOST:
            raise EngineError(
                f"{_MOST} runs of this notebook wait for devices: no more may. Wait for some of"
                " them (result()), or stop some."
            )

    def add(self, submit: Submit, recorder: Recorder) -> None:
        """Add a run to the queue; its record shows what it waits for."""
        self._runs.append(Waiting(submit, recorder))
        recorder.begin(())
        self._say_places()

    def first(self) -> Waiting | None:
        """Return the next run, if it is time to check whether there are devices for it."""
        if not self._runs or time.monotonic() < self._look_at:
            return None
        self._look_at = time.monotonic() + _LOOK_SECONDS
        return self._runs[0]

    def note_kept(self, *, hold_gpus: bool) -> None:
        """Note whether kept ranks of this notebook hold GPUs; on a change, update the records.

        The user does not have to wait for these GPUs: the kept ranks can be ended.
        """
        if hold_gpus != self._kept_hold_gpus:
            self._kept_hold_gpus = hold_gpus
            self._say_places()

    def look_again(self) -> None:
        """Check for free devices at once, since some were released."""
        self._look_at = 0.0

    def remove_first(self) -> None:
        """Remove the next run, because it begins or has failed."""
        self._runs.popleft().recorder.note(waiting="")
        self.look_again()
        self._say_places()

    def stop(self, name: str, place: str) -> None:
        """Remove a run that a person has stopped, and end its record."""
        for run in list(self._runs):
            if run.recorder.record.name == name:
                self._runs.remove(run)
                stopped = f"stopped{place and f' from {place}'} while it waited for devices"
                run.recorder.end(Verdict(outcome="interrupted", message=stopped), (), None)
                run.recorder.close()
        self._say_places()

    def _say_places(self) -> None:
        for before, run in enumerate(self._runs):
            spec = run.submit.cell.spec
            device, holders = "processor", "other runs"
            if _takes_gpus(run.submit):
                device = "GPU"
                if self._kept_hold_gpus:
                    holders += " or ranks that this notebook keeps (%taas release ends these)"
            behind = f" and behind {counted(before, 'run')}" if before else ""
            waiting = f"{counted(spec.world_size, device)}, which {holders} have{behind}"
            run.recorder.note(waiting=waiting)


def _takes_gpus(submit: Submit) -> bool:
    return bool(submit.gpus) and not submit.cell.spec.rehearse


def check_processors(submit: Submit, world_sizes: Iterable[int]) -> None:
    """Raise NotEnoughDevices if rehearsed ranks would share the processors with other runs.

    ``world_sizes`` are those of the runs under way. A run that is alone may have more ranks than
    there are processors.
    """
    if submit.engine.kind != "local" or _takes_gpus(submit):
        return
    busy = sum(world_sizes)
    here = len(os.sched_getaffinity(0))
    if busy and busy + submit.cell.spec.world_size > here:
        raise NotEnoughDevices(
            f"{counted(busy, 'rehearsed rank')} are at work on {here} processors"
        )
