"""One rank's view of the project: its own files first, then the live ones.

The rank's own version of <project>/a/b is <scratch>/tree/a/b, and its forked workers see it, too.
The record of removed entries is in the process itself. Nothing about the project is cached, so the
view immediately shows the files that rank 0 saves. Of two versions of a file the view shows the
newer one, unless a process is currently writing rank 0's version; then it shows this rank's own
complete one. The project's file system may be on another machine with another clock; the view
allows for the difference.

Functions of ``os`` are diverted when this runs, so they are called only for paths in the scratch.
"""

# Plain strings: a Path removes "..", which the kernel follows, and is slow in code that every call
# in a rank runs.
# ruff: noqa: PTH103

from __future__ import annotations

import contextlib
import errno
import os
import posix
import shutil
import stat
import threading
from typing import NamedTuple

from taas.base.linux import is_being_written
from taas.project.wall.boundary import (
    NEVER,
    Boundary,
    changed_since,
    clock_of,
    join,
    resolve_beneath,
)

TREE = "tree"
_MAX_LINKS = 40  # as the kernel's MAXSYMLINKS
_SKEW = 10**8
"""The clocks of two file systems of one machine differ by fewer nanoseconds than this.

Some of them tick more often than others.
"""


class Seen(NamedTuple):
    """The entry at a place: its real path, its lstat, and whether it is this rank's own."""

    path: str
    status: os.stat_result
    own: bool

    @property
    def is_directory(self) -> bool:
        """Return whether it is a directory, and not a link to one."""
        return stat.S_ISDIR(self.status.st_mode)


