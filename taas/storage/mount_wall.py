"""The strongest wall: a private mount namespace in which the project is mounted read-only.

Holds for every call of every program the rank starts (EROFS), with live reads, and is undone by
nothing the rank can do: what would undo it (mounting, entering another process's namespace through
/proc, opening by file handle, raw devices) needs capabilities that are given up. As an ordinary user
a user namespace supplies the right to mount, and all its capabilities are given up afterwards.
"""

from __future__ import annotations

import contextlib
import errno
import os

from taas import _linux
from taas.storage.boundary import Boundary, resolve_beneath
from taas.storage.own_mounts import own_mounts

__all__ = ["raise_wall"]

# What root keeps is what root has in an ordinary container, less these; each could write past the mount.
_WAYS_ROUND = (
    _linux.CAP_SYS_ADMIN,  # mount, umount, setns
    _linux.CAP_SYS_PTRACE,  # /proc/<pid>/root and memory of processes outside
    _linux.CAP_DAC_READ_SEARCH,  # open_by_handle_at through another mount
    _linux.CAP_SYS_MODULE,
    _linux.CAP_SYS_RAWIO,
    _linux.CAP_MKNOD,  # the disk itself
    _linux.CAP_BPF,
    _linux.CAP_CHECKPOINT_RESTORE,
)


def raise_wall(boundary: Boundary) -> str:
    """Put this single-threaded process, and all it will start, behind the wall.

    Returns:
        How: "as root" or "through a user namespace".

    Raises:
        OSError: refused here; the text says by what. The process may then be in a namespace of its own,
            which restricts nothing.
    """
    with own_mounts(_WAYS_ROUND) as as_root:
        _mount_readonly(boundary)
    _verify(boundary)
    return "as root" if as_root else "through a user namespace"


def _mount_readonly(boundary: Boundary) -> None:
    with contextlib.ExitStack() as stack:
        # Held from before the bind, these descriptors still lead to the writable mounts.
        before = {path: os.open(path, os.O_PATH | os.O_CLOEXEC) for path in boundary.open}
        for descriptor in before.values():
            stack.callback(os.close, descriptor)
        for path in boundary.closed:
            _linux.mount(path, path, _linux.MS_BIND | _linux.MS_REC)
            try:
                _linux.mount_readonly(path)
            except OSError as error:
                if error.errno != errno.ENOSYS:
                    raise
                for entry in _linux.mounts():
                    if resolve_beneath(entry.point, path) is not None:
                        _linux.remount_readonly(entry)
        for path, descriptor in before.items():
            _linux.mount(f"/proc/self/fd/{descriptor}", path, _linux.MS_BIND | _linux.MS_REC)


def _verify(boundary: Boundary) -> None:
    for path in boundary.closed:
        if path not in boundary.open and not os.statvfs(path).f_flag & os.ST_RDONLY:
            raise OSError(errno.EPERM, f"{path} is still writable after it was mounted read-only")
