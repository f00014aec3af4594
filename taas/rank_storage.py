"""The write rule: only rank 0 writes to the project directory.

The rule applies to every rank except 0, and to all processes that such a rank starts (DataLoader
workers, child processes, shells). It covers
  * all changes to files, directories or links below the project directory, on every path: through
    links, ``..``, /proc/self/fd, or a working directory set before the write protection;
  * attempts to remove the protection: mounting, remounting, entering namespaces of other processes.
Reads are live: every rank can immediately load a file that rank 0 has saved.

The rule does not cover
  * file descriptors, hard links and mappings of project files that existed before the protection,
    and other mounts of the project's directories, because they give access to the same files;
  * the gaps of the weaker mechanisms, which ``taas doctor`` lists for this machine (Landlock:
    metadata such as mode and times; no mechanism: writes by C code and by other programs);
  * writes that a rank requests from another process: a daemon, another machine, rank 0.

``--rank-writes`` sets the effect of a write in such a rank:
  * ``discard``: writes by Python code go to the rank's scratch folder, from which the rank also
    reads; at the end of the run, ``project/wall/rescued`` sorts the files there. A write that is
    not redirected is rejected by the write protection, and a read that is not redirected does not
    find files in the scratch folder; if either raises an error, the cell explains it. (An overlay
    mount would also give C code access to the rank's files, but is not used: if rank 0 replaces a
    file by a rename, the mount silently shows the old file until it is remounted, and any process
    may read the file in the meantime.)
  * ``deny``: the write raises ``StorageDenied``.
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
"""The files to which this process must not write; None in rank 0."""
MECHANISMS = tuple(walls.WALLS)


@dataclass
class Guard:
    """The write protection of a rank, which is active.

    Attributes:
        mechanism: the name of the mechanism, or "none (rank 0)".
        scratch: the rank's scratch folder for the current run.
        denial: the error for a rejected write; None in rank 0.
        table: the rank's view of the project; None in rank 0.
        others: in rank 0, the object that finds other ranks' files; None in the other ranks.
    """

    mechanism: str
    scratch: Path
    denial: Denial | None = None
    table: Table | None = None
    others: saves.OtherRanksFiles | None = None

    def begin_run(self, scratch: Path, since_ns: int) -> None:
        """Begin another run in this rank; the arguments are those of :func:`guard`."""
        self.scratch = scratch
        if self.others is not None:
            self.others.begin_run(scratch.parent, since_ns)
        if self.table is not None:
            scratch.mkdir(parents=True, exist_ok=True)
            self.table.begin_run(str(scratch), since_ns)

    def explain(self, error: BaseException) -> str | None:
        """Explain an error that the write rule caused in C code; return None for other errors."""
        if self.denial is None or self.table is None:
            return None
        return self.denial.explain(error) or explain_missing(error, self.table, self.denial)


def scratch_of(run_scratch: Path, rank: int) -> Path:
    """Return a rank's scratch folder; ``project/wall/rescued`` parses the name of this folder."""
    return run_scratch / f"rank{rank}"


def is_closed(path: str) -> bool:
    """Tell whether the write rule prevents this process from writing to a file."""
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
    """Write-protect the project in this rank; a process calls this early, when it becomes a rank.

    At this time the process must have one thread, must not have opened files of the project yet,
    and must have opened whatever it needs from other processes through ``/proc/<pid>/fd``. Rank 0
    has no write protection. It completes checkpoints that all ranks write, and finds files that
    other ranks wrote into its saves.

    Args:
        project: the notebook's directory.
        rank: the global rank.
        scratch: the rank's existing folder for redirected files (``scratch_of``); it may be below
            the project directory.
        mode: the effect of writes to the project.
        shared: directories to which every rank may write, relative to the project or absolute;
            created if they do not exist.
        since_ns: the time at which the run began, by the clock of the project's file system;
            later changes there are attributed to rank 0.
        writable: absolute paths to which taas itself has to write in this rank: output files,
            sockets.
        mechanisms: the mechanisms to try, in order.

    Raises:
        StorageDenied: no mechanism is available.
    """
    if rank == 0:
        return _rank_0(project, scratch, since_ns, mode)
    global _edge
    edge = boundary.draw(project, shared, (*writable, str(scratch)))
    table = Table(edge, str(scratch), since_ns)
    mechanism = _build_wall(rank, edge, mechanisms)
    with contextlib.suppress(OSError):  # the working directory may have been removed
        os.chdir(Path.cwd())  # again by its path, which now leads to the protected directory
    _edge = edge
    if mechanism == "landlock":
        _move_temporary_files(edge, scratch)
    denial = Denial(rank, mode, edge, LANDLOCK_SAID if mechanism == "landlock" else WALL_SAID)
    diversion.install(diversion.Diversion(table, denial))
    return Guard(mechanism, scratch, denial, table)


def _rank_0(project: str, scratch: Path, since_ns: int, mode: str) -> Guard:
    """Let rank 0 find other ranks' files in its saves; it has no write protection."""
    others = saves.OtherRanksFiles(project, scratch.parent, since_ns)
    standing = Guard("none (rank 0)", scratch, others=others)
    rescued.complete_checkpoints(project, lambda: standing.scratch.parent)
    if mode == "discard":  # otherwise no other rank has files
        saves.install(others)
    return standing


def _build_wall(rank: int, edge: boundary.Boundary, mechanisms: Sequence[str]) -> str:
    """Apply the first mechanism that is available, and return its name.

    Raises:
        StorageDenied: no mechanism is available.
    """
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
    """Move the temporary directory to the scratch folder if it is a parent of the project.

    Landlock rejects new entries in parent directories of the project.
    """
    default = "/tmp"  # noqa: S108  it is every program's default
    named = tempfile.tempdir or os.environ.get("TMPDIR", default)
    if boundary.resolve_beneath(edge.project, os.path.realpath(named)) is not None:
        place = scratch / "tmp"
        place.mkdir(exist_ok=True)
        os.environ["TMPDIR"] = tempfile.tempdir = str(place)
