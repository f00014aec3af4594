"""The way to a supervisor: its folder of sockets, its connection file, and both ends of the socket.

The file, 0600, holds a CURVE key pair that the supervisor accepts as a client's: whoever can read
the file may stop the runs, and nobody else is heard. Kernels' connection files work the same way. A
supervisor removes both at its end; the next one removes what a killed one has left.
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
"""In the folder, where the supervisor listens, and a link to the file by which clients find it."""
_AT_ONCE = 64


class Connection(msgspec.Struct, frozen=True, kw_only=True):
    """What a client needs to talk to a supervisor."""

    endpoint: str
    server_key: str
    public_key: str
    secret_key: str
    supervisor: ProcessMark
    kernel: ProcessMark


_read_connection = MessageReader(Connection, msgspec.json)


def write_connection(connection: Connection) -> Path:
    """Write a supervisor's connection file, in place of those of dead ones."""
    all_connections()
    # another machine that shares the folder may have a process of this id, too
    name = f"{connection.supervisor.pid}-{os.urandom(3).hex()}.json"
    path = runtime_folder("supervisors") / name
    write_private(path, msgspec.json.encode(connection))
    return path


def all_connections() -> list[Connection]:
    """Return the supervisors that are there; files of those that were killed are removed."""
    found = []
    for path in runtime_folder("supervisors").glob("*.json"):
        with contextlib.suppress(OSError, Unreadable):  # the supervisor ends just now
            connection: Connection = _read_connection(path.read_bytes())
            if connection.supervisor.lives:
                found.append(connection)
            elif connection.supervisor.has_left(path):
                path.unlink(missing_ok=True)
    return found


def hold_folder(folder: Path) -> None:
    """Lock the folder, which shows for as long as this process lives that its supervisor does.

    A locked folder is also left alone by tmpfiles.d(5).
    """
    fcntl.flock(os.open(folder, os.O_RDONLY | os.O_CLOEXEC), fcntl.LOCK_SH)


def remove_folders_left(beside: Path) -> None:
    """Remove the folders of supervisors that were killed.

    A supervisor that lives locks its own before it listens there.
    """
    for folder in beside.parent.glob(f"{PREFIX}*"):
        # it is another user's, is no folder, or another process has removed it
        with contextlib.suppress(OSError):
            _remove_if_left(folder)


def _remove_if_left(folder: Path) -> None:
    """Remove a folder if it is this user's, a supervisor's, and nobody holds it.

    TMPDIR is open to everybody: what stands at this path may be, or be swapped for, a link, a FIFO,
    or another user's folder with anything in it. Hence it is opened as a directory, without
    following and without waiting, and what is asked is the open folder and not the path.

    Raises:
        OSError: it is none of these.
    """
    fd = os.open(
        folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    )
    try:
        if os.fstat(fd).st_uid != os.geteuid():
            return
        # a node's agent has no such socket, and nobody locks its folder
        os.stat(SOCKET, dir_fd=fd, follow_symlinks=False)
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        remove_tree(folder)
    finally:
        os.close(fd)


def connection_of(record: RunRecord) -> Connection:
    """Return the way to the supervisor of a run that goes on.

    Raises:
        EngineError: it cannot be found.
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
    """A client's way to a supervisor, to which it shows this key pair."""

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
    """A short conversation with a supervisor; a context manager.

    Raises:
        EngineError: this process has no way to the supervisor.
    """

    def __init__(self, connection: Connection) -> None:
        path = connection.endpoint.removeprefix("ipc://")
        if not os.path.exists(path):  # noqa: PTH110  also where the folder may not be entered
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
        """Send a message; return the reply, which is of this kind.

        Raises:
            EngineError: there is none in time.
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

    It listens in a folder that only this user enters, and on addresses that other machines reach,
    where an engine asks for them.

    Attributes:
        up: what clients have to know to come in; the kernel has a key of its own.
        clients: the keys of the kernel, and of visitors who could read the connection file.
        agents: the keys of the agents that may connect.
        outgoing: messages that were not sent yet, each with the key of its receiver.
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
        """Yield messages that have come in, up to a number: the sender's key, route and message.

        The message is packed still.
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
        """Send a message to the peer with this key, if it has come in.

        Messages for agents wait for :meth:`flush`.
        """
        if key in self.clients:
            self._send(key, message)
        else:
            self.outgoing.append((key, message))

    def flush(self, seconds: float = float("inf")) -> None:
        """Send what is outgoing, for so long: there may be a thousand agents to tell."""
        until = time.monotonic() + seconds
        while self.outgoing and time.monotonic() < until:
            self._send(*self.outgoing.popleft())

    def _send(self, key: str, message: Message) -> None:
        route = self._routes.get(key)
        if route is not None and not self.reply(route, message):
            self._unreachable.setdefault(key, time.monotonic())

    def reply(self, route: bytes, message: Message) -> bool:
        """Send a message; returns whether there is a way to the peer."""
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
        """Listen on an address that other machines reach; return the endpoint.

        Peers that connect there have to show signs of life.
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
        """Send what is outgoing, and close."""
        self.flush()
        self.socket.close(linger=1000)
        self.gate.socket.close()
        self._context.term()
