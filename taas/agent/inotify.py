"""Being told that files grew (inotify(7)), without asking.

A user has so many of these, and editors may have taken them all: who watches has to ask then.
"""

from __future__ import annotations

import ctypes
import os
import struct
from pathlib import Path

_IN_MODIFY, _IN_CREATE, _IN_IGNORED = 0x2, 0x100, 0x8000
BLIND_SECONDS = 0.1
_EVENT = struct.Struct("iIII")


class Inotify:
    """Watches folders; :meth:`changed` names those in which a file was written.

    Attributes:
        blind: the system has no watch left for some of them; look every :data:`BLIND_SECONDS`.
    """

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._fd = self._libc.inotify_init1(os.O_CLOEXEC | os.O_NONBLOCK)
        self.blind = self._fd < 0
        if self.blind:
            self._fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)  # never readable
        self._folders: dict[int, Path] = {}

    def fileno(self) -> int:
        """Return the descriptor that becomes readable."""
        return int(self._fd)

    def add(self, folder: Path) -> None:
        """Watch the files of a folder."""
        watch = self._libc.inotify_add_watch(self._fd, os.fsencode(folder), _IN_MODIFY | _IN_CREATE)
        if watch < 0:
            self.blind = True
        else:
            self._folders[watch] = folder

    def changed(self) -> set[Path]:
        """Return the folders in which something was written since the last call."""
        found: set[Path] = set()
        try:
            data = os.read(self._fd, 1 << 16)
        except BlockingIOError:
            return found
        offset = 0
        while offset < len(data):
            watch, mask, _, length = _EVENT.unpack_from(data, offset)
            offset += _EVENT.size + length
            if mask & _IN_IGNORED:  # the folder is gone, and its watch with it
                self._folders.pop(watch, None)
            elif watch in self._folders:
                found.add(self._folders[watch])
        return found

    def close(self) -> None:
        """Stop watching."""
        os.close(self._fd)
