"""The write rule: only rank 0 writes the project.

Covered, in every rank but 0 and in all it starts (DataLoader workers, child processes, shells):
  * every way to change files, directories or links beneath the project, by whatever route: links,
    ``..``, /proc/self/fd, the working directory from before;
  * attempts to undo it: mounting, remounting, other processes' namespaces.
Reads stay live: what rank 0 saves, every rank can load right away.

Not covered:
  * descriptors, hard links and mappings of project files from before the wall, other mounts of its
    directories: they are the file itself;
  * the weaker walls' holes, which ``taas doctor`` lists for this machine (Landlock: metadata such
    as mode and times; no wall: everything that is not Python, and other programs);
  * what a rank asks somebody else to write: a daemon, another machine, rank 0.

What happens to a write in such a rank (``--rank-writes``):
  * ``discard``: Python-level writers go to the rank's scratch, which it reads back; at the end of
    the run ``storage/kept`` sorts that. What the diversion cannot see hits the wall, or does not
    find what was diverted; where that raises an error, the cell explains it. (An overlay mount
    would give C code the rank's own files, too, and is none: a file that rank 0 replaces by a
    rename stays the old one there, silently, until another one is mounted; between the two anybody
    may read it.)
  * ``deny``: it is ``StorageDenied``.
"""

from __future__ import annotations

import contextlib
import errno
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from taas.errors import StorageDenied
from taas.storage import boundary, diversion, kept, saves, walls
from taas.storage.boundary import LANDLOCK_SAID, NEVER, WALL_SAID, Denial
from taas.storage.missed import explain_missing
from taas.storage.table import Table

_edge: boundary.Boundary | None = None
"""What this process, a rank other than 0, must not write."""
MECHANISMS = tuple(walls.WALLS)


@dataclass
class Guard:
    """A rank's wall, standing.

    Attributes:
        mechanism: which wall, or "none (rank 0)".
        scratch: the rank's folder for the run that goes on.
        denial: what this rank is told that meets the wall; None in rank 0.
        table: what it sees of the project; None in rank 0.
        others: what rank 0 finds of other ranks' files; None in those.
    """

    mechanism: str
    scratch: Path
    denial: Denial | None = None
    table: Table | None = None
    others: saves.OtherRanksFiles | None = None

    def begin_run(self, scratch: Path, since_ns: int) -> None:
        """Another run begins in this rank, with scratch and time as :func:`guard` has them."""
        self.scratch = scratch
        if self.others is not None:
            self.others.begin_run(scratch.parent, since_ns)
        if self.table is not None:
            scratch.mkdir(parents=True, exist_ok=True)
            self.table.begin_run(str(scratch), since_ns)

    def explain(self, error: BaseException) -> str | None:
        """Explain an error that the write rule raised through C code; None for other errors."""
        if self.denial is None or self.table is None:
            return None
        return self.denial.explain(error) or explain_missing(error, self.table, self.denial)


def scratch_of(run_scratch: Path, rank: int) -> Path:
    """A rank's scratch folder within its run's; ``storage/kept`` knows the ranks by these names."""
    return run_scratch / f"rank{rank}"


def is_closed(path: str) -> bool:
    """Tell whether the write rule keeps this process from writing a file."""
    return _edge is not None and _edge.relative(os.path.realpath(path)) is not None


def guard(
    *,
    project: str,
    rank: int,
    scratch: Path,
    mode: Literal["discard", "deny"] = "discard",
    shared: tuple[str, ...] = (),
    since_ns: int = NEVER,
    writable: tuple[str, ...] = (),
    mechanisms: Sequence[str] = MECHANISMS,
) -> Guard:
    """Put this rank behind the wall; the first thing a freshly forked rank does.

    The process has one thread and has not yet opened the project; what it needs of other processes
    by ``/proc/<pid>/fd`` it has opened. Rank 0 writes as ever; it completes checkpoints which all
    ranks write, and finds what others wrote into its saves.

    Args:
        project: the notebook's directory.
        rank: global rank.
        scratch: its folder for diverted files, which is there (``scratch_of``); it may lie beneath
            the project.
        mode: what becomes of writes to the project.
        shared: directories where every rank may write, relative to the project or absolute; made if
            absent.
        since_ns: when the run began, by the clock of the project's file system: what changed there
            since is rank 0's doing.
        writable: absolute paths that taas itself needs to write in this rank: output files,
            sockets.
        mechanisms: which walls to try, in order; where none of them stands, this raises
            StorageDenied.
    """
    if rank == 0:
        others = saves.OtherRanksFiles(project, scratch.parent, since_ns)
        standing = Guard("none (rank 0)", scratch, others=others)
        kept.complete_checkpoints(project, lambda: standing.scratch.parent)
        if mode == "discard":  # else no rank has any
            saves.install(others)
        return standing
    global _edge
    edge = boundary.draw(project, shared, (*writable, str(scratch)))
    table = Table(edge, str(scratch), since_ns)
    why_not = []
    for mechanism in mechanisms:
        try:
            walls.WALLS[mechanism](edge)
        except OSError as error:
            why_not.append(f"{mechanism}: {error.strerror or error}")
            continue
        with contextlib.suppress(OSError):  # the working directory may have been removed
            os.chdir(Path.cwd())  # by its path, which leads behind the wall
        _edge = edge
        if mechanism == "landlock":
            _move_temporary_files(edge, scratch)
        denial = Denial(rank, mode, edge, LANDLOCK_SAID if mechanism == "landlock" else WALL_SAID)
        diversion.install(diversion.Diversion(table, denial))
        return Guard(mechanism, scratch, denial, table)
    why = "; ".join(why_not)
    raise StorageDenied(errno.EPERM, f"rank {rank} cannot be kept from writing the project: {why}")


def _move_temporary_files(edge: boundary.Boundary, scratch: Path) -> None:
    """Landlock denies new entries in the project's parents; the temporary directory may be one."""
    default = "/tmp"  # noqa: S108  it is every program's default
    named = tempfile.tempdir or os.environ.get("TMPDIR", default)
    if boundary.resolve_beneath(edge.project, os.path.realpath(named)) is not None:
        place = scratch / "tmp"
        place.mkdir(exist_ok=True)
        os.environ["TMPDIR"] = tempfile.tempdir = str(place)
