"""The state of a directory tree, and archives of files that are sent between hosts.

The project's code and its small files are sent to a VM: modules of any size, other files up to
:data:`LARGE`, all together up to :data:`TOTAL`, modules first, then small files before large ones.
Data belongs on a disk that all VMs can access, or the cell downloads it. Version control,
environments, caches and a notebook's checkpoints are not sent, because they can be created again.

Files that were changed on a VM are sent back once they are closed. An archive is a file with a
sequence of entries, each with the bytes of its file. Links are never followed.
"""

# Paths are bytes, relative to a tree's root.
# ruff: noqa: PTH108, PTH115, PTH118

from __future__ import annotations

import contextlib
import itertools
import mmap
import os
import stat
import time
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping
from typing import NamedTuple

import msgspec

from taas.base.linux import is_being_written
from taas.base.wording import shown_path
from taas.protocol.framing import MessageReader, Unreadable

LARGE = 8 << 20  # the most bytes of a file that is sent and is not a module
TOTAL = 64 << 20  # the most bytes of all files that are sent
ENTRIES = 100_000  # the most files and directories that are examined

_MODULES = (b".py", b".pyi", b".pyx", b".so")
_STAY = frozenset(
    b".git .hg .svn .venv node_modules __pycache__ .ipynb_checkpoints .mypy_cache .pytest_cache"
    b" .ruff_cache .tox .nox .cache .local .conda .ipython .jupyter".split()
)
_ENVIRONMENT = (b"pyvenv.cfg", b"conda-meta")
_OWN = b".taas-"  # prefix of names of taas's own files
PART = _OWN + b"part-"  # prefix of names of files that are being written
_LEFT_SECONDS = 3600.0  # a part file that has not changed for that long has lost its writer
_ORDER = {"directory": 0, "file": 1, "link": 2}  # links come after their possible targets
_TICK_NS = 20_000_000  # two changes within this time may have the same time stamp
_LENGTH, _PIECE = 4, 16 << 20


class FileState(NamedTuple):
    """The state of the entry at a path.

    Equal states mean the same unchanged entry, because no program can set back ``changed_ns``.
    """

    kind: str  # file, directory, link, or other (a socket, a device)
    mode: int  # permission bits
    size: int = 0  # bytes of a file
    target: bytes = b""  # of a link
    inode: int = 0  # 0 for directories
    modified_ns: int = 0  # mtime of a file
    changed_ns: int = 0  # ctime of a file

    @classmethod
    def of(cls, status: os.stat_result, target: bytes = b"") -> FileState:
        """Build the state from an lstat result."""
        mode, inode = status.st_mode & 0o777, status.st_ino
        if stat.S_ISREG(status.st_mode):
            return cls(
                "file", mode, status.st_size, b"", inode, status.st_mtime_ns, status.st_ctime_ns
            )
        if stat.S_ISDIR(status.st_mode):
            return cls("directory", mode)
        return cls("link" if stat.S_ISLNK(status.st_mode) else "other", mode, 0, target, inode)

    def is_version_of(self, other: FileState) -> bool:
        """Return whether these are copies of one version of a file on two hosts."""
        return (*self[:3], self.modified_ns) == (*other[:3], other.modified_ns)


Skip = Callable[[bytes, os.DirEntry[bytes]], bool]
"""Tells whether to skip an entry, with everything beneath it; its arguments are path and entry."""


def scan(root: bytes, skip: Skip) -> Iterator[tuple[bytes, FileState]]:
    """Yield everything beneath a directory, each directory before its entries.

    Entries nearest to the root come first. Entries that cannot be read, that disappear meanwhile,
    or that belong to taas are skipped; a part file that a killed process has left is removed.
    """
    folders = [b""]
    for folder in folders:
        with (
            contextlib.suppress(OSError),
            os.scandir(os.path.join(root, folder) if folder else root) as entries,
        ):
            for entry in entries:
                path = folder + b"/" + entry.name if folder else entry.name
                if skip(path, entry):
                    continue
                with contextlib.suppress(OSError):
                    if entry.name.startswith(_OWN):
                        left = (
                            time.time() - entry.stat(follow_symlinks=False).st_ctime > _LEFT_SECONDS
                        )
                        if left and entry.name.startswith(PART):
                            os.unlink(entry.path)
                        continue
                    target = os.readlink(entry.path) if entry.is_symlink() else b""
                    seen = FileState.of(entry.stat(follow_symlinks=False), target)
                    if seen.kind == "directory":
                        folders.append(path)
                    yield path, seen


# ---------------------------------------------------------------- the file


class ArchiveEntry(msgspec.Struct, frozen=True):
    """The current state at a path; the bytes of a file follow."""

    path: bytes
    # None: the entry is gone; entries for its content come before it
    state: FileState | None = None
    # no bytes follow: a host with another version of the file removes that version
    bare: bool = False


