"""What the writing calls of Python's ``os`` mean in a rank whose writes are diverted.

Writes to the project go to the rank's scratch, with the checks and errors the file system would have given;
under ``--rank-writes deny`` they are ``StorageDenied``. Changes of metadata (mode, owner, times, attributes) of
a live file are accepted and forgotten: copying a data set to note its new mode would help nobody.
"""

# Methods have no docstrings: each means what the function of os means whose name it bears.
# ruff: noqa: D102

from __future__ import annotations

import errno
import functools
import os
import posix
import stat
from collections.abc import Callable
from typing import Any

from taas.storage.overlay import PathView
from taas.storage.view import View, fail

_TRIES = 20
"""So often a tree is removed that another rank removes, too."""
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


def _noting(call: Callable[..., Any], follow: bool = True) -> Callable[..., Any]:
    """A method in the place of a call that changes metadata: done to the rank's own file, forgotten for a live one."""

    def note(self: Diversion, path: Any, *rest: Any, **options: Any) -> None:
        followed = follow and options.get("follow_symlinks", True)
        place = self.place(path, options.get("dir_fd"), followed)
        if place is None:
            call(path, *rest, **options)
            return
        seen = self.overlay.see(place)
        options.pop("dir_fd", None)
        if seen is None:
            raise fail(errno.ENOENT, path)
        self._allow(place)
        if seen.own:
            call(seen.path, *rest, **options)

    return note


def _making(call: Callable[..., Any]) -> Callable[..., Any]:
    """A method in the place of a call that makes what its first argument names, and fails where something was."""

    def make(self: Diversion, path: Any, *rest: Any, dir_fd: int | None = None, **options: Any) -> Any:
        place = self.place(path, dir_fd, follow=False)
        if place is None:
            return call(path, *rest, dir_fd=dir_fd, **options)
        seen = self.overlay.see(place)
        if seen is not None and not self.overlay.is_rank_0s(place, seen):
            raise fail(errno.EEXIST, path)
        self._allow(place)
        return call(self.overlay.claim(place), *rest, **options)

    return make


def _removing(call: Callable[..., None], *, directory: bool) -> Callable[..., None]:
    """A method in the place of a call that removes what its argument names: an empty directory, or anything else."""

    def remove(self: Diversion, path: Any, *, dir_fd: int | None = None) -> None:
        place = self.place(path, dir_fd, follow=False)
        if place is None:
            call(path, dir_fd=dir_fd)
            return
        seen = self.overlay.see(place)
        if seen is None:
            self._miss(place, path)
            return
        if seen.is_directory != directory:
            raise fail(errno.ENOTDIR if directory else errno.EISDIR, path)
        if directory and self.overlay.names(place):
            raise fail(errno.ENOTEMPTY, path)
        self._allow(place)
        self._vanish(place)

    return remove


