"""What the reading calls of Python's ``os`` see in a rank whose writes are diverted.

Each method has the signature of the function of ``os`` whose name it bears. Paths outside the rule go to the
real function untouched; all others see the rank's view (``overlay``).
"""

# Methods have no docstrings: each means what the function of os means whose name it bears.
# ruff: noqa: PTH118, D102

from __future__ import annotations

import errno
import os
import posix
import stat
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

from taas.storage.denial import Denial
from taas.storage.overlay import Overlay, PathView


def fail(code: int, path: Any) -> OSError:
    """The error the system gives for a path."""
    return OSError(code, os.strerror(code), path)


def _reading(call: Callable[..., Any], follow: bool = True) -> Callable[..., Any]:
    """A method in the place of a call that looks at what its first argument names; ``follow``: links, by default."""

    def read(self: View, path: Any = None, *rest: Any, **options: Any) -> Any:
        given = "." if path is None else path
        followed = follow and options.get("follow_symlinks", True)
        place = self.place(given, options.get("dir_fd"), followed) if self.overlay.touched else None
        if place is None:
            return call(given, *rest, **options)
        options.pop("dir_fd", None)
        return call(self._there(self.overlay.see(place), path), *rest, **options)

    return read


class View:
    """The reading calls of one rank, over its overlay."""

    def __init__(self, overlay: Overlay, denial: Denial) -> None:
        self.overlay = overlay
        self.denial = denial

    def place(self, path: Any, dir_fd: int | None = None, follow: bool = True) -> str | None:
        """The place a call's path argument leads to; None when the call is none of ours."""
        if isinstance(path, int):
            return None
        return self.overlay.locate(os.fsdecode(path), dir_fd, follow)

    def source(self, path: Any) -> str:
        """Where C code that reads a file by name should read."""
        place = self.place(path) if self.overlay.touched else None
        return os.fsdecode(path) if place is None else self._there(self.overlay.see(place), path)

    @staticmethod
    def _there(seen: PathView | None, path: Any) -> str:
        if seen is None:
            raise fail(errno.ENOENT, path)
        return seen.path

    # looking ---------------------------------------------------------------------------------------

    stat = _reading(posix.stat)
    lstat = _reading(posix.lstat, follow=False)
    readlink = _reading(posix.readlink, follow=False)
    statvfs = _reading(posix.statvfs)
    getxattr = _reading(posix.getxattr)
    listxattr = _reading(posix.listxattr)
    chdir = _reading(posix.chdir)

    def access(
        self,
        path: Any,
        mode: int,
        *,
        dir_fd: int | None = None,
        effective_ids: bool = False,
        follow_symlinks: bool = True,
    ) -> bool:
        options = {"effective_ids": effective_ids, "follow_symlinks": follow_symlinks}
        place = self.place(path, dir_fd, follow_symlinks)
        if place is None:
            return posix.access(path, mode, dir_fd=dir_fd, **options)
        seen = self.overlay.see(place)
        if seen is None:
            return False
        # The wall would answer no to W_OK, but a write would be diverted.
        diverted = self.denial.mode == "discard" and not seen.own
        return posix.access(seen.path, mode & ~os.W_OK if diverted else mode, **options)

    def listdir(self, path: Any = None) -> list[Any]:
        given = "." if path is None else path
        names = self._names(given)
        if names is None:
            return posix.listdir(given)
        return [os.fsencode(name) for name in names] if isinstance(given, bytes) else names

    def scandir(self, path: Any = None) -> Any:
        given = "." if path is None else path
        names = self._names(given)
        return posix.scandir(given) if names is None else Entries(self, given, names)

    def _names(self, given: Any) -> list[str] | None:
        """What is in a directory whose listing may differ from the live one; None to list it as it is."""
        if not self.overlay.touched:
            return None
        place = self.place(f"/proc/self/fd/{given}" if isinstance(given, int) else given)
        if place is None or not self.overlay.mixed(place):
            return None
        seen = self.overlay.see(place)
        if seen is None or not seen.is_directory:
            raise fail(errno.ENOENT if seen is None else errno.ENOTDIR, given)
        return self.overlay.names(place)

    def getcwd(self) -> str:
        return self.overlay.outward(posix.getcwd())

    def getcwdb(self) -> bytes:
        return os.fsencode(self.getcwd())


class Entry(os.PathLike[Any]):
    """An ``os.DirEntry`` of a rank's view; the real one cannot be made from Python."""

    def __init__(self, calls: View, directory: Any, name: str) -> None:
        self._calls = calls
        self.name: Any = os.fsencode(name) if isinstance(directory, bytes) else name
        self._at = f"/proc/self/fd/{directory}/{name}" if isinstance(directory, int) else None
        self.path: Any = self.name if self._at else os.path.join(directory, self.name)

    def __fspath__(self) -> Any:
        return self.path

    def __repr__(self) -> str:
        return f"<DirEntry {self.name!r}>"

    def stat(self, *, follow_symlinks: bool = True) -> os.stat_result:
        status: os.stat_result = self._calls.stat(self._at or self.path, follow_symlinks=follow_symlinks)
        return status

    def inode(self) -> int:
        return self.stat(follow_symlinks=False).st_ino

    def is_symlink(self) -> bool:
        return self._is(stat.S_ISLNK, False)

    def is_dir(self, *, follow_symlinks: bool = True) -> bool:
        return self._is(stat.S_ISDIR, follow_symlinks)

    def is_file(self, *, follow_symlinks: bool = True) -> bool:
        return self._is(stat.S_ISREG, follow_symlinks)

    def is_junction(self) -> bool:
        return False

    def _is(self, kind: Callable[[int], bool], follow: bool) -> bool:
        try:
            return kind(self.stat(follow_symlinks=follow).st_mode)
        except FileNotFoundError:
            return False


class Entries(Iterator[Entry], AbstractContextManager["Entries"]):
    """What ``os.scandir`` returns: an iterator that is closed after use."""

    def __init__(self, calls: View, directory: Any, names: list[str]) -> None:
        given = directory if isinstance(directory, int) else os.fspath(directory)
        self._entries = (Entry(calls, given, name) for name in names)

    def __next__(self) -> Entry:
        return next(self._entries)

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._entries.close()
