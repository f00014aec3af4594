"""A directory tree as it stands, how what is at a path is known again, what of it crosses, and what in it is taas' own.

Links are never followed.
"""

# Paths are bytes, or what the wire carries.
# ruff: noqa: PTH108, PTH115, PTH118

from __future__ import annotations

import contextlib
import os
import re
import secrets
import stat
import time
from collections.abc import Callable, Generator, Iterator
from typing import NamedTuple

import msgspec


class FileState(NamedTuple):
    """What stands at a path. Two that are equal are the same thing, unchanged.

    Attributes:
        identity: inode, and of a file its times of change, in nanoseconds: ``ctime`` among them, which no program can
            set back. Of a directory nothing.
    """

    kind: str  # file, directory, link, or other (a socket, a device)
    mode: int  # permission bits
    size: int = 0  # bytes of a file
    target: bytes = b""  # of a link
    identity: tuple[int, ...] = ()

    @property
    def changed_ns(self) -> int:
        """When a file was changed, as its file system's clock has it; 0 of all else."""
        return self.identity[1] if self.kind == "file" and self.identity else 0

    @classmethod
    def of(cls, status: os.stat_result, target: bytes = b"") -> FileState:
        """What a status without following links tells."""
        mode = stat.S_IMODE(status.st_mode) & 0o777
        if stat.S_ISREG(status.st_mode):
            times = status.st_mtime_ns, status.st_ctime_ns
            return cls("file", mode, status.st_size, identity=(status.st_ino, *times))
        if stat.S_ISDIR(status.st_mode):
            return cls("directory", mode)
        kind = "link" if stat.S_ISLNK(status.st_mode) else "other"
        return cls(kind, mode, target=target, identity=(status.st_ino,))


def look(directory: int, name: bytes) -> FileState | None:
    """What stands at a name in an open directory; None where nothing does."""
    try:
        status = os.stat(name, dir_fd=directory, follow_symlinks=False)
        target = os.readlink(name, dir_fd=directory) if stat.S_ISLNK(status.st_mode) else b""
    except FileNotFoundError:
        return None
    return FileState.of(status, target)


def scan(
    root: bytes, skip: Callable[[bytes, os.DirEntry[bytes]], bool], limit: int | None = None
) -> Iterator[tuple[bytes, FileState]]:
    """Yield what is beneath a directory, each directory before what is in it, nearest to the root first; ``limit`` entries at most.

    What cannot be read, or goes while it is looked at, is passed over. ``skip`` says of an entry, with its path relative
    to the root, whether to leave it out with all beneath it.
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
                    seen = FileState.of(entry.stat(follow_symlinks=False), target)
                    if seen.kind == "directory":
                        folders.append(path)
                    yield path, seen


def open_directory(root: int, path: bytes, make: bool = False) -> int:
    """Open a directory beneath an open one, through no link and no ``..``; ``make``: what is missing of it.

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


# ---------------------------------------------------------------- what crosses
#
# Changes go from a watcher to an applier, in pieces of bounded size. The pieces of one file follow each other: the
# one with offset 0 begins it, the one that reaches its size completes it, and nothing of it is seen before. Another
# change of the same path in between gives it up, also its own beginning: a file that changed while it was read begins
# anew. Pieces of other files may come in between.


PIECE = 1 << 20
"""Bytes of a file in one change."""
_LENGTH = 4


class PathChange(msgspec.Struct, frozen=True):
    """What stands at a path now."""

    path: bytes  # relative to the tree's root, as the file system has it
    state: FileState | None = None  # None: nothing any more; what was beneath a directory was removed before
    offset: int = 0  # of a file, where these bytes are; each piece begins where the one before it ended
    data: bytes = b""  # of a file, at most PIECE bytes; empty only where the file is


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(PathChange)


def encode(change: PathChange) -> bytes:
    """Return a change as bytes that say their own length."""
    data = _encoder.encode(change)
    return len(data).to_bytes(_LENGTH, "big") + data


