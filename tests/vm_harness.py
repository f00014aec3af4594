"""A VM without its agent's process.

Jobs run in the test's own, and what the agent would say is collected.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from multiprocessing.connection import wait
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from taas.agent.forkserver import Forkserver
from taas.agent.job import Job
from taas.agent.spares import KeptProcesses, Spares
from taas.protocol import deadlines
from taas.protocol.engines import AgentConfig

DEADLINE = 120.0


class Vm:
    """What jobs have of their VM, and the loop over one of them."""

    def __init__(self, scratch: Path, forkserver: Forkserver) -> None:
        self._actions: dict[Any, Callable[[], None]] = {}
        self._said: deque[Any] = deque()
        on, off = self._actions.__setitem__, lambda source: self._actions.pop(source, None)
        spares = Spares(forkserver, on, off)
        spares.forget = spares.end  # the test's own children are no orphans
        self.services = SimpleNamespace(
            config=AgentConfig("", "", "", "", str(scratch)),
            forkserver=forkserver,
            spares=spares,
            kept=KeptProcesses(on, off, self._said.append),
            on=on,
            off=off,
            say=self._said.append,
            sweep=lambda: None,
        )

    def run(self, job: Job) -> Iterator[Any]:
        """Give what a job that has begun says, until it is over."""
        heard = time.monotonic()
        while not job.over:
            for source in wait(list(self._actions), deadlines.TICK):
                heard = time.monotonic()
                if source in self._actions:
                    self._actions[source]()
            if time.monotonic() - heard > DEADLINE:
                raise TimeoutError("ranks of the test do not answer")
            job.step()
            while self._said:
                yield self._said.popleft()
