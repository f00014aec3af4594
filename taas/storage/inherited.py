"""What a process brought along from before its wall: working directory and descriptors.

Both name the project through the old, writable mount, so each is opened again by path, from behind the
wall. A mapping made before cannot be taken back; a freshly forked rank has none.
"""

# Plain strings: a Path folds "..", which the kernel follows, and these run on every call of a rank.
# ruff: noqa: PTH109, PTH115, PTH208

from __future__ import annotations

import contextlib
import fcntl
import os
import stat

from taas.storage.boundary import Boundary

__all__ = ["reopen"]

_KEPT = os.O_APPEND | os.O_NONBLOCK | os.O_DIRECTORY | os.O_PATH


def reopen(boundary: Boundary) -> list[str]:
    """Open the working directory and every descriptor beneath the project again, read-only.

    A file that was open for writing can only be read afterwards: writing to it is EBADF.

    Returns:
        Paths of the files that were open for writing.
    """
    with contextlib.suppress(OSError):  # a working directory that was removed stays what it is
        os.chdir(os.getcwd())  # the string matters, not the directory
    demoted = []
    for name in os.listdir("/proc/self/fd"):
        descriptor = int(name)
        try:
            path = os.readlink(f"/proc/self/fd/{descriptor}")
            mode = os.fstat(descriptor).st_mode
        except OSError:
            continue  # the listing's own descriptor, closed by now
        if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)) or boundary.relative(path) is None:
            continue
        flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
        if flags & os.O_ACCMODE and not flags & os.O_PATH:
            demoted.append(path)
        _replace(descriptor, path, flags & _KEPT)
    return demoted


def _replace(descriptor: int, path: str, flags: int) -> None:
    position = 0 if flags & os.O_PATH else os.lseek(descriptor, 0, os.SEEK_CUR)
    inheritable = os.get_inheritable(descriptor)
    try:
        fresh = os.open(path, os.O_RDONLY | os.O_CLOEXEC | flags)
    except OSError:
        # Removed, renamed or unreadable: closed descriptors surprise less when the number stays taken.
        fresh = os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)
    os.dup2(fresh, descriptor, inheritable=inheritable)
    os.close(fresh)
    with contextlib.suppress(OSError):
        os.lseek(descriptor, position, os.SEEK_SET)