_encoder = msgspec.msgpack.Encoder()
_read_entry = MessageReader(ArchiveEntry)


def entries(fd: int) -> Iterator[tuple[ArchiveEntry, memoryview]]:
    """Read an archive: its entries, each with its bytes, which are valid until the next one.

    Raises:
        Unreadable: it is not an archive, or is cut off.
    """
    size, offset = os.fstat(fd).st_size, 0
    if not size:
        return
    with mmap.mmap(fd, size, prot=mmap.PROT_READ) as mapped, memoryview(mapped) as whole:
        while offset < size:
            begins = offset + _LENGTH
            ends = begins + int.from_bytes(whole[offset:begins], "big")
            with whole[begins:ends] as head:
                entry = _read_entry(head)
            offset = ends + (0 if entry.state is None or entry.bare else entry.state.size)
            if not ends <= offset <= size:
                raise Unreadable(f"an archive of {size:,} bytes ends within {entry.path!r}")
            with whole[ends:offset] as data:
                yield entry, data


def _add(fd: int, entry: ArchiveEntry) -> None:
    data = _encoder.encode(entry)
    data = len(data).to_bytes(_LENGTH, "big") + data
    while data:
        data = data[os.write(fd, data) :]


def _add_file(
    fd: int, root: bytes, path: bytes, *, closed: bool
) -> Generator[None, None, FileState | None]:
    """Add a file; yield between its pieces; return its state, or None if it was not added.

    With ``closed`` it is only added if no process has it open, and its last change is at least a
    tick ago. It is also not added if it cannot be read, or changes meanwhile.
    """
    try:
        source = os.open(
            root + b"/" + path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        )
    except OSError:
        return None
    try:
        seen, began = FileState.of(os.fstat(source)), os.lseek(fd, 0, os.SEEK_CUR)
        young = abs(time.time_ns() - seen.changed_ns) <= _TICK_NS
        if seen.kind != "file" or (closed and (young or is_being_written(source) is not False)):
            return None
        _add(fd, ArchiveEntry(path, seen))
        left = seen.size
        while left and (sent := os.sendfile(fd, source, None, min(left, _PIECE))):
            left -= sent
            yield
        if not left and FileState.of(os.fstat(source)) == seen:
            return seen
        os.ftruncate(fd, began)
        os.lseek(fd, began, os.SEEK_SET)
        return None
    finally:
        os.close(source)


def _add_all(
    fd: int,
    root: bytes,
    known: Mapping[bytes, FileState],
    found: Mapping[bytes, FileState],
    tell: Iterable[bytes],
    told: dict[bytes, FileState],
    *,
    closed: bool,
) -> Iterator[None]:
    """Add the entries that turn a ``known`` tree into the one that was ``found``.

    Only paths in ``tell`` are added; ``told`` receives those that were. Removals come last, so
    that of two checkpoints one exists at any time; but removals of entries that are in another
    entry's way come first.
    """
    gone = [
        path for path, was in known.items() if path not in found or found[path].kind != was.kind
    ]
    gone.sort(reverse=True)  # the content of a directory before the directory
    turned = {path for path in gone if path in found}
    first = {path for path in gone if path in turned or _beneath(path, turned)}
    for path in [path for path in gone if path in first]:
        _add(fd, ArchiveEntry(path))
    for path in sorted(tell, key=lambda path: _ORDER[found[path].kind]):
        seen: FileState | None = found[path]
        if found[path].kind == "file":
            seen = yield from _add_file(fd, root, path, closed=closed)
        else:
            _add(fd, ArchiveEntry(path, seen))
        if seen is not None:
            told[path] = seen
    for path in [path for path in gone if path not in first]:
        _add(fd, ArchiveEntry(path))


def _beneath(path: bytes, folders: Collection[bytes]) -> bool:
    return any(path.startswith(folder + b"/") for folder in folders)


# ---------------------------------------------------------------- the project, to a VM


class Archive(NamedTuple):
    """A packed project."""

    fd: int  # a memory file; the caller closes it
    # the files that are sent, as they were when the project was packed
    found: dict[bytes, FileState]
    # files that are not sent: too large, unreadable, or being written at that time
    stayed: dict[bytes, FileState]
    # False if the project has more than ENTRIES files, and the rest was not examined
    whole: bool


def stays_home(path: bytes, entry: os.DirEntry[bytes]) -> bool:
    """Return whether an entry, with everything beneath it, is not part of the project."""
    del path
    environment = entry.is_dir(follow_symlinks=False) and any(
        os.path.lexists(os.path.join(entry.path, mark)) for mark in _ENVIRONMENT
    )
    return environment or entry.name in _STAY


