"""What changes beneath a folder, in the order in which it was finished.

The folder is looked at when its owner says so, as a whole: nothing that was done to it can be missed, by
whatever program, and nothing has to be kept of what happened in between. A file is told of when nobody has it
open for writing (the system knows); at the last look, in any case.
"""

# Paths are bytes.
# ruff: noqa: PTH118

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Generator, Iterable, Iterator
from typing import NamedTuple

from taas.travel.changes import Change, DirectoryMade, LinkMade, Removed
from taas.travel.own_files import is_own
from taas.travel.reading import digest, is_being_written, open_to_read, pieces
from taas.travel.tree import Seen, scan

__all__ = ["Watcher"]

_TRIES = 3
_TICK_NS = 20_000_000
"""A change so soon after another one may bear the same time."""
_SHARE = 0.05
"""Of a core, spent on looking."""


class _Known(NamedTuple):
    """What was told of a path.

    Attributes:
        digest: of a file that had changed less than a tick before; its times alone do not prove that it is the same.
    """

    seen: Seen
    digest: bytes | None = None


class Watcher:
    """Tells what becomes of a folder after this moment.

    Args:
        root: the folder.
        only: directories in it, relative: nothing else is told of.
        afresh: tell of what is there already, too.

    Attributes:
        writing: files that were open for writing when last looked at.
        unsent: files that changed whenever they were read, at the last look.
    """

    def __init__(self, root: str, only: Iterable[str] = (), afresh: bool = False) -> None:
        self._root = os.fsencode(root)
        self._only = tuple(os.fsencode(os.path.normpath(path)) for path in only)
        self._known: dict[bytes, _Known] = {}
        self._pause = 0.0
        self.writing: set[bytes] = set()
        self.unsent: list[str] = []
        if not afresh:
            for path, seen in self._scan():
                self._known[path] = self._record(path, seen)

    @property
    def pause(self) -> float:
        """Seconds that should pass between two looks, so that looking costs little."""
        return max(0.5, self._pause)

    def changes(self, last: bool = False) -> Iterator[Change]:
        """Look, and yield what has changed since the last look.

        What was yielded counts as told. What is left when the iterator is dropped is found by the next look.

        Args:
            last: nobody is there any more who would close a file: it is told of as it stands.
        """
        self.writing.clear()
        began = time.monotonic()
        found = dict(self._scan())
        self._pause = (time.monotonic() - began) / _SHARE
        gone = sorted(self._known.keys() - found.keys(), reverse=True)  # what is in a directory before it
        turned = {path for path in self._known.keys() & found.keys() if self._turned(path, found[path])}
        in_the_way = [path for path in gone if _beneath(path, turned)]
        yield from self._remove([*in_the_way, *turned])
        for path, seen in found.items():
            if seen.kind == "directory" and path not in self._known:
                yield DirectoryMade(path=path, mode=seen.mode)
                self._known[path] = _Known(seen)
        contents = {path: seen for path, seen in found.items() if seen.kind in ("file", "link")}
        order = sorted(contents, key=lambda path: (contents[path].kind, contents[path].changed_ns, path))
        for path in order:  # links after what they may lead to
            yield from self._tell(path, contents[path], last)
        yield from self._remove([path for path in gone if path in self._known])

    def _scan(self) -> Iterator[tuple[bytes, Seen]]:
        return scan(self._root, self._skip)

    def _skip(self, path: bytes, entry: os.DirEntry[bytes]) -> bool:
        if entry.name == b"__pycache__" or is_own(entry.name):
            return True
        return bool(self._only) and not any(
            _beneath(path, {wanted}) or path == wanted or wanted.startswith(path + b"/")
            for wanted in self._only
        )

    def _turned(self, path: bytes, seen: Seen) -> bool:
        """Whether something of another kind is there now."""
        return self._known[path].seen.kind != seen.kind

    def _remove(self, paths: list[bytes]) -> Iterator[Change]:
        for path in paths:
            yield Removed(path=path)
            del self._known[path]

    # ------------------------------------------------------------ files and links

    def _tell(self, path: bytes, seen: Seen, last: bool) -> Iterator[Change]:
        if seen.kind == "link":
            if self._known.get(path) != _Known(seen):
                yield LinkMade(path=path, target=seen.identity[1])  # type: ignore[arg-type]
                self._known[path] = _Known(seen)
            return
        if self._is_told(path, seen):
            return
        for _ in range(_TRIES):
            with contextlib.suppress(OSError):  # it went: the next look finds out
                told = yield from self._send(path, last)
                if told or not last:
                    return
        if last and os.path.lexists(os.path.join(self._root, path)):
            self.unsent.append(os.fsdecode(path))

    def _is_told(self, path: bytes, seen: Seen) -> bool:
        known = self._known.get(path)
        if known is None or known.seen != seen:
            return False
        if known.digest is not None:
            settled = time.time_ns() - seen.changed_ns > _TICK_NS  # later changes will bear another time
            if self._record(path, seen, doubtful=True).digest != known.digest:
                return False
            if settled:
                self._known[path] = _Known(seen)
        return True

    def _send(self, path: bytes, last: bool) -> Generator[Change, None, bool]:
        fd = open_to_read(self._root, path)
        try:
            if not last and is_being_written(fd) is not False:
                self.writing.add(path)
                return False
            seen = Seen.of(os.fstat(fd))
            known = _Known(seen, self._doubt(fd, seen))
            whole = yield from pieces(fd, path, seen)
            if whole:
                self._known[path] = known
            return whole
        finally:
            os.close(fd)

    def _record(self, path: bytes, seen: Seen, doubtful: bool = False) -> _Known:
        if seen.kind != "file":
            return _Known(seen)
        try:
            fd = open_to_read(self._root, path)
        except OSError:
            return _Known(seen)
        try:
            return _Known(seen, digest(fd) if doubtful else self._doubt(fd, seen))
        finally:
            os.close(fd)

    @staticmethod
    def _doubt(fd: int, seen: Seen) -> bytes | None:
        return digest(fd) if time.time_ns() - seen.changed_ns < _TICK_NS else None


def _beneath(path: bytes, folders: set[bytes]) -> bool:
    return any(path.startswith(folder + b"/") for folder in folders)
