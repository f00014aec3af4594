"""How Python's ``os`` functions behave in a rank whose writes are diverted.

Writes to the project go to the rank's scratch (``table``), with the checks and errors of the file
system, and functions that read find them there; with ``--rank-writes deny`` a write raises
``StorageDenied``. Changes to the metadata of a live file are accepted and dropped: no user wants a
copy of a data set because of its new mode.

The functions of ``os`` and ``open`` are replaced where they are defined, and in every module that
has imported them by name; ``posix`` and ``_io`` keep the real ones. Calls that are not diverted
(links, devices, paths relative to a descriptor) are no loophole, because the write protection
(``walls``) stops them.
"""

# Entry is an os.DirEntry, which has strings and not paths; its methods are those of that class.
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
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from types import FunctionType, ModuleType
from typing import Any, NamedTuple

from taas.base.import_hooks import attributes_of, imported_since
from taas.project.wall.boundary import Denial
from taas.project.wall.table import Seen, Table

_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_Call = Callable[..., Any]


def _fail(code: int, path: Any) -> OSError:
    return OSError(code, os.strerror(code), path)


class Diversion:
    """How one rank's calls treat paths of the project.

    The table is the rank's view; the denial provides its error messages, and whether it may write
    at all. Methods from ``look`` to ``mkdir`` are entries of ``ONE_PATH``. They get the function
    that they replace, the place that the path leads to, and the arguments of the call: the path
    and the rest.
    """

    def __init__(self, table: Table, denial: Denial) -> None:
        self.table = table
        self.denial = denial

    def place(self, path: Any, descriptor: int | None = None, *, follow: bool = True) -> str | None:
        """Return the place that a call's path leads to.

        Return None if the rule does not apply there, or the path is relative to a descriptor.
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

        In that case this rank was about to do the same.
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

    def look(self, real: _Call, place: str, path: Any, *rest: Any, **options: Any) -> Any:
        """Call the function on the entry that this rank sees there."""
        return real(self._there(place, path).path, *rest, **options)

    def access(self, real: _Call, place: str, _path: Any, mode: int, **options: Any) -> bool:
        """Return whether this rank may access the path."""
        seen = self.table.see(place)
        if seen is None:
            return False
        # the write protection would refuse W_OK, but a write would be diverted
        if self.denial.mode == "discard":
            mode &= ~os.W_OK
        return bool(real(seen.path, mode, **options))

    def scandir(self, real: _Call, place: str, path: Any) -> Any:
        """List a directory, with entries like those of ``os.scandir``."""
        if not self.table.mixed(place):
            return real(path)
        return Entries("." if path is None else os.fspath(path), self._names(place, path))

    def listdir(self, _real: _Call, place: str, path: Any) -> list[Any]:
        """List a directory."""
        return self._names(place, path)

    def _names(self, place: str, path: Any) -> list[Any]:
        """Return the entries of a directory, as bytes if its path is bytes."""
        if not self._there(place, path).is_directory:
            raise _fail(errno.ENOTDIR, path)
        names = self.table.names(place)
        return [os.fsencode(name) for name in names] if isinstance(path, bytes) else names

    # changing metadata ----------------------------------------------------------------------------

    def note(self, real: _Call, place: str, path: Any, *rest: Any, **options: Any) -> None:
        """Change metadata of the rank's own file; accept and drop a change to another one."""
        seen = self._there(place, path)
        self._allow(place)
        if seen.own and not seen.is_directory:  # a rank can always write in its own folders
            real(seen.path, *rest, **options)

    # making and removing --------------------------------------------------------------------------

    def unlink(self, _real: _Call, place: str, path: Any, **_: Any) -> None:
        """Remove a file."""
        self._remove(place, path, directory=False)

    def rmdir(self, _real: _Call, place: str, path: Any, **_: Any) -> None:
        """Remove an empty directory."""
        if self.table.names(place):
            raise _fail(errno.ENOTEMPTY, path)
        self._remove(place, path, directory=True)

    def rmtree(
        self,
        _real: _Call,
        place: str,
        path: Any,
        ignore_errors: bool = False,
        *_: Any,
        **__: Any,
    ) -> None:
        """Remove a directory with everything beneath it.

        It is removed in one step, so it does not matter whether rank 0 removes it at the same
        time.
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

    def mkdir(self, real: _Call, place: str, path: Any, mode: int = 0o777, **_: Any) -> None:
        """Create a directory; one that rank 0 has just created is no error."""
        seen = self.table.see(place)
        if seen is not None and not self.table.is_rank_0s(place, seen):
            raise _fail(errno.EEXIST, path)
        self._allow(place)
        real(self.table.claim(place), mode | stat.S_IRWXU)

    # moving: a row of TWO_PATHS -------------------------------------------------------------------

    def rename(
        self, real: _Call, source: str | None, target: str | None, src: Any, dst: Any
    ) -> None:
        """Move an entry; at least one of the two places is in the project."""
        self._allow(source or target or ".")
        if source is None or target is None:
            raise _fail(errno.EXDEV, dst)  # as between file systems: shutil.move then copies
        if self.table.see(source) is None:
            self._miss(source, src)
        elif source != target:
            own = self.table.copy_up(source)
            # the system refuses to replace what cannot be replaced
            real(own, self.table.claim(target))
            self._vanish(source)

    # functions with their own arguments
    # -------------------------------------------------------------

    def getcwd(self) -> str:
        """Return the working directory, as a path of the project."""
        return self.table.outward(posix.getcwd())

    def getcwdb(self) -> bytes:
        """Return the working directory as bytes."""
        return os.fsencode(self.getcwd())

    def open(self, path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        """Open a file; the flags tell whether it is written, and whether a link is followed."""
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
            except FileNotFoundError:  # rank 0 has just moved or removed it
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
                # including for O_TMPFILE: programs that request one have a fallback
                raise _fail(errno.EISDIR, path)
            if not stat.S_ISREG(seen.status.st_mode):
                return seen.path  # a pipe, socket or device: writing to it changes no file
        self._allow(place)
        afresh = seen is None or exclusive or flags & os.O_TRUNC
        return self.table.claim(place) if afresh else self.table.copy_up(place)

    # for C code that opens files by name ----------------------------------------------------------

    def target(self, path: Any) -> str:
        """Return the path where C code that creates or replaces a file by name should write."""
        place = self.place(path)
        if place is None:
            return os.fsdecode(path)
        return self._for_writing(place, os.O_CREAT | os.O_TRUNC | os.O_WRONLY, path)

    def source(self, path: Any) -> str:
        """Return the path from which C code that reads a file by name should read."""
        place = self.place(path) if self.table.touched else None
        return os.fsdecode(path) if place is None else self._there(place, path).path


# ---------------------------------------------------------------- the table of calls


class OnePath(NamedTuple):
    """A function with one path, and its replacement in a rank if the path is in the project."""

    real: _Call
    diverted: _Call  # a method of Diversion
    follow: bool = True  # it follows a link in the last component, unless its caller says otherwise
    # it changes nothing: the real function is called until something was diverted
    reads: bool = False


class TwoPaths(NamedTuple):
    """A function that moves an entry, and its replacement in a rank for project paths."""

    real: _Call
    diverted: _Call  # a method of Diversion


ONE_PATH = {
    "stat": OnePath(posix.stat, Diversion.look, reads=True),
    "lstat": OnePath(posix.lstat, Diversion.look, reads=True, follow=False),
    "statvfs": OnePath(posix.statvfs, Diversion.look, reads=True),
    "chdir": OnePath(posix.chdir, Diversion.look, reads=True),
    "listxattr": OnePath(posix.listxattr, Diversion.look, reads=True),
    "getxattr": OnePath(posix.getxattr, Diversion.look, reads=True),
    "scandir": OnePath(posix.scandir, Diversion.scandir, reads=True),
    "listdir": OnePath(posix.listdir, Diversion.listdir, reads=True),
    # It reads, but its result differs behind the write protection, whatever was diverted.
    "access": OnePath(posix.access, Diversion.access),
    "chmod": OnePath(posix.chmod, Diversion.note),
    "chown": OnePath(posix.chown, Diversion.note),
    "utime": OnePath(posix.utime, Diversion.note),
    "setxattr": OnePath(posix.setxattr, Diversion.note),
    "mkdir": OnePath(posix.mkdir, Diversion.mkdir, follow=False),
    "unlink": OnePath(posix.unlink, Diversion.unlink, follow=False),
    "remove": OnePath(posix.remove, Diversion.unlink, follow=False),
    "rmdir": OnePath(posix.rmdir, Diversion.rmdir, follow=False),
    "shutil.rmtree": OnePath(shutil.rmtree, Diversion.rmtree, follow=False),
}
"""By name; names without a module are functions of ``os``."""

TWO_PATHS = {
    "rename": TwoPaths(posix.rename, Diversion.rename),
    "replace": TwoPaths(posix.replace, Diversion.rename),
}

_OTHERS = ("getcwd", "getcwdb", "open", "builtins.open")
"""These have their own arguments: see ``install`` for their replacements."""


def _around_one_path(diversion: Diversion, call: OnePath) -> _Call:
    """Return the replacement of a function of ``ONE_PATH``."""

    def diverted(path: Any = ".", *rest: Any, **options: Any) -> Any:
        if call.reads and not diversion.table.touched:
            return call.real(path, *rest, **options)
        follow = call.follow and options.get("follow_symlinks", True)
        place = diversion.place(path, options.get("dir_fd"), follow=follow)
        if place is None:
            return call.real(path, *rest, **options)
        return call.diverted(diversion, call.real, place, path, *rest, **options)

    return diverted


def _around_two_paths(diversion: Diversion, call: TwoPaths) -> _Call:
    """Return the replacement of a function of ``TWO_PATHS``."""

    def diverted(
        src: Any, dst: Any, *, src_dir_fd: int | None = None, dst_dir_fd: int | None = None
    ) -> Any:
        source = diversion.place(src, src_dir_fd, follow=False)
        target = diversion.place(dst, dst_dir_fd, follow=False)
        if source is None and target is None:
            return call.real(src, dst, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd)
        return call.diverted(diversion, call.real, source, target, src, dst)

    return diverted


class Entry(os.PathLike[Any]):
    """An ``os.DirEntry`` of a rank's view; Python code cannot create a real one."""

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

