"""The socket pair between an agent and a rank, which has no name: nobody else can connect.

A message is one packet (unix(7), SOCK_SEQPACKET): no half of one is ever seen. Descriptors go with it, since a rank behind
its wall may not open those of other processes by ``/proc``. A long message is a memory file, the last of its descriptors.
A rank waits for what its agent says, and until there is room for what it says; the agent never waits.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
from array import array

import msgspec

from taas.wire.framing import WIRE_LIMIT, MessageReader
from taas.wire.ranks import RankSays

NOTICE = signal.SIGRTMIN + 12
"""Asks the main thread of a rank to say that it runs Python code; neither glibc, CUDA nor profilers use it."""
_read_rank = MessageReader(RankSays)
_LONG = b"\xc1"
"""The packet of a long message: no message in MessagePack has this byte."""
_SHORT = 4096
"""Bytes of a packet, at most."""
_READS = 1024
"""A dead process has left no more packets than this: they are more than a socket holds."""
_MOST_DESCRIPTORS = 4


def socket_pair() -> tuple[socket.socket, socket.socket]:
    """Return the two ends of a connection."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def send(end: socket.socket, message: bytes, *descriptors: int, flags: int = 0) -> None:
    """Send a message, and with it descriptors of this process; any thread may, and a handler of signals."""
    with contextlib.ExitStack() as stack:
        if len(message) > _SHORT:
            file = stack.enter_context(os.fdopen(os.memfd_create("taas-message"), "wb"))
            file.write(message)
            file.flush()
            message, descriptors = _LONG, (*descriptors, file.fileno())
        rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", descriptors))
        end.sendmsg([message], [rights] if descriptors else [], flags)


def receive(end: socket.socket, flags: int = 0) -> tuple[bytes, list[int]]:
    """Return the next message, and the descriptors that came with it.

    Raises:
        EOFError: the other end is closed, and all that was said there was heard.
        OSError: there is no descriptor left.
    """
    descriptors = array("i")
    room = socket.CMSG_SPACE(_MOST_DESCRIPTORS * descriptors.itemsize)
    try:
        message, rights, _, _ = end.recvmsg(_SHORT, room, flags | socket.MSG_CMSG_CLOEXEC)
    except ConnectionResetError:  # said once where it was closed with messages unheard
        return receive(end, flags)
    for _, _, data in rights:
        descriptors.frombytes(data)
    if not message:
        raise EOFError("the other end is closed")
    if message != _LONG:
        return message, descriptors.tolist()
    if not descriptors:
        raise OSError("a message could not be taken: too many files are open")
    with os.fdopen(descriptors.pop(), "rb") as file:
        file.seek(0)  # its place is the sender's, too
        return file.read(WIRE_LIMIT), descriptors.tolist()


# ---------------------------------------------------------------- the agent's end


def tell(rank: socket.socket, message: bytes, *descriptors: int) -> None:
    """Send a rank a message. One that has left hundreds unheard is cut off: :func:`hear` finds the connection closed.

    Raises:
        OSError: there is no memory or descriptor for a long one.
    """
    try:
        send(rank, message, *descriptors, flags=socket.MSG_DONTWAIT)
    except BlockingIOError:
        rank.shutdown(socket.SHUT_RDWR)
    except ConnectionError:  # killed: its sentinel says so
        pass


def hear(rank: socket.socket) -> tuple[list[RankSays], bool]:
    """Return the messages that are there, and whether there will be no others: it is closed, or said what no rank says."""
    said: list[RankSays] = []
    try:
        for _ in range(_READS):
            message, descriptors = receive(rank, socket.MSG_DONTWAIT)
            for descriptor in descriptors:  # of no use here
                os.close(descriptor)
            said.append(_read_rank(message))
    except BlockingIOError:
        return said, False
    except (EOFError, OSError, msgspec.DecodeError):
        return said, True
    return said, False
