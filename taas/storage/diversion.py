"""What the calls of Python's ``os`` do in a rank whose writes are diverted.

Writes to the project go to the rank's scratch (``table``), with the checks and errors of the file
system, and reading calls see them there; with ``--rank-writes deny`` a write raises
``StorageDenied``. Changes to metadata of a live file are accepted and dropped: nobody wants a copy
of a data set because of its new mode.

The functions of ``os`` and ``open`` are replaced where they are defined, and in every module that
has imported them by name; ``posix`` and ``_io`` keep the real ones. Calls that are not diverted
(links, devices, paths relative to a descriptor) are no hole, because they meet the wall.
"""

# Methods have no docstrings: each does what the function of os of that name does.
# ruff: noqa: PTH112, PTH113, PTH114, PTH116, PTH118, D102

from __future__ import annotations

import _io
import builtins
import contextlib
import errno
import functools
import io
import os
import posix
import shutil
import stat
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from types import FunctionType, ModuleType
from typing import Any

from taas.import_hooks import attributes_of, imported_since
from taas.storage.boundary import Denial
from taas.storage.table import Seen, Table

_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_Call = Callable[..., Any]


def _fail(code: int, path: Any) -> OSError:
    return OSError(code, os.strerror(code), path)


def _in_place_of(
    native: _Call, *, follow: bool = True, reads: bool = False
) -> Callable[[_Call], _Call]:
    """Decorate a method, which is given a place, so that it replaces a function of ``os``.

    Calls about paths outside the project go to the original function.

    ``follow``: whether it follows a link in the last component by default; ``reads``: it only
    reads, and the original function serves it until something was diverted.
    """

    def decorate(method: _Call) -> _Call:
        @functools.wraps(native)
        def call(self: Diversion, path: Any = ".", *rest: Any, **options: Any) -> Any:
            followed = follow and options.get("follow_symlinks", True)
            asked = self.table.touched or not reads
            place = self.place(path, options.get("dir_fd"), follow=followed) if asked else None
            if place is None:
                return native(path, *rest, **options)
            return method(self, place, path, *rest, **options)

        return call

    return decorate


def _reading(native: _Call, *, follow: bool = True) -> _Call:
    """Return a call that looks at what a path names."""

    def read(self: Diversion, place: str, path: Any, *rest: Any, **options: Any) -> Any:
        return native(self._there(place, path).path, *rest, **options)

    return _in_place_of(native, follow=follow, reads=True)(read)


def _noting(native: _Call) -> _Call:
    """Return a call that changes metadata of the rank's own files, and ignores that of others."""

    def note(self: Diversion, place: str, path: Any, *rest: Any, **options: Any) -> None:
        seen = self._there(place, path)
        self._allow(place)
        if seen.own and not seen.is_directory:  # in its own folders a rank can always write
            native(seen.path, *rest, **options)

    return _in_place_of(native)(note)