# Modules that stored the real functions as defaults or class attributes when they were imported.
_BOUND_EARLY = ("tempfile", "shutil", "pathlib", "glob", "zipfile", "tarfile")
_REAL = {"posix", "_io", "os", "io", "builtins"}

_surveyed: set[str] = set()
_bound: list[tuple[Callable[[Any], None], str]] = []
"""References to real functions in modules: a setter that replaces each, and the function's name.

They are found before the fork, because a rank that searched all modules would touch, and so copy,
their pages.
"""


def survey() -> None:
    """Record which modules hold real functions by name.

    Done once before forking, it costs a rank nothing.
    """
    originals = {id(_function(name)): name for name in (*ONE_PATH, *TWO_PATHS, *_OTHERS)}
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
    """Record real functions in a function's defaults, or in a class and its methods' defaults."""
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
    new: dict[str, _Call] = {
        "getcwd": diversion.getcwd,
        "getcwdb": diversion.getcwdb,
        "open": diversion.open,
        "builtins.open": _opener(diversion),
    }
    new |= {name: _around_one_path(diversion, call) for name, call in ONE_PATH.items()}
    new |= {name: _around_two_paths(diversion, call) for name, call in TWO_PATHS.items()}
    # not os.supports_dir_fd: paths relative to a descriptor are not diverted
    replace(new, [os.supports_follow_symlinks])
    if "torch" in sys.modules:
        _divert_torch(sys.modules["torch"], diversion)


