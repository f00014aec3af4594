"""Both ends of an encrypted connection: the server proves its key, and checks its clients' keys.

The protocol is CURVE (https://rfc.zeromq.org/spec/26/) with a key pair for each peer. The server's
ZAP handler (https://rfc.zeromq.org/spec/27/) has no thread of its own: the loop that reads its
socket also answers it. Between hosts, a connection whose peer sends no heartbeat is closed. On one
host, all sockets of a process and its children are in one private folder.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from typing import Any

import zmq
from zmq.utils import z85

from taas.protocol import deadlines
from taas.protocol.framing import WIRE_LIMIT

_AT_ONCE = 64
PREFIX = "taas-"
LONGEST_BASE = 45
"""The folder contains the folders of agents, and these contain multiprocessing's:
``taas-…/agent-12/pymp-…/listener-…``.
"""
_INSTEAD = ("/tmp", "/dev/shm")  # noqa: S108  a private folder is made there

Socket = zmq.Socket[Any]


def make_short_folder() -> str:
    """Make the folder for sockets: in TMPDIR, unless that path is too long.

    The TMPDIR of Slurm and of pytest is too long: the path of a UNIX socket has at most 107 bytes
    (unix(7)). This function is sent to VMs by value.

    Raises:
        OSError: the folder cannot be made anywhere; the message lists the attempts.
    """
    refused = []
    for base in dict.fromkeys((tempfile.gettempdir(), *_INSTEAD)):
        try:
            base.encode()  # messages contain it
        except UnicodeEncodeError:
            refused.append(f"{base!a} is not UTF-8")
            continue
        if len(os.fsencode(base)) > LONGEST_BASE:
            refused.append(f"{base} is too long for the path of a socket")
            continue
        try:
            return tempfile.mkdtemp(prefix=PREFIX, dir=base)
        except OSError as error:
            refused.append(f"{base}: {error.strerror}")
    raise OSError(
        f"no folder for sockets can be made ({'; '.join(refused)}). Set TMPDIR to a folder that you"
        f" can write, with a path of {LONGEST_BASE} bytes at most"
    )


class Gate:
    """Decides which clients may connect to the servers of a context.

    Call ``answer`` when ``socket`` is readable.

    Make the gate before the servers listen. ``allows`` returns whether a client with this public
    CURVE key, or with this PLAIN password, may connect.
    """

    def __init__(self, context: Any, allows: Callable[[bytes], bool]) -> None:
        self._allows = allows
        self.socket: Socket = context.socket(zmq.REP)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.bind("inproc://zeromq.zap.01")

    def answer(self) -> None:
        """Decide about clients that want to connect, up to a fixed number of them."""
        for _ in range(_AT_ONCE):
            if not self.socket.poll(0):
                return
            version, request, _, _, _, mechanism, *credentials = self.socket.recv_multipart()
            shown = b""
            if mechanism == b"CURVE" and credentials:
                shown = z85.encode(credentials[0])
            elif mechanism == b"PLAIN" and len(credentials) == 2:
                shown = credentials[1]
            user = shown if mechanism == b"CURVE" else b"peer"
            status = (b"200", b"OK", user) if self._allows(shown) else (b"400", b"unknown key", b"")
            self.socket.send_multipart([version, request, *status, b""])


def serve_curve(socket: Any, public: bytes, secret: bytes) -> None:
    """Let a socket authenticate its clients; call this before the socket listens."""
    socket.curve_server = True
    socket.curve_publickey, socket.curve_secretkey = public, secret


def show_key(socket: Any, server: str | bytes, public: str | bytes, secret: str | bytes) -> None:
    """Let a socket authenticate itself to a server with this key; call it before connecting."""
    socket.curve_serverkey, socket.curve_publickey, socket.curve_secretkey = (
        key.encode() if isinstance(key, str) else key for key in (server, public, secret)
    )


def make_router(context: Any, public: bytes, secret: bytes) -> Socket:
    """Return a server's socket for control messages.

    Sending to a peer that cannot be reached is an error.
    """
    router: Socket = context.socket(zmq.ROUTER)
    serve_curve(router, public, secret)
    router.setsockopt(zmq.MAXMSGSIZE, WIRE_LIMIT)
    router.setsockopt(zmq.ROUTER_MANDATORY, 1)
    router.set_hwm(0)  # the senders themselves limit the messages in transit
    return router


def make_dealer(
    context: Any, server: str | bytes, public: str | bytes, secret: str | bytes
) -> Socket:
    """Return a client's socket for control messages."""
    dealer: Socket = context.socket(zmq.DEALER)
    show_key(dealer, server, public, secret)
    dealer.setsockopt(zmq.MAXMSGSIZE, WIRE_LIMIT)
    dealer.set_hwm(0)  # the senders themselves limit the messages in transit
    return dealer


def set_heartbeat(socket: Socket) -> None:
    """Let zmq close later connections of this socket if their peers are silent.

    zmq's own thread sends and answers heartbeats (https://rfc.zeromq.org/spec/37/), even while the
    process is busy.
    """
    socket.set(zmq.HEARTBEAT_IVL, int(deadlines.BEAT * 1000))
    socket.set(zmq.HEARTBEAT_TIMEOUT, int(deadlines.SILENCE * 1000))


class SupervisorLink:
    """Detects that the connection to a remote supervisor is gone, or was never made.

    Make this object before the socket connects. A broken connection is not used again, because
    messages were lost with it.
    """

    def __init__(self, socket: Socket, endpoint: str) -> None:
        self._monitor = socket.get_monitor_socket(
            zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_FAILED_AUTH
        )
        self._socket, self._endpoint = socket, endpoint
        self._made = False
        self._until = time.monotonic() + deadlines.CONNECT

    @property
    def source(self) -> Socket:
        """Return the socket that becomes readable when there is an event."""
        return self._monitor

    def wait(self) -> float | None:
        """Return the seconds until connecting is given up; None once it has succeeded."""
        return None if self._made else max(0.0, self._until - time.monotonic())

    def gone(self) -> str:
        """Read the events; return why the supervisor is gone for good, or an empty string."""
        # imported here, because it imports asyncio
        from zmq.utils.monitor import recv_monitor_message

        while self._monitor.poll(0):
            event = recv_monitor_message(self._monitor)["event"]
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._made = True
            elif self._made or event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
                return "the connection to the notebook's machine broke"
        if not self._made and time.monotonic() > self._until:
            return (
                f"the notebook's machine could not be reached at {self._endpoint} within "
                f"{deadlines.CONNECT:.0f} s: a firewall between them?"
            )
        return ""

    def close(self) -> None:
        """Stop monitoring the connection."""
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
