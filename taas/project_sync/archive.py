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
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import IO

from taas.project_sync.applier import Applier
from taas.project_sync.tree import (
    FileState,
    PathChange,
    decode_all,
    encode,
    is_own,
    open_to_read,
    read_pieces,
    scan,
)

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


@dataclass(frozen=True)
class Archive:
    """A project, packed. An :class:`Applier` is told what travels, and what stays."""

    fd: int  # a memory file for unpack(); the caller closes it
    nbytes: int  # its size
    found: dict[bytes, FileState]  # what travels, as it stood when it was packed
    stayed: frozenset[bytes]  # files that do not: too large, unreadable, or written to just then
    left_out: dict[str, int]  # the too large ones with their sizes in bytes, the largest first
    whole: bool = True  # False where the project has more than ENTRIES files, and the rest was not looked at


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
    known: Mapping[bytes, FileState] | None = None,
) -> Archive:
    """Pack a project as it stands; what is in ``always`` travels whatever its size, beside what is within the limits.

    ``known`` is what stands on the VMs already, as it stood here when it did: what is too large does not travel again, and what
    is not so any more is removed there.

    Raises:
        OSError: the directory cannot be read, or there is no memory for it.
    """
    root = os.fsencode(project)
    os.close(os.open(root, os.O_RDONLY | os.O_DIRECTORY))
    found = dict(scan(root, stays_home, entries + 1))
    whole = len(found) <= entries
    known = known or {}
    had = {path for path, seen in known.items() if found.get(path) == seen}
    chosen, left_out = _choose(found, large, total, always)
    left_out = {path: size for path, size in left_out.items() if os.fsencode(path) not in had}
    stayed = {path for path, seen in found.items() if seen.kind == "file"} - chosen - had
    gone = [path for path, was in known.items() if path in stayed or _other_kind(was, found.get(path))]
    fd = os.memfd_create("taas-archive", os.MFD_CLOEXEC)
    try:
        with os.fdopen(os.dup(fd), "wb") as file:
            for path in sorted(gone, reverse=True):  # what is in a directory before it
                file.write(encode(PathChange(path)))
            for path, seen in found.items():
                if seen.kind in ("directory", "link"):
                    file.write(encode(PathChange(path, seen)))
                elif path in chosen and not _write(file, root, path, seen):
                    stayed.add(path)
        travels = {path: seen for path, seen in found.items() if path not in stayed}
        return Archive(fd, os.fstat(fd).st_size, travels, frozenset(stayed), left_out, whole)
    except BaseException:
        os.close(fd)
        raise


def _other_kind(was: FileState, now: FileState | None) -> bool:
    return now is None or now.kind != was.kind


def _choose(
    found: dict[bytes, FileState], large: int, total: int, always: Collection[bytes]
) -> tuple[set[bytes], dict[str, int]]:
    chosen = {path for path in always if path in found and found[path].kind == "file"}
    files = {path: seen.size for path, seen in found.items() if seen.kind == "file" and path not in chosen}
    left_out: list[bytes] = []
    for path in sorted(files, key=lambda path: (not path.endswith(_MODULES), files[path], path)):
        if files[path] <= total and (path.endswith(_MODULES) or files[path] <= large):
            chosen.add(path)
            total -= files[path]
        else:
            left_out.append(path)
    left_out.sort(key=lambda path: -files[path])
    return chosen, {os.fsdecode(path): files[path] for path in left_out}


def _write(file: IO[bytes], root: bytes, path: bytes, seen: FileState) -> bool:
    """Write a file of the project in pieces; returns whether all of it could be read as it was ``seen``."""
    whole = False
    with contextlib.suppress(OSError):  # it went, or cannot be read: no VM will have it
        fd = open_to_read(root, path)
        try:
            for piece in read_pieces(fd, path, seen):
                file.write(encode(piece))
                whole = piece.offset + len(piece.data) >= seen.size
        finally:
            os.close(fd)
    return whole


def unpack(fd: int, folder: str) -> list[str]:
    """Unpack an archive into a folder, empty or as earlier ones left it; returns what could not be, and why, a line each.

    Raises:
        msgspec.DecodeError: it is no archive.
    """
    size = os.fstat(fd).st_size
    stands = dict(scan(os.fsencode(folder), lambda path, entry: False))
    applier = Applier(folder, stands, "", durable=False)
    try:
        if size:
            with mmap.mmap(fd, size, prot=mmap.PROT_READ) as whole, memoryview(whole) as view:
                for change in decode_all(view):
                    applier.take(change)
        return applier.notices
    finally:
        applier.close()
