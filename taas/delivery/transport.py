"""The channels of a delivery: control, data, the slabs' descriptor, the coordinator's pipes.

Control is one CURVE ROUTER at the coordinator; each peer has a key pair, and can only send under
its own name. Data goes from worker to rank on one PUSH socket for each pair. On one host all of
these are UNIX sockets in a private folder; between hosts they are TCP with CURVE, or PLAIN for
data if the user chose that. In both cases a MAC over header and pickle is checked before anything
is unpickled (``taas.protocol.framing``).
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import os
import socket
from collections.abc import Iterator
from hashlib import blake2b
from typing import Any

import zmq

from taas.base.poll_loop import Child
from taas.delivery.slab import Slabs
from taas.protocol.curve import Gate, make_dealer, make_router, serve_curve, show_key
from taas.protocol.delivery_messages import Peer, Report, Result, Ticket, new_identity, peer_named
from taas.protocol.delivery_orders import DeliveryConfig, Keys
from taas.protocol.framing import Message, MessageReader, pack

_SLABS = "slabs"


def new_context() -> zmq.Context[zmq.Socket[bytes]]:
    """Return a context for this process alone; it ends without waiting for unsent messages."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    context.setsockopt(zmq.MAX_SOCKETS, 8192)
    return context


def _bind(server: zmq.Socket[bytes], folder: str, name: str, host: str) -> str:
    """Let a socket listen in the folder, or without one at the host's address.

    Return the endpoint.
    """
    if folder:
        endpoint = f"ipc://{folder}/{name}"
        server.bind(endpoint)
        return endpoint
    return f"tcp://{host}:{server.bind_to_random_port(f'tcp://{host}')}"


class ControlServer:
    """The coordinator's end of the control channel.

    Poll its router and its gate's socket; messages come and go with their peers' names.
    """

    def __init__(self, context: Any, config: DeliveryConfig) -> None:
        keys = config.keys
        self._holders = {public: holder for holder, (public, _) in keys.clients.items()}
        self._routes: dict[Peer, bytes] = {}
        self.gate = Gate(context, lambda shown: shown.decode() in self._holders)
        self.router = make_router(context, keys.server_public.encode(), keys.server_secret.encode())
        self.router.setsockopt(zmq.LINGER, 500)
        self.router.setsockopt(zmq.ROUTER_HANDOVER, 1)
        self.endpoint = _bind(self.router, config.folder, "control", config.host)

    def receive(self, most: int) -> Iterator[tuple[Peer, bytes]]:
        """Yield up to ``most`` waiting messages with their senders, whose keys were checked."""
        for _ in range(most):
            try:
                name, *frames = self.router.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            with contextlib.suppress(ValueError):  # not a peer of this run
                peer = peer_named(name.bytes)
                if len(frames) == 1 and peer.holder == self._holders[str(frames[0].get("User-Id"))]:
                    self._routes[peer] = name.bytes
                    yield peer, frames[0].bytes

    def send(self, peer: Peer, message: Message | list[Ticket]) -> bool:
        """Send a message; return False if no such peer is connected."""
        if peer not in self._routes:
            return False
        try:
            self.router.send_multipart([self._routes[peer], pack(message)], zmq.NOBLOCK)
        except zmq.ZMQError:
            return False
        return True


class ControlClient:
    """A peer's connection to the coordinator.

    ``hears`` is the union of messages that the coordinator sends it.
    """

    def __init__(self, context: Any, config: DeliveryConfig, name: Peer, hears: Any) -> None:
        keys = config.keys
        self.socket = make_dealer(context, keys.server_public, *keys.clients[name.holder])
        self.socket.setsockopt(zmq.IDENTITY, new_identity(name))
        self.socket.setsockopt(zmq.LINGER, 1000)
        self.socket.connect(config.endpoint)
        self._read = MessageReader(hears)

    def send(self, message: Message | list[Result]) -> None:
        """Send a message to the coordinator."""
        self.socket.send(pack(message))

    def receive(self, flags: int = 0) -> Any:
        """Return the next message; wait for it, unless ``flags`` are ``zmq.NOBLOCK``."""
        return self._read(self.socket.recv(flags))


