"""Total and available memory of this machine, and of the control groups of this process.

The limit of a container is that of a control group (cgroups(7)), and the machine around it may have
far more memory. A group's usage includes its page cache: after a data set of 4 GB was read in a pod
of 4 GB, no memory would seem to be left. The system frees clean pages of files as soon as memory is
needed, so they count as free here. Pages of shared memory stay until the last process that uses
them closes them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import NamedTuple

import psutil

_HIERARCHIES = Path("/sys/fs/cgroup")
_SCARCE_SHARE = 0.1


class MemoryLeft(NamedTuple):
    """Memory in bytes, of the machine or of the control group that has less left."""

    free: int  # available without taking memory from any process
    total: int

    @property
    def is_scarce(self) -> bool:
        """Whether so little is left that no process should allocate memory in advance."""
        return self.free < _SCARCE_SHARE * self.total


class _Version(NamedTuple):
    """The file and line names for the same figures in one version of control groups."""

    limit: str
    used: str
    reclaimable: tuple[str, ...]  # lines of memory.stat, for a group including its subgroups


_FIRST = _Version(
    limit="memory.limit_in_bytes",
    used="memory.usage_in_bytes",
    reclaimable=("total_inactive_file", "total_active_file"),
)
_SECOND = _Version(
    limit="memory.max",
    used="memory.current",
    reclaimable=("inactive_file", "active_file"),
)


def memory_left() -> MemoryLeft:
    """Return the memory of this machine or of one of the control groups of this process.

    The one with the least free memory is chosen.
    """
    machine = psutil.virtual_memory()
    found = [MemoryLeft(machine.available, machine.total)]
    for version, folder in _groups():
        # the root of version 2 has no such file, and a group without a limit has the value "max"
        with suppress(OSError, ValueError):
            found.append(_left_in(version, folder))
    tightest = min(found, key=lambda memory: memory.free)
    return MemoryLeft(max(0, tightest.free), min(tightest.total, machine.total))


def _left_in(version: _Version, folder: Path) -> MemoryLeft:
    limit = int((folder / version.limit).read_text())
    used = int((folder / version.used).read_text())
    lines = (folder / "memory.stat").read_text().splitlines()
    stat = dict(line.split() for line in lines)
    # sandboxes that imitate control groups may lack lines
    reclaimable = sum(int(stat.get(name, "0")) for name in version.reclaimable)
    return MemoryLeft(limit - max(0, used - reclaimable), limit)


def _groups() -> Iterator[tuple[_Version, Path]]:
    """Yield the folders of the control groups of this process, and of their parent groups.

    A container often sees its own group as the root of the hierarchy, while the path in
    /proc/self/cgroup begins further up. Such a path does not exist; the root is read in any case.
    """
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except FileNotFoundError:  # a kernel without control groups
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            version, root = _SECOND, _HIERARCHIES
        elif "memory" in controllers.split(","):
            version, root = _FIRST, _HIERARCHIES / "memory"
        else:
            continue
        own = PurePosixPath(path.lstrip("/"))
        for group in (own, *own.parents):
            if ".." not in group.parts:  # the path of a group outside this namespace
                yield version, root / group
