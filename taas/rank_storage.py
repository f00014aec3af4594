"""The write rule: only rank 0 writes the project.

In every rank except 0, and in all that it starts (DataLoader workers, child processes, shells), the
rule covers
  * every way to change files, directories or links beneath the project, by whatever route: links,
    ``..``, /proc/self/fd, a working directory from before the wall;
  * attempts to undo it: mounting, remounting, other processes' namespaces.
Reads stay live: every rank can load at once what rank 0 saves.

It does not cover
  * descriptors, hard links and mappings of project files from before the wall, and other mounts of
    the project's directories: they are the files themselves;
  * the holes of the weaker walls, which ``taas doctor`` lists for this machine (Landlock: metadata
    such as mode and times; no wall: everything that is not Python, and other programs);
  * writes that a rank asks another process for: a daemon, another machine, rank 0.

``--rank-writes`` says what happens to a write in such a rank:
  * ``discard``: Python-level writers write to the rank's scratch, from which the rank also reads;
    at the end of the run ``project/wall/rescued`` sorts the scratch. A write that the diversion
    misses hits the wall, and a read that it misses does not find diverted files; if that raises an
    error, the cell explains it. (An overlay mount would give C code the rank's own files, too, but
    is not used: if rank 0 replaces a file by a rename, the mount silently shows the old file until
    it is mounted again, and any process may read the file in between.)
  * ``deny``: it raises ``StorageDenied``.
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
from taas.project.wall import boundary, diversion, rescued, saves, walls
from taas.project.wall.boundary import LANDLOCK_SAID, NEVER, WALL_SAID, Denial
from taas.project.wall.missed import explain_missing
from taas.project.wall.table import Table

_edge: boundary.Boundary | None = None
"""The files that this process, a rank other than 0, must not write."""
MECHANISMS = tuple(walls.WALLS)


@dataclass
class Guard:
    """A rank's wall, in place.

    Attributes:
        mechanism: which wall, or "none (rank 0)".
        scratch: the rank's folder for the present run.
        denial: the error for a write that meets the wall; None in rank 0.
        table: the rank's view of the project; None in rank 0.
        others: in rank 0, finds other ranks' files; None in the other ranks.
    """

    mechanism: str
    scratch: Path
    denial: Denial | None = None
    table: Table | None = None
    others: saves.OtherRanksFiles | None = None

    def begin_run(self, scratch: Path, since_ns: int) -> None:
        """Begin another run in this rank; the arguments are as in :func:`guard`."""
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
    """Return a rank's scratch folder in its run's; ``project/wall/rescued`` parses these names."""
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
    """Put this rank behind the wall; this is the first thing that a freshly forked rank does.

    The process has one thread, has not yet opened the project, and has opened whatever it needs of
    other processes through ``/proc/<pid>/fd``. Rank 0 writes without a wall; it completes
    checkpoints that all ranks write, and finds what others wrote into its saves.

    Args:
        project: the notebook's directory.
        rank: global rank.
        scratch: the rank's existing folder for diverted files (``scratch_of``); it may be beneath
            the project.
        mode: what happens to writes to the project.
        shared: directories in which every rank may write, relative to the project or absolute;
            made if absent.
        since_ns: when the run began, by the clock of the project's file system: rank 0 made all
            later changes there.
        writable: absolute paths that taas itself needs to write in this rank: output files,
            sockets.
        mechanisms: the walls to try, in order.

    Raises:
        StorageDenied: none of the walls can be raised.
    """
    if rank == 0:
        return _rank_0(project, scratch, since_ns, mode)
    global _edge
    edge = boundary.draw(project, shared, (*writable, str(scratch)))
    table = Table(edge, str(scratch), since_ns)
    mechanism = _build_wall(rank, edge, mechanisms)
    with contextlib.suppress(OSError):  # the working directory may have been removed
        os.chdir(Path.cwd())  # by its path, which leads behind the wall
    _edge = edge
    if mechanism == "landlock":
        _move_temporary_files(edge, scratch)
    denial = Denial(rank, mode, edge, LANDLOCK_SAID if mechanism == "landlock" else WALL_SAID)
    diversion.install(diversion.Diversion(table, denial))
    return Guard(mechanism, scratch, denial, table)


def _rank_0(project: str, scratch: Path, since_ns: int, mode: str) -> Guard:
    """Let rank 0 find other ranks' files of its saves; it has no wall."""
    others = saves.OtherRanksFiles(project, scratch.parent, since_ns)
    standing = Guard("none (rank 0)", scratch, others=others)
    rescued.complete_checkpoints(project, lambda: standing.scratch.parent)
    if mode == "discard":  # else no rank has any
        saves.install(others)
    return standing


def _build_wall(rank: int, edge: boundary.Boundary, mechanisms: Sequence[str]) -> str:
    """Build the first wall that can be had here; return its name, or raise StorageDenied."""
    why_not = []
    for mechanism in mechanisms:
        try:
            walls.WALLS[mechanism](edge)
        except OSError as error:
            why_not.append(f"{mechanism}: {error.strerror or error}")
        else:
            return mechanism
    why = "; ".join(why_not)
    raise StorageDenied(errno.EPERM, f"rank {rank} cannot be kept from writing the project: {why}")


def _move_temporary_files(edge: boundary.Boundary, scratch: Path) -> None:
    """Move the temporary directory to the scratch if it is a parent of the project.

    Landlock denies new entries in the project's parents.
    """
    default = "/tmp"  # noqa: S108  it is every program's default
    named = tempfile.tempdir or os.environ.get("TMPDIR", default)
    if boundary.resolve_beneath(edge.project, os.path.realpath(named)) is not None:
        place = scratch / "tmp"
        place.mkdir(exist_ok=True)
        os.environ["TMPDIR"] = tempfile.tempdir = str(place)