@contextlib.contextmanager
def connect_control(config: DeliveryConfig, name: Peer, hears: Any) -> Iterator[ControlClient]:
    """Open a connection to the coordinator in a separate context.

    The arguments are those of :class:`ControlClient`.
    """
    with new_context() as context:
        control = ControlClient(context, config, name, hears)
        with control.socket:
            yield control


class DataReceiver:
    """A rank's end of the data path.

    On TCP a worker has to present a secret to connect: the server's public key, which only peers
    have; without encryption, a password. This keeps other processes from filling this one's
    memory.
    """

    def __init__(self, context: Any, config: DeliveryConfig, rank: int, host: str) -> None:
        folder = config.folder
        self.socket: zmq.Socket[bytes] = context.socket(zmq.PULL)
        self.socket.set_hwm(0)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.key = b""  # workers need it to connect, in addition to the address
        self.gate: Gate | None = None  # answer it, if there is one; workers wait for it
        if not folder:
            self.socket.setsockopt(zmq.RCVBUF, 4 << 20)
        if not folder and config.encrypt:
            self.key, secret = zmq.curve_keypair()
            serve_curve(self.socket, self.key, secret)
        elif not folder:
            password = _password(config.keys)
            self.gate = Gate(context, lambda shown: hmac.compare_digest(shown, password))
            self.socket.plain_server = True
        self.address = _bind(self.socket, folder, f"rank-{rank}", host)


def _password(keys: Keys) -> bytes:
    return blake2b(b"password", key=keys.mac).hexdigest().encode()


def connect_data(context: Any, address: str, key: bytes, keys: Keys) -> zmq.Socket[bytes]:
    """Connect a worker to one rank."""
    data: zmq.Socket[bytes] = context.socket(zmq.PUSH)
    data.set_hwm(0)
    data.setsockopt(zmq.LINGER, 0)
    if key:
        show_key(data, key, *zmq.curve_keypair())
    elif address.startswith("tcp"):
        data.plain_username, data.plain_password = b"worker", _password(keys)
    if address.startswith("tcp"):
        data.setsockopt(zmq.SNDBUF, 4 << 20)
    data.connect(address)
    return data


class SlabServer:
    """Sends the slabs' descriptor to every process that connects; its folder is private.

    The descriptor is sent as ancillary data, because a rank that has given up its capabilities may
    not open ``/proc/<pid>/fd``.
    """

    def __init__(self, folder: str, fd: int) -> None:
        self._fd = fd
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(f"{folder}/{_SLABS}")
        self._listener.listen(1024)
        self._listener.setblocking(False)

    def fileno(self) -> int:
        """Return a descriptor that is readable when a process connects."""
        return self._listener.fileno()

    def answer(self) -> None:
        """Serve one client without waiting for it; unread data stays in its socket."""
        with contextlib.suppress(OSError):
            client, _ = self._listener.accept()
            with client:
                client.setblocking(False)
                socket.send_fds(client, [b"s"], [self._fd])


def map_slabs(folder: str) -> Slabs | None:
    """Map all slabs; return None if they are on another host, or empty.

    A limit on file sizes makes them empty. Batches are then sent as frames.
    """
    if not folder:
        return None
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        client.settimeout(10.0)
        client.connect(f"{folder}/{_SLABS}")
        found = socket.recv_fds(client, 1, 1, socket.MSG_CMSG_CLOEXEC)[1]
    if not found:  # the system drops a descriptor if the process has too many
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
    [fd] = found
    try:
        return Slabs(fd) if os.fstat(fd).st_size else None
    finally:
        os.close(fd)


class CoordinatorProcess(Child):
    """A run's coordinator as a child process.

    The first line to send it is its DeliveryConfig.
    """

    def __init__(self) -> None:
        environ = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        super().__init__(["-P", "-m", "taas.delivery.coordinator"], Report, env=environ)
