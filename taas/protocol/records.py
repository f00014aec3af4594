"""The record of a run, which stands in its folder: what every process may see of it.

``runs/records`` says what else is in the folder, reads records and writes them.
"""

from __future__ import annotations

import time
from pathlib import Path

import msgspec

from taas.base.places import ProcessMark, runtime_folder
from taas.protocol.delivery_orders import Delivered
from taas.protocol.ranks import Asking, Cell, RankEnded, RankKept, RankUse
from taas.protocol.stacks import Trouble


class Verdict(msgspec.Struct, kw_only=True):
    """How a run ended.

    Attributes:
        outcome: ``done``, ``failed``, ``interrupted`` or ``lost``; empty before the end.
        first: the end of the first failing rank.
        vm: that rank's VM; empty if the run is on this machine alone.
        others: how many ranks failed after it, for another reason than waiting for it.
        waited: how many ranks stood in a collective that could not end without it.
        message: for ``lost``: what was lost; for ``failed``: which ranks had ended before; for
            ``interrupted``: from where, if that was not its own cell, and what failed while the
            cell was finishing.
        names: what happened to rank 0's names, if the run is not done.
        error: for ``lost``: the class of :mod:`taas.errors` to raise.
    """

    outcome: str = ""
    first: RankEnded | None = None
    vm: str = ""
    others: int = 0
    waited: int = 0
    message: str = ""
    names: str = "no names came back"
    error: str = "RunLost"


class RunRecord(Verdict, kw_only=True):
    """A run as every process may see it, with its verdict once it is over.

    Attributes:
        name: it may be used again; name and ``id`` together are unique.
        project: the notebook's folder.
        notebook: its path; empty if its front end does not say it.
        device: the ranks' devices in words.
        gpus: the GPUs of this machine that it has, by device (:class:`taas.protocol.clients.Gpu`).
        state: ``acquiring``, ``starting``, ``running``, ``finishing`` (interrupted: the cell's own
            ``except`` and ``finally`` run), ``ending`` or ``over``.
        waiting: what it waits for while it is ``acquiring``, or has lost its last data VM; while it
            is ``finishing``, where its ranks stand.
        interrupted: somebody has interrupted it, however it ended then.
        submitted, ended: seconds since the epoch, 0 before.
        losses: what was lost before each restart, one line for the user each.
        notices: lines for the user.
        trouble: what is wrong while it goes on; after a bad end, what was wrong then.
        questions: questions to the person at the keyboard on which its ranks wait.
        use: what its ranks use, in the order of their numbers.
        curve: how busy they were, in percent, in equal parts of its time.
        kept_ranks: its ranks, while they stay after it and wait for the notebook's next cell.
        ranks_gone: why kept ranks do not stay any more.
        files: the files that it left for `%taas attach`, with their sizes in bytes.
    """

    name: str
    id: str
    cell: Cell
    project: str
    notebook: str = ""
    supervisor: ProcessMark
    kernel: ProcessMark
    device: str
    gpus: tuple[str, ...] = ()
    state: str = "acquiring"
    waiting: str = ""
    interrupted: bool = False
    submitted: float = msgspec.field(default_factory=time.time)
    ended: float = 0.0
    restarts: int = 0
    losses: tuple[str, ...] = ()
    notices: tuple[str, ...] = ()
    trouble: Trouble | None = None
    questions: tuple[Asking, ...] = ()
    delivered: Delivered | None = None
    use: tuple[RankUse, ...] = ()
    curve: tuple[int, ...] = ()
    kept_ranks: tuple[RankKept, ...] | None = None
    ranks_gone: str = ""
    files: dict[str, int] = {}

    @property
    def owner(self) -> str:
        """Return the notebook in words."""
        return in_words(self.notebook, self.project)

    @property
    def folder(self) -> Path:
        """Return the run's folder."""
        return runs_root() / f"{self.name}-{self.id}"

    @property
    def writes(self) -> list[Path]:
        """Return the folders with project files of ranks other than 0, one for each start."""
        return [
            output_folder(self.folder, number) / "writes" for number in range(self.restarts + 1)
        ]

    @property
    def background(self) -> bool:
        """Return whether it outlives its kernel."""
        return self.cell.spec.background

    @property
    def busy(self) -> float | None:
        """Return how busy its GPUs are, in percent on average.

        Without GPUs, or if that is not known, this is the use of one processor for each rank.
        """
        gpus = [rank.gpu for rank in self.use if rank.gpu is not None]
        shares = gpus or [rank.cpu for rank in self.use]
        return sum(shares) / len(shares) if shares else None

    def rank_folders(self) -> list[Path]:
        """Return the folders in which the ranks of its last start write."""
        output = output_folder(self.folder, self.restarts)
        return [output / str(rank) for rank in range(self.cell.spec.world_size)]

    @property
    def live(self) -> bool:
        """Return whether the run still goes on."""
        return self.state != "over"

    @property
    def may_go_on(self) -> bool:
        """Return whether it only counts as lost because its supervisor is on another machine."""
        return self.outcome == "lost" and self.supervisor.elsewhere

    @property
    def holds(self) -> bool:
        """Return whether it holds its GPUs: it goes on, or its ranks stay."""
        return self.live or self.kept_ranks is not None


def in_words(notebook: str, project: str) -> str:
    """Name a notebook, or its project if its front end does not say its path."""
    return "/".join(Path(notebook).parts[-2:]) if notebook else f"{project.rstrip('/')}/"


def output_folder(folder: Path, restarts: int) -> Path:
    """Return the folder in which the ranks of a run write after so many restarts."""
    return folder / f"restart-{restarts}" if restarts else folder


def runs_root() -> Path:
    """Return the folder of all runs of this user; make it if it is missing."""
    return runtime_folder("runs")
