"""Where a run stands: its stages, and the table of the steps from one to another.

A run is in one stage at a time. :class:`taas.supervisor.recorder.Recorder` holds it, and writes the
word for it into the record, which is what people see. Whatever happens to a run asks for a step by
the stage that it leads to. The table refuses a step that it does not know: then what taas believes
of the run is wrong, and to go on would be a guess. Such a run is lost
(:meth:`taas.supervisor.runs.Run.break_off`), and the others of the notebook go on.

ARCHITECTURE.md draws the table. The words "the run" below mean one start of it: a run that starts
again after a loss passes through the stages once more.
"""

from __future__ import annotations

import logging
from enum import Enum, auto

logger = logging.getLogger(__name__)


class Stage(Enum):
    """Where a run stands."""

    WAITING = auto()
    """It has no devices: it was just submitted, or is in the queue of ``taas.submit``."""
    ACQUIRING = auto()
    """Some of its VMs are not up yet, or too few elements are ready."""
    STARTING = auto()
    """Its ranks are being started; not all have begun the cell."""
    RUNNING = auto()
    """All ranks have begun the cell."""
    FINISHING = auto()
    """A person has interrupted it: the cell's own ``except`` and ``finally`` run."""
    ENDING = auto()
    """It has failed, a person insists, or nobody wants it any more: what it started is ended."""
    SORTING = auto()
    """Nothing of it is left, and nothing changes how it ended: what ranks wrote is sorted."""
    RESTARTING = auto()
    """The same, after a loss which another start can make good."""
    OVER = auto()
    """Its record says how it ended; its client may still have to take rank 0's names."""

    def __str__(self) -> str:
        return self.name.lower()


UNDISTURBED = frozenset({Stage.ACQUIRING, Stage.STARTING, Stage.RUNNING})
"""Nothing has made the run end."""
UNDER_WAY = UNDISTURBED | {Stage.FINISHING, Stage.ENDING}
"""Something of the run is there, or may come."""
ENDED = frozenset({Stage.SORTING, Stage.OVER})
"""Nothing changes how the run ended."""

WORDS = {
    Stage.WAITING: "acquiring",
    Stage.ACQUIRING: "acquiring",
    Stage.STARTING: "starting",
    Stage.RUNNING: "running",
    Stage.FINISHING: "finishing",
    Stage.ENDING: "ending",
    Stage.OVER: "over",
}
"""What a record says of a stage. The others take no time that a person sees: the word stays."""

STEPS = {
    (Stage.WAITING, Stage.ACQUIRING): "it has its devices",
    (Stage.WAITING, Stage.OVER): "a person stops it in the queue, or it cannot begin",
    (Stage.ACQUIRING, Stage.STARTING): "its VMs are up, and enough elements are ready",
    (Stage.ACQUIRING, Stage.FINISHING): "a person interrupts it",
    (Stage.ACQUIRING, Stage.ENDING): "a VM or its data cannot be had, or its client is gone",
    (Stage.STARTING, Stage.RUNNING): "all ranks have begun the cell",
    (Stage.STARTING, Stage.FINISHING): "a person interrupts it",
    (Stage.STARTING, Stage.ENDING): "a rank, a VM or its data is lost, or its client is gone",
    (Stage.RUNNING, Stage.FINISHING): "a person interrupts it",
    (Stage.RUNNING, Stage.ENDING): "a rank fails, something is lost, or its client is gone",
    (Stage.RUNNING, Stage.SORTING): "all is gone: the cell has ended well in every rank",
    (Stage.FINISHING, Stage.ENDING): "a person insists, or its client is gone",
    (Stage.FINISHING, Stage.SORTING): "all is gone",
    (Stage.ENDING, Stage.SORTING): "all is gone",
    (Stage.ENDING, Stage.RESTARTING): "all is gone, some by a loss, and it may start again",
    (Stage.SORTING, Stage.OVER): "what ranks wrote is sorted",
    (Stage.RESTARTING, Stage.ACQUIRING): "another start has its VMs",
    (Stage.RESTARTING, Stage.OVER): "another start cannot have its VMs, or is not wanted",
}
"""The steps that there are, and what brings each about."""


class UnknownStep(RuntimeError):
    """A step that the table does not know was asked for: taas itself is wrong.

    Attributes:
        before: where the run stands.
        after: the stage that was asked for.
    """

    def __init__(self, run: str, before: Stage, after: Stage) -> None:
        super().__init__(f"{run} is {before}: it cannot be {after} next")
        self.before, self.after = before, after


def check_step(run: str, before: Stage, after: Stage) -> None:
    """Log a step of a run.

    Raises:
        UnknownStep: the table does not know it.
    """
    if (before, after) not in STEPS:
        raise UnknownStep(run, before, after)
    logger.info("%s: %s -> %s", run, before, after)
