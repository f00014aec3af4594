"""What is known of runs, on disk: one folder a run, which outlives kernel, supervisor and machine restarts.

::

    <jupyter runtime dir>/taas/runs/<name>-<id>/      0700
        record.json     RunRecord, replaced as a whole whenever it changes
        announced       empty: its removal was announced when this was made (runs/retention.py)
        <rank>/         what the rank wrote (runs/events.py); after a restart below restart-<n>/
        data.log        what the data processes printed; after a restart as well below restart-<n>/
        writes/         what ranks other than 0 wrote in the project's place (storage/kept.py); as well
        reserve         room on the disk for the last record, until that is written
        payload         the names the cell was given, and
        answer          rank 0's names, and
        loaders         the generators of registered loaders: kept of a background run, for `%taas attach`

Each file has one writer: the supervisor of a run its record, a rank its output, which from another host is mirrored
here. Everybody else reads (runs/reader.py): the launching cell, ``status``, ``history``, ``logs`` and ``attach``
need no supervisor to answer.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Iterable
from copy import copy
from functools import lru_cache
from pathlib import Path

import msgspec

from taas.delivery.config import Delivered
from taas.errors import HeaderError
from taas.runs.places import ProcessMark, runtime_folder, write_private
from taas.runs.stacks import Trouble
from taas.wire.ranks import Asking, Cell, RankEnded, RankKept, RankUse
from taas.wording import nearest, shown

ANSWER, PAYLOAD, LOADERS, ANNOUNCED, _RECORD = "answer", "payload", "loaders", "announced", "record.json"
_MADE_NAME = re.compile(r"r(\d+)-[0-9a-f]{6}")


class Verdict(msgspec.Struct, kw_only=True):
    """How a run ended.

    Attributes:
        outcome: ``done``, ``failed``, ``interrupted`` or ``lost``; empty before.
        first: what the first failing rank said.
        vm: where that was; empty where the run has this machine alone.
        others: how many ranks failed after it.
        message: for ``lost``: what was; for ``failed``: who had ended before; for ``interrupted``: from where, if
            that was not its own cell, and what failed while the cell was finishing.
        names: what became of rank 0's names, if it is not done.
        error: for ``lost``: the class of :mod:`taas.errors` to raise.
    """

    outcome: str = ""
    first: RankEnded | None = None
    vm: str = ""
    others: int = 0
    message: str = ""
    names: str = "no names came back"
    error: str = "RunLost"


class RunRecord(Verdict, kw_only=True):
    """A run, as everybody may see it; once it is over, with its verdict.

    Attributes:
        name: what it is called; not unique for ever.
        id: makes it unique.
        cell: what runs, with its header.
        project: the notebook's folder.
        notebook: its path; empty where its front end does not say it.
        supervisor, kernel: the processes.
        device: on what it runs, in words.
        gpus: the GPUs it has, as CUDA_VISIBLE_DEVICES names them.
        names_nbytes: size of the names that travelled to its ranks, in bytes.
        state: ``acquiring``, ``starting``, ``running``, ``finishing`` (interrupted: the cell's own ``except`` and
            ``finally`` run), ``ending`` or ``over``.
        waiting: what it waits for while it is ``acquiring``, or while it has lost its last data VM; where its ranks
            stand while it is ``finishing``.
        submitted, ended: seconds since the epoch, 0 before.
        restarts: how often it was started again.
        losses: what was lost each time, a line for the user each.
        notices: lines for the user.
        trouble: what is wrong while it goes on.
        questions: what its ranks ask the person at the keyboard, and wait for.
        delivered: how far its registered loaders are.
        use: what its ranks use, in the order of their numbers.
        curve: how busy they were, in percent, in as many equal parts of its time.
        kept_ranks: its ranks, while they stay after it and wait for the notebook's next cell.
        files: what it left for `%taas attach`: by name, the size in bytes.
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
    names_nbytes: int = 0
    state: str = "acquiring"
    waiting: str = ""
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
    files: dict[str, int] = {}

    @property
    def owner(self) -> str:
        """The notebook in words: its name with its folder's, or its project's."""
        return in_words(self.notebook, self.project)

    @property
    def folder(self) -> Path:
        """Where it is kept."""
        return runs_root() / f"{self.name}-{self.id}"

    @property
    def writes(self) -> list[Path]:
        """The folders of what ranks other than 0 wrote in the project's place, the first start's first."""
        return [writes_folder(output_folder(self.folder, number)) for number in range(self.restarts + 1)]

    def is_of(self, kernel: int, notebook: str) -> bool:
        """Whether it is surely of the notebook with this kernel and this path, which may have had another kernel then."""
        return bool(notebook and self.notebook == notebook) or (
            self.kernel.pid == kernel and self.kernel.lives
        )

    @property
    def background(self) -> bool:
        """Whether it outlives its kernel."""
        return self.cell.spec.background

    @property
    def busy(self) -> float | None:
        """How busy its GPUs are, or, where nobody can tell or there are none, a processor for each rank, in percent on average."""
        gpus = [rank.gpu for rank in self.use if rank.gpu is not None]
        shares = gpus or [rank.cpu for rank in self.use]
        return sum(shares) / len(shares) if shares else None

    def rank_folders(self) -> list[Path]:
        """Return the folders in which the ranks of its last start write."""
        output = output_folder(self.folder, self.restarts)
        return [output / str(rank) for rank in range(self.cell.spec.world_size)]

    @property
    def live(self) -> bool:
        """Whether it goes on."""
        return self.state != "over"

    @property
    def may_go_on(self) -> bool:
        """Whether it counts as lost only because its supervisor cannot be seen from this machine."""
        return self.outcome == "lost" and self.supervisor.elsewhere

    @property
    def holds(self) -> bool:
        """Whether it has its GPUs: it goes on, or its ranks stay."""
        return self.live or self.kept_ranks is not None

    @property
    def announced(self) -> float:
        """When its removal was announced, in seconds since the epoch; 0: it was not."""
        with contextlib.suppress(OSError):
            return (self.folder / ANNOUNCED).stat().st_mtime
        return 0.0


