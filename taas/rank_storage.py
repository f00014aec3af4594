"""The write rule: only rank 0 writes the project.

Covered, in every rank but 0 and in all it starts (DataLoader workers, child processes, shells):
  * every way to change files, directories or links beneath the project, by whatever route: links, ``..``,
    /proc/self/fd, a working directory or descriptor from before, other mounts of the same directories;
  * attempts to undo it: mounting, remounting, other processes' namespaces.
Reads stay live: what rank 0 saves, every rank can load right away.

Not covered:
  * hard links and mappings of project files made before the run: they are the file itself;
  * the weaker walls' holes, which ``doctor()`` lists for this machine (Landlock: metadata such as mode and
    times; audit hooks: everything that is not Python, and other processes);
  * what a rank asks somebody else to write: a daemon, another machine, rank 0.

What happens to a write in such a rank (``--rank-writes``):
  * ``discard``: Python-level writers go to the rank's scratch, which it reads back; ``settle`` sorts that
    at the end of the run. What the diversion cannot see hits the wall.
  * ``deny``: it is ``StorageDenied``.
"""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import msgspec

from taas.errors import StorageDenied
from taas.storage import audit_wall, boundary, calls, inherited, landlock_wall, mount_wall, probe
from taas.storage.denial import Denial
from taas.storage.diversion import Diversion
from taas.storage.overlay import Overlay
from taas.storage.recovery import kept_runs, recover, retention
from taas.storage.settlement import Settlement, settle

__all__ = [
    "MECHANISMS",
    "Diverted",
    "Guard",
    "Mechanism",
    "Policy",
    "RankWrites",
    "Report",
    "Settlement",
    "doctor",
    "guard",
    "kept_runs",
    "prepare",
    "recover",
    "retention",
    "scratch_of",
    "settle",
]

RankWrites = Literal["discard", "deny"]
Mechanism = Literal["none (rank 0)", "mount", "landlock", "audit"]
MECHANISMS: tuple[Mechanism, ...] = ("mount", "landlock", "audit")


class Policy(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank may write.

    Attributes:
        project: the notebook's directory.
        rank: global rank.
        vm: name of its VM, for messages.
        mode: what becomes of writes to the project.
        shared: directories where every rank may write, relative to the project or absolute; made if absent.
        scratch: this rank's private folder for diverted files, made by the agent (``scratch_of``); it may
            lie beneath the project.
        writable: absolute paths that taas itself needs to write in this rank: output files, sockets.
    """

    project: str
    rank: int
    vm: str = ""
    mode: RankWrites = "discard"
    shared: tuple[str, ...] = ()
    scratch: str
    writable: tuple[str, ...] = ()


class Diverted(msgspec.Struct, frozen=True):
    """A file this rank wrote to its scratch in the project's place."""

    path: str
    size: int


class Report(msgspec.Struct, frozen=True):
    """What a rank's writes came to: paths relative to the project, sizes in bytes."""

    rank: int
    diverted: tuple[Diverted, ...] = ()


class Guard:
    """A rank's wall, standing.

    Attributes:
        mechanism: which wall.
        how: its variant, for people ("as root", "version 7").
        why_not: stronger mechanisms that were tried, each with the reason it failed.
        demoted: files that were open for writing before, and can only be read now.
    """

    def __init__(self, policy: Policy, mechanism: Mechanism, how: str = "") -> None:
        self.policy = policy
        self.mechanism: Mechanism = mechanism
        self.how = how
        self.why_not: list[str] = []
        self.demoted: list[str] = []
        self.denial: Denial | None = None
        self.overlay: Overlay | None = None

    def report(self) -> Report:
        """What this rank has written to its scratch so far."""
        files = () if self.overlay is None else self.overlay.diverted()
        return Report(self.policy.rank, tuple(Diverted(path, size) for path, size in files))

    def explain(self, error: BaseException) -> str | None:
        """A sentence for an error the wall raised through C code; None when the wall had no part in it."""
        return None if self.denial is None else self.denial.explain(error)


def scratch_of(run_scratch: Path, rank: int) -> Path:
    """A rank's scratch folder within its run's; ``settle`` knows the ranks by these names."""
    return run_scratch / f"rank{rank}"


def prepare() -> None:
    """Do once, in the forkserver, what every rank's guard would otherwise repeat: 10 ms each."""
    calls.survey()


def guard(policy: Policy, mechanisms: Sequence[Mechanism] = MECHANISMS) -> Guard:
    """Put this rank behind the wall; the first thing a freshly forked rank does.

    The process must have one thread and must not yet have opened the project. Rank 0 is left as it is.
    Descriptors that a rank needs from other processes by ``/proc/<pid>/fd`` must be opened before.

    Args:
        policy: what the rank may write.
        mechanisms: which walls to try, in order.

    Raises:
        StorageDenied: no mechanism works; unguarded ranks do not run.
    """
    if policy.rank == 0:
        return Guard(policy, "none (rank 0)")
    edge = boundary.draw(policy.project, policy.shared, (*policy.writable, policy.scratch))
    denial = Denial(policy.rank, policy.mode, edge)
    why_not: list[str] = []
    for mechanism in mechanisms:
        try:
            how = _raise(mechanism, edge, denial)
        except OSError as error:
            why_not.append(f"{mechanism}: {error.strerror or error}")
            continue
        result = Guard(policy, mechanism, how)
        result.why_not, result.denial, result.overlay = why_not, denial, Overlay(edge, policy.scratch)
        result.demoted = inherited.reopen(edge)
        if mechanism == "landlock":
            _move_temporary_files(edge, policy)
        calls.install(Diversion(result.overlay, denial), audited=mechanism == "audit")
        return result
    raise StorageDenied(
        errno.EPERM, f"rank {policy.rank} cannot be kept from writing the project: {'; '.join(why_not)}"
    )


def doctor(only: Mechanism | None = None) -> list[str]:
    """Which wall this machine gives, found by raising each in a process of its own, and its limits.

    Args:
        only: ask about this one instead.
    """
    return probe.verdicts(MECHANISMS if only is None else (only,))


def _raise(mechanism: Mechanism, edge: boundary.Boundary, denial: Denial) -> str:
    if mechanism == "mount":
        return mount_wall.raise_wall(edge)
    if mechanism == "landlock":
        return landlock_wall.raise_wall(edge)
    return audit_wall.raise_wall(edge, denial)


def _move_temporary_files(edge: boundary.Boundary, policy: Policy) -> None:
    """Landlock denies new entries in the project's parents; the temporary directory may be one."""
    named = tempfile.tempdir or os.environ.get("TMPDIR", "/tmp")  # noqa: S108 the default of every program
    if boundary.resolve_beneath(edge.project, os.path.realpath(named)) is not None:
        place = Path(policy.scratch, "tmp")
        place.mkdir(exist_ok=True)
        os.environ["TMPDIR"] = tempfile.tempdir = str(place)
