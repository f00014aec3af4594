"""The makers of a VM: started when what they need is here, watched, and said to be over."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from taas.agent.endings import sweep_orphans
from taas.agent.forkserver import Forkserver
from taas.agent.maker_intake import MakerIntake
from taas.agent.makers import Makers
from taas.engines import AgentConfig
from taas.messages.agents import EndMakers, MakerEnded, StartMaker
from taas.messages.wire import Message

__all__ = ["MakerDesk"]


class MakerDesk:
    """Serves the supervisor's orders about makers, of one run at a time.

    Args:
        config: the agent's.
        forkserver: what they are forked from.
        renewed: called when the forkserver had to be started anew for them.
        on, off: begin and end to watch a descriptor.
        grows: tells of a folder in which a log grows.
        say: sends a message to the supervisor.
    """

    def __init__(
        self,
        config: AgentConfig,
        forkserver: Forkserver,
        renewed: Callable[[], None],
        on: Callable[[Any, Callable[[], None]], None],
        off: Callable[[Any], None],
        grows: Callable[[Path], None],
        say: Callable[[Message], None],
    ) -> None:
        self._config, self._forkserver, self._renewed = config, forkserver, renewed
        self._on, self._off, self._grows, self._say = on, off, grows, say
        self._makers = Makers("")
        self._intakes: dict[int, MakerIntake] = {}

    def hear(self, message: Message) -> bool:
        """Take in a message; returns whether it was about makers."""
        if isinstance(message, StartMaker):
            self._order(message)
        elif isinstance(message, EndMakers):
            self._end(message.run)
        else:
            return any(intake.hear(message) for intake in self._intakes.values())
        return True

    def _order(self, message: StartMaker) -> None:
        if not message.payload.elsewhere:
            self._start(message)
            return
        intake = MakerIntake(message, self._config, self._start, self._say)
        self._intakes[message.number] = intake
        self._grows(intake.root)
        intake.begin()

    def _start(self, message: StartMaker) -> None:
        try:
            if self._forkserver.fit(message.environ, rehearsed=message.rehearsed):
                self._renewed()
            if self._makers.run != message.run:
                self._makers = Makers(message.run)
            source = self._makers.start(message)
        except Exception as error:  # the supervisor says so in the cell
            self._over(message, f"{type(error).__name__}: {error}")
            return
        self._on(source, partial(self._gone, self._makers, message, source))

    def _gone(self, makers: Makers, order: StartMaker, source: int) -> None:
        self._off(source)
        code = makers.bury(order.number)
        if self._config.data:
            self._forkserver.outlived(code)  # or is dead now, and its processes are this one's children
            sweep_orphans(self._forkserver.own_pids())  # as a keeper's data workers are
        self._over(order, f"killed by signal {-code}" if code < 0 else f"ended with status {code}")

    def _over(self, order: StartMaker, how: str) -> None:
        if order.number in self._intakes:
            self._intakes[order.number].end(how)  # it is said when its log is on its way
        else:
            self._say(MakerEnded(run=order.run, number=order.number, how=how))

    def _end(self, run: str) -> None:
        if run == self._makers.run:
            self._makers.end()
        for intake in self._intakes.values():
            if intake.run == run and not intake.started:
                intake.end("ended before it began")

    def step(self) -> None:
        """Send what makers elsewhere have written, and say which are over."""
        for number, intake in list(self._intakes.items()):
            if intake.step():
                del self._intakes[number]

    def close(self) -> None:
        """Remove what they had on this VM; their processes are ended with the agent's."""
        for intake in self._intakes.values():
            intake.close()