def in_words(notebook: str, project: str) -> str:
    """Name a notebook, or the project that it is in, where its front end does not say its path."""
    return "/".join(Path(notebook).parts[-2:]) if notebook else f"{project.rstrip('/')}/"


def output_folder(folder: Path, restarts: int) -> Path:
    """Return where the ranks of a run write, below the run's folder, after so many restarts."""
    return folder / f"restart-{restarts}" if restarts else folder


def writes_folder(output: Path) -> Path:
    """Return where one start of a run has what ranks other than 0 write in the project's place."""
    return output / "writes"


def runs_root() -> Path:
    """Return the folder of all runs of this user, made if it is not there."""
    return runtime_folder("runs")


def new_folder(name: str | None) -> tuple[str, str]:
    """Make the folder of a new run.

    Args:
        name: what the user calls it; None: the next number after all that are kept.

    Returns:
        Name and id.
    """
    root = runs_root()
    if name is None:
        numbers = [int(match[1]) for entry in root.iterdir() if (match := _MADE_NAME.fullmatch(entry.name))]
        name = f"r{max(numbers, default=0) + 1}"
    while True:
        mark = os.urandom(3).hex()
        with contextlib.suppress(FileExistsError):
            (root / f"{name}-{mark}").mkdir(mode=0o700)
            return name, mark


def write_record(record: RunRecord) -> None:
    """Replace a run's record.

    Raises:
        OSError: the disk is full, for one.
    """
    write_private(record.folder / _RECORD, msgspec.json.encode(record))


