"""The record of a run, which is stored in its folder, and can be read by every process.

``runs/records`` lists the other files in the folder, and reads and writes records.
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
        first: the end of the rank that failed first.
        vm: the VM of that rank; empty if the run is on this machine alone.
        others: how many ranks failed after it, for other reasons than waiting for it.
        waited: how many ranks were in a collective that could not end without it.
        message: for ``lost``: what was lost; for ``failed``: which ranks had ended before; for
            ``interrupted``: from where, if that was not the run's own cell, and what failed while
            the cell was finishing.
        names: what happened to rank 0's variables, if the run is not done.
        error: for ``lost``: the name of the class in :mod:`taas.errors` to raise.
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
        name: the name of the run, which may be reused; name and ``id`` together are unique.
        project: the notebook's folder.
        notebook: the path of the notebook; empty if its front end does not provide it.
        device: the ranks' devices in words.
        gpus: the GPUs of this machine that the run has, by ``device``
            (:class:`taas.protocol.clients.Gpu`).
        state: ``acquiring``, ``starting``, ``running``, ``finishing`` (interrupted: the cell's own
            ``except`` and ``finally`` blocks run), ``ending`` or ``over``.
        waiting: what the run waits for while it is ``acquiring``, or after it has lost its last
            data VM; while it is ``finishing``, where its ranks are.
        interrupted: whether a person has interrupted it, however it ended afterwards.
        submitted, ended: seconds since the epoch; ``ended`` is 0 until then.
        losses: what was lost before each restart, one line for the user each.
        notices: lines for the user.
        trouble: what is wrong while the run goes on; after a bad end, what was wrong then.
        questions: questions to the person at the keyboard for whose replies ranks wait.
        use: the resources that its ranks use, in the order of their numbers.
        kept_ranks: its ranks, while they stay after it and wait for the notebook's next cell.
        ranks_gone: why kept ranks do not stay any more.
        files: the files that it left for ``%taas attach``, with their sizes in bytes.
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
    kept_ranks: tuple[RankKept, ...] | None = None
    ranks_gone: str = ""
    files: dict[str, int] = {}

    @property
    def owner(self) -> str:
        """Return the name of the notebook for messages."""
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
        """Return whether the run outlives its kernel."""
        return self.cell.spec.background

    @property
    def busy(self) -> float | None:
        """Return how busy the run's GPUs are, in percent on average.

        Without GPUs, or if this is unknown, return the use of one processor by each rank instead.
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
        """Return whether the run has not ended."""
        return self.state != "over"

    @property
    def may_go_on(self) -> bool:
        """Return whether it only counts as lost because its supervisor is on another machine."""
        return self.outcome == "lost" and self.supervisor.elsewhere

    @property
    def holds(self) -> bool:
        """Return whether it holds its GPUs: it has not ended, or its ranks are kept."""
        return self.live or self.kept_ranks is not None


def in_words(notebook: str, project: str) -> str:
    """Return a notebook's name, or its project if the front end does not provide its path."""
    return "/".join(Path(notebook).parts[-2:]) if notebook else f"{project.rstrip('/')}/"


def output_folder(folder: Path, restarts: int) -> Path:
    """Return the folder in which the ranks of a run write after this many restarts."""
    return folder / f"restart-{restarts}" if restarts else folder


def runs_root() -> Path:
    """Return the folder of all runs of this user; make it if it is missing."""
    return runtime_folder("runs")
