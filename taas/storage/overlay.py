"""A rank's own view of the project: what it diverted first, then the live project beneath.

On disk, in the rank's scratch, so that the rank's forked workers share it::

    tree/a/b         the file the rank wrote in the place of <project>/a/b
    gone/a/b/<mark>  the rank removed what was at a/b when the mark was made

Nothing is cached about the project: what rank 0 saves is seen at once. Of two versions of a file the newer
one is seen (the project's file system may be another machine's, with another clock: what that differs is known), unless somebody is writing rank 0's at this moment: then this rank's own complete one is.

Only ``posix`` functions are called here: those of ``os`` are the diverted ones by then.
"""

# Plain strings: a Path folds "..", which the kernel follows, and these run on every call of a rank.
# ruff: noqa: PTH118

from __future__ import annotations

import contextlib
import errno
import os
import posix
import stat
from typing import NamedTuple

from taas._linux import is_being_written
from taas.storage.boundary import NEVER, Boundary, changed_since, clock_of, join, resolve_beneath

MARK = "\x7ftaas-removed"
_MAX_LINKS = 40  # as the kernel's MAXSYMLINKS
_MAX_REMEMBERED = 4096
_SKEW = 10**8
"""Nanoseconds by which the clocks of two file systems of one machine do not differ: theirs tick, some more often."""
_SPARE_BYTES = 64 << 20


class PathView(NamedTuple):
    """What stands at a place: its real path, its lstat, and whether it is this rank's own."""

    path: str
    status: os.stat_result
    own: bool

    @property
    def is_directory(self) -> bool:
        """A directory itself, not a link to one."""
        return stat.S_ISDIR(self.status.st_mode)


