"""The supervisor's control socket, for clients and agents: the keys it lets in, and the way back to each peer."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import zmq

from taas.runs.places import ProcessMark
from taas.supervisor.connections import CONNECTION, SOCKET, Connection, write_connection
from taas.wire import deadlines
from taas.wire.curve import Gate, make_router, set_heartbeat
from taas.wire.framing import Message, pack

_AT_ONCE = 64


class ControlSocket:
    """A CURVE socket in a folder that nobody else enters, and on addresses of other machines where an engine asks for them.

    Args:
        client_key: the kernel's public key.
        kernel: whose supervisor this is.
        folder: where the socket is made.

    Attributes:
        up: what clients have to know to come in; the kernel has a key of its own.
        socket, gate: what to poll.
    """

    def __init__(self, client_key: str, kernel: ProcessMark, folder: Path) -> None:
        self._context = zmq.Context()
        visitor, visitor_secret = zmq.curve_keypair()
        self._clients = {client_key, visitor.decode()}
        self._allowed = set(self._clients)
        self.gate = Gate(self._context, lambda key: key.decode() in self._allowed)
        public, secret = zmq.curve_keypair()
        self.socket = make_router(self._context, public, secret)
        endpoint = f"ipc://{folder / SOCKET}"
        self.socket.bind(endpoint)
        self.up = Connection(
            endpoint=endpoint,
            server_key=public.decode(),
            public_key=visitor.decode(),
            secret_key=visitor_secret.decode(),
            supervisor=ProcessMark.of(os.getpid()),
            kernel=kernel,
        )
        self._connection_file = write_connection(self.up)
        (folder / CONNECTION).symlink_to(self._connection_file.absolute())
        self._routes: dict[str, bytes] = {}
        self._endpoints: dict[str, str] = {}
        self._unreachable: dict[str, float] = {}

    def allow(self, key: str) -> None:
        """Let an agent in."""
        self._allowed.add(key)

    def forbid(self, key: str) -> None:
        """Let an agent in no more."""
        self._allowed.discard(key)

    def is_client(self, key: str) -> bool:
        """Whether it is the kernel's key, or a visitor's who could read the connection file."""
        return key in self._clients

    def receive(self) -> Iterator[tuple[str, bytes, memoryview]]:
        """Give what has come in, up to a number: then the other sources are looked at.

        Yields:
            The public key of who sent it; the way back, also for one that has no key of its own; the message, packed.
        """
        for _ in range(_AT_ONCE):
            try:
                route, *_, frame = self.socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            key = str(frame.get("User-Id"))
            self._routes[key] = route.bytes
            yield key, route.bytes, frame.buffer

    def send(self, key: str, message: Message) -> None:
        """Send a message to the peer with a key, if it has come in."""
        route = self._routes.get(key)
        if route is not None and not self.reply(route, message):
            self._unreachable.setdefault(key, time.monotonic())

    def reply(self, route: bytes, message: Message) -> bool:
        """Send a message; returns whether there is a way to the peer, who may have left."""
        try:
            self.socket.send_multipart([route, pack(message)])
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            return False
        return True

    def is_out_of_reach(self, key: str) -> bool:
        """Whether messages have not reached a peer for longer than its last word may take."""
        since = self._unreachable.get(key)
        return since is not None and time.monotonic() > since + deadlines.LAST_WORD

    def listen(self, host: str) -> str:
        """Listen on an address that other machines reach; peers that connect there have to show signs of life."""
        if host not in self._endpoints:
            set_heartbeat(self.socket)
            port = self.socket.bind_to_random_port(f"tcp://{host}")
            self._endpoints[host] = f"tcp://{host}:{port}"
        return self._endpoints[host]

    def hide(self) -> None:
        """Take the file away by which visitors find the way."""
        self._connection_file.unlink(missing_ok=True)

    def close(self) -> None:
        """Send what is on its way, and close."""
        self.socket.close(linger=1000)
        self.gate.socket.close()
        self._context.term()
