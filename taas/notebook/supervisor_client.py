"""A kernel's connection to its supervisor, which is started at its first use."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import msgspec
import zmq

from taas.base.process_log import how_it_broke, log_file
from taas.base.wording import shown
from taas.config import project_folder
from taas.engines.choice import current_engine
from taas.errors import EngineError, HeaderError, RunLost
from taas.protocol.clients import RunRequest, SupervisorConfig
from taas.supervisor.connections import CONNECTION, SOCKET, Connection, Wire

_START_SECONDS = 60.0


class SupervisorClient(Wire):
    """The kernel's connection to a supervisor, with the only write end of the life pipe.

    Attributes:
        heard_at: the monotonic time of the supervisor's last message.
    """

    def __init__(self, *, warm: bool, idle: bool = False) -> None:
        public, secret = zmq.curve_keypair()
        life, self._life = os.pipe()
        os.register_at_fork(after_in_child=self._forget_life)  # a child may outlive this process
        try:
            up = _start(SupervisorConfig(os.getpid(), life, public.decode(), warm, idle))
        except BaseException:
            self._forget_life()
            raise
        finally:
            os.close(life)
        super().__init__(up, public, secret)
        self.pid, self.heard_at = up.supervisor.pid, time.monotonic()
        self._folder = Path(up.endpoint.removeprefix("ipc://")).parent
        self._pidfd = os.pidfd_open(self.pid)
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._pidfd, zmq.POLLIN)

    def hear(self, timeout_ms: int) -> Iterator[Any]:
        """Yield the messages that have arrived, or that arrive within the timeout.

        Messages that the caller does not consume stay in the queue.

        Raises:
            RunLost: the supervisor has ended.
        """
        ready = dict(self._poller.poll(timeout_ms))
        before = self.heard_at
        with contextlib.suppress(zmq.Again):
            while self._socket in ready:
                message = self._read(self._socket.recv(zmq.NOBLOCK))
                self.heard_at = time.monotonic()
                yield message
        if self._pidfd in ready and self.heard_at == before:
            self.close()
            raise RunLost(
                f"{_how_it_ended(self.pid)}, and all ranks with it. Nothing came back; the next"
                " cell starts a new one."
            )

    @property
    def alive(self) -> bool:
        """Whether the supervisor's process exists."""
        return self._pidfd >= 0 and not wait([self._pidfd], 0)

    @property
    def usable(self) -> bool:
        """Whether the supervisor can accept new runs.

        A cleaner of temporary files may have removed its socket.
        """
        return (
            self.alive and (self._folder / SOCKET).exists() and (self._folder / CONNECTION).exists()
        )

    def kill(self) -> None:
        """SIGKILL a supervisor that does not answer; all its processes end with it."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
        self.close()

    def close(self) -> None:
        """Close the connection to a supervisor that has ended."""
        if self._pidfd >= 0:
            self._hang_up(0)
            os.close(self._pidfd)
            self._pidfd = -1
            self._forget_life()

    def _forget_life(self) -> None:
        if self._life >= 0:
            os.close(self._life)
            self._life = -1


def _how_it_ended(supervisor: int) -> str:
    """Return what ended a supervisor: an internal error, recorded in its log, or a signal."""
    if broke := how_it_broke(supervisor):
        return (
            f"the supervisor broke down of an error of its own ({shown(broke, 200)};"
            f" {log_file(supervisor)} has more, and `%taas doctor --report RUN` puts it into a file"
            " for a bug report)"
        )
    return "the supervisor was killed (by somebody, or the out-of-memory killer: see dmesg)"


def _start(config: SupervisorConfig) -> Connection:
    process = subprocess.Popen(
        # -P: a module of the project must not hide one of Python's
        [sys.executable, "-P", "-m", "taas.supervisor"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
        pass_fds=(config.life,),
    )
    assert process.stdin and process.stdout and process.stderr
    try:
        process.stdin.write(msgspec.json.encode(config) + b"\n")
        process.stdin.flush()
        ready = wait([process.stdout.fileno()], _START_SECONDS)
        line = process.stdout.readline() if ready else b""
        if not line:
            tail = (
                process.stderr.read().decode(errors="replace").strip().splitlines()[-1:]
                if ready
                else []
            )
            process.kill()  # it may be stuck; if it has a child, the child ends with the life pipe
            why = tail[0] if tail else f"it said nothing for {_START_SECONDS:.0f} s"
            raise EngineError(
                f"the supervisor did not start: {why}. `taas doctor` looks for the cause."
            )
        return msgspec.json.decode(line, type=Connection)
    finally:
        for pipe in (process.stdin, process.stdout, process.stderr):
            pipe.close()
        process.wait()  # it has exited at once: the supervisor is its orphaned child


_current: SupervisorClient | None = None
_ahead: threading.Thread | None = None


def get_supervisor(*, warm: bool) -> SupervisorClient:
    """Return this kernel's supervisor, starting one if there is none.

    Args:
        warm: whether a new supervisor starts an agent on this machine at once.
    """
    global _current, _ahead
    if _ahead is not None:
        _ahead.join()
        _ahead = None
    # A supervisor that can no longer be used lives on until its background runs have ended.
    if _current is None or not _current.usable:
        if _current is not None:
            _current.close()
        _current = SupervisorClient(warm=warm)
    return _current


def start_ahead() -> None:
    """Start in a thread what the first cell will need, if that cell runs on this machine.

    :func:`get_supervisor` joins the thread.
    """
    global _ahead
    with contextlib.suppress(HeaderError):  # the first cell reports it
        if current_engine(project_folder()).kind == "local" and _current is None and _ahead is None:
            _ahead = threading.Thread(target=_start_idle, name="taas-ahead", daemon=True)
            _ahead.start()


def _start_idle() -> None:
    global _current
    # the cell that needs a supervisor reports why there is none
    with contextlib.suppress(EngineError, OSError):
        _current = SupervisorClient(warm=True, idle=True)


def release_ahead() -> None:
    """Release what was started for the next cell, if anything was."""
    if _ahead is not None:
        _ahead.join()
    if _current is not None and _current.alive:
        _current.say(RunRequest(what="release"))
