"""How a supervisor is reached: its socket folder, its connection file and both ends of the socket.

The connection file (mode 0600) holds a CURVE key pair that the supervisor accepts from clients.
Anyone who can read the file may stop the runs; messages from anyone else are dropped. The
connection files of Jupyter kernels work in the same way. A supervisor removes its folder and its
connection file when it ends; those of a supervisor that was killed are removed by the next one.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import zmq

from taas.base.linux import remove_tree
from taas.base.places import ProcessMark, runtime_folder, write_private
from taas.errors import EngineError
from taas.protocol import deadlines
from taas.protocol.clients import ClientHears
from taas.protocol.curve import PREFIX, Gate, make_dealer, make_router, set_heartbeat
from taas.protocol.framing import Message, MessageReader, Unreadable, pack
from taas.protocol.records import RunRecord

SOCKET, CONNECTION = "supervisor", "connection"
"""Entries of the folder: the socket on which the supervisor listens, and a link to the connection
file by which clients find it.
"""
_AT_ONCE = 64


class Connection(msgspec.Struct, frozen=True, kw_only=True):
    """The data that a client needs to connect to a supervisor."""

    endpoint: str
    server_key: str
    public_key: str
    secret_key: str
    supervisor: ProcessMark
    kernel: ProcessMark


_read_connection = MessageReader(Connection, msgspec.json)


def write_connection(connection: Connection) -> Path:
    """Write a supervisor's connection file, and remove the files of supervisors that have ended."""
    all_connections()
    # another machine that shares the folder may have a process with the same id
    name = f"{connection.supervisor.pid}-{os.urandom(3).hex()}.json"
    path = runtime_folder("supervisors") / name
    write_private(path, msgspec.json.encode(connection))
    return path


def all_connections() -> list[Connection]:
    """Return the connections of all living supervisors, and remove the files of killed ones."""
    found = []
    for path in runtime_folder("supervisors").glob("*.json"):
        with contextlib.suppress(OSError, Unreadable):  # the supervisor is just ending
            connection: Connection = _read_connection(path.read_bytes())
            if connection.supervisor.lives:
                found.append(connection)
            elif connection.supervisor.has_left(path):
                path.unlink(missing_ok=True)
    return found


def hold_folder(folder: Path) -> None:
    """Lock the folder for the life of this process, which shows that its supervisor is alive.

    tmpfiles.d(5), too, leaves a locked folder alone.
    """
    fcntl.flock(os.open(folder, os.O_RDONLY | os.O_CLOEXEC), fcntl.LOCK_SH)


def remove_folders_left(beside: Path) -> None:
    """Remove the folders of supervisors that were killed.

    A living supervisor locks its own folder before it listens there.
    """
    for folder in beside.parent.glob(f"{PREFIX}*"):
        # the folder belongs to another user, is not a folder, or was removed by another process
        with contextlib.suppress(OSError):
            _remove_if_left(folder)


def _remove_if_left(folder: Path) -> None:
    """Remove a folder if it is this user's and a supervisor's, and no process holds its lock.

    TMPDIR is writable by everyone: the path may be, or may be swapped for, a link, a FIFO or
    another user's folder with arbitrary content. The folder is therefore opened as a directory,
    without following links and without blocking, and the checks are made on the open descriptor and
    not on the path.

    Raises:
        OSError: one of these conditions is not met.
    """
    fd = os.open(
        folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    )
    try:
        if os.fstat(fd).st_uid != os.geteuid():
            return
        # the folder of an agent on a cluster node has no such socket, and is not locked
        os.stat(SOCKET, dir_fd=fd, follow_symlinks=False)
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        remove_tree(folder)
    finally:
        os.close(fd)


def connection_of(record: RunRecord) -> Connection:
    """Return the connection to the supervisor of a run that has not ended.

    Raises:
        EngineError: the supervisor cannot be found.
    """
    for connection in all_connections():
        if connection.supervisor == record.supervisor:
            return connection
    raise EngineError(
        f"the supervisor of run {record.name} (process {record.supervisor.pid}) cannot be found: it"
        " has just ended, or was started with another JUPYTER_RUNTIME_DIR. `%taas status` shows"
        " what goes on."
    )


class Wire:
    """A client's connection to a supervisor, authenticated with the given key pair."""

    def __init__(self, connection: Connection, public: str | bytes, secret: str | bytes) -> None:
        self._context = zmq.Context()
        self._socket = make_dealer(self._context, connection.server_key, public, secret)
        self._socket.connect(connection.endpoint)
        self._read = MessageReader(ClientHears)

    def say(self, message: Message) -> None:
        """Send a message."""
        self._socket.send(pack(message))

    def _hang_up(self, linger_ms: int) -> None:
        self._socket.close(linger=linger_ms)
        self._context.term()