class Table:
    """The view of one rank, created before its write protection is set up.

    A *place* is a path relative to the project; "." is the project. ``since_ns`` is the start time
    of the run, by the clock of the project's file system.
    """

    def __init__(self, boundary: Boundary, scratch: str, since_ns: int) -> None:
        self.boundary = boundary
        ahead = clock_of(boundary.project) - clock_of(scratch)
        self._ahead = ahead if _SKEW < abs(ahead) < NEVER // 2 else 0
        self.begin_run(scratch, since_ns)

    def begin_run(self, scratch: str, since_ns: int) -> None:
        """Set the scratch for the next run; the rank's writes go there from now on."""
        self._since_ns = since_ns
        self._scratch = os.path.realpath(scratch)
        self._tree = f"{self._scratch}/{TREE}"
        self._gone: dict[str, int] = {}
        """When the rank removed a place with everything beneath it, by the clock of its scratch
        (ns).
        """

    # the view
    # --------------------------------------------------------------------------------------

    @property
    def touched(self) -> bool:
        """Return whether this rank, or one of its workers, has diverted anything yet.

        Until then its view is the live project.
        """
        return bool(self._gone) or _lstat(self._tree) is not None

    def own(self, place: str) -> str:
        """Return the path that this rank's version of a place has, or would have."""
        return join(self._tree, place)

    def live(self, place: str) -> str:
        """Return the path that the project's version of a place has, or would have."""
        return join(self.boundary.project, place)

    def is_only_own(self, place: str) -> bool:
        """Return whether this rank has an entry at a place, and rank 0 has none there."""
        own, live = self._both(place)
        return own is not None and live is None

    def see(self, place: str) -> Seen | None:
        """Return the entry at a place in this rank's view, without following links."""
        own, live = self._both(place)
        if own is None or live is None:
            return own or live
        if own.is_directory or live.is_directory:
            return live if own.is_directory and live.is_directory else own
        newer = live.status.st_ctime_ns - self._ahead > own.status.st_ctime_ns
        return live if newer and not _being_written(live.path) else own

    def _both(self, place: str) -> tuple[Seen | None, Seen | None]:
        own_path, live_path = self.own(place), self.live(place)
        own, live = _lstat(own_path), _lstat(live_path)
        removed = live is not None and self._removed_at(place) >= live.st_ctime_ns - self._ahead
        return (
            None if own is None else Seen(own_path, own, True),
            None if live is None or removed else Seen(live_path, live, False),
        )

    def _removed_at(self, place: str) -> int:
        """Return when this rank last removed the place or a directory above it (ns); -1: never."""
        latest = -1
        while self._gone and place != ".":
            latest = max(latest, self._gone.get(place, -1))
            place = _above(place)
        return latest

    def is_rank_0s(self, place: str, seen: Seen | None) -> bool:
        """Return whether rank 0 may have created the entry, or removed the missing one.

        Only actions of rank 0 since the run began count. This rank does the same a moment later,
        and so does not fail because rank 0 was first.
        """
        if seen is not None:
            return not seen.own and seen.status.st_ctime_ns > self._since_ns
        if self._removed_at(place) >= 0:
            return False  # this rank has removed it
        while place != "." and _lstat(self.live(place)) is None:
            place = _above(place)  # a removal changes the folder that is left
        return changed_since(self.live(place), self._since_ns)

    def names(self, place: str) -> list[str]:
        """Return the entries of a directory: this rank's own, and live ones it has not removed."""
        found: dict[str, None] = {}
        for directory in (self.live(place), self.own(place)):
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                found.update(dict.fromkeys(posix.listdir(directory)))
        return [
            name for name in found if not self._gone or self.see(_below(place, name)) is not None
        ]

    def mixed(self, place: str) -> bool:
        """Return whether a directory's listing may differ from the live one."""
        return bool(self._gone) or _lstat(self.own(place)) is not None

    def locate(self, path: str, *, follow: bool = True) -> str | None:
        """Return the place to which a call's path leads; None if the rule does not apply."""
        if not path:
            return None  # the system's error for an empty path is ENOENT
        if not path.startswith("/"):
            path = f"{self.outward(posix.getcwd())}/{path}"
        return self.boundary.relative(without_links(path, follow=follow))

    def outward(self, path: str) -> str:
        """Return the project path that corresponds to a path in this rank's tree.

        Other paths stay unchanged.
        """
        inside = resolve_beneath(path, self._tree)
        return path if inside is None else self.live(inside)

    # changing the view ----------------------------------------------------------------------------

    def claim(self, place: str) -> str:
        """Create the directories above a place in this rank's tree; return the place's path there.

        The view must have these directories.
        """
        parent = _above(place)
        seen = self.see(parent)
        if seen is None or not seen.is_directory:
            code = errno.ENOENT if seen is None else errno.ENOTDIR
            raise OSError(code, os.strerror(code), self.live(place))
        if _lstat(self.own(parent)) is None:
            os.makedirs(self.own(parent), exist_ok=True)
        return self.own(place)

    def copy_up(self, place: str) -> str:
        """Give this rank its own version of a place, with everything beneath it.

        Raises ENOSPC, or ELOOP for a link.
        """
        own = self.claim(place)
        while (seen := self.see(place)) is not None:
            if seen.is_directory:
                os.makedirs(own, exist_ok=True)
                for name in self.names(place):
                    self.copy_up(_below(place, name))
                break
            if seen.own:
                break
            if stat.S_ISLNK(seen.status.st_mode):
                raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), seen.path)
            # rank 0 may be moving or removing it
            with contextlib.suppress(FileNotFoundError):
                self._copy(seen.path, own)
                break
        return own

    def _copy(self, source: str, target: str) -> None:
        """Copy a regular file with its mode and times."""
        size, space = posix.lstat(source).st_size, posix.statvfs(self._scratch)
        if size > space.f_bavail * space.f_frsize:
            raise OSError(
                errno.ENOSPC, "no room for a private copy: write it in rank 0 only", source
            )
        partial = f"{self._scratch}/copy-{threading.get_native_id()}"
        shutil.copy2(source, partial)
        posix.rename(partial, target)

    def drop(self, place: str) -> None:
        """Remove a place, and everything beneath it, from this rank's view."""
        own, live = self._both(place)
        if own is not None:
            (shutil.rmtree if own.is_directory else posix.unlink)(own.path)
        if live is not None:
            self._gone[place] = clock_of(self._scratch)


def without_links(path: str, *, follow: bool) -> str:
    """Return an absolute path without links and dots; components that do not exist stay."""
    current, links = "", 0
    todo = path.split("/")
    todo.reverse()
    while todo:
        name = todo.pop()
        if name in ("", "."):
            continue
        if name == "..":
            current = current.rpartition("/")[0]
            continue
        candidate = f"{current}/{name}"
        try:
            target = posix.readlink(candidate) if todo or follow else None
        except OSError:  # not a link, or missing
            target = None
        if target is None:
            current = candidate
            continue
        links += 1
        if links > _MAX_LINKS:
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), path)
        if target.startswith("/"):
            current = ""
        todo.extend(reversed(target.split("/")))
    return current or "/"


def _lstat(path: str) -> os.stat_result | None:
    try:
        return posix.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return None


def _above(place: str) -> str:
    return place.rpartition("/")[0] or "."


def _below(place: str, name: str) -> str:
    return name if place == "." else f"{place}/{name}"


def _being_written(path: str) -> bool:
    """Return whether a process has the file open for writing.

    In that case, the kernel grants no read lease (fcntl(2)).
    """
    try:
        descriptor = posix.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        # None: leases are not possible on this file system, or for this owner
        return is_being_written(descriptor) is True
    finally:
        posix.close(descriptor)
