"""The parts that all messages share: their base class, packing and seals, and memory files.

A seal is a MAC with a key that only the processes of one run have. It is checked before anything is
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
"""Maximum size of a message from a peer, in bytes."""
SEAL_BYTES = 16


class Message(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Base class of all messages."""


class Alive(Message, frozen=True):
    """A message without content.

    A worker pool sends it regularly to show that it is alive. The supervisor sends it to each agent
    on another host to find out whether the connection still exists: ZeroMQ closes a connection
    without heartbeats (:func:`taas.protocol.curve.set_heartbeat`), and then sending fails. Agents
    do not reply.
    """


class Leave(Message, frozen=True):
    """End all processes that you have started, and then yourself."""


class Memory(msgspec.Struct, frozen=True):
    """A memory file of another process.

    Attributes:
        pid: the process on this host that holds the file open; 0 if the file is on another host,
            and the peer that announced it sends it in chunks (:mod:`taas.protocol.chunks`).
        fd: the number of the descriptor in that process.
    """

    pid: int
    fd: int
    nbytes: int

    @property
    def elsewhere(self) -> bool:
        """Return whether the file is on another host."""
        return self.pid == 0

    def from_elsewhere(self) -> Memory:
        """Return the form in which a peer on another host gets it."""
        return Memory(0, 0, self.nbytes)

    @property
    def path(self) -> str:
        """Return the path by which processes on the same host open the file."""
        return f"/proc/{self.pid}/fd/{self.fd}"

    def open(self) -> int:
        """Open the file in this process; the caller closes the descriptor.

        Raises:
            OSError: the process is gone, or the file is not the announced one.
        """
        fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        status = os.fstat(fd)
        if status.st_uid != os.getuid() or status.st_size != self.nbytes:
            os.close(fd)
            raise OSError(f"{self.path} is not the memory that was announced")
        return fd


class StoreAddress(msgspec.Struct, frozen=True, tag=True):
    """The address of a run's store.

    Attributes:
        host: the value of MASTER_ADDR. If it is loopback, all ranks are on one machine, and the
            store is a folder on it.
        secret: the key of the run's seals (:func:`seal`); only its ranks and their agents have it.
        port: the value of MASTER_PORT: the TCPStore's port or, if the store is a folder, a port on
            which no process listens; 0 if the store is not open yet.
        folder: an absolute path; empty if the store is not a folder.
    """

    host: str
    secret: bytes
    port: int = 0
    folder: str = ""


pack = msgspec.msgpack.Encoder().encode


class Unreadable(ValueError):
    """A message, or the content of a file, is not what its reader expects."""


class MessageReader:
    """Decodes the messages that one side expects.

    Anything else raises :class:`Unreadable`, however it is malformed.

    Args:
        kinds: the expected type, or union of types.
        form: ``msgspec.msgpack`` for messages, ``msgspec.json`` for files that people may read.
    """

    def __init__(self, kinds: Any, form: Any = msgspec.msgpack) -> None:
        self._decode = form.Decoder(kinds).decode

    def __call__(self, data: bytes | memoryview) -> Any:
        """Decode one message.

        Three kinds of errors are converted to :class:`Unreadable`: a UnicodeDecodeError, which is a
        ValueError, for invalid UTF-8; msgspec's own errors, which are ValueErrors only in newer
        versions; and a RecursionError, for a field that is nested too deeply, even an unknown one.
        """
        try:
            return self._decode(data)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise Unreadable(f"{type(error).__name__}: {error}") from None


def seal(key: bytes, header: bytes, body: Any) -> bytes:
    """Return the MAC over a header and a body.

    The header identifies the body and its owner. The body is bytes, or an object that exports
    memory.
    """
    digest = blake2b(len(header).to_bytes(8, "little"), key=key, digest_size=SEAL_BYTES)
    digest.update(header)
    digest.update(body)
    return digest.digest()


def authenticate(key: bytes, frame: bytes, body: Any) -> bytes | None:
    """Return the header after the seal in ``frame``, or None if the seal is wrong.

    The seal covers the header and the body.
    """
    header = frame[SEAL_BYTES:]
    return header if hmac.compare_digest(frame[:SEAL_BYTES], seal(key, header, body)) else None
