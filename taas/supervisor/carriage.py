"""What crosses hosts in a run: the payload to its VMs, rank 0's answer and what ranks write from them.

A VM of this host needs none of it: it opens the memory, and writes to the run's folder.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from taas.messages.hosts import Piece, WantPiece, Wrote, WroteTaken
from taas.messages.wire import Memory, Message
from taas.pieces import Fetch, piece_of
from taas.rank.streams import EVENTS, STDERR, STDOUT

_FILES = (EVENTS, STDOUT, STDERR)


class Carriage:
    """The bytes of one run that cross hosts.

    Args:
        run: its name.
        world_size: its ranks.
        payload: its names, on this host.
        folder: the run's folder.
        send: sends a message to a VM, by its number.
    """

    def __init__(
        self, run: str, world_size: int, payload: Memory, folder: str, send: Callable[[int, Message], None]
    ) -> None:
        self._run, self._world_size, self._payload, self._folder = run, world_size, payload, Path(folder)
        self._send = send
        self._fetch: Fetch | None = None
        self._fetching_from = -1
        self._held: list[int] = []
        self._lost_bytes = 0

    @property
    def answer(self) -> Memory | None:
        """Rank 0's names, once they are here."""
        return self._fetch.memory if self._fetch is not None and self._fetch.complete else None

    @property
    def fetching_from(self) -> int:
        """The VM whose answer is on its way; -1: none is."""
        return self._fetching_from

    @property
    def notices(self) -> tuple[str, ...]:
        """Lines for the user."""
        if not self._lost_bytes:
            return ()
        return (
            f"{self._lost_bytes:,} bytes of the ranks' output could not be kept: the disk of {self._folder} is full",
        )

    def payload_for(self, *, remote: bool) -> Memory:
        """Return the payload as a VM gets at it."""
        return Memory(0, self._payload.fd, self._payload.nbytes) if remote else self._payload

    def fetch(self, vm: int, answer: Memory) -> None:
        """Get rank 0's answer."""
        self._fetch = Fetch(self._run, vm, answer, lambda message: self._send(vm, message))
        self._held.append(self._fetch.fd)
        self._fetching_from = -1 if self._fetch.complete else vm

    def hear(self, message: WantPiece | Piece | Wrote) -> None:
        """Take in what an agent of this run asks for or brings.

        Raises:
            OSError: there is no memory for the answer.
        """
        match message:
            case WantPiece() if message.fd == self._payload.fd:
                self._send(message.vm, piece_of(message, self._payload.fd))
            case Piece() if self._fetch is not None and self._fetch.wants(message):
                self._fetch.take(message)
                if self._fetch.complete:
                    self._fetching_from = -1
            case Wrote():
                self._write(message)
                self._send(message.vm, WroteTaken(run=self._run, vm=message.vm, size=len(message.data)))

    def _write(self, wrote: Wrote) -> None:
        """Write what a rank wrote to the same place here; a full disk loses output, as it does in a rank."""
        if wrote.file not in _FILES or not 0 <= wrote.rank < self._world_size:
            return
        folder = self._folder / str(wrote.rank)
        try:
            folder.mkdir(mode=0o700, exist_ok=True)
            fd = os.open(folder / wrote.file, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError:
            self._lost_bytes += len(wrote.data)
            return
        try:
            written = os.pwrite(fd, wrote.data, wrote.offset)
        except OSError:
            written = 0
        finally:
            os.close(fd)
        self._lost_bytes += len(wrote.data) - written

    def close(self) -> None:
        """Give back the memory it holds."""
        for fd in self._held:
            os.close(fd)
        self._held.clear()
