"""What is known of runs, on disk: one folder a run, which outlives kernel, supervisor and machine restarts.

::

    <jupyter runtime dir>/taas/runs/<name>-<id>/      0700
        record.json     RunRecord, replaced as a whole whenever it changes
        <rank>/         what the rank wrote (rank/streams.py)
        payload         the names the cell was given, and
        answer          rank 0's names: kept of a background run that is done, for `%taas attach`

The supervisor of a run is the only one that writes its record. Everybody else reads: ``status``, ``history``,
``logs`` and ``attach`` need no supervisor to answer.
"""

from __future__ import annotations

import contextlib
import getpass
import os
import re
import socket
import time
from collections.abc import Iterable
from pathlib import Path

import msgspec

from taas.errors import HeaderError
from taas.messages.clients import Delivered
from taas.messages.ranks import RankEnded
from taas.places import runtime_folder
from taas.stacks import Trouble
from taas.wording import nearest, shown

__all__ = [
    "ANSWER",
    "LOADERS",
    "PAYLOAD",
    "Delivered",
    "ProcessMark",
    "RunRecord",
    "find_run",
    "new_folder",
    "read_record",
    "read_records",
    "runs_root",
    "write_record",
]

ANSWER, PAYLOAD, LOADERS, _RECORD = "answer", "payload", "loaders", "record.json"
_FORGOTTEN_SECONDS = 30 * 24 * 3600.0
"""So old is what a process of another machine left behind when it is taken for left behind."""
_MADE_NAME = re.compile(r"r(\d+)-[0-9a-f]{6}")


class ProcessMark(msgspec.Struct, frozen=True):
    """A process that cannot be taken for another one, also when the clock is set meanwhile.

    Attributes:
        pid: its id.
        born: when it was born, in the system's ticks since it was booted.
        boot: which start of which machine or container that was.
        host: the machine's name; several may share a home directory.
    """

    pid: int
    born: float
    boot: str = ""
    host: str = ""

    @classmethod
    def of(cls, pid: int) -> ProcessMark:
        """Mark a living process.

        Raises:
            OSError: there is none.
        """
        _, born = _state_and_birth(pid)
        return cls(pid, born, _boot(), socket.gethostname())

    @property
    def lives(self) -> bool:
        """Whether it is there, on this machine."""
        with contextlib.suppress(OSError):
            state, born = _state_and_birth(self.pid)
            return born == self.born and state not in "ZX" and self.boot == _boot() and not self.elsewhere
        return False

    @property
    def elsewhere(self) -> bool:
        """Whether it is a process of another machine or container, which cannot be looked up here."""
        return self.host not in ("", socket.gethostname())

    def has_left(self, file: Path) -> bool:
        """Whether it is gone for good, and with it the use of a file that it wrote.

        Raises:
            OSError: the file cannot be looked at.
        """
        if self.elsewhere:
            return time.time() - file.stat().st_mtime > _FORGOTTEN_SECONDS
        return not self.lives


def _state_and_birth(pid: int) -> tuple[str, float]:
    """Read a process's state and the tick it was born in (proc_pid_stat(5))."""
    fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    return fields[0], float(fields[19])


def _boot() -> str:
    """Name this start of the system, and within it the container, whose process ids are its own."""
    with contextlib.suppress(OSError):
        started = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{started} {Path('/proc/self/ns/pid').readlink()}"
    return ""


