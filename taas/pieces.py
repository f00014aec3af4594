"""Memory files that cross hosts: whoever needs one asks its holder for it, piece by piece.

The receiver asks, so it sets the pace: so many pieces are on their way as it has asked for, and none is asked
for before an earlier one has been written down.
"""

from __future__ import annotations

import os
from collections.abc import Callable

from taas.messages.hosts import Piece, WantPiece
from taas.messages.wire import Memory, Message

__all__ = ["Fetch", "piece_of"]

PIECE = 1 << 20
"""Bytes of a piece."""
_AHEAD = 16
"""Pieces on their way."""


def piece_of(want: WantPiece, fd: int) -> Piece:
    """Read a piece of a memory file for who asked for it.

    Args:
        want: the question.
        fd: the file, which this process said may be asked for.
    """
    data = os.pread(fd, min(want.size, PIECE), want.offset)
    return Piece(run=want.run, vm=want.vm, fd=want.fd, offset=want.offset, data=data)


class Fetch:
    """A memory file of a peer's, on its way into one of this process.

    Args:
        run, vm: what the questions carry.
        memory: what the peer named; ``elsewhere`` holds.
        say: sends a message to the peer.

    Attributes:
        fd: the copy, whole once :attr:`complete`. The caller closes it.
    """

    def __init__(self, run: str, vm: int, memory: Memory, say: Callable[[Message], None]) -> None:
        self._run, self._vm, self._memory, self._say = run, vm, memory, say
        self.fd = os.memfd_create("taas-fetched", os.MFD_CLOEXEC)
        self._asked = self._got = 0
        for _ in range(_AHEAD):
            self._ask()

    def _ask(self) -> None:
        size = min(PIECE, self._memory.nbytes - self._asked)
        if size > 0:
            self._say(
                WantPiece(run=self._run, vm=self._vm, fd=self._memory.fd, offset=self._asked, size=size)
            )
            self._asked += size

    def wants(self, piece: Piece) -> bool:
        """Whether a piece is of this file."""
        return (piece.run, piece.vm, piece.fd) == (self._run, self._vm, self._memory.fd)

    def take(self, piece: Piece) -> None:
        """Write a piece down, and ask for one more.

        Raises:
            OSError: there is no memory for it, or the peer has less than it said.
        """
        if not piece.data or piece.offset + len(piece.data) > self._memory.nbytes:
            raise OSError(f"a memory of {self._memory.nbytes:,} bytes ended at byte {piece.offset:,}")
        left = memoryview(piece.data)
        offset = piece.offset
        while left:
            written = os.pwrite(self.fd, left, offset)
            left, offset = left[written:], offset + written
        self._got += len(piece.data)
        self._ask()

    @property
    def complete(self) -> bool:
        """Whether all of it is here."""
        return self._got == self._memory.nbytes

    @property
    def memory(self) -> Memory:
        """The copy, for processes of this host."""
        return Memory(os.getpid(), self.fd, self._memory.nbytes)
