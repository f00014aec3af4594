"""Project files on VMs that cannot access the notebook's disk.

A VM is a machine (host or node) on which an agent runs.

``archive`` packs and reads the project files that are sent to a VM, and the changes made there
since. ``applier`` applies an archive's changes to a folder, each file completely and without
overwriting the user's work. ``files_on_demand`` transfers files that were not sent when a process
opens them.

This module makes the copy on a VM visible at the project's own path, for a rank and all processes
it starts. The best way is a mount namespace of the rank, in which the copy is mounted at the path:
no other process on the VM sees it, and it leaves nothing behind. If that is refused (most
containers refuse it), the rank works in the copy's own folder: relative paths and imports work,
absolute paths don't, and the cell's output says so.

Some directories of the VM beneath that path stay visible: Python's own installation, if the
project is a home directory, and caches, so that a model is downloaded once.
"""

# Plain strings: a Path removes "..", which the kernel follows.
# ruff: noqa: PTH103, PTH112, PTH118

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

from taas.base import linux, own_code
from taas.project.wall.boundary import HOME_CACHES, resolve_beneath

_CACHES = (*HOME_CACHES, ".local", ".conda")


def kept_places(project: str, own: str = "") -> list[str]:
    """Return the VM's own directories beneath a project's path that its ranks still see.

    ``own`` may be such a directory of taas.
    """
    taas = str(Path(own_code.FOLDER).parent)
    here = [
        own,
        sys.prefix,
        sys.base_prefix,
        taas,
        *(os.path.join(project, name) for name in _CACHES),
    ]
    real = {os.path.realpath(path) for path in here if path and os.path.isdir(path)}
    inside = sorted(path for path in real if resolve_beneath(path, project) not in (None, "."))
    return [
        path
        for path in inside
        if not any(other != path and resolve_beneath(path, other) for other in inside)
    ]


def make_places(replica: str, project: str) -> list[str]:
    """Create the directories in a copy over which :func:`kept_places` are mounted; return them."""
    places = kept_places(project, str(Path(replica).parent))
    for place in places:
        inside = resolve_beneath(place, project)
        assert inside is not None
        os.makedirs(os.path.join(replica, inside), exist_ok=True)
    return places


def enter_replica(replica: str, project: str, say: Callable[[str], object]) -> str:
    """Make this process, and all it will start, see a copy of the project at the project's path.

    Return the path of the project. The process must have only one thread. Its working directory
    and its open files do not move.

    Args:
        replica: the copy, in a folder of taas that stays visible at its own path; empty if there
            is no copy.
        project: the absolute path of a directory.
        say: called with the reason if the copy cannot be mounted there; the process may be in a
            new namespace then.
    """
    if not replica:
        return project
    try:
        # Root keeps its capabilities, because the write protection is set up after this.
        with linux.own_mounts(()), linux.still_seen(make_places(replica, project)):
            linux.mount(replica, project, linux.MS_BIND | linux.MS_REC)
    except OSError as error:
        say(f"absolute paths of the project do not hold here, relative ones do: {error}")
        return replica
    return project
