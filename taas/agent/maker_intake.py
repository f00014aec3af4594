"""A maker on a VM that is not the notebook's machine: what it needs comes before it starts, its log goes home."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import msgspec

from taas.agent.luggage import Luggage
from taas.agent.mirror import LogMirror
from taas.agent.project_arrival import ProjectArrival
from taas.agent.remote import Stay, environment
from taas.engines import AgentConfig
from taas.messages.agents import MakerEnded, StartMaker
from taas.messages.hosts import WroteTaken
from taas.messages.wire import Message

__all__ = ["MakerIntake"]

_LOG = "data.log"


class MakerIntake:
    """One maker, from its order until its end was said.

    Args:
        order: as it came.
        config: the agent's.
        start: starts a maker whose order says where all is on this VM.
        say: sends a message to the supervisor.

    Attributes:
        root: its folder on this VM, in which its log grows.
        started: whether it was.
    """

    def __init__(
        self,
        order: StartMaker,
        config: AgentConfig,
        start: Callable[[StartMaker], None],
        say: Callable[[Message], None],
    ) -> None:
        assert order.files is not None
        self.root = Path(tempfile.mkdtemp(prefix="maker-", dir=config.scratch))
        self.started = False
        self._start, self._say, self._how = start, say, ""
        log = self.root / _LOG
        environ = environment(order.environ, order.changed, config)
        self._order = msgspec.structs.replace(order, environ=environ, log=str(log))
        stay = Stay(order.run, order.number, f"data VM {order.number}")
        self._arrival = ProjectArrival(stay, order.project, order.files, self.root, say)
        self._luggage = Luggage(stay, order.payload, "the registered loaders", self._arrival, say)
        self._mirror = LogMirror(order.run, order.number, log, say)

    @property
    def run(self) -> str:
        """Name of the run it is of."""
        return self._order.run

    def hear(self, message: Message) -> bool:
        """Take in a message; returns whether it was about this maker."""
        mine = (getattr(message, "run", ""), getattr(message, "vm", self._order.number))
        if mine != (self._order.run, self._order.number):
            return False
        if isinstance(message, WroteTaken):
            self._mirror.acknowledge(message.size)
            return True
        try:
            taken = not self.started and self._luggage.hear(message)
        except OSError as error:
            self.end(str(error))
            return True
        if taken and self._luggage.complete and not self._how:
            self.begin()
        return taken

    def begin(self) -> None:
        """Start it, if all that it needs is here."""
        if self.started or not self._luggage.complete:
            return
        self.started = True
        Path(self._order.log).write_text("".join(f"{notice}\n" for notice in self._arrival.notices))
        self._start(
            msgspec.structs.replace(
                self._order,
                payload=self._luggage.memory,
                project=self._arrival.project,
                replica=self._arrival.replica,
            )
        )

    def end(self, how: str) -> None:
        """It ended, or will not start."""
        self._how = self._how or how

    def step(self) -> bool:
        """Send what it wrote; returns whether it has ended, and that was said."""
        if not self._mirror.step(last=bool(self._how)) or not self._how:
            return False
        self.close()
        self._say(MakerEnded(run=self._order.run, number=self._order.number, how=self._how))
        return True

    def close(self) -> None:
        """Remove what it had on this VM."""
        self._luggage.close()
        self._arrival.close()
        shutil.rmtree(self.root, ignore_errors=True)
