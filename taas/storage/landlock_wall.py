"""The second wall: Landlock, where namespaces are refused.

Landlock only grants. To deny one folder, everything else is granted: each entry of each of the project's
parent directories. Hence its limits, which ``LIMITS`` says to the user: entries that appear directly in a
parent later cannot be written, and Landlock knows no rights for metadata.
"""

from __future__ import annotations

import contextlib
import os
import stat
from pathlib import PurePath

from taas import _linux
from taas.storage.boundary import Boundary

__all__ = ["LIMITS", "raise_wall"]

LIMITS = (
    "mode, owner, times and extended attributes of project files can be changed by programs other than Python",
    "nothing can be made, renamed or removed directly in the project's parent directories",
    "as an ordinary user: sudo and other set-user-ID programs do not work in ranks other than 0",
)


def raise_wall(boundary: Boundary) -> str:
    """Restrict this process, and all it will start, to writing outside the project.

    Returns:
        How: the version of Landlock.

    Raises:
        OSError: the kernel refuses; the text says why.
    """
    abi = _linux.landlock_abi()
    rights = _linux.landlock_write_rights(abi)
    ruleset = _linux.landlock_ruleset(rights)
    try:
        for path in _free_entries(boundary):
            _grant(ruleset, path, rights)
        for path in boundary.open:
            _grant(ruleset, path, rights)
        if not _linux.has_capability(_linux.CAP_SYS_ADMIN):
            _linux.set_no_new_privs()
        _linux.landlock_restrict(ruleset)
    finally:
        os.close(ruleset)
    return f"version {abi}" + ("" if abi >= 3 else ": truncation is not covered before version 3")


def _free_entries(boundary: Boundary) -> list[str]:
    """Entries of the project's parents that lead neither into the project nor to an alias of it."""
    closed = set(boundary.closed)
    parents = {str(parent) for path in closed for parent in PurePath(path).parents}
    free = []
    for parent in parents - closed:
        if closed.intersection(map(str, PurePath(parent).parents)):
            continue  # an alias inside the project's own tree
        with contextlib.suppress(PermissionError):  # what cannot be listed stays denied
            free += [entry.path for entry in os.scandir(parent) if not entry.is_symlink()]
    return [path for path in free if path not in closed and path not in parents]


def _grant(ruleset: int, path: str, rights: int) -> None:
    try:
        descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return  # gone since it was listed, or out of this user's reach
    try:
        if not stat.S_ISDIR(os.fstat(descriptor).st_mode):
            rights &= _linux.LANDLOCK_WRITE_FILE | _linux.LANDLOCK_TRUNCATE
        _linux.landlock_grant(ruleset, descriptor, rights)
    finally:
        os.close(descriptor)
