"""The stages of a run, and the table of transitions between them.

A run is in one stage at a time. :class:`taas.supervisor.recorder.Recorder` holds the stage, and
writes its label into the record, which is what people see. An event that changes a run requests a
transition to a stage. A transition that is not in the table is rejected: it means that the
supervisor's view of the run is wrong, and to continue would be a guess. Such a run is lost
(:meth:`taas.supervisor.runs.Run.break_off`), and the other runs of the notebook continue.

ARCHITECTURE.md has a diagram of the table. Below, "the run" means one start of it: a run that
starts again after a loss passes through the stages again.
"""

from __future__ import annotations

import logging
from enum import Enum, auto

logger = logging.getLogger(__name__)


class Stage(Enum):
    """The stage of a run."""

    WAITING = auto()
    """The run has no devices: it was just submitted, or is in the queue of ``taas.submit``."""
    ACQUIRING = auto()
    """Some VMs are not up yet, or too few batches are ready."""
    STARTING = auto()
    """The ranks are being started; not all have begun the cell."""
    RUNNING = auto()
    """All ranks have begun the cell."""
    FINISHING = auto()
    """A person has interrupted the run: the cell's own ``except`` and ``finally`` blocks run."""
    ENDING = auto()
    """The run has failed, a person has interrupted it twice, or its client is gone: its processes
    are being ended.
    """
    SORTING = auto()
    """No process of the run is left and its outcome is fixed. Files that ranks other than 0 wrote
    are being sorted into those to keep and those to remove.
    """
    RESTARTING = auto()
    """As SORTING, but after a loss for which the run will be started again."""
    OVER = auto()
    """The record has the outcome; the client may still have to receive rank 0's variables."""

    def __str__(self) -> str:
        return self.name.lower()


UNDISTURBED = frozenset({Stage.ACQUIRING, Stage.STARTING, Stage.RUNNING})
"""Nothing has caused the run to end."""
UNDER_WAY = UNDISTURBED | {Stage.FINISHING, Stage.ENDING}
"""Processes of the run exist, or may still be started."""
ENDED = frozenset({Stage.SORTING, Stage.OVER})
"""The outcome of the run is fixed."""

WORDS = {
    Stage.WAITING: "acquiring",
    Stage.ACQUIRING: "acquiring",
    Stage.STARTING: "starting",
    Stage.RUNNING: "running",
    Stage.FINISHING: "finishing",
    Stage.ENDING: "ending",
    Stage.OVER: "over",
}
"""The label of a stage in the record; for other stages, which are very short, the label stays."""

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
"""The valid transitions, with the cause of each."""


class UnknownStep(RuntimeError):
    """A transition that is not in the table was requested, which is a bug in taas.

    Attributes:
        before: the stage of the run.
        after: the stage that was requested.
    """

    def __init__(self, run: str, before: Stage, after: Stage) -> None:
        super().__init__(f"{run} is {before}: it cannot be {after} next")
        self.before, self.after = before, after


def check_step(run: str, before: Stage, after: Stage) -> None:
    """Check and log a transition of a run.

    Raises:
        UnknownStep: the transition is not in the table.
    """
    if (before, after) not in STEPS:
        raise UnknownStep(run, before, after)
    logger.info("%s: %s -> %s", run, before, after)