class Overlay:
    """The view of one rank, made before its wall stands. A *place* is a path relative to the project; "." is the project.

    Args:
        boundary: the project's.
        scratch: the rank's folder.
        since_ns: when the run began, by the clock of the project's file system.
    """

    def __init__(self, boundary: Boundary, scratch: str, since_ns: int) -> None:
        self.boundary, self.since_ns = boundary, since_ns
        ahead = clock_of(boundary.project) - clock_of(scratch)
        self._ahead = ahead if _SKEW < abs(ahead) < NEVER // 2 else 0
        self.tree = os.path.join(os.path.realpath(scratch), "tree")
        self.gone = os.path.join(os.path.realpath(scratch), "gone")
        self._touched = False
        self._directories: set[str] = set()  # outside the project, known to contain no link

    # what is seen ----------------------------------------------------------------------------------

    @property
    def touched(self) -> bool:
        """Whether this rank has diverted anything yet; until then the live project is the view."""
        if not self._touched:
            self._touched = _lstat(self.tree) is not None or _lstat(self.gone) is not None
        return self._touched

    def own(self, place: str) -> str:
        """Where this rank's version of a place is, or would be."""
        return join(self.tree, place)

    def live(self, place: str) -> str:
        """Where the project's version of a place is, or would be."""
        return join(self.boundary.project, place)

    def see(self, place: str) -> PathView | None:
        """What stands at a place in this rank's view, links not followed."""
        own, live = self._both(place)
        if own is None:
            return live
        if live is None or (own.is_directory and not live.is_directory):
            return own
        if own.is_directory or live.is_directory:
            return live if own.is_directory else own
        newer = live.status.st_ctime_ns - self._ahead > own.status.st_ctime_ns
        return live if newer and not _being_written(live.path) else own

    def _both(self, place: str) -> tuple[PathView | None, PathView | None]:
        own_path, live_path = self.own(place), self.live(place)
        own, live = _lstat(own_path), _lstat(live_path)
        hidden = (
            live is not None and place != "." and self._removed_at(place) >= live.st_ctime_ns - self._ahead
        )
        return (
            PathView(own_path, own, True) if own else None,
            PathView(live_path, live, False) if live and not hidden else None,
        )

    def _removed_at(self, place: str) -> int:
        """When this rank last removed the place or a directory above it (ns); -1 for never."""
        if _lstat(self.gone) is None:
            return -1
        latest, path = -1, self.gone
        for name in place.split("/"):
            path = f"{path}/{name}"
            mark = _lstat(f"{path}/{MARK}")
            if mark is not None:
                latest = max(latest, mark.st_ctime_ns)
        return latest

    def is_rank_0s(self, place: str, seen: PathView | None) -> bool:
        """Whether rank 0 may have put there what is seen, or taken away what is missing, since the run began.

        Then this rank, which does the same a moment later, is not failed by it.
        """
        if seen is not None:
            return not seen.own and seen.status.st_ctime_ns > self.since_ns
        if self._removed_at(place) >= 0:
            return False  # this rank took it away
        while place != "." and _lstat(self.live(place)) is None:
            place = _above(place)  # who takes something away changes the folder that is left
        return changed_since(self.live(place), self.since_ns)

    def names(self, place: str) -> list[str]:
        """Entries of a directory in this rank's view."""
        found: dict[str, None] = {}
        for directory in (self.live(place), self.own(place)):
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                found.update(dict.fromkeys(posix.listdir(directory)))
        return [name for name in found if self.see(_below(place, name)) is not None]

    def mixed(self, place: str) -> bool:
        """Whether a directory's listing may differ from the live one."""
        return _lstat(self.own(place)) is not None or _lstat(self.gone) is not None

    # where a path leads ----------------------------------------------------------------------------

    def locate(self, path: str, dir_fd: int | None, follow: bool = True) -> str | None:
        """The place a path leads to in this rank's view, None when that is outside the rule.

        Args:
            path: as given to the call.
            dir_fd: the directory it is relative to, None for the working directory.
            follow: whether a link in the last component is followed.
        """
        if not path:
            return None  # the system's error for it is ENOENT
        if not path.startswith("/"):
            base = (
                posix.getcwd() if dir_fd is None or dir_fd < 0 else posix.readlink(f"/proc/self/fd/{dir_fd}")
            )
            path = f"{base}/{path}"
        return self.boundary.relative(self._walk(self.outward(path), follow))

    def outward(self, path: str) -> str:
        """A path in this rank's own tree as the project path it stands for; any other as it is."""
        inside = resolve_beneath(path, self.tree)
        return path if inside is None else self.live(inside)

    def _walk(self, path: str, follow: bool) -> str:
        head, _, tail = path.rpartition("/")
        inside = resolve_beneath(path, self.boundary.project)
        if inside is not None:
            current, todo = self.boundary.project, inside.split("/")
        elif head in self._directories and tail not in ("", ".", ".."):
            current, todo = head, [tail]
        else:
            current, todo = "/", path.split("/")
        todo.reverse()
        links = 0
        while todo:
            name = todo.pop()
            if name in ("", "."):
                continue
            if name == "..":
                current = current.rpartition("/")[0] or "/"
                continue
            candidate = f"{current.rstrip('/')}/{name}"
            target = None if not (todo or follow) else self._link(candidate)
            if target is None:
                current = candidate
                continue
            links += 1
            if links > _MAX_LINKS:
                raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), path)
            if target.startswith("/"):
                current, target = "/", self.outward(target)
            todo.extend(reversed(target.split("/")))
        self._remember(head, current)
        return current

    def _remember(self, head: str, resolved: str) -> None:
        """Directories outside the project are resolved once: reading many files there stays cheap."""
        unchanged = head == resolved.rpartition("/")[0] != ""
        if unchanged and self.boundary.relative(head) is None and len(self._directories) < _MAX_REMEMBERED:
            self._directories.add(head)

    def _link(self, path: str) -> str | None:
        place = self.boundary.relative(path)
        seen = None if place is None else self.see(place)
        real = path if place is None else seen.path if seen else None
        if real is None:
            return None
        try:
            return posix.readlink(real)
        except OSError:
            return None

    # changing the view -----------------------------------------------------------------------------

    def claim(self, place: str) -> str:
        """Make the directories above a place in this rank's tree and return its own path.

        Raises:
            FileNotFoundError, NotADirectoryError: as the live file system would.
        """
        parent = _above(place)
        seen = self.see(parent)
        if seen is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), self.live(place))
        if not seen.is_directory:
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), self.live(place))
        _make_directories(self.own(parent))
        return self.own(place)

    def hide(self, place: str) -> None:
        """Remove the live version of a place from this rank's view."""
        directory = f"{self.gone}/{place}"
        _make_directories(directory)
        mark = f"{directory}/{MARK}"
        posix.close(posix.open(mark, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600))
        posix.utime(mark)

    def copy_up(self, place: str) -> str:
        """Give this rank its own version of what stands at a place, with all beneath it.

        Raises:
            OSError: ENOSPC when the scratch cannot hold it.
        """
        seen = self.see(place)
        own = self.claim(place)
        if seen is None or (seen.own and not seen.is_directory):
            return own
        if seen.is_directory:
            _make_directories(own)
            for name in self.names(place):
                self.copy_up(_below(place, name))
        else:
            try:
                _copy(seen, own)
            except FileNotFoundError:
                if not self.is_gone(seen):
                    raise
                return self.copy_up(place)
        return own

    def is_gone(self, seen: PathView) -> bool:
        """Whether rank 0 has moved or removed what was seen: this rank's view has to be looked at again."""
        if seen.own:
            return False
        now, then = _lstat(seen.path), seen.status
        return now is None or (now.st_ino, now.st_ctime_ns) != (then.st_ino, then.st_ctime_ns)

    def drop(self, place: str) -> None:
        """Remove a file, link or empty directory from this rank's view."""
        own, live = self._both(place)
        if own is not None:
            (posix.rmdir if own.is_directory else posix.unlink)(own.path)
        if live is not None:
            self.hide(place)


