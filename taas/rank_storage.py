"""The write rule: only rank 0 writes the project.

Covered, in every rank but 0 and in all it starts (DataLoader workers, child processes, shells):
  * every way to change files, directories or links beneath the project, by whatever route: links, ``..``,
    /proc/self/fd, a working directory or descriptor from before, other mounts of the same directories;
  * attempts to undo it: mounting, remounting, other processes' namespaces.
Reads stay live: what rank 0 saves, every rank can load right away.

Not covered:
  * hard links and mappings of project files made before the run: they are the file itself;
  * the weaker walls' holes, which ``taas doctor`` lists for this machine (Landlock: metadata such as mode and
    times; no wall: everything that is not Python, and other programs);
  * what a rank asks somebody else to write: a daemon, another machine, rank 0.

What happens to a write in such a rank (``--rank-writes``):
  * ``discard``: Python-level writers go to the rank's scratch, which it reads back; at the end of the run ``storage/kept``
    sorts that. What the diversion cannot see hits the wall.
  * ``deny``: it is ``StorageDenied``.
"""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from taas.errors import StorageDenied
from taas.storage import boundary, calls, kept, walls
from taas.storage.boundary import NEVER, Denial
from taas.storage.diversion import Diversion
from taas.storage.table import Table

_edge: boundary.Boundary | None = None
"""What this process, a rank other than 0, must not write."""
RankWrites = Literal["discard", "deny"]
MECHANISMS = tuple(walls.WALLS)


@dataclass(frozen=True, kw_only=True)
class Policy:
    """What one rank may write.

    Attributes:
        project: the notebook's directory.
        rank: global rank.
        mode: what becomes of writes to the project.
        shared: directories where every rank may write, relative to the project or absolute; made if absent.
        since_ns: when the run began, by the clock of the project's file system: what changed there since is rank 0's doing.
        scratch: this rank's private folder for diverted files, made by the agent (``scratch_of``); it may
            lie beneath the project.
        writable: absolute paths that taas itself needs to write in this rank: output files, sockets.
    """

    project: str
    rank: int
    mode: RankWrites = "discard"
    shared: tuple[str, ...] = ()
    scratch: str
    writable: tuple[str, ...] = ()
    since_ns: int = NEVER


@dataclass
class Guard:
    """A rank's wall, standing.

    Attributes:
        mechanism: which wall, or "none (rank 0)".
        scratch: the rank's folder for the run that goes on.
        denial: what this rank is told that meets the wall; None in rank 0.
        table: what it sees of the project; None in rank 0.
    """

    mechanism: str
    scratch: Path
    denial: Denial | None = None
    table: Table | None = None

    def begin_run(self, scratch: Path, since_ns: int) -> None:
        """Another run begins in this rank, with scratch and time as :class:`Policy` has them."""
        self.scratch = scratch
        if self.table is not None:
            scratch.mkdir(parents=True, exist_ok=True)
            self.table.begin_run(str(scratch), since_ns)

    def explain(self, error: BaseException) -> str | None:
        """A sentence for an error the wall raised through C code; None when the wall had no part in it."""
        return None if self.denial is None else self.denial.explain(error)


def scratch_of(run_scratch: Path, rank: int) -> Path:
    """A rank's scratch folder within its run's; ``storage/kept`` knows the ranks by these names."""
    return run_scratch / f"rank{rank}"


def is_closed(path: str) -> bool:
    """Tell whether the write rule keeps this process from writing a file."""
    return _edge is not None and _edge.relative(os.path.realpath(path)) is not None


def prepare() -> None:
    """Do once, in the forkserver, what every rank's guard would otherwise repeat: 10 ms each."""
    calls.survey()


def guard(policy: Policy, mechanisms: Sequence[str] = MECHANISMS) -> Guard:
    """Put this rank behind the wall; the first thing a freshly forked rank does.

    The process must have one thread and must not yet have opened the project. Rank 0 is left as it is, but that it
    completes checkpoints which all ranks write.
    Descriptors that a rank needs from other processes by ``/proc/<pid>/fd`` must be opened before.

    Args:
        policy: what the rank may write.
        mechanisms: which walls to try, in order.

    Raises:
        StorageDenied: none of these mechanisms works.
    """
    scratch = Path(policy.scratch)
    if policy.rank == 0:
        standing = Guard("none (rank 0)", scratch)
        kept.complete_checkpoints(policy.project, lambda: standing.scratch.parent)
        return standing
    global _edge
    edge = boundary.draw(policy.project, policy.shared, (*policy.writable, policy.scratch))
    brought_along = walls.inherited(edge)
    table = Table(edge, policy.scratch, policy.since_ns)
    why_not: list[str] = []
    for mechanism in mechanisms:
        denial = Denial(policy.rank, policy.mode, edge, landlock=mechanism == "landlock")
        try:
            walls.WALLS[mechanism](edge)
        except OSError as error:
            why_not.append(f"{mechanism}: {error.strerror or error}")
            continue
        walls.reopen(brought_along)
        _edge = edge
        if mechanism == "landlock":
            _move_temporary_files(edge, scratch)
        calls.install(Diversion(table, denial))
        return Guard(mechanism, scratch, denial, table)
    raise StorageDenied(
        errno.EPERM, f"rank {policy.rank} cannot be kept from writing the project: {'; '.join(why_not)}"
    )


def _move_temporary_files(edge: boundary.Boundary, scratch: Path) -> None:
    """Landlock denies new entries in the project's parents; the temporary directory may be one."""
    named = tempfile.tempdir or os.environ.get("TMPDIR", "/tmp")  # noqa: S108 the default of every program
    if boundary.resolve_beneath(edge.project, os.path.realpath(named)) is not None:
        place = scratch / "tmp"
        place.mkdir(exist_ok=True)
        os.environ["TMPDIR"] = tempfile.tempdir = str(place)
