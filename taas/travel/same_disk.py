"""Whether a VM sees the notebook's disk, found out by a file that the one makes and the other looks for.

Names, sizes, times and inode numbers prove nothing: a VM may be started from a copy of the same disk.
"""

# Paths are what the wire carries.
# ruff: noqa: PTH108, PTH118

from __future__ import annotations

import contextlib
import os
import secrets

from taas.travel.own_files import new_name

__all__ = ["Token", "read_token"]

_BYTES = 32


class Token:
    """A file in the project with a content nobody can guess, for as long as the question is open.

    Args:
        project: the notebook's directory.

    Attributes:
        content: what is to be found there.
        path: where VMs have to look; None where the project cannot be written: then no VM is said to see it.
    """

    def __init__(self, project: str) -> None:
        self.content = secrets.token_bytes(_BYTES)
        path = os.path.join(project, os.fsdecode(new_name("disk")))
        self.path: str | None = None
        with contextlib.suppress(OSError):
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            self.path = path
            try:
                os.write(fd, self.content)
                os.fsync(fd)
            finally:
                os.close(fd)

    def is_seen_by(self, answer: bytes) -> bool:
        """Whether a VM that read this sees the same disk."""
        return self.path is not None and secrets.compare_digest(answer, self.content)

    def remove(self) -> None:
        """Remove the file. Twice is harmless."""
        if self.path is not None:
            with contextlib.suppress(OSError):
                os.unlink(self.path)


def read_token(path: str) -> bytes:
    """Return what a VM finds at a token's path; empty where nothing is."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return b""
    try:
        return os.read(fd, _BYTES + 1)
    except OSError:
        return b""
    finally:
        os.close(fd)
