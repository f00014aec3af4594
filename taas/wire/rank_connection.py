"""The socket pair between an agent and a rank, which has no name: nobody else can connect.

A message has its length before it. Descriptors go with it, since a rank behind its wall may not open those of
other processes by ``/proc``. What an agent says never waits for the rank to hear it: a long message is a memory file, of
which the last descriptor is sent, and its length is minus one.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import struct
import threading
from array import array
from collections.abc import Iterator

import msgspec

from taas.wire.framing import WIRE_LIMIT, MessageReader
from taas.wire.ranks import RankSays

NOTICE = signal.SIGRTMIN + 12
"""Asks the main thread of a rank to say that it runs Python code; neither glibc, CUDA nor profilers use it."""
_read_rank = MessageReader(RankSays)
_LENGTH = struct.Struct("!i")
_READ_BYTES, _READS = 1 << 16, 16
"""A dead process has left no more than this: it is more than a socket holds."""
_MOST_DESCRIPTORS = 4
_SHORT = 4096
"""Bytes of a message that the socket takes as a whole, or not at all."""


class RankConnection:
    """The agent's end; it never waits for a rank to hear, or to say all it began.

    Attributes:
        closed: whether one of the two has closed its end.
    """

    def __init__(self, end: socket.socket) -> None:
        self._socket, self._unread = end, bytearray()
        self.closed = False

    def fileno(self) -> int:
        """Return its descriptor; -1 once it is closed."""
        return self._socket.fileno()

    def send(self, message: bytes, *descriptors: int) -> None:
        """Send the rank a message, and with it descriptors of this process.

        A rank that has left hundreds of messages unheard is cut off: :meth:`receive` finds the connection closed.

        Raises:
            OSError: there is no memory or descriptor for a long one.
        """
        with contextlib.ExitStack() as stack:
            said = _LENGTH.pack(len(message)) + message
            if len(said) > _SHORT:
                file = stack.enter_context(os.fdopen(os.memfd_create("taas-message"), "wb"))
                file.write(message)
                file.flush()
                said, descriptors = _LENGTH.pack(-1), (*descriptors, file.fileno())
            rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", descriptors))
            try:  # socket.send_fds has flags, and does not use them
                self._socket.sendmsg([said], [rights] if descriptors else [], socket.MSG_DONTWAIT)
            except (BrokenPipeError, ConnectionResetError):  # killed: its sentinel says so
                pass
            except BlockingIOError:
                self._socket.shutdown(socket.SHUT_RDWR)

    def receive(self) -> list[RankSays]:
        """Return the whole messages that are there; closes it when the rank has, or says what no rank says."""
        try:
            for _ in range(_READS):
                data = self._socket.recv(_READ_BYTES, socket.MSG_DONTWAIT)
                self._unread += data
                if not data:
                    self.close()
                    break
        except BlockingIOError:
            pass
        except OSError:  # it was killed
            self.close()
        try:
            return [_read_rank(message) for message in self._whole()]
        except msgspec.DecodeError:
            self.close()
            return []

    def _whole(self) -> Iterator[bytes]:
        while len(self._unread) >= _LENGTH.size:
            [size] = _LENGTH.unpack_from(self._unread)
            end = _LENGTH.size + size
            if not 0 <= size <= WIRE_LIMIT:
                raise msgspec.DecodeError(f"a message of {size} bytes")
            if len(self._unread) < end:
                return
            message = bytes(self._unread[_LENGTH.size : end])
            del self._unread[:end]
            yield message

    def close(self) -> None:
        """Close it. Twice is harmless."""
        self.closed = True
        self._socket.close()


class AgentConnection:
    """The rank's end; it waits for whole messages."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self._sending = threading.RLock()  # a handler of signals may send, too

    def fileno(self) -> int:
        """Return its descriptor."""
        return self._socket.fileno()

    def send(self, message: bytes) -> None:
        """Send the agent a message; any thread may."""
        with self._sending:
            self._socket.sendall(_LENGTH.pack(len(message)) + message)

    def receive(self) -> tuple[bytes, list[int]]:
        """Return the next message, and the descriptors that came with it.

        Raises:
            EOFError: the agent is gone.
        """
        header, descriptors, _, _ = socket.recv_fds(
            self._socket, _LENGTH.size, _MOST_DESCRIPTORS, socket.MSG_CMSG_CLOEXEC
        )
        [size] = _LENGTH.unpack(header + self._read(_LENGTH.size - len(header)))
        if size >= 0:
            return self._read(size), descriptors
        with os.fdopen(descriptors.pop(), "rb") as file:
            file.seek(0)  # its place is the sender's, too
            return file.read(), descriptors

    def _read(self, size: int) -> bytes:
        data = bytearray()
        while len(data) < size:
            some = self._socket.recv(size - len(data))
            if not some:
                raise EOFError("the agent is gone")
            data += some
        return bytes(data)
