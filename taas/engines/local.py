"""The local engine: every VM is an agent on this machine."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Sequence
from multiprocessing.connection import wait
from pathlib import Path

from taas.base.memory_limits import memory_left
from taas.base.poll_loop import Child, give_limit
from taas.engines import Machine
from taas.errors import EngineError
from taas.protocol.engines import AgentConfig, Demand
from taas.protocol.framing import LOOPBACK

_END_SECONDS = 5.0
_LINE_BYTES = 4096
_RANK_BYTES = 25_000_000
"""Memory of one rank alone after it has joined a process group; measured with 32 ranks."""


class LocalMachine:
    """An agent of this machine; it ends when its standard input is closed."""

    waiting = ending = ""
    error = "RunLost"

    def __init__(self, config: AgentConfig) -> None:
        scratch = Path(config.scratch)
        scratch.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._log = os.open(
            scratch / "agent.log", os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600
        )
        self._agent = Child(
            ["-P", "-m", "taas.agent"],
            stdout=self._log,
            stderr=self._log,
            env={**os.environ, "TMPDIR": config.scratch},
            start_new_session=True,
        )
        self.pid = self._agent.process.pid
        # before it gets its configuration, after which it raises its own limit
        give_limit(self.pid)
        self._pidfd = os.pidfd_open(self.pid)
        self._end_by = float("inf")
        self._agent.send(config)

    @property
    def ended(self) -> bool:
        """Return whether it was reaped."""
        return self._pidfd < 0

    def fileno(self) -> int:
        """Return the agent's pidfd."""
        return self._pidfd

    def want(self) -> None:
        """Do nothing, because the agent was started at once."""

    def how_it_ended(self) -> str:
        """Return the agent's signal, or its exit status and the last line of its log."""
        code = self._agent.process.wait()
        if code < 0:
            return f"killed by {signal.Signals(-code).name}"
        size = os.fstat(self._log).st_size
        end = os.pread(self._log, _LINE_BYTES, max(0, size - _LINE_BYTES)).decode(errors="replace")
        error = end.rstrip().rpartition("\n")[2] if code else ""
        return f"ended with status {code}" + (f" ({error})" if error else "")

    def end(self) -> None:
        """Close the agent's standard input; it then has some seconds to end."""
        self._end_by = min(self._end_by, time.monotonic() + _END_SECONDS)
        self._agent.hang_up()

    def reap(self) -> None:
        """Wait for an agent that has to end, and kill it if it is late; may be called twice."""
        if self._pidfd < 0:
            return
        if not wait([self._pidfd], max(0.0, self._end_by - time.monotonic())):
            self._agent.process.kill()
        # a process that is stuck in a system call does not end
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._agent.process.wait(_END_SECONDS)
        os.close(self._pidfd)
        os.close(self._log)
        self._pidfd = -1


class LocalEngine:
    """Agents on this machine."""

    remote = False
    here = LOOPBACK

    def __init__(self) -> None:
        self._machines: list[LocalMachine] = []

    def start(
        self, demand: Demand, configs: Sequence[AgentConfig], lost: Sequence[Machine] = ()
    ) -> Sequence[LocalMachine]:
        """Start agents."""
        started = [LocalMachine(config) for config in configs]
        self._machines += started
        return started

    def fileno(self) -> int:
        """Return -1, because the agents' pidfds show when they end."""
        return -1

    def step(self) -> None:
        """Do nothing."""

    def pids(self) -> list[int]:
        """Return the agents' process ids."""
        return [machine.pid for machine in self._machines if not machine.ended]

    def close(self) -> None:
        """End all agents."""
        for machine in self._machines:
            machine.end()  # end all at once, then wait for each
        for machine in self._machines:
            machine.reap()
        self._machines.clear()


def check_memory(ranks: int) -> None:
    """Raise an EngineError if this machine lacks the memory for this many empty ranks."""
    needed, free = ranks * _RANK_BYTES, memory_left().free
    if needed > free:
        raise EngineError(
            f"{ranks:,} ranks on this machine need {needed / 1e9:.0f} GB of memory before they hold"
            f" anything, and {free / 1e9:.0f} GB are free: nothing was started. Ask for fewer"
            " (--gpus)."
        )