def pack(
    project: str,
    large: int = LARGE,
    total: int = TOTAL,
    limit: int = ENTRIES,
    always: Collection[bytes] = (),
    known: Mapping[bytes, FileState] | None = None,
) -> Archive:
    """Pack a project in its current state.

    Paths in ``always`` are sent whatever their size, in addition to those within the limits.
    ``known`` contains the files that VMs have already, with the state that they had here at that
    time. Of these, files that are too large are not sent again, and those that have changed are
    removed there.

    Raises:
        OSError: the directory cannot be read, or there is not enough memory.
    """
    root, known = os.fsencode(project), known or {}
    os.close(os.open(root, os.O_RDONLY | os.O_DIRECTORY))
    found = dict(itertools.islice(scan(root, stays_home), limit + 1))
    files = {path: seen.size for path, seen in found.items() if seen.kind == "file"}
    left = files.keys() - _choose(files, large, total, always)
    had = {path: found[path] for path in left if known.get(path) == found[path]}
    stands = {path: seen for path, seen in found.items() if path not in left or path in had}
    tell = [path for path, seen in stands.items() if seen.kind in _ORDER and path not in had]
    told: dict[bytes, FileState] = {}
    fd = os.memfd_create("taas-archive", os.MFD_CLOEXEC)
    try:
        for _ in _add_all(fd, root, known, stands, tell, told, closed=False):
            pass
        stayed = {path: found[path] for path in files if path not in told and path not in had}
        # Files that were not sent may be sent later, when a process opens them (files_on_demand).
        for path, seen in (had | stayed).items():
            _add(fd, ArchiveEntry(path, seen, bare=True))
    except BaseException:
        os.close(fd)
        raise
    return Archive(fd, told | had, stayed, len(found) <= limit)


def _choose(
    files: dict[bytes, int], large: int, total: int, always: Collection[bytes]
) -> set[bytes]:
    chosen = files.keys() & set(always)
    others = files.keys() - chosen
    for path in sorted(others, key=lambda path: (not path.endswith(_MODULES), files[path], path)):
        if files[path] <= total and (path.endswith(_MODULES) or files[path] <= large):
            chosen.add(path)
            total -= files[path]
    return chosen


# ------------------------------------------------------------------------ changes on a VM, and back


class Changes:
    """The changes in a folder from now on, packed whenever its owner requests them.

    With ``afresh`` everything in it counts as changed. Each scan covers the whole folder, so no
    change is missed, whatever program made it, and no history has to be kept. ``unsent`` are the
    files that could not be packed at the last scan.
    """

    def __init__(self, root: str, skip: Skip, *, afresh: bool = False) -> None:
        self._root, self._skip = os.fsencode(root), skip
        self._known: dict[bytes, FileState] = {} if afresh else dict(scan(self._root, skip))
        self.unsent: list[str] = []

    def know(self, came: Mapping[bytes, FileState]) -> None:
        """Record files that have come into the folder from elsewhere."""
        self._known |= came

    def pack(self, fd: int, *, last: bool = False) -> Iterator[None]:
        """Write the changes since the last scan into an empty file, in steps of bounded size.

        ``last``: pack open files, too.
        """
        found, known = dict(scan(self._root, self._skip)), self._known
        tell = [
            path for path, seen in found.items() if seen.kind in _ORDER and seen != known.get(path)
        ]
        told: dict[bytes, FileState] = {}
        yield from _add_all(fd, self._root, known, found, tell, told, closed=not last)
        self._known = {
            p: was for p, was in known.items() if p in found and found[p].kind == was.kind
        } | told
        self.unsent = [shown_path(path) for path in tell if last and path not in told]


def only(places: Collection[str]) -> Skip:
    """Return a filter that skips everything except these directories, and Python's caches.

    Without directories, everything is packed.
    """

    def skip(path: bytes, entry: os.DirEntry[bytes]) -> bool:
        directory = entry.is_dir(follow_symlinks=False)
        return entry.name == b"__pycache__" or (
            bool(places) and not is_in(places, path, directory=directory)
        )

    return skip


def is_in(places: Collection[str], path: bytes, *, directory: bool) -> bool:
    """Return whether a path is in one of these directories, is one of them, or is above one."""
    inside = map(os.fsencode, places)
    return any(
        path == place or _beneath(path, [place]) or (directory and _beneath(place, [path]))
        for place in inside
    )


def shared_places(project: str, shared: tuple[str, ...]) -> list[str]:
    """Return the ``--shared`` directories in the project, relative to it.

    The ranks of every VM may write there.
    """
    paths = (os.path.normpath(os.path.join(project, path)) for path in shared)
    return [
        os.path.relpath(path, project)
        for path in paths
        if path.startswith(os.path.join(project, ""))
    ]
