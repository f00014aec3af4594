"""What of a project travels to a VM that does not see its disk: its code, and what is small.

Modules travel whatever their size, other files up to :data:`LARGE`, all together up to :data:`TOTAL`: modules
first, then the small before the large. Data is for a disk that all VMs see, or for the cell to download. What
others make anew stays: version control, environments, caches, a notebook's checkpoints.
"""

# Paths are bytes.
# ruff: noqa: PTH118

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Collection
from typing import IO

import msgspec

from taas.travel.applier import Applier
from taas.travel.changes import DirectoryMade, FilePiece, LinkMade, decode_all, encode
from taas.travel.own_files import is_own
from taas.travel.reading import open_to_read, pieces
from taas.travel.tree import Seen, scan

__all__ = ["ENTRIES", "LARGE", "TOTAL", "LeftOut", "Parcel", "pack", "stays_home", "unpack"]

LARGE = 8 << 20
"""Bytes up to which a file that is no module travels."""
TOTAL = 64 << 20
"""Bytes of all files that travel."""
ENTRIES = 100_000
"""Files and directories that are looked at."""

_MODULES = (b".py", b".pyi", b".pyx", b".so")
_STAY = frozenset(
    b".git .hg .svn .venv node_modules __pycache__ .ipynb_checkpoints .mypy_cache .pytest_cache .ruff_cache "
    b".tox .nox .cache .local .conda .ipython .jupyter".split()
)
_ENVIRONMENT = ("pyvenv.cfg", "conda-meta")


class LeftOut(msgspec.Struct, frozen=True):
    """A file that stays where the notebook is.

    Attributes:
        path: relative to the project.
        size: in bytes.
    """

    path: str
    size: int


class Parcel(msgspec.Struct, frozen=True):
    """A project, packed.

    Attributes:
        fd: a memory file for :func:`unpack`; the caller closes it.
        nbytes: its size.
        found: what travels, as it stood when it was packed: an :class:`Applier` is told.
        stayed: files that do not travel, being too large, unreadable, or written to just then: it is told, too.
        left_out: files too large to travel, the largest first.
        whole: False where the project has more than :data:`ENTRIES` files, and the rest was not looked at.
    """

    fd: int
    nbytes: int
    found: dict[bytes, Seen]
    stayed: frozenset[bytes]
    left_out: tuple[LeftOut, ...]
    whole: bool = True


def stays_home(path: bytes, entry: os.DirEntry[bytes]) -> bool:
    """Whether an entry of a project is none of its files, with all that is beneath it."""
    del path
    if entry.name in _STAY or is_own(entry.name):
        return True
    if not entry.is_dir(follow_symlinks=False):
        return False
    return any(os.path.lexists(os.path.join(os.fsdecode(entry.path), mark)) for mark in _ENVIRONMENT)


def pack(
    project: str,
    large: int = LARGE,
    total: int = TOTAL,
    entries: int = ENTRIES,
    always: Collection[bytes] = (),
) -> Parcel:
    """Pack a project as it stands.

    Args:
        project: its directory.
        large: as :data:`LARGE`.
        total: as :data:`TOTAL`.
        entries: as :data:`ENTRIES`.
        always: files that travel whatever their size, beside those within the limits.

    Raises:
        OSError: the directory cannot be read, or there is no memory for it.
    """
    root = os.fsencode(project)
    os.close(os.open(root, os.O_RDONLY | os.O_DIRECTORY))
    found = dict(scan(root, stays_home, entries + 1))
    whole = len(found) <= entries
    chosen, left_out = _choose(found, large, total, always)
    stayed = {path for path, seen in found.items() if seen.kind == "file"} - chosen
    fd = os.memfd_create("taas-parcel", os.MFD_CLOEXEC)
    try:
        with os.fdopen(os.dup(fd), "wb") as file:
            for path, seen in found.items():
                if seen.kind == "directory":
                    file.write(encode(DirectoryMade(path=path, mode=seen.mode)))
                elif seen.kind == "link":
                    file.write(encode(LinkMade(path=path, target=seen.identity[1])))  # type: ignore[arg-type]
                elif path in chosen and not _write(file, root, path, seen):
                    stayed.add(path)
        travels = {path: seen for path, seen in found.items() if path not in stayed}
        return Parcel(fd, os.fstat(fd).st_size, travels, frozenset(stayed), left_out, whole)
    except BaseException:
        os.close(fd)
        raise


def _choose(
    found: dict[bytes, Seen], large: int, total: int, always: Collection[bytes]
) -> tuple[set[bytes], tuple[LeftOut, ...]]:
    chosen = {path for path in always if path in found and found[path].kind == "file"}
    files = {path: seen.size for path, seen in found.items() if seen.kind == "file" and path not in chosen}
    left_out: list[LeftOut] = []
    room = total
    for path in sorted(files, key=lambda path: (not path.endswith(_MODULES), files[path], path)):
        fits = files[path] <= room and (path.endswith(_MODULES) or files[path] <= large)
        if fits:
            chosen.add(path)
            room -= files[path]
        else:
            left_out.append(LeftOut(os.fsdecode(path), files[path]))
    return chosen, tuple(sorted(left_out, key=lambda file: -file.size))


def _write(file: IO[bytes], root: bytes, path: bytes, seen: Seen) -> bool:
    """Write a file of the project in pieces; returns whether all of it could be read as it was ``seen``."""
    whole = False
    with contextlib.suppress(OSError):  # it went, or cannot be read: no VM will have it
        fd = open_to_read(root, path)
        try:
            for piece in pieces(fd, path, seen):
                file.write(encode(piece))
                whole = isinstance(piece, FilePiece) and piece.offset + len(piece.data) >= seen.size
        finally:
            os.close(fd)
    return whole


def unpack(fd: int, folder: str) -> list[str]:
    """Unpack a parcel into a folder of this machine.

    Args:
        fd: the parcel, from its beginning.
        folder: an empty directory.

    Returns:
        What could not be unpacked, and why: one line each.

    Raises:
        msgspec.DecodeError: it is no parcel.
    """
    size = os.fstat(fd).st_size
    applier = Applier(folder, {}, "", durable=False)
    try:
        if size:
            with mmap.mmap(fd, size, prot=mmap.PROT_READ) as whole, memoryview(whole) as view:
                for change in decode_all(view):
                    applier.take(change)
        return applier.notices
    finally:
        applier.close()