def _copy(seen: PathView, target: str) -> None:
    """Copy a link, or a regular file with its mode and its times."""
    if stat.S_ISLNK(seen.status.st_mode):
        posix.symlink(posix.readlink(seen.path), target)
        return
    space = posix.statvfs(target.rpartition("/")[0])
    if seen.status.st_size + _SPARE_BYTES > space.f_bavail * space.f_frsize:
        raise OSError(
            errno.ENOSPC, f"no room for a private copy of {seen.path}: write it in rank 0 only", target
        )
    source = posix.open(seen.path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        with contextlib.suppress(FileNotFoundError):
            posix.unlink(target)
        fresh = posix.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            while posix.sendfile(fresh, source, None, 1 << 30):
                pass
            posix.fchmod(fresh, stat.S_IMODE(seen.status.st_mode))
            posix.utime(fresh, ns=(seen.status.st_atime_ns, seen.status.st_mtime_ns))
        finally:
            posix.close(fresh)
    finally:
        posix.close(source)


def _lstat(path: str) -> os.stat_result | None:
    try:
        return posix.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return None


def _above(place: str) -> str:
    return place.rpartition("/")[0] or "."


def _below(place: str, name: str) -> str:
    return name if place == "." else f"{place}/{name}"


def _make_directories(path: str) -> None:
    try:
        posix.mkdir(path)
    except FileExistsError:
        return
    except FileNotFoundError:
        _make_directories(path.rpartition("/")[0])
        with contextlib.suppress(FileExistsError):
            posix.mkdir(path)


def _being_written(path: str) -> bool:
    """Whether any process has the file open for writing: then the kernel grants no read lease (fcntl(2))."""
    try:
        descriptor = posix.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        return is_being_written(descriptor) is True  # None: a file system or an owner without leases
    finally:
        posix.close(descriptor)
