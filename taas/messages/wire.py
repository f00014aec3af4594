"""What all messages are made of: their base, memory files beside them, and how they are packed and read."""

from __future__ import annotations

import os
from typing import Any

import msgspec

WIRE_LIMIT = 64 << 20
"""Largest message accepted from a peer, in bytes."""


class Message(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Base of all messages: immutable, tagged with their class's name."""


class Memory(msgspec.Struct, frozen=True):
    """A memory file of another process.

    Attributes:
        pid: the process of this host that holds it open; 0: it is on another host, and the peer that named it
            hands out its pieces (:mod:`taas.pieces`).
        fd: its number there.
        nbytes: its size in bytes.
    """

    pid: int
    fd: int
    nbytes: int

    @property
    def elsewhere(self) -> bool:
        """Whether it is on another host."""
        return self.pid == 0

    @property
    def path(self) -> str:
        """Where processes of its host find it."""
        return f"/proc/{self.pid}/fd/{self.fd}"

    def open(self) -> int:
        """Return a descriptor of one's own for the same memory.

        Raises:
            OSError: the process is gone, or the file there belongs to somebody else.
        """
        fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        status = os.fstat(fd)
        if status.st_uid != os.getuid() or status.st_size != self.nbytes:
            os.close(fd)
            raise OSError(f"{self.path} is not the memory that was announced")
        return fd


class Endpoint(msgspec.Struct, frozen=True):
    """Where a TCPStore listens."""

    host: str
    port: int


pack = msgspec.msgpack.Encoder().encode


class Reader:
    """Decodes the messages one side expects; anything else is a :class:`msgspec.ValidationError`."""

    def __init__(self, kinds: Any) -> None:
        self._decoder = msgspec.msgpack.Decoder(kinds)

    def __call__(self, data: bytes | memoryview) -> Any:
        """Decode one message."""
        return self._decoder.decode(data)
