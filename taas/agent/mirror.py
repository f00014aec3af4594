"""Sending what a run's processes write to the notebook's machine, where it is kept: bytes of files, as they grow."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from taas.messages.hosts import Wrote
from taas.messages.wire import Message
from taas.rank.streams import EVENTS, STDERR, STDOUT

__all__ = ["LogMirror", "Mirror"]

_WINDOW = 8 << 20
"""Bytes on their way before they are acknowledged."""
_PIECE = 1 << 18
_MAKER = -1


class _Outflow:
    """Growing files, sent at the pace of who writes them down.

    Args:
        run, vm: what the messages carry.
        say: sends a message to the supervisor.
    """

    def __init__(self, run: str, vm: int, say: Callable[[Message], None]) -> None:
        self._run, self._vm, self._say = run, vm, say
        self._sent: dict[tuple[int, str], int] = {}
        self._window = _WINDOW

    def acknowledge(self, size: int) -> None:
        """So many bytes were taken."""
        self._window += size

    def _send_file(self, rank: int, path: Path, size: int, *, lines: bool = False) -> bool:
        """Send a file up to a size; returns whether nothing is left. ``lines``: what ends with one, if anything."""
        offset = self._sent.get((rank, path.name), 0)
        if offset >= size:
            return True
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            while offset < size and self._window > 0:
                data = os.pread(fd, min(_PIECE, size - offset), offset)
                if lines and len(data) < _PIECE:
                    data = data[: data.rfind(b"\n") + 1]
                if not data:
                    break
                self._say(
                    Wrote(run=self._run, vm=self._vm, rank=rank, file=path.name, offset=offset, data=data)
                )
                offset += len(data)
                self._window -= len(data)
        finally:
            os.close(fd)
        self._sent[rank, path.name] = offset
        return offset >= size


class Mirror(_Outflow):
    """The output files of a run's ranks on this VM.

    Args:
        run, vm: what the messages carry.
        folders: each rank's folder, by its number.
        say: sends a message to the supervisor.
    """

    def __init__(self, run: str, vm: int, folders: dict[int, Path], say: Callable[[Message], None]) -> None:
        super().__init__(run, vm, say)
        self._folders = folders

    def step(self) -> bool:
        """Send what the window allows; returns whether all that was written is on its way, or there."""
        done = [self._send_rank(rank, folder) for rank, folder in self._folders.items()]
        return all(done)

    def _send_rank(self, rank: int, folder: Path) -> bool:
        """Send one rank's new bytes, the raw files first: a record in the events counts on them."""
        events = _size(folder / EVENTS)
        sizes = {STDOUT: _size(folder / STDOUT), STDERR: _size(folder / STDERR), EVENTS: events}
        return all(self._send_file(rank, folder / name, size) for name, size in sizes.items())


class LogMirror(_Outflow):
    """The log of a maker on this VM. Those of several VMs are one file there, so lines are sent whole."""

    def __init__(self, run: str, number: int, log: Path, say: Callable[[Message], None]) -> None:
        super().__init__(run, number, say)
        self._log = log

    def step(self, *, last: bool) -> bool:
        """Send what the window allows; returns whether nothing is left. ``last``: nobody writes there any more."""
        return self._send_file(_MAKER, self._log, _size(self._log), lines=not last)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0