def read_record(folder: Path) -> RunRecord | None:
    """Read a run's record; None if there is none that can be read.

    A run that nobody looks after any more was lost with its supervisor, which could not write that down.
    """
    path = folder / _RECORD
    try:
        file = path.stat()
        record = copy(_decoded(path, file.st_ino, file.st_mtime_ns, file.st_size))
    except (OSError, msgspec.MsgspecError):  # removed meanwhile, or of another version of taas
        return None
    if record.kept_ranks is not None and not record.supervisor.lives:
        record.kept_ranks = None
    if record.live and not record.supervisor.lives:
        again = msgspec.json.decode(path.read_bytes(), type=RunRecord)
        if not again.live:
            return again  # it ended in the very moment
        record.state, record.outcome, record.ended = "over", "lost", file.st_mtime
        killed = "the supervisor was killed, and all ranks with it"
        record.message = (
            killed if record.kernel.lives else "the notebook's kernel ended, and all ranks with it"
        )
        if record.supervisor.elsewhere:
            record.message = (
                f"its supervisor is, or was, on {record.supervisor.host}, and cannot be seen from this machine: "
                "look there whether it goes on"
            )
        record.trouble, record.questions = None, ()
    return record


@lru_cache(maxsize=1024)
def _decoded(path: Path, *_: int) -> RunRecord:
    """Decode a record, once for each file that there was: it is replaced as a whole."""
    return msgspec.json.decode(path.read_bytes(), type=RunRecord)


def read_records() -> list[RunRecord]:
    """Read all runs, oldest first."""
    found = [record for folder in runs_root().iterdir() if (record := read_record(folder)) is not None]
    return sorted(found, key=lambda record: record.submitted)


def told_apart(record: RunRecord, records: Iterable[RunRecord]) -> str:
    """Return what to type for a run: its name, with its id where others of these have that name, too."""
    alike = [other for other in records if other.name == record.name]
    return f"{record.name}-{record.id}" if len(alike) > 1 else record.name


def of_notebook(
    records: Iterable[RunRecord], kernel: int, notebook: str = "", project: str = ""
) -> list[RunRecord]:
    """Return a notebook's runs, those of its earlier kernels, too.

    Where front ends do not say their notebooks' paths, and its kernel has none, those of its project that may be its
    own, since their kernels are gone.
    """
    records = list(records)
    return [record for record in records if record.is_of(kernel, notebook)] or [
        record
        for record in records
        if not (notebook or record.notebook) and record.project == project and not record.kernel.lives
    ]


def find_run(
    name: str | None,
    records: Iterable[RunRecord],
    *,
    live: bool,
    kernel: int,
    notebook: str = "",
    project: str = "",
) -> RunRecord:
    """Find the run that a person means: this notebook's before others', of these one that goes on, of these the newest.

    Args:
        name: as typed: its name, or its name and id; None: any.
        records: all runs.
        live: only one that goes on will do.
        kernel: process id of that of the notebook where it was typed; 0 in a terminal.
        notebook: that notebook's path; empty where nobody says it.
        project: its folder.

    Raises:
        HeaderError: there is none, or it is over.
    """
    fitting = _called(name, list(records))
    mine = of_notebook(fitting, kernel, notebook, project)
    best = max(mine or fitting, key=lambda record: (record.live, record.submitted))
    if live and not best.live:
        what = f"run {best.name}" if name else f"the last run, {best.name},"
        raise HeaderError(f"{what} is over ({best.outcome}); `%taas status` shows what goes on")
    return best


def _called(name: str | None, everything: list[RunRecord]) -> list[RunRecord]:
    fitting = [r for r in everything if name is None or name in (r.name, f"{r.name}-{r.id}")]
    if fitting:
        return fitting
    if name is None:
        raise HeaderError("there is no run yet: start one by a cell with #pragma taas on top")
    near = nearest(name, {record.name for record in everything}, 0.5)
    hint = f"; did you mean {near}?" if near else "; `%taas history` lists what there is"
    raise HeaderError(f"no run is called {shown(name)}{hint}")