def decode_all(data: memoryview | bytes) -> Iterator[PathChange]:
    """Read what :func:`encode` made, one after the other.

    Raises:
        msgspec.DecodeError: it is something else, or ends within a change.
    """
    whole, offset = memoryview(data), 0
    while offset < len(whole):
        size = int.from_bytes(whole[offset : offset + _LENGTH], "big")
        offset += _LENGTH
        yield _decoder.decode(whole[offset : offset + size])
        offset += size


def shared_places(project: str, shared: tuple[str, ...]) -> list[str]:
    """Return the ``--shared`` directories in the project, where the ranks of every VM write; relative to it."""
    paths = (os.path.normpath(os.path.join(project, path)) for path in shared)
    return [os.path.relpath(path, project) for path in paths if path.startswith(os.path.join(project, ""))]


def is_in(places: list[str], change: PathChange) -> bool:
    """Whether a change is made in one of these directories, or makes one, or a folder that it is in."""
    made = change.state is not None and change.state.kind == "directory"
    return any(
        (change.path + b"/").startswith(place + b"/") or (made and place.startswith(change.path + b"/"))
        for place in map(os.fsencode, places)
    )


def open_to_read(root: bytes, path: bytes) -> int:
    """Open a regular file beneath a directory; raises OSError where it is none any more."""
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
    return os.open(root + b"/" + path, flags)


def read_pieces(fd: int, path: bytes, seen: FileState) -> Generator[PathChange, None, bool]:
    """Yield a file in pieces; the last one only if it has not changed since it was ``seen``.

    Returns:
        Whether all of it was yielded.
    """
    offset = 0
    while True:
        data = os.pread(fd, PIECE, offset)
        ends = offset + len(data) >= seen.size
        if (ends and FileState.of(os.fstat(fd)) != seen) or (not data and not ends):
            return False
        yield PathChange(path, seen, offset, data)
        offset += len(data)
        if ends:
            return True


# ---------------------------------------------------------------- files of taas' own
#
# Anybody can see that they are nobody's work; one of them proves that a VM sees this disk.

_NAME = re.compile(rb"\.taas-[a-z]+-[0-9a-f]+")
_ABANDONED_SECONDS = 3600.0
_TOKEN_BYTES = 32


def new_name(what: str) -> bytes:
    """Return a name that nobody uses."""
    return f".taas-{what}-{secrets.token_hex(8)}".encode()


def is_own(name: bytes) -> bool:
    """Whether a file's name says that it is taas' own."""
    return _NAME.fullmatch(name) is not None


def sweep(directory: int) -> None:
    """Remove what a killed process left in an open directory: who still writes to a file has changed it within the hour."""
    with os.scandir(directory) as entries:
        own = [name for entry in entries if is_own(name := os.fsencode(entry.name))]
    for name in own:
        with contextlib.suppress(OSError):
            if time.time() - os.stat(name, dir_fd=directory).st_ctime > _ABANDONED_SECONDS:
                os.unlink(name, dir_fd=directory)


class Token:
    """A file in the project with a content nobody can guess, for as long as VMs ask whether they see this disk.

    Names, sizes, times and inode numbers prove nothing: a VM may be started from a copy of the same disk.

    Attributes:
        content: what is to be found there.
        path: where VMs have to look; None where the project cannot be written: then no VM is said to see it.
    """

    def __init__(self, project: str) -> None:
        self.content = secrets.token_bytes(_TOKEN_BYTES)
        path = os.path.join(project, os.fsdecode(new_name("disk")))
        self.path: str | None = None
        with contextlib.suppress(OSError):
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            self.path = path
            with os.fdopen(fd, "wb", buffering=0) as file:
                file.write(self.content)
                os.fsync(fd)

    def remove(self) -> None:
        """Remove the file. Twice is harmless."""
        if self.path is not None:
            with contextlib.suppress(OSError):
                os.unlink(self.path)


def read_token(path: str) -> bytes:
    """Return what a VM finds at a token's path; empty where nothing is."""
    with contextlib.suppress(OSError):
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(fd, "rb", buffering=0) as file:
            return file.read(_TOKEN_BYTES + 1)
    return b""