class Diversion:
    """All diverted calls of one rank.

    The table is what the rank sees; the denial is what it is told, and whether it may write at all.
    """

    def __init__(self, table: Table, denial: Denial) -> None:
        self.table = table
        self.denial = denial

    def place(self, path: Any, descriptor: int | None = None, *, follow: bool = True) -> str | None:
        """Return the place that a call's path leads to.

        None if the rule does not hold there, or the path is relative to a descriptor.
        """
        if isinstance(path, int) or descriptor is not None:
            return None
        return self.table.locate(os.fsdecode("." if path is None else path), follow=follow)

    def _there(self, place: str, path: Any) -> Seen:
        seen = self.table.see(place)
        if seen is None:
            raise _fail(errno.ENOENT, path)
        return seen

    def _allow(self, place: str) -> None:
        """Raise StorageDenied if this rank may not write; every write to the project calls this."""
        if self.denial.mode == "deny":
            raise self.denial.error(self.table.live(place))

    def _miss(self, place: str, path: Any) -> None:
        """Raise ENOENT for a missing path, unless rank 0 has removed it.

        Then this rank was about to do the same.
        """
        if not self.table.is_rank_0s(place, None):
            raise _fail(errno.ENOENT, path)

    def _vanish(self, place: str) -> None:
        self._allow(place)
        if place == ".":
            raise self.denial.error(
                self.table.live(place), "the project itself cannot be moved or removed"
            )
        self.table.drop(place)

    # looking --------------------------------------------------------------------------------------

    stat = _reading(posix.stat)
    lstat = _reading(posix.lstat, follow=False)
    statvfs = _reading(posix.statvfs)
    chdir = _reading(posix.chdir)
    listxattr = _reading(posix.listxattr)
    getxattr = _reading(posix.getxattr)

    def getcwd(self) -> str:
        return self.table.outward(posix.getcwd())

    def getcwdb(self) -> bytes:
        return os.fsencode(self.getcwd())

    @_in_place_of(posix.access)
    def access(self, place: str, _: Any, mode: int, **options: Any) -> bool:
        seen = self.table.see(place)
        if seen is None:
            return False
        # the wall would refuse W_OK, but a write would be diverted
        if self.denial.mode == "discard":
            mode &= ~os.W_OK
        return posix.access(seen.path, mode, **options)

    @_in_place_of(posix.scandir, reads=True)
    def scandir(self, place: str, path: Any) -> Any:
        if not self.table.mixed(place):
            return posix.scandir(path)
        return Entries("." if path is None else os.fspath(path), self.listdir(path))

    @_in_place_of(posix.listdir, reads=True)
    def listdir(self, place: str, path: Any) -> list[Any]:
        if not self._there(place, path).is_directory:
            raise _fail(errno.ENOTDIR, path)
        names = self.table.names(place)
        return [os.fsencode(name) for name in names] if isinstance(path, bytes) else names

    # opening --------------------------------------------------------------------------------------

    def open(self, path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        writes = bool(flags & _WRITES)
        if not writes and not self.table.touched:
            return posix.open(path, flags, mode, dir_fd=dir_fd)
        exclusive = flags & os.O_CREAT and flags & os.O_EXCL
        place = self.place(path, dir_fd, follow=not (flags & os.O_NOFOLLOW or exclusive))
        if place is None:
            return posix.open(path, flags, mode, dir_fd=dir_fd)
        if writes:
            return posix.open(self._for_writing(place, flags, path), flags | os.O_CREAT, mode)
        while True:
            there = self._there(place, path).path
            try:
                return posix.open(there, flags)
            except FileNotFoundError:  # rank 0 has moved or removed it at this moment
                continue

    def _for_writing(self, place: str, flags: int, path: Any) -> str:
        seen = self.table.see(place)
        exclusive = flags & os.O_CREAT and flags & os.O_EXCL
        if seen is None and not flags & os.O_CREAT:
            raise _fail(errno.ENOENT, path)
        if seen is not None and exclusive:
            if not self.table.is_rank_0s(place, seen):
                raise _fail(errno.EEXIST, path)
        elif seen is not None:
            if seen.is_directory:
                # also for O_TMPFILE: programs that ask for one have another way
                raise _fail(errno.EISDIR, path)
            if not stat.S_ISREG(seen.status.st_mode):
                return seen.path  # a pipe, socket or device: writing to it changes no file
        self._allow(place)
        afresh = seen is None or exclusive or flags & os.O_TRUNC
        return self.table.claim(place) if afresh else self.table.copy_up(place)

    def target(self, path: Any) -> str:
        """Return where C code that makes or replaces a file by name should write instead."""
        place = self.place(path)
        if place is None:
            return os.fsdecode(path)
        return self._for_writing(place, os.O_CREAT | os.O_TRUNC | os.O_WRONLY, path)

    def source(self, path: Any) -> str:
        """Return where C code that reads a file by name should read."""
        place = self.place(path) if self.table.touched else None
        return os.fsdecode(path) if place is None else self._there(place, path).path

    # making, removing, moving ---------------------------------------------------------------------

    chmod = _noting(posix.chmod)
    chown = _noting(posix.chown)
    utime = _noting(posix.utime)
    setxattr = _noting(posix.setxattr)

    @_in_place_of(posix.unlink, follow=False)
    def unlink(self, place: str, path: Any, **_: Any) -> None:
        self._remove(place, path, directory=False)

    remove = unlink

    @_in_place_of(posix.rmdir, follow=False)
    def rmdir(self, place: str, path: Any, **_: Any) -> None:
        if self.table.names(place):
            raise _fail(errno.ENOTEMPTY, path)
        self._remove(place, path, directory=True)

    @_in_place_of(shutil.rmtree, follow=False)
    def rmtree(
        self, place: str, path: Any, ignore_errors: bool = False, *_: Any, **__: Any
    ) -> None:
        """Remove a folder in one step, in the place of ``shutil.rmtree``.

        So it does not matter whether rank 0 removes it at the same time.
        """
        with contextlib.suppress(OSError) if ignore_errors else contextlib.nullcontext():
            self._remove(place, path, directory=True)

    def _remove(self, place: str, path: Any, *, directory: bool) -> None:
        seen = self.table.see(place)
        if seen is None:
            self._miss(place, path)
        elif seen.is_directory != directory:
            raise _fail(errno.ENOTDIR if directory else errno.EISDIR, path)
        else:
            self._vanish(place)

    @_in_place_of(posix.mkdir, follow=False)
    def mkdir(self, place: str, path: Any, mode: int = 0o777, **_: Any) -> None:
        seen = self.table.see(place)
        if seen is not None and not self.table.is_rank_0s(place, seen):
            raise _fail(errno.EEXIST, path)
        self._allow(place)
        posix.mkdir(self.table.claim(place), mode | stat.S_IRWXU)

    def rename(
        self, src: Any, dst: Any, *, src_dir_fd: int | None = None, dst_dir_fd: int | None = None
    ) -> None:
        source = self.place(src, src_dir_fd, follow=False)
        target = self.place(dst, dst_dir_fd, follow=False)
        if source is None and target is None:
            posix.rename(src, dst, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd)
            return
        self._allow(source or target or ".")
        if source is None or target is None:
            raise _fail(errno.EXDEV, dst)  # as between file systems: shutil.move copies then
        if self.table.see(source) is None:
            self._miss(source, src)
        elif source != target:  # the system refuses what cannot be replaced
            own = self.table.copy_up(source)
            posix.rename(own, self.table.claim(target))
            self._vanish(source)

    replace = rename


class Entry(os.PathLike[Any]):
    """An ``os.DirEntry`` of a rank's view; Python code cannot make a real one."""

    def __init__(self, directory: Any, name: Any) -> None:
        self.name = name
        self.path = os.path.join(directory, name)

    def __fspath__(self) -> Any:
        return self.path

    def stat(self, *, follow_symlinks: bool = True) -> os.stat_result:
        return os.stat(self.path, follow_symlinks=follow_symlinks)

    def is_symlink(self) -> bool:
        return os.path.islink(self.path)

    def is_dir(self, *, follow_symlinks: bool = True) -> bool:
        return os.path.isdir(self.path) and (follow_symlinks or not self.is_symlink())

    def is_file(self, *, follow_symlinks: bool = True) -> bool:
        return os.path.isfile(self.path) and (follow_symlinks or not self.is_symlink())

    def is_junction(self) -> bool:
        return False


class Entries(Iterator[Entry], AbstractContextManager["Entries"]):
    """The iterator and context manager that ``os.scandir`` returns."""

    def __init__(self, directory: Any, names: list[Any]) -> None:
        self._entries = (Entry(directory, name) for name in names)

    def __next__(self) -> Entry:
        return next(self._entries)

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._entries.close()


# ---------------------------------------------------------------- replacing Python's functions

_DIVERTED = [name for name in vars(Diversion) if name in os.__all__]
# Modules that bound the real functions as defaults or class attributes when they were imported.
_BOUND_EARLY = ("tempfile", "shutil", "pathlib", "glob", "zipfile", "tarfile")
_REAL = {"posix", "_io", "os", "io", "builtins"}

_surveyed: set[str] = set()
_bound: list[tuple[Callable[[Any], None], str]] = []
"""Where modules hold real functions: a setter that replaces one there, and its name. They are found
before the fork, because a rank that searched all modules would touch, and so copy, their pages.
"""


def survey() -> None:
    """Note which modules hold real functions by name.

    Done once before forking, it costs a rank nothing.
    """
    originals = {id(getattr(os, name)): name for name in _DIVERTED}
    originals |= {id(builtins.open): "builtins.open", id(shutil.rmtree): "shutil.rmtree"}
    for name in imported_since(_surveyed):
        module = sys.modules[name]
        if not isinstance(module, ModuleType) or name in _REAL or name == __name__:
            continue
        for key, value in [*attributes_of(module).items()]:
            if id(value) in originals:
                _bound.append((functools.partial(setattr, module, key), originals[id(value)]))
            elif name in _BOUND_EARLY and getattr(value, "__module__", "") == name:
                _survey_bound(value, originals)


def _survey_bound(value: Any, originals: dict[int, str]) -> None:
    """Note real functions in a function's defaults, or in a class and its methods' defaults."""
    if isinstance(value, type):
        for key, member in [*vars(value).items()]:
            if isinstance(member, staticmethod) and id(member.__func__) in originals:
                put = functools.partial(_set_static, value, key)
                _bound.append((put, originals[id(member.__func__)]))
            else:
                _survey_bound(member, originals)
    elif isinstance(value, FunctionType):
        for index, default in enumerate(value.__defaults__ or ()):
            if id(default) in originals:
                _bound.append(
                    (functools.partial(_set_default, value, index), originals[id(default)])
                )


def _set_static(owner: type, key: str, new: _Call) -> None:
    setattr(owner, key, staticmethod(new))


def _set_default(function: FunctionType, index: int, new: _Call) -> None:
    before = function.__defaults__ or ()
    function.__defaults__ = (*before[:index], new, *before[index + 1 :])


def install(diversion: Diversion) -> None:
    """Divert this process's calls from now on."""
    replacements: dict[str, _Call] = {name: getattr(diversion, name) for name in _DIVERTED}
    links = os.supports_follow_symlinks
    links |= {new for name, new in replacements.items() if getattr(os, name) in links}
    replace(replacements | {"builtins.open": _opener(diversion), "shutil.rmtree": diversion.rmtree})
    if "torch" in sys.modules:
        _divert_torch(sys.modules["torch"], diversion)


def replace(new: Mapping[str, _Call]) -> None:
    """Replace functions of ``os``, ``builtins.open`` and ``shutil.rmtree`` in all modules."""
    survey()
    for name, function in new.items():
        if name == "builtins.open":
            builtins.open = io.open = function
        else:
            setattr(shutil if name == "shutil.rmtree" else os, name.rpartition(".")[2], function)
    for put, name in _bound:
        if name in new:
            put(new[name])


def _opener(diversion: Diversion) -> _Call:
    """Return an ``open`` that gets its descriptor from the diversion and keeps the given name."""

    def divert(path: Any, flags: int) -> int:
        return diversion.open(path, flags, 0o666)

    @functools.wraps(_io.open)
    def open(file: Any, *options: Any, **named: Any) -> Any:  # noqa: A001 in place of the built-in
        if len(options) < 7:  # its last one is the opener
            named["opener"] = named.get("opener") or divert
        return _io.open(file, *options, **named)

    return open


def _divert_torch(torch: Any, diversion: Diversion) -> None:
    """Divert ``torch.save`` and ``torch.load(mmap=True)``, whose C++ code opens files by name."""
    real_writer = torch._C.PyTorchFileWriter

    class PyTorchFileWriter(real_writer):  # type: ignore[misc, valid-type]
        """The C++ writer, on the rank's own file."""

        def __init__(self, file: Any, *args: Any, **options: Any) -> None:
            super().__init__(
                diversion.target(file) if isinstance(file, str) else file, *args, **options
            )

    torch._C.PyTorchFileWriter = PyTorchFileWriter
    native_map = torch.UntypedStorage.from_file

    def from_file(filename: Any, shared: bool = False, *args: Any, **options: Any) -> Any:
        return native_map(
            filename if shared else diversion.source(filename), shared, *args, **options
        )

    torch.UntypedStorage.from_file = staticmethod(from_file)
