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
from types import TracebackType
from typing import Any

from taas.storage.denial import Denial
from taas.storage.overlay import Overlay, Seen

__all__ = ["View", "fail"]


def fail(code: int, path: Any) -> OSError:
    """The error the system gives for a path."""
    return OSError(code, os.strerror(code), path)


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
    def _there(seen: Seen | None, path: Any) -> str:
        if seen is None:
            raise fail(errno.ENOENT, path)
        return seen.path

    # looking ---------------------------------------------------------------------------------------

    def _look(
        self, call: Callable[..., Any], path: Any, dir_fd: int | None, follow: bool, **options: Any
    ) -> Any:
        place = self.place(path, dir_fd, follow) if self.overlay.touched else None
        if place is None:
            if dir_fd is not None:
                options["dir_fd"] = dir_fd
            return call(path, **options)
        return call(self._there(self.overlay.see(place), path), **options)

    def stat(self, path: Any, *, dir_fd: int | None = None, follow_symlinks: bool = True) -> os.stat_result:
        result: os.stat_result = self._look(
            posix.stat, path, dir_fd, follow_symlinks, follow_symlinks=follow_symlinks
        )
        return result

    def lstat(self, path: Any, *, dir_fd: int | None = None) -> os.stat_result:
        return self.stat(path, dir_fd=dir_fd, follow_symlinks=False)

    def readlink(self, path: Any, *, dir_fd: int | None = None) -> Any:
        return self._look(posix.readlink, path, dir_fd, False)

    def statvfs(self, path: Any) -> os.statvfs_result:
        result: os.statvfs_result = self._look(posix.statvfs, path, None, True)
        return result

    def getxattr(self, path: Any, attribute: Any, *, follow_symlinks: bool = True) -> bytes:
        result: bytes = self._look(
            posix.getxattr, path, None, follow_symlinks, attribute=attribute, follow_symlinks=follow_symlinks
        )
        return result

    def listxattr(self, path: Any = None, *, follow_symlinks: bool = True) -> list[str]:
        found: list[str] = self._look(
            posix.listxattr,
            "." if path is None else path,
            None,
            follow_symlinks,
            follow_symlinks=follow_symlinks,
        )
        return found

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
        place = self._directory(given)
        if place is None:
            return posix.listdir(given)
        names = self.overlay.names(place)
        return [os.fsencode(name) for name in names] if isinstance(given, bytes) else names

    def scandir(self, path: Any = None) -> Any:
        given = "." if path is None else path
        place = self._directory(given)
        if place is None:
            return posix.scandir(given)
        return Entries(self, given, self.overlay.names(place))

    def _directory(self, given: Any) -> str | None:
        """The place of a directory whose listing may differ from the live one; None to list it as it is."""
        if not self.overlay.touched:
            return None
        place = self.place(f"/proc/self/fd/{given}" if isinstance(given, int) else given)
        if place is None or not self.overlay.mixed(place):
            return None
        seen = self.overlay.see(place)
        if seen is None:
            raise fail(errno.ENOENT, given)
        if not seen.is_directory:
            raise fail(errno.ENOTDIR, given)
        return place

    def chdir(self, path: Any) -> None:
        self._look(posix.chdir, path, None, True)

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
        return self._calls.stat(self._at or self.path, follow_symlinks=follow_symlinks)

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


class Entries:
    """What ``os.scandir`` returns: an iterator that is closed after use."""

    def __init__(self, calls: View, directory: Any, names: list[str]) -> None:
        given = directory if isinstance(directory, int) else os.fspath(directory)
        self._entries: Iterator[Entry] = (Entry(calls, given, name) for name in names)

    def __iter__(self) -> Entries:
        return self

    def __next__(self) -> Entry:
        return next(self._entries)

    def __enter__(self) -> Entries:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        self._entries = iter(())