def _user() -> str:
    """Return who runs this: the number, where no name goes with it, as in a container with a user of its own."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return str(os.getuid())


class RunRecord(msgspec.Struct, kw_only=True):
    """A run, as everybody may see it.

    Attributes:
        name: what it is called; not unique for ever.
        id: makes it unique.
        cell: its text.
        execution_count: the notebook's ``In[n]``.
        project: the notebook's folder.
        user: who started it.
        supervisor, kernel: the processes.
        background: whether it outlives its kernel.
        world_size, vms, instance: its shape.
        output: the ranks whose output it shows; None for all.
        device: on what it runs, in words.
        gpus: the GPUs it has, as CUDA_VISIBLE_DEVICES names them.
        state: ``acquiring``, ``starting``, ``running``, ``ending`` or ``over``.
        waiting: what it waits for while it is ``acquiring``, or while it has lost its last data VM.
        submitted, began, ended: seconds since the epoch, 0 before; ``began``: all ranks are in the cell.
        outcome: once over: ``done``, ``failed``, ``interrupted`` or ``lost``.
        message: what is to be said about the outcome.
        restarts: how often it was started again.
        first, vm, others: of a failed run, as in :class:`~taas.messages.clients.RunEnded`.
        notices: lines for the user.
        trouble: what is wrong while it goes on.
        delivered: how far its registered loaders are.
        announced: when its removal was announced; 0: it was not.
    """

    name: str
    id: str
    cell: str
    execution_count: int
    project: str
    user: str = msgspec.field(default_factory=_user)
    supervisor: ProcessMark
    kernel: ProcessMark
    background: bool
    world_size: int
    vms: int
    instance: str | None
    output: tuple[int, ...] | None
    device: str
    gpus: tuple[str, ...] = ()
    state: str = "acquiring"
    waiting: str = ""
    submitted: float = msgspec.field(default_factory=time.time)
    began: float = 0.0
    ended: float = 0.0
    outcome: str = ""
    message: str = ""
    restarts: int = 0
    first: RankEnded | None = None
    vm: str = ""
    others: int = 0
    notices: tuple[str, ...] = ()
    trouble: Trouble | None = None
    delivered: Delivered | None = None
    announced: float = 0.0

    @property
    def folder(self) -> Path:
        """Where it is kept."""
        return runs_root() / f"{self.name}-{self.id}"

    def shown_ranks(self) -> range | tuple[int, ...]:
        """Return the ranks whose output it shows."""
        return range(self.world_size) if self.output is None else self.output

    @property
    def live(self) -> bool:
        """Whether it goes on."""
        return self.state != "over"


def output_folder(folder: Path, restarts: int) -> Path:
    """Return where the ranks of a run write, below the run's folder, after so many restarts."""
    return folder / f"restart-{restarts}" if restarts else folder


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
    path = record.folder / _RECORD
    partial = path.with_suffix(".new")
    partial.write_bytes(msgspec.json.encode(record))
    partial.chmod(0o600)
    partial.replace(path)


def read_record(folder: Path) -> RunRecord | None:
    """Read a run's record; None if there is none that can be read.

    A run that nobody looks after any more was lost with its supervisor, which could not write that down.
    """
    try:
        data = (folder / _RECORD).read_bytes()
        written = (folder / _RECORD).stat().st_mtime
        record = msgspec.json.decode(data, type=RunRecord)
    except (OSError, msgspec.MsgspecError):  # removed meanwhile, or of another version of taas
        return None
    if record.live and not record.supervisor.lives:
        again = msgspec.json.decode((folder / _RECORD).read_bytes(), type=RunRecord)
        if not again.live:
            return again  # it ended in the very moment
        record.state, record.outcome, record.ended = "over", "lost", written
        record.message = "the supervisor was killed, and its agents ended all ranks"
        if record.supervisor.elsewhere:
            record.message = (
                f"its supervisor is, or was, on {record.supervisor.host}, and cannot be seen from this machine: "
                "look there whether it goes on"
            )
        record.trouble = None
    return record


def read_records() -> list[RunRecord]:
    """Read all runs, oldest first."""
    found = [record for folder in runs_root().iterdir() if (record := read_record(folder)) is not None]
    return sorted(found, key=lambda record: record.submitted)


def find_run(name: str | None, records: Iterable[RunRecord], *, live: bool, kernel: int) -> RunRecord:
    """Find the run that a person means.

    Args:
        name: as typed: its name, or its name and id; None: the newest.
        records: all runs, oldest first.
        live: only one that goes on will do.
        kernel: whose runs are preferred, if several have the name.

    Raises:
        HeaderError: there is none, or it is over.
    """
    everything = list(records)
    fitting = [r for r in everything if name is None or name in (r.name, f"{r.name}-{r.id}")]
    if not fitting:
        if name is None:
            raise HeaderError("there is no run yet: start one by a cell with #pragma taas on top")
        near = nearest(name, {record.name for record in everything}, 0.5)
        hint = f"; did you mean {near}?" if near else "; `%taas history` lists what there is"
        raise HeaderError(f"no run is called {shown(name)}{hint}")
    best = max(fitting, key=lambda r: (r.live, r.kernel.pid == kernel, r.submitted))
    if live and not best.live:
        what = f"run {best.name}" if name else f"the last run, {best.name},"
        raise HeaderError(
            f"{what} is over ({best.outcome}); no other goes on. `%taas history` lists all runs"
        )
    return best
