"""Project files on VMs that do not see the notebook's disk.

``archive``     what of the project travels to a VM, and what was changed there since: packed, and
read ``applier``     an archive's changes made to a folder: whole, and over nobody's work

Here is how that folder becomes the project on a VM: under the project's own path, for a rank and
all it starts. Best is a mount namespace of the rank's own, in which the copy is mounted at the
path: nobody else on the VM sees it, and nothing of it is left. Where that is refused (most
containers refuse it) the rank works in the copy where it lies: relative paths and imports hold,
absolute ones don't, and the cell says so.

What the VM keeps beneath that path stays what it is: Python's own installation, where a home
directory is the project, and caches, so that a model is downloaded once.
"""

# Plain strings: a Path folds "..", which the kernel follows.
# ruff: noqa: PTH103, PTH112, PTH118

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

from taas import _linux
from taas.storage.boundary import HOME_CACHES, resolve_beneath

_CACHES = (*HOME_CACHES, ".local", ".conda")


def kept_places(project: str, own: str = "") -> list[str]:
    """Return the directories of this VM beneath a project's path that its ranks go on seeing there; one may be taas' ``own``."""
    taas = str(Path(__file__).resolve().parents[2])
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
    """Make the directories in a copy over which :func:`kept_places` are to be mounted; returns the places."""
    places = kept_places(project, str(Path(replica).parent))
    for place in places:
        inside = resolve_beneath(place, project)
        assert inside is not None
        os.makedirs(os.path.join(replica, inside), exist_ok=True)
    return places


def entered(replica: str, project: str, say: Callable[[str], object]) -> str:
    """Let this process, and all it will start, see a copy of the project in the project's place; returns where the project is.

    The process has one thread. Its working directory and what it has open do not move.

    Args:
        replica: the copy, in a folder of taas' that is seen where it is, wherever that is; empty:
            there is none.
        project: an absolute path, where a directory is.
        say: is told why the copy cannot stand there; the process may be in a namespace of its own
            then.
    """
    if not replica:
        return project
    try:
        # Root keeps its capabilities: the wall comes after this.
        with _linux.own_mounts(()), _linux.still_seen(make_places(replica, project)):
            _linux.mount(replica, project, _linux.MS_BIND | _linux.MS_REC)
    except OSError as error:
        say(f"absolute paths of the project do not hold here, relative ones do: {error}")
        return replica
    return project
