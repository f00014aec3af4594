"""Sockets of the delivery: the control channel, the data path, and file descriptors of slabs.

Control is one CURVE ROUTER at the coordinator; only the run's own client key gets in (ZAP, answered by the
same loop). Data goes from worker to rank on one PUSH socket per pair. On one host that is an abstract unix
socket, which no file outlives; between hosts TCP under CURVE, or plain where the user chose so. On either, a
MAC over header and pickle is checked before anything is unpickled: who lacks the run's key gets nothing read.
"""

from __future__ import annotations

import array
import hmac
import os
import secrets
import socket
from collections.abc import Iterator
from hashlib import blake2b
from typing import Any

import zmq
from zmq.utils import z85

from taas.delivery.config import Keys

__all__ = [
    "ControlServer",
    "DataReceiver",
    "FdServer",
    "authenticate",
    "connect_control",
    "connect_data",
    "fetch_fds",
    "new_context",
    "seal",
]

_CONTROL_LIMIT = 64 << 20
_MAC = 16


def new_context() -> zmq.Context[zmq.Socket[bytes]]:
    """Return a context of this process alone; it ends without waiting for unsent messages."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    context.setsockopt(zmq.MAX_SOCKETS, 8192)
    return context


def seal(key: bytes, header: bytes, body: bytes) -> bytes:
    """Return the MAC of one element's header and pickle."""
    digest = blake2b(header, key=key, digest_size=_MAC)
    digest.update(body)
    return digest.digest()


def authenticate(key: bytes, frame: bytes, body: Any) -> bytes | None:
    """Return the header in ``frame`` if its MAC holds, else None."""
    header = frame[_MAC:]
    return header if hmac.compare_digest(frame[:_MAC], seal(key, header, body)) else None


def connect_control(context: Any, endpoint: str, keys: Keys, identity: str) -> zmq.Socket[bytes]:
    """Connect to the coordinator under a name."""
    control: zmq.Socket[bytes] = context.socket(zmq.DEALER)
    control.setsockopt(zmq.IDENTITY, identity.encode())
    control.setsockopt(zmq.LINGER, 1000)
    control.setsockopt(zmq.MAXMSGSIZE, _CONTROL_LIMIT)
    control.set_hwm(0)
    control.curve_serverkey = keys.server_public.encode()
    control.curve_publickey = keys.client_public.encode()
    control.curve_secretkey = keys.client_secret.encode()
    control.connect(endpoint)
    return control


class ControlServer:
    """The coordinator's end: ``poll`` these sockets, answer ZAP, receive and send named messages."""

    def __init__(self, context: Any, host: str, keys: Keys) -> None:
        self._allowed = keys.client_public.encode()
        self.zap: zmq.Socket[bytes] = context.socket(zmq.REP)
        self.zap.setsockopt(zmq.LINGER, 0)
        self.zap.bind("inproc://zeromq.zap.01")
        self.router: zmq.Socket[bytes] = context.socket(zmq.ROUTER)
        self.router.setsockopt(zmq.LINGER, 500)
        self.router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self.router.setsockopt(zmq.ROUTER_HANDOVER, 1)
        self.router.setsockopt(zmq.MAXMSGSIZE, _CONTROL_LIMIT)
        self.router.set_hwm(0)
        self.router.curve_server = True
        self.router.curve_publickey = keys.server_public.encode()
        self.router.curve_secretkey = keys.server_secret.encode()
        port = self.router.bind_to_random_port(f"tcp://{host}")
        self.endpoint = f"tcp://{host}:{port}"

    def answer_zap(self) -> None:
        """Let in, or keep out, the clients that are at the door (RFC 27, ZAP)."""
        while self.zap.poll(0):
            version, request, _, _, _, mechanism, *credentials = self.zap.recv_multipart()
            key = z85.encode(credentials[0]) if mechanism == b"CURVE" and credentials else b""
            known = hmac.compare_digest(key, self._allowed)
            status = (b"200", b"OK", b"peer") if known else (b"400", b"unknown key", b"")
            self.zap.send_multipart([version, request, *status, b""])

    def receive(self, most: int) -> Iterator[tuple[str, bytes]]:
        """Yield up to ``most`` messages that are there, with their senders' names."""
        for _ in range(most):
            try:
                frames = self.router.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            if len(frames) == 2:
                yield frames[0].decode("ascii", "replace"), frames[1]

    def send(self, peer: str, message: bytes) -> bool:
        """Send; False if no such peer is connected."""
        try:
            self.router.send_multipart([peer.encode(), message], zmq.NOBLOCK)
        except zmq.ZMQError:
            return False
        return True

    def close(self) -> None:
        """Close both sockets."""
        self.router.close()
        self.zap.close()


