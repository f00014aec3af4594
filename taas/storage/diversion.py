"""What the writing calls of Python's ``os`` mean in a rank whose writes are diverted.

Writes to the project go to the rank's scratch, with the checks and errors the file system would have given;
under ``--rank-writes deny`` they are ``StorageDenied``. Changes of metadata (mode, owner, times, attributes) of
a live file are accepted and forgotten: copying a data set to note its new mode would help nobody.
"""

# Methods have no docstrings: each means what the function of os means whose name it bears.
# ruff: noqa: PTH118, D102

from __future__ import annotations

import errno
import os
import posix
import stat
from collections.abc import Callable
from typing import Any

from taas.storage.overlay import Seen
from taas.storage.view import View, fail

__all__ = ["Diversion"]

_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


class Diversion(View):
    """All calls of one rank: reading as in its view, writing to its scratch."""

    # opening ---------------------------------------------------------------------------------------

    def open(self, path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        temporary = flags & os.O_TMPFILE == os.O_TMPFILE
        writes = bool(flags & _WRITES) or temporary
        if not writes and not self.overlay.touched:
            return posix.open(path, flags, mode, dir_fd=dir_fd)
        exclusive = flags & os.O_CREAT and flags & os.O_EXCL
        place = self.place(path, dir_fd, not (flags & os.O_NOFOLLOW or exclusive))
        if place is None:
            return posix.open(path, flags, mode, dir_fd=dir_fd)
        seen = self.overlay.see(place)
        if not writes:
            return posix.open(self._there(seen, path), flags, mode)
        return posix.open(self._for_writing(place, seen, flags, path), flags, mode)

    def _for_writing(self, place: str, seen: Seen | None, flags: int, path: Any) -> str:
        if seen is None:
            if not flags & os.O_CREAT:
                raise fail(errno.ENOENT, path)
            self._allow(place)
            return self.overlay.claim(place)
        if flags & os.O_CREAT and flags & os.O_EXCL:
            raise fail(errno.EEXIST, path)
        if seen.is_directory:
            if flags & os.O_TMPFILE != os.O_TMPFILE:
                raise fail(errno.EISDIR, path)
            self._allow(place)
            return self.overlay.own_directory(place)
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

    def writable(self, path: Any) -> str:
        """Where C code that changes a file in place should work: this rank's copy."""
        place = self.place(path)
        if place is None:
            return os.fsdecode(path)
        return self._for_writing(place, self.overlay.see(place), os.O_CREAT | os.O_RDWR, path)

    # making and removing ---------------------------------------------------------------------------

    def _make(self, call: Callable[..., Any], path: Any, dir_fd: int | None, *rest: Any) -> Any:
        """A call that makes a new entry and fails where one is."""
        place = self.place(path, dir_fd, follow=False)
        if place is None:
            return call(path, *rest, dir_fd=dir_fd)
        if self.overlay.see(place) is not None:
            raise fail(errno.EEXIST, path)
        self._allow(place)
        return call(self.overlay.claim(place), *rest)

    def mkdir(self, path: Any, mode: int = 0o777, *, dir_fd: int | None = None) -> None:
        self._make(posix.mkdir, path, dir_fd, mode)

    def mkfifo(self, path: Any, mode: int = 0o666, *, dir_fd: int | None = None) -> None:
        self._make(posix.mkfifo, path, dir_fd, mode)

    def mknod(self, path: Any, mode: int = 0o600, device: int = 0, *, dir_fd: int | None = None) -> None:
        if self.place(path, dir_fd, follow=False) is not None and (stat.S_ISCHR(mode) or stat.S_ISBLK(mode)):
            raise self.denial.error(os.fsdecode(path), "a device cannot be diverted")
        self._make(posix.mknod, path, dir_fd, mode, device)

    def symlink(
        self, src: Any, dst: Any, target_is_directory: bool = False, *, dir_fd: int | None = None
    ) -> None:
        def call(path: Any, dir_fd: int | None = None) -> None:
            posix.symlink(src, path, target_is_directory, dir_fd=dir_fd)

        self._make(call, dst, dir_fd)

    def link(
        self,
        src: Any,
        dst: Any,
        *,
        src_dir_fd: int | None = None,
        dst_dir_fd: int | None = None,
        follow_symlinks: bool = True,
    ) -> None:
        source = self.place(src, src_dir_fd, follow_symlinks)
        target = self.place(dst, dst_dir_fd, follow=False)
        if source is None and target is None:
            posix.link(
                src, dst, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd, follow_symlinks=follow_symlinks
            )
            return
        self._allow(source, target)
        # A second name of a project file would be a way to write it: the second name gets a copy.
        seen = self.overlay.see(source) if source is not None else _outside(src, src_dir_fd)
        if seen is None:
            raise fail(errno.ENOENT, src)
        self._make(lambda path, dir_fd=None: self.overlay.copy(seen, _named(path, dir_fd)), dst, dst_dir_fd)

    def unlink(self, path: Any, *, dir_fd: int | None = None) -> None:
        place = self.place(path, dir_fd, follow=False)
        if place is None:
            posix.unlink(path, dir_fd=dir_fd)
            return
        seen = self.overlay.see(place)
        if seen is None:
            raise fail(errno.ENOENT, path)
        if seen.is_directory:
            raise fail(errno.EISDIR, path)
        self._allow(place)
        self._vanish(place)

    remove = unlink

    def rmdir(self, path: Any, *, dir_fd: int | None = None) -> None:
        place = self.place(path, dir_fd, follow=False)
        if place is None:
            posix.rmdir(path, dir_fd=dir_fd)
            return
        seen = self.overlay.see(place)
        if seen is None:
            raise fail(errno.ENOENT, path)
        if not seen.is_directory:
            raise fail(errno.ENOTDIR, path)
        if self.overlay.names(place):
            raise fail(errno.ENOTEMPTY, path)
        self._allow(place)
        self._vanish(place)

    def _vanish(self, place: str) -> None:
        if place == ".":
            raise self.denial.error(
                self.overlay.boundary.project, "the project itself cannot be moved or removed"
            )
        self.overlay.drop(place)

    # moving ----------------------------------------------------------------------------------------

    def rename(
        self, src: Any, dst: Any, *, src_dir_fd: int | None = None, dst_dir_fd: int | None = None
    ) -> None:
        source, target = self.place(src, src_dir_fd, follow=False), self.place(dst, dst_dir_fd, follow=False)
        if source is None and target is None:
            posix.rename(src, dst, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd)
            return
        self._allow(source, target)
        if source is None:
            assert target is not None
            self._ready(target, _outside(src, src_dir_fd), src, dst)
            posix.rename(src, self.overlay.claim(target), src_dir_fd=src_dir_fd)
        elif source != target:
            moved = self.overlay.see(source)
            if source == ".":
                self._vanish(source)
            self._ready(target, moved, src, dst)
            self._move(source, moved, target, dst, dst_dir_fd)

    replace = rename

    def _move(
        self, source: str, moved: Seen | None, target: str | None, dst: Any, dst_dir_fd: int | None
    ) -> None:
        assert moved is not None
        if target is None and moved.is_directory:
            raise fail(errno.EXDEV, dst)  # as between file systems: shutil.move copies then
        own = self.overlay.copy_up(source)
        if target is None:
            posix.rename(own, dst, dst_dir_fd=dst_dir_fd)
        else:
            posix.rename(own, self.overlay.claim(target))
        self.overlay.drop(source)

    def _ready(self, target: str | None, moved: Seen | None, src: Any, dst: Any) -> None:
        """Refuse as rename(2) does; clear what the rename replaces."""
        if moved is None:
            raise fail(errno.ENOENT, src)
        old = None if target is None else self.overlay.see(target)
        if old is None or target is None:
            return
        if old.is_directory != moved.is_directory:
            raise fail(errno.EISDIR if old.is_directory else errno.ENOTDIR, dst)
        if old.is_directory:
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

    def _note(self, call: Callable[..., Any], path: Any, *rest: Any, **options: Any) -> None:
        """A change of metadata: done to the rank's own file, forgotten for a live one."""
        follow = options.get("follow_symlinks", True)
        place = self.place(path, options.get("dir_fd"), follow)
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

    def chmod(self, path: Any, mode: int, **options: Any) -> None:
        self._note(posix.chmod, path, mode, **options)

    def chown(self, path: Any, uid: int, gid: int, **options: Any) -> None:
        self._note(posix.chown, path, uid, gid, **options)

    def lchown(self, path: Any, uid: int, gid: int) -> None:
        self._note(posix.chown, path, uid, gid, follow_symlinks=False)

    def utime(self, path: Any, times: Any = None, **options: Any) -> None:
        self._note(posix.utime, path, times, **options)

    def setxattr(self, path: Any, attribute: Any, value: Any, flags: int = 0, **options: Any) -> None:
        self._note(posix.setxattr, path, attribute, value, flags, **options)

    def removexattr(self, path: Any, attribute: Any, **options: Any) -> None:
        self._note(posix.removexattr, path, attribute, **options)


def _named(path: Any, dir_fd: int | None) -> str:
    text = os.fsdecode(path)
    return text if dir_fd is None else os.path.join(posix.readlink(f"/proc/self/fd/{dir_fd}"), text)


def _outside(path: Any, dir_fd: int | None) -> Seen | None:
    real = _named(path, dir_fd)
    try:
        return Seen(real, posix.lstat(real), False)
    except FileNotFoundError:
        return None
