"""A directory tree as it stands: what is at each path, and how it is known again. Links are never followed."""

# Paths are bytes.
# ruff: noqa: PTH115, PTH118

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Callable, Iterator
from typing import NamedTuple

__all__ = ["Seen", "look", "open_directory", "scan"]


class Seen(NamedTuple):
    """What stands at a path. Two that are equal are the same thing, unchanged.

    Attributes:
        kind: ``file``, ``directory``, ``link``, or ``other`` (a socket, a device).
        mode: permission bits.
        identity: of a file its inode, size, and times of change, in nanoseconds: ``ctime`` among them, which no
            program can set back; of a link its inode and target; of a directory nothing.
    """

    kind: str
    mode: int
    identity: tuple[object, ...] = ()

    @property
    def size(self) -> int:
        """Bytes of a file; 0 of all else."""
        return self.identity[1] if self.kind == "file" else 0  # type: ignore[return-value]

    @property
    def changed_ns(self) -> int:
        """When a file was changed, as its file system's clock has it; 0 of all else."""
        return self.identity[3] if self.kind == "file" else 0  # type: ignore[return-value]

    @classmethod
    def of(cls, status: os.stat_result, target: bytes = b"") -> Seen:
        """What a status without following links tells."""
        mode = stat.S_IMODE(status.st_mode) & 0o777
        if stat.S_ISREG(status.st_mode):
            return cls("file", mode, (status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns))
        if stat.S_ISDIR(status.st_mode):
            return cls("directory", mode)
        if stat.S_ISLNK(status.st_mode):
            return cls("link", 0o777, (status.st_ino, target))
        return cls("other", mode, (status.st_ino,))


def look(directory: int, name: bytes) -> Seen | None:
    """What stands at a name in an open directory; None where nothing does."""
    try:
        status = os.stat(name, dir_fd=directory, follow_symlinks=False)
        target = os.readlink(name, dir_fd=directory) if stat.S_ISLNK(status.st_mode) else b""
    except FileNotFoundError:
        return None
    return Seen.of(status, target)


def scan(
    root: bytes, skip: Callable[[bytes, os.DirEntry[bytes]], bool], limit: int | None = None
) -> Iterator[tuple[bytes, Seen]]:
    """Yield what is beneath a directory, each directory before what is in it, nearest to the root first.

    What cannot be read, or goes while it is looked at, is passed over.

    Args:
        root: the directory.
        skip: whether to leave out an entry, given its path relative to the root, and all beneath it.
        limit: stop after so many entries.
    """
    folders, count = [b""], 0
    for folder in folders:
        with (
            contextlib.suppress(OSError),
            os.scandir(os.path.join(root, folder) if folder else root) as entries,
        ):
            for entry in entries:
                path = folder + b"/" + entry.name if folder else entry.name
                if skip(path, entry):
                    continue
                count += 1
                if limit is not None and count > limit:
                    return
                with contextlib.suppress(OSError):
                    target = os.readlink(entry.path) if entry.is_symlink() else b""
                    seen = Seen.of(entry.stat(follow_symlinks=False), target)
                    if seen.kind == "directory":
                        folders.append(path)
                    yield path, seen


def open_directory(root: int, path: bytes, make: bool = False) -> int:
    """Open a directory beneath an open one, through no link and no ``..``.

    Args:
        root: the open directory.
        path: relative to it; empty is itself.
        make: make what is missing of it.

    Raises:
        OSError: it is not there, is no directory, or leads through a link.
    """
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    here = os.open(b".", flags, dir_fd=root)
    for part in path.split(b"/") if path else ():
        try:
            if part in (b"", b".", b".."):
                raise OSError(f"{path!r} is no plain path")
            if make:
                with contextlib.suppress(FileExistsError):
                    os.mkdir(part, dir_fd=here)
            there = os.open(part, flags, dir_fd=here)
        finally:
            os.close(here)
        here = there
    return here
