"""How a copy of the project becomes the project on a VM: under the project's own path, for a rank and all it starts.

Best is a mount namespace of the rank's own, in which the copy is mounted at the path: nobody else on the VM
sees it, and nothing of it is left. Where that is refused (most containers refuse it) the rank works in the copy
where it lies: relative paths and imports hold, absolute ones don't, and the cell says so.

What the VM keeps beneath that path stays what it is: Python's own installation, where a home directory is the
project, and caches, so that a model is downloaded once.
"""

# Plain strings: a Path folds "..", which the kernel follows.
# ruff: noqa: PTH103, PTH106, PTH112, PTH118

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

from taas import _linux
from taas.storage.boundary import HOME_CACHES, resolve_beneath

_TRIES = 20
_CACHES = (*HOME_CACHES, ".local", ".conda")


def kept_places(project: str, own: str = "") -> list[str]:
    """Return the directories of this VM beneath a project's path that its ranks go on seeing there; one may be taas' ``own``."""
    taas = str(Path(__file__).resolve().parents[2])
    here = [own, sys.prefix, sys.base_prefix, taas, *(os.path.join(project, name) for name in _CACHES)]
    real = {os.path.realpath(path) for path in here if path and os.path.isdir(path)}
    inside = sorted(path for path in real if resolve_beneath(path, project) not in (None, "."))
    return [
        path for path in inside if not any(other != path and resolve_beneath(path, other) for other in inside)
    ]


def make_places(replica: str, project: str) -> list[str]:
    """Make the directories in a copy over which :func:`kept_places` are to be mounted; returns the places."""
    places = kept_places(project, str(Path(replica).parent))
    for place in places:
        inside = resolve_beneath(place, project)
        assert inside is not None
        os.makedirs(os.path.join(replica, inside), exist_ok=True)
    return places


class Room:
    """An empty directory for the project to be mounted at, made where this VM has none.

    Removing it would take the mounts of others away, too, so that everybody who needs it has it locked: the last one
    who leaves removes it, if it was he who made it.

    Raises:
        OSError: it may not be made.
    """

    def __init__(self, project: str) -> None:
        for _ in range(_TRIES):
            self._made = _make(project)
            with contextlib.suppress(FileNotFoundError):  # who removed it just now is done with it
                self._fd = os.open(project, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
                fcntl.flock(self._fd, fcntl.LOCK_SH)
                if Path(project).exists() and os.path.samestat(Path(project).stat(), os.fstat(self._fd)):
                    return
                os.close(self._fd)
        raise OSError(errno.EBUSY, f"{project} is made and removed all the time")

    def leave(self) -> None:
        """Remove what was made, if nobody else needs it, and nobody has put anything there. Twice is harmless."""
        if self._fd < 0:
            return
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _remove(self._made)
        os.close(self._fd)
        self._fd = -1


def _make(project: str) -> list[str]:
    """Make what is missing of a path; returns it, the innermost last."""
    missing = [path for path in (Path(project), *Path(project).parents) if not path.exists()]
    made: list[str] = []
    try:
        for path in reversed(missing):
            path.mkdir(mode=0o755, exist_ok=True)
            made.append(str(path))
    except OSError:
        _remove(made)
        raise
    return made


def _remove(made: Iterable[str]) -> None:
    for path in reversed(list(made)):
        with contextlib.suppress(OSError):
            os.rmdir(path)


def entered(replica: str, project: str, say: Callable[[str], object]) -> str:
    """Let a copy of the project stand in its place, if there is one; return where the project is, and say why it is not there."""
    if not replica:
        return project
    try:
        enter(replica, project)
    except OSError as error:
        say(f"absolute paths of the project do not hold here, relative ones do: {error}")
        return replica
    return project


def enter(replica: str, project: str) -> None:
    """Let this process, and all it will start, see a copy of the project in the project's place.

    The process has one thread. Its working directory and what it has open do not move.

    Args:
        replica: the copy, in a folder of taas' that is seen where it is, wherever that is.
        project: an absolute path, where a directory is.

    Raises:
        OSError: refused here; the text says by what. Nothing has changed then, but that the process may be in
            a namespace of its own.
    """
    # Root keeps its capabilities: the wall comes after this.
    with _linux.own_mounts(()), _linux.still_seen(make_places(replica, project)):
        _linux.mount(replica, project, _linux.MS_BIND | _linux.MS_REC)