class Diversion(View):
    """All calls of one rank: reading as in its view, writing to its scratch."""

    # opening ---------------------------------------------------------------------------------------

    def open(self, path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        writes = bool(flags & _WRITES)
        if not writes and not self.overlay.touched:
            return posix.open(path, flags, mode, dir_fd=dir_fd)
        exclusive = flags & os.O_CREAT and flags & os.O_EXCL
        place = self.place(path, dir_fd, not (flags & os.O_NOFOLLOW or exclusive))
        if place is None:
            return posix.open(path, flags, mode, dir_fd=dir_fd)
        seen = self.overlay.see(place)
        if not writes:
            return self._open_to_read(place, seen, flags, path)
        return posix.open(self._for_writing(place, seen, flags, path), flags, mode)

    def _open_to_read(self, place: str, seen: PathView | None, flags: int, path: Any) -> int:
        while True:
            there = self._there(seen, path)
            try:
                return posix.open(there, flags)
            except FileNotFoundError:
                if seen is None or not self.overlay.is_gone(seen):
                    raise
            seen = self.overlay.see(place)

    def _for_writing(self, place: str, seen: PathView | None, flags: int, path: Any) -> str:
        if seen is None:
            if not flags & os.O_CREAT:
                raise fail(errno.ENOENT, path)
            self._allow(place)
            return self.overlay.claim(place)
        if flags & os.O_CREAT and flags & os.O_EXCL:
            if not self.overlay.is_rank_0s(place, seen):
                raise fail(errno.EEXIST, path)
            self._allow(place)
            return self.overlay.claim(place)
        if seen.is_directory:
            raise fail(errno.EISDIR, path)  # an O_TMPFILE, too: who asks for one has another way
        if not stat.S_ISREG(seen.status.st_mode):
            return seen.path  # a pipe, socket or device: writing to it changes no file
        self._allow(place)
        if flags & os.O_TRUNC:
            own = self.overlay.claim(place)
            # Given a name of its own even when nothing is copied, with the mode the file had.
            posix.close(
                posix.open(own, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, stat.S_IMODE(seen.status.st_mode))
            )
            return own
        return self.overlay.copy_up(place)

    def _allow(self, *places: str | None) -> None:
        """Every write to the project passes here."""
        if self.denial.mode == "deny":
            named = next(place for place in places if place is not None)
            raise self.denial.error(self.overlay.live(named))

    def target(self, path: Any) -> str:
        """Where C code that makes or replaces a file by name should write instead."""
        place = self.place(path)
        if place is None:
            return os.fsdecode(path)
        return self._for_writing(place, self.overlay.see(place), os.O_CREAT | os.O_TRUNC | os.O_WRONLY, path)

    def _miss(self, place: str, path: Any) -> None:
        """What a call is about is missing: an error, unless rank 0 has taken it away, as this rank was about to."""
        if not self.overlay.is_rank_0s(place, None):
            raise fail(errno.ENOENT, path)

    # making, removing, moving ------------------------------------------------------------------------

    mkdir = _making(posix.mkdir)
    mkfifo = _making(posix.mkfifo)
    mknod = _making(posix.mknod)

    def symlink(
        self, src: Any, dst: Any, target_is_directory: bool = False, *, dir_fd: int | None = None
    ) -> None:
        self._link_at(dst, src, dir_fd=dir_fd)

    _link_at = _making(lambda path, target, dir_fd=None: posix.symlink(target, path, dir_fd=dir_fd))

    unlink = remove = _removing(posix.unlink, directory=False)
    rmdir = _removing(posix.rmdir, directory=True)

    def rmtree(self, native: Callable[..., None]) -> Callable[..., None]:
        """Return ``shutil.rmtree`` as it is where rank 0 removes the same tree at the same time."""

        @functools.wraps(native)
        def rmtree(path: Any, *args: Any, **options: Any) -> None:
            for _ in range(_TRIES):
                try:
                    return native(path, *args, **options)
                except FileNotFoundError:
                    place = self.place(path, options.get("dir_fd"), follow=False)
                    if place is None or not self.overlay.is_rank_0s(place, self.overlay.see(place)):
                        raise
                    if self.overlay.see(place) is None:
                        return None
            return native(path, *args, **options)

        return rmtree

    def _vanish(self, place: str) -> None:
        if place == ".":
            raise self.denial.error(
                self.overlay.boundary.project, "the project itself cannot be moved or removed"
            )
        self.overlay.drop(place)

    def rename(
        self, src: Any, dst: Any, *, src_dir_fd: int | None = None, dst_dir_fd: int | None = None
    ) -> None:
        source, target = self.place(src, src_dir_fd, follow=False), self.place(dst, dst_dir_fd, follow=False)
        if source is None and target is None:
            posix.rename(src, dst, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd)
            return
        self._allow(source, target)
        if source is None or target is None:
            raise fail(errno.EXDEV, dst)  # as between file systems: shutil.move copies then
        moved = self.overlay.see(source)
        if moved is None:
            self._miss(source, src)
            return
        if source == target:
            return
        if source == ".":
            self._vanish(source)
        self._make_way(target, moved, dst)
        posix.rename(self.overlay.copy_up(source), self.overlay.claim(target))
        self.overlay.drop(source)

    replace = rename

    def _make_way(self, target: str, moved: PathView, dst: Any) -> None:
        """Refuse as rename(2) does; remove the directory that a rename replaces."""
        old = self.overlay.see(target)
        if old is None:
            return
        if old.is_directory != moved.is_directory:
            raise fail(errno.EISDIR if old.is_directory else errno.ENOTDIR, dst)
        if old.is_directory:
            if self.overlay.is_rank_0s(target, old):
                return
            if self.overlay.names(target):
                raise fail(errno.ENOTEMPTY, dst)
            self._vanish(target)

    # changing --------------------------------------------------------------------------------------

    def truncate(self, path: Any, length: int) -> None:
        place = self.place(path)
        if place is None:
            posix.truncate(path, length)
            return
        seen = self.overlay.see(place)
        posix.truncate(self._for_writing(place, seen, os.O_WRONLY, path), length)

    chmod = _noting(posix.chmod)
    chown = _noting(posix.chown)
    lchown = _noting(posix.lchown, follow=False)
    utime = _noting(posix.utime)
    setxattr = _noting(posix.setxattr)
    removexattr = _noting(posix.removexattr)
