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
from collections.abc import Iterable, Iterator

from taas._linux import is_being_written
from taas.project_sync.tree import FileState, PathChange, is_own, open_to_read, read_pieces, scan

_ORDER = {"directory": 0, "file": 1, "link": 2}
"""Links after what they may lead to."""
_TICK_NS = 20_000_000
"""A change so soon after another one may bear the same time."""
_SHARE = 0.05
"""Of a core, spent on looking."""


class Watcher:
    """Tells what becomes of a folder after this moment.

    Args:
        root: the folder.
        only: directories in it, relative: nothing else is told of.
        afresh: tell of what is there already, too.

    Attributes:
        unsent: files that changed while they were read, at the last look.
    """

    def __init__(self, root: str, only: Iterable[str] = (), afresh: bool = False) -> None:
        self._root = os.fsencode(root)
        self._only = tuple(os.fsencode(os.path.normpath(path)) for path in only)
        self._known: dict[bytes, FileState] = {}
        self._pause = 0.0
        self.unsent: list[str] = []
        if not afresh:
            for path, seen in self._scan():
                self._note(path, seen)

    @property
    def pause(self) -> float:
        """Seconds that should pass between two looks, so that looking costs little."""
        return max(0.5, self._pause)

    def changes(self, last: bool = False) -> Iterator[PathChange]:
        """Look, and yield what has changed since the last look.

        What was yielded counts as told. What is left when the iterator is dropped is found by the next look.

        Args:
            last: nobody is there any more who would close a file: it is told of as it stands.
        """
        began = time.monotonic()
        found = dict(self._scan())
        self._pause = (time.monotonic() - began) / _SHARE
        turned = {
            path for path, known in self._known.items() if path in found and found[path].kind != known.kind
        }
        # What is in a directory comes before it.
        gone = sorted(self._known.keys() - found.keys() | turned, reverse=True)
        yield from self._remove(path for path in gone if path in turned or _beneath(path, turned))
        told = [path for path in found if found[path].kind in _ORDER and found[path] != self._known.get(path)]
        for path in sorted(told, key=lambda path: (_ORDER[found[path].kind], found[path].changed_ns, path)):
            if found[path].kind == "file":
                yield from self._send(path, last)
            else:
                yield PathChange(path, found[path])
                self._known[path] = found[path]
        yield from self._remove(path for path in gone if path not in found)

    def _scan(self) -> Iterator[tuple[bytes, FileState]]:
        return scan(self._root, self._skip)

    def _skip(self, path: bytes, entry: os.DirEntry[bytes]) -> bool:
        if entry.name == b"__pycache__" or is_own(entry.name):
            return True
        return bool(self._only) and not any(
            _beneath(path, {wanted}) or path == wanted or wanted.startswith(path + b"/")
            for wanted in self._only
        )

    def _remove(self, paths: Iterable[bytes]) -> Iterator[PathChange]:
        for path in paths:
            if self._known.pop(path, None) is not None:
                yield PathChange(path)

    def _send(self, path: bytes, last: bool) -> Iterator[PathChange]:
        whole = False
        with contextlib.suppress(OSError):  # it went: the next look finds out
            fd = open_to_read(self._root, path)
            try:
                if not last and is_being_written(fd) is not False:
                    return
                seen = FileState.of(os.fstat(fd))
                whole = yield from read_pieces(fd, path, seen)
                if whole:
                    self._note(path, seen)
            finally:
                os.close(fd)
        if last and not whole and os.path.lexists(os.path.join(self._root, path)):
            self.unsent.append(os.fsdecode(path))

    def _note(self, path: bytes, seen: FileState) -> None:
        """What was told of a path, or was there from the beginning.

        A file that changed just now may change once more within the same tick, and bear the same time: it is told of
        again at the next look.
        """
        young = abs(time.time_ns() - seen.changed_ns) <= _TICK_NS
        self._known[path] = seen._replace(identity=()) if young else seen


def _beneath(path: bytes, folders: set[bytes]) -> bool:
    return any(path.startswith(folder + b"/") for folder in folders)
