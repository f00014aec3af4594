"""A kernel's connection to its supervisor, which is started when it is first needed."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
from typing import Any

import msgspec
import zmq

from taas.errors import EngineError, RunLost
from taas.messages.clients import ClientHears
from taas.messages.wire import WIRE_LIMIT, Message, Reader, pack
from taas.places import crash_report

_START_SECONDS = 60.0


class SupervisorConfig(msgspec.Struct, frozen=True):
    """What a kernel writes to its supervisor's standard input, as one line of JSON.

    Attributes:
        kernel: process id of the kernel it serves.
        client_key: the kernel's public CURVE key in Z85.
        warm: a VM of this machine is about to be asked for.
    """

    kernel: int
    client_key: str
    warm: bool = True


class SupervisorUp(msgspec.Struct, frozen=True):
    """What a supervisor answers on its standard output, as one line of JSON."""

    pid: int
    endpoint: str
    server_key: str


class Supervised:
    """The wire to one supervisor."""

    def __init__(self, *, warm: bool) -> None:
        public, secret = zmq.curve_keypair()
        self._up = _start(SupervisorConfig(os.getpid(), public.decode(), warm))
        self.pid = self._up.pid
        self._pidfd = os.pidfd_open(self.pid)
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.curve_serverkey = self._up.server_key.encode()
        self._socket.curve_publickey, self._socket.curve_secretkey = public, secret
        self._socket.set_hwm(0)  # credits bound what is on its way
        self._socket.set(zmq.MAXMSGSIZE, WIRE_LIMIT)
        self._socket.connect(self._up.endpoint)
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._pidfd, zmq.POLLIN)
        self._read = Reader(ClientHears)

    def say(self, message: Message) -> None:
        """Send a message."""
        self._socket.send(pack(message))

    def hear(self, timeout_ms: int) -> list[Any]:
        """Return the messages there are, or those that come within the time.

        Raises:
            RunLost: the supervisor is gone.
        """
        ready = dict(self._poller.poll(timeout_ms))
        heard: list[Any] = []
        while self._socket in ready and len(heard) < 64:
            try:
                heard.append(self._read(self._socket.recv(zmq.NOBLOCK)))
            except zmq.Again:
                break
        if self._pidfd in ready and not heard:
            self.close()
            raise RunLost(
                f"the supervisor {self._how_it_ended()}, and its agents ended all ranks. Nothing came back; the "
                "next cell starts a new one."
            )
        return heard

    @property
    def alive(self) -> bool:
        """Whether the supervisor is there."""
        return self._pidfd >= 0 and not select.select([self._pidfd], [], [], 0)[0]

    def _how_it_ended(self) -> str:
        report = crash_report(self.pid)
        if report.exists():
            return f"broke down ({report.read_text().strip().splitlines()[-1]}; please report {report})"
        return "was killed (by somebody, or the out-of-memory killer: see dmesg)"

    def kill(self) -> None:
        """SIGKILL a supervisor that does not answer; its agents end all ranks and themselves."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
        self.close()

    def close(self) -> None:
        """Close the wire; the supervisor goes on."""
        if self._pidfd >= 0:
            self._socket.close(linger=0)
            self._context.term()
            os.close(self._pidfd)
            self._pidfd = -1


def _start(config: SupervisorConfig) -> SupervisorUp:
    """Start a supervisor and wait until it says where it listens."""
    process = subprocess.Popen(
        # -P: no module of the project's stands for one of Python's
        [sys.executable, "-P", "-m", "taas.supervisor"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    assert process.stdin and process.stdout and process.stderr
    try:
        process.stdin.write(msgspec.json.encode(config) + b"\n")
        process.stdin.flush()
        ready, _, _ = select.select([process.stdout], [], [], _START_SECONDS)
        line = process.stdout.readline() if ready else b""
        if not line:
            tail = process.stderr.read().decode(errors="replace").strip().splitlines()[-1:] if ready else []
            why = tail[0] if tail else f"it said nothing for {_START_SECONDS:.0f} s"
            raise EngineError(f"the supervisor did not start: {why}. `taas doctor` looks for the cause.")
        return msgspec.json.decode(line, type=SupervisorUp)
    finally:
        for pipe in (process.stdin, process.stdout, process.stderr):
            pipe.close()
        process.wait()  # it has left at once: the supervisor is its orphan


_current: Supervised | None = None


def supervised(*, warm: bool = True) -> Supervised:
    """Return this kernel's supervisor, starting one if there is none.

    Args:
        warm: a new one starts an agent on this machine at once.
    """
    global _current
    if _current is None or not _current.alive:
        if _current is not None:
            _current.close()
        _current = Supervised(warm=warm)
    return _current
