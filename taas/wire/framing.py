"""What all messages are made of: their base, memory files beside them, and how they are packed, read and sealed.

A seal is a MAC with a key that only the processes of one run have, checked before anything is
unpickled.
"""

from __future__ import annotations

import hmac
import os
from hashlib import blake2b
from typing import Any

import msgspec

LOOPBACK = "127.0.0.1"
WIRE_LIMIT = 64 << 20
"""Largest message accepted from a peer, in bytes."""
SEAL_BYTES = 16


class Message(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Base of all messages."""


class Alive(Message, frozen=True):
    """The sender is there.

    A worker pool says so again and again, and so does the supervisor: that it cannot be sent tells
    that the agent is out of reach.
    """


class Leave(Message, frozen=True):
    """End all that was started, and yourself."""


class Memory(msgspec.Struct, frozen=True):
    """A memory file of another process.

    Attributes:
        pid: the process of this host that holds it open; 0: it is on another host, and the peer
            that named it sends it in chunks (:mod:`taas.wire.transfer`).
        fd: its number there.
    """

    pid: int
    fd: int
    nbytes: int

    @property
    def elsewhere(self) -> bool:
        """Whether it is on another host."""
        return self.pid == 0

    def from_elsewhere(self) -> Memory:
        """Return what a peer on another host is told of it."""
        return Memory(0, 0, self.nbytes)

    @property
    def path(self) -> str:
        """Where processes of its host find it."""
        return f"/proc/{self.pid}/fd/{self.fd}"

    def open(self) -> int:
        """Return a descriptor of one's own; an OSError: the process is gone, or the file there is somebody else's."""
        fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        status = os.fstat(fd)
        if status.st_uid != os.getuid() or status.st_size != self.nbytes:
            os.close(fd)
            raise OSError(f"{self.path} is not the memory that was announced")
        return fd


class StoreAddress(msgspec.Struct, frozen=True, tag=True):
    """Where a run's store is.

    Attributes:
        host: what MASTER_ADDR says. Loopback: all ranks are on one machine, and the store is a
            folder there.
        secret: key of the run's seals (:func:`seal`), which only its ranks and their agents have.
        port: what MASTER_PORT says: of the TCPStore; where there is a folder nobody listens. 0: not
            opened yet.
        folder: an absolute path; empty where there is none.
    """

    host: str
    secret: bytes
    port: int = 0
    folder: str = ""


pack = msgspec.msgpack.Encoder().encode


class Unreadable(ValueError):
    """What a peer sent, or what stands in a file, is not what its reader expects."""


class MessageReader:
    """Decodes what one side expects; whatever else comes, and however it is broken, is :class:`Unreadable`.

    Args:
        kinds: the type, or the union of types, that is expected.
        form: ``msgspec.msgpack`` for messages, ``msgspec.json`` for files that people may read.
    """

    def __init__(self, kinds: Any, form: Any = msgspec.msgpack) -> None:
        self._decode = form.Decoder(kinds).decode

    def __call__(self, data: bytes | memoryview) -> Any:
        """Decode one message.

        msgspec's own errors are ValueErrors, as is the UnicodeDecodeError that invalid UTF-8
        raises. A field that is nested too deeply, an unknown one too, raises a RecursionError,
        which is neither.
        """
        try:
            return self._decode(data)
        except (ValueError, RecursionError) as error:
            raise Unreadable(f"{type(error).__name__}: {error}") from None


def seal(key: bytes, header: bytes, body: Any) -> bytes:
    """Return the MAC over a header, which says whose body it is and which, and a body: bytes, or memory that exports them."""
    digest = blake2b(len(header).to_bytes(8, "little"), key=key, digest_size=SEAL_BYTES)
    digest.update(header)
    digest.update(body)
    return digest.digest()


def authenticate(key: bytes, frame: bytes, body: Any) -> bytes | None:
    """Return the header that follows the seal in ``frame``, if it holds for that header and the body, else None."""
    header = frame[SEAL_BYTES:]
    return header if hmac.compare_digest(frame[:SEAL_BYTES], seal(key, header, body)) else None