class _InPlace(functools.partial[Any]):
    """A function that replaces a real one.

    A Python function that is a class attribute (``look = os.stat``) becomes a method; functions
    written in C do not, nor does this one. pickle stores it by name, like C functions, so that
    another process uses its own function of this name.
    """

    def __get__(self, instance: object, owner: type | None = None) -> _InPlace:
        return self

    def __reduce__(self) -> str:
        name: str = vars(self)["__name__"]
        return name


def replace(new: Mapping[str, _Call], known: Iterable[set[_Call]] = ()) -> None:
    """Replace functions in all modules: of ``os``, ``builtins.open`` and ``shutil.rmtree``.

    ``known`` are sets that tell what a function supports, such as ``os.supports_dir_fd``.
    """
    survey()
    in_place: dict[str, _InPlace] = {}
    for name, function in new.items():
        module, attribute = _where(name)
        old = getattr(module, attribute)
        in_place[name] = one = _InPlace(function)
        functools.update_wrapper(one, old)
        vars(one).update(__module__=module.__name__, __name__=attribute, __qualname__=attribute)
        for functions in known:
            if old in functions:
                functions.add(one)
        setattr(module, attribute, one)
        if name == "builtins.open":
            io.open = one
    for put, name in _bound:
        if name in in_place:
            put(in_place[name])


def _where(name: str) -> tuple[ModuleType, str]:
    """Return the module of a function that is replaced, and its name there."""
    module, _, attribute = name.rpartition(".")
    return {"": os, "builtins": builtins, "shutil": shutil}[module], attribute


def _function(name: str) -> _Call:
    """Return the function that currently has this name."""
    function: _Call = getattr(*_where(name))
    return function


def _opener(diversion: Diversion) -> _Call:
    """Return an ``open`` that gets its descriptor from the diversion and keeps the given name."""

    def divert(path: Any, flags: int) -> int:
        return diversion.open(path, flags, 0o666)

    def open(file: Any, *options: Any, **named: Any) -> Any:  # noqa: A001 in place of the built-in
        if len(options) < 7:  # the last one is the opener
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