class Visit(Wire):
    """A short exchange with a supervisor; a context manager.

    Raises:
        EngineError: the supervisor's socket is not visible to this process.
    """

    def __init__(self, connection: Connection) -> None:
        path = connection.endpoint.removeprefix("ipc://")
        if not os.path.exists(path):  # noqa: PTH110  also False if the folder may not be entered
            raise EngineError(
                f"the supervisor (process {connection.supervisor.pid}) listens at {path}, which is"
                " not there for this process: it sees another /tmp (systemd's PrivateTmp, a"
                " container). Use a terminal of Jupyter's own."
            )
        super().__init__(connection, connection.public_key, connection.secret_key)

    def __enter__(self) -> Visit:
        return self

    def __exit__(self, *_: object) -> None:
        self._hang_up(2000)

    def ask(self, message: Message, kind: type[Any]) -> Any:
        """Send a message, and return the reply, which is of type ``kind``.

        Raises:
            EngineError: no reply came in time.
        """
        self.say(message)
        deadline = time.monotonic() + deadlines.SUPERVISOR_ANSWERS
        while (left := deadline - time.monotonic()) > 0:
            if self._socket.poll(int(left * 1000) + 1):
                answer = self._read(self._socket.recv())
                if isinstance(answer, kind):
                    return answer
        raise EngineError(
            f"the supervisor did not answer within {deadlines.SUPERVISOR_ANSWERS:.0f} s. `taas"
            " doctor` looks for the cause."
        )


class ControlSocket:
    """The supervisor's CURVE socket.

    It listens in a folder that only this user can enter and, at an engine's request, on addresses
    that other machines can reach.

    Attributes:
        up: the data that a client needs to connect. The key pair in it is for visitors; the kernel
            has its own.
        clients: the public keys of the kernel and of visitors (clients that read the connection
            file).
        agents: the public keys of the agents that may connect.
        outgoing: messages that have not been sent yet, each with the key of its receiver.
    """

    def __init__(self, client_key: str, kernel: ProcessMark, folder: Path) -> None:
        self._context = zmq.Context()
        visitor, visitor_secret = zmq.curve_keypair()
        self.clients, self.agents = {client_key, visitor.decode()}, set[str]()
        self.gate = Gate(self._context, lambda key: key.decode() in self.clients | self.agents)
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
        self.outgoing: deque[tuple[str, Message]] = deque()
        self._routes: dict[str, bytes] = {}
        self._endpoints: dict[str, str] = {}
        self._unreachable: dict[str, float] = {}

    def receive(self) -> Iterator[tuple[str, bytes, memoryview]]:
        """Yield received messages: the sender's key, the route, and the message, still packed.

        At most ``_AT_ONCE`` messages are yielded in one call.
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
        """Send a message to the peer with this key, if that peer has connected.

        Messages to clients are sent at once, messages to agents by :meth:`flush`.
        """
        if key in self.clients:
            self._send(key, message)
        else:
            self.outgoing.append((key, message))

    def flush(self, seconds: float = float("inf")) -> None:
        """Send outgoing messages for at most ``seconds``, since there may be a thousand agents."""
        until = time.monotonic() + seconds
        while self.outgoing and time.monotonic() < until:
            self._send(*self.outgoing.popleft())

    def _send(self, key: str, message: Message) -> None:
        route = self._routes.get(key)
        if route is not None and not self.reply(route, message):
            self._unreachable.setdefault(key, time.monotonic())

    def reply(self, route: bytes, message: Message) -> bool:
        """Send a message to a route; return whether the route leads to a connected peer."""
        try:
            self.socket.send_multipart([route, pack(message)])
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            return False
        return True

    def is_out_of_reach(self, key: str) -> bool:
        """Return whether a peer has been unreachable for longer than its last message may take."""
        since = self._unreachable.get(key)
        return since is not None and time.monotonic() > since + deadlines.LAST_WORD

    def listen(self, host: str) -> str:
        """Listen on an address that other machines can reach; return the endpoint.

        Peers that connect to it have to send heartbeats.
        """
        if host not in self._endpoints:
            set_heartbeat(self.socket)
            port = self.socket.bind_to_random_port(f"tcp://{host}")
            self._endpoints[host] = f"tcp://{host}:{port}"
        return self._endpoints[host]

    def hide(self) -> None:
        """Remove the connection file, by which visitors find this process."""
        self._connection_file.unlink(missing_ok=True)

    def close(self) -> None:
        """Send the outgoing messages, and close the socket."""
        self.flush()
        self.socket.close(linger=1000)
        self.gate.socket.close()
        self._context.term()
