"""Reading a file that others may be writing: all of it as it was at one time, or nothing."""

# Paths are bytes.
# ruff: noqa: PTH118

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import signal
from collections.abc import Generator

from taas.travel.changes import PIECE, FileAbandoned, FilePiece
from taas.travel.tree import Seen

__all__ = ["digest", "is_being_written", "open_to_read", "pieces"]


def open_to_read(root: bytes, path: bytes) -> int:
    """Open a regular file beneath a directory; raises OSError where it is none any more."""
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
    return os.open(os.path.join(root, path), flags)


def is_being_written(fd: int) -> bool | None:
    """Whether anybody has a file open for writing, or mapped; None where the system cannot tell.

    The system grants a read lease (fcntl(2)) on a file only while nobody could write it. It is given back at
    once; who opens the file in between is not told, and does not wait.
    """
    try:
        # A broken lease is told by SIGIO, which would end this process. This signal is ignored by default.
        fcntl.fcntl(fd, fcntl.F_SETSIG, signal.SIGURG)
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_RDLCK)
    except OSError as error:
        return True if error.errno == errno.EAGAIN else None
    fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    return False


def pieces(fd: int, path: bytes, seen: Seen) -> Generator[FilePiece | FileAbandoned, None, bool]:
    """Yield a file in pieces; the last one only if it has not changed since it was ``seen``.

    Returns:
        Whether all of it was yielded.
    """
    offset = 0
    while True:
        data = os.pread(fd, PIECE, offset)
        ends = offset + len(data) >= seen.size
        if (ends and Seen.of(os.fstat(fd)) != seen) or (not data and not ends):
            if offset:
                yield FileAbandoned(path=path)
            return False
        yield FilePiece(path=path, mode=seen.mode, size=seen.size, offset=offset, data=data)
        offset += len(data)
        if ends:
            return True


def digest(fd: int) -> bytes:
    """Return a file's fingerprint."""
    found, offset = hashlib.blake2b(digest_size=16), 0
    while data := os.pread(fd, PIECE, offset):
        found.update(data)
        offset += len(data)
    return found.digest()
