"""The embedded engine: every VM is an agent on this machine."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from taas.engines import AgentConfig, Demand, Machine

_END_SECONDS = 5.0
_LINE_BYTES = 4096


class LocalMachine:
    """An agent of this machine, held by its standard input: it ends when that is closed."""

    host = "127.0.0.1"
    gpus: tuple[str, ...] | None = None
    place = waiting = ""
    error = "RunLost"

    def __init__(self, config: AgentConfig) -> None:
        scratch = Path(config.scratch)
        scratch.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._log = os.open(scratch / "agent.log", os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "taas.agent"],
            stdin=subprocess.PIPE,
            stdout=self._log,
            stderr=self._log,
            env={**os.environ, "TMPDIR": config.scratch},
            start_new_session=True,
        )
        self.pid = self._process.pid
        self._pidfd = os.pidfd_open(self.pid)
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it is gone already: the pidfd says so
            self._process.stdin.write(msgspec.json.encode(config) + b"\n")
            self._process.stdin.flush()

    @property
    def ended(self) -> bool:
        """Whether it was given back."""
        return self._pidfd < 0

    def fileno(self) -> int:
        """Return the agent's pidfd."""
        return self._pidfd

    def how_it_ended(self) -> str:
        """Return the signal or the status the agent ended with, and the error that it wrote last."""
        code = self._process.wait()
        if code < 0:
            return f"killed by {signal.Signals(-code).name}"
        error = self._last_line() if code else ""
        return f"ended with status {code}" + (f" ({error})" if error else "")

    def _last_line(self) -> str:
        size = os.fstat(self._log).st_size
        end = os.pread(self._log, _LINE_BYTES, max(0, size - _LINE_BYTES)).decode(errors="replace")
        return end.rstrip().rpartition("\n")[2]

    def ask_to_end(self) -> None:
        """Close the agent's standard input."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()

    def end(self) -> None:
        """Ask the agent to end and wait for it; kill it when it does not."""
        if self._pidfd < 0:
            return
        self.ask_to_end()
        poll = select.poll()
        poll.register(self._pidfd, select.POLLIN)
        if not poll.poll(_END_SECONDS * 1000):
            self._process.kill()
        self._process.wait()
        os.close(self._pidfd)
        os.close(self._log)
        self._pidfd = -1


class LocalEngine:
    """Agents on this machine; they stay warm for the next run."""

    keeps_warm = True
    remote = False
    here = LocalMachine.host

    def __init__(self) -> None:
        self._machines: list[LocalMachine] = []

    def start(
        self, demand: Demand, configs: Sequence[AgentConfig], lost: Sequence[Machine] = ()
    ) -> Sequence[LocalMachine]:
        """Start agents."""
        del demand  # this machine is whatever it is
        started = [LocalMachine(config) for config in configs]
        self._machines += started
        return started

    def fileno(self) -> int:
        """Return -1: what becomes of the agents is told by their pidfds."""
        return -1

    def step(self) -> None:
        """Do nothing."""

    def pids(self) -> list[int]:
        """Return the agents' process ids."""
        return [machine.pid for machine in self._machines if not machine.ended]

    def close(self) -> None:
        """End all agents."""
        for machine in self._machines:
            machine.ask_to_end()  # all at once, then wait for each
        for machine in self._machines:
            machine.end()
        self._machines.clear()