class DataReceiver:
    """A rank's end of the data path. ``address`` and ``key`` are what workers need to connect."""

    def __init__(self, context: Any, *, local: bool, host: str, encrypt: bool) -> None:
        self.socket: zmq.Socket[bytes] = context.socket(zmq.PULL)
        self.socket.set_hwm(0)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.key = b""
        if local:
            self.address = f"ipc://@taas-{secrets.token_hex(16)}"
            self.socket.bind(self.address)
            return
        if encrypt:
            self.key, secret = zmq.curve_keypair()
            self.socket.curve_server = True
            self.socket.curve_publickey, self.socket.curve_secretkey = self.key, secret
        self.socket.setsockopt(zmq.RCVBUF, 4 << 20)
        port = self.socket.bind_to_random_port(f"tcp://{host}")
        self.address = f"tcp://{host}:{port}"


def connect_data(context: Any, address: str, key: bytes, keys: Keys) -> zmq.Socket[bytes]:
    """Connect a worker to one rank."""
    data: zmq.Socket[bytes] = context.socket(zmq.PUSH)
    data.set_hwm(0)
    data.setsockopt(zmq.LINGER, 0)
    if key:
        data.curve_serverkey = key
        data.curve_publickey = keys.client_public.encode()
        data.curve_secretkey = keys.client_secret.encode()
    if address.startswith("tcp"):
        data.setsockopt(zmq.SNDBUF, 4 << 20)
    data.connect(address)
    return data


def _token(keys: Keys) -> bytes:
    return blake2b(b"slabs", key=keys.mac, digest_size=32).digest()


class FdServer:
    """Hands the slabs' descriptors to whoever knows the run's key, over an abstract unix socket.

    Descriptors travel as ancillary data, not as ``/proc/<pid>/fd`` paths: a rank whose storage guard dropped
    its capabilities may no longer look into other processes.
    """

    def __init__(self, keys: Keys, fds: list[int]) -> None:
        self.name = f"taas-{secrets.token_hex(16)}"
        self._token = _token(keys)
        self._fds = fds
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind("\0" + self.name)
        self._listener.listen(64)
        self._listener.setblocking(False)

    def fileno(self) -> int:
        """Readable when somebody asks."""
        return self._listener.fileno()

    def answer(self) -> None:
        """Serve one client; one that is slow or wrong is hung up on."""
        try:
            client, _ = self._listener.accept()
        except BlockingIOError:
            return
        with client:
            client.settimeout(1.0)
            try:
                if hmac.compare_digest(client.recv(32, socket.MSG_WAITALL), self._token):
                    for start in range(0, len(self._fds), 64):
                        socket.send_fds(client, [b"s"], self._fds[start : start + 64])
            except OSError:
                return

    def close(self) -> None:
        """Stop listening."""
        self._listener.close()


def fetch_fds(keys: Keys, name: str, count: int) -> list[int]:
    """Return the descriptors of ``count`` slabs.

    Raises:
        OSError: there is no such server here (another host, another network namespace), or it refused.
    """
    fds: list[int] = []
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        client.settimeout(10.0)
        client.connect("\0" + name)
        client.sendall(_token(keys))
        room = socket.CMSG_LEN(64 * array.array("i").itemsize)
        while len(fds) < count:
            data, ancillary, _, _ = client.recvmsg(1, room, getattr(socket, "MSG_CMSG_CLOEXEC", 0))
            if not data:
                break
            for _, _, raw in ancillary:
                numbers = array.array("i")
                numbers.frombytes(raw[: len(raw) - len(raw) % numbers.itemsize])
                fds.extend(numbers)
    if len(fds) != count:
        for fd in fds:
            os.close(fd)
        raise OSError(f"got {len(fds)} of {count} slabs")
    return fds
