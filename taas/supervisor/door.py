"""The supervisor's door: one socket for clients and agents, the keys it lets in, and the way back to each peer."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from typing import NamedTuple

import zmq
from zmq.auth.thread import ThreadAuthenticator

from taas.connections import Connection, write_connection
from taas.heartbeat import LAST_WORD_SECONDS, set_heartbeat
from taas.messages.wire import WIRE_LIMIT, Message, pack
from taas.records import ProcessMark
from taas.supervised import SupervisorUp

_AT_ONCE = 64


class Letter(NamedTuple):
    """What came in.

    Attributes:
        key: public key of who sent it.
        route: the way back, also for one that has no key of its own.
        data: the message, packed.
    """

    key: str
    route: bytes
    data: memoryview


class Door:
    """A CURVE socket on loopback, and on addresses that other machines reach where an engine asks for them.

    Attributes:
        up: what the kernel has to know to come in.
        socket: what to poll.
    """

    def __init__(self, client_key: str, kernel: ProcessMark) -> None:
        self._context = zmq.Context()
        visitor, visitor_secret = zmq.curve_keypair()
        self._clients = {client_key, visitor.decode()}
        self._allowed = set(self._clients)
        self._auth = ThreadAuthenticator(self._context)
        self._auth.start()
        self._auth.configure_curve_callback("*", self)
        public, secret = zmq.curve_keypair()
        self.socket = self._context.socket(zmq.ROUTER)
        self.socket.curve_server = True
        self.socket.curve_publickey, self.socket.curve_secretkey = public, secret
        self.socket.set(zmq.MAXMSGSIZE, WIRE_LIMIT)
        self.socket.set_hwm(0)  # credits bound what is on its way
        port = self.socket.bind_to_random_port("tcp://127.0.0.1")
        self.up = SupervisorUp(os.getpid(), f"tcp://127.0.0.1:{port}", public.decode())
        self._connection_file = write_connection(
            Connection(
                endpoint=self.up.endpoint,
                server_key=self.up.server_key,
                public_key=visitor.decode(),
                secret_key=visitor_secret.decode(),
                supervisor=ProcessMark.of(os.getpid()),
                kernel=kernel,
            )
        )
        self._routes: dict[str, bytes] = {}
        self._endpoints: dict[str, str] = {}
        self.socket.set(zmq.ROUTER_MANDATORY, 1)  # a remote agent out of reach is heard of by sending
        self._unreachable: dict[str, float] = {}

    def callback(self, domain: str, key: bytes) -> bool:
        """Decide, for zmq's authenticator, whether a public key may connect."""
        del domain
        name = zmq.utils.z85.encode(key).decode() if len(key) == 32 else key.decode()
        return name in self._allowed

    def allow(self, key: str) -> None:
        """Let an agent in."""
        self._allowed.add(key)

    def forbid(self, key: str) -> None:
        """Let an agent in no more."""
        self._allowed.discard(key)

    def is_client(self, key: str) -> bool:
        """Whether it is the kernel's key, or a visitor's who could read the connection file."""
        return key in self._clients

    def letters(self) -> Iterator[Letter]:
        """Give what has come in, up to a number: then the other sources are looked at."""
        for _ in range(_AT_ONCE):
            try:
                route, frame = self.socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            key = str(frame.get("User-Id"))
            self._routes[key] = route.bytes
            yield Letter(key, route.bytes, frame.buffer)

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
        return since is not None and time.monotonic() > since + LAST_WORD_SECONDS

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
        self._auth.stop()
        self._context.term()
