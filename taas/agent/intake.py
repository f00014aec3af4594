"""An order for ranks on a VM that is not the notebook's machine: what they need is fetched before they start."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from taas.agent.luggage import Luggage
from taas.agent.project_arrival import ProjectArrival
from taas.agent.project_copy import ProjectCopy
from taas.agent.remote import Stay, localized, run_root
from taas.engines import AgentConfig
from taas.messages.agents import AgentTrouble, EndRanks, StartRanks, VmDone
from taas.messages.wire import Message

__all__ = ["Intake"]


class Intake:
    """The order that is waiting for the cell's names, and for the project where this VM does not see its disk.

    Args:
        config: the agent's.
        start: starts the ranks of an order that has all it needs.
        say: sends a message to the supervisor.

    Attributes:
        copy: the project of the order's run on this VM, until :meth:`forget`; None where nothing is copied.
    """

    def __init__(
        self, config: AgentConfig, start: Callable[[StartRanks], None], say: Callable[[Message], None]
    ) -> None:
        self._config, self._start, self._say = config, start, say
        self._waiting: StartRanks | None = None
        self._luggage: Luggage | None = None
        self.copy: ProjectCopy | None = None

    def order(self, message: StartRanks) -> None:
        """Start ranks: at once, where their names are on this host."""
        files = message.order.files
        if not message.order.payload.elsewhere or files is None:
            self._start(message)
            return
        order = localized(message.order, self._config)
        self._waiting = msgspec.structs.replace(message, order=order)
        stay = Stay(message.run, message.vm, f"VM {order.vm}")
        arrival = ProjectArrival(stay, order.project, files, run_root(self._config, order), self._say)
        self.copy = ProjectCopy(stay, order, arrival, self._say)
        self._luggage = Luggage(stay, order.payload, "the cell's names", arrival, self._say)
        self._start_when_complete()

    def hear(self, message: Message) -> bool:
        """Take in a message; returns whether it was about the order that is waiting."""
        waiting = self._waiting
        if waiting is None or self._luggage is None or getattr(message, "run", "") != waiting.run:
            return False
        if isinstance(message, EndRanks):
            self._drop(VmDone(run=waiting.run, vm=waiting.vm))
            return True
        try:
            taken = self._luggage.hear(message)
        except OSError as error:
            self._drop(AgentTrouble(run=waiting.run, vm=waiting.vm, message=str(error)))
            return True
        self._start_when_complete()
        return taken

    def _start_when_complete(self) -> None:
        waiting, luggage, copy = self._waiting, self._luggage, self.copy
        if waiting is None or luggage is None or copy is None or not luggage.complete:
            return
        self._waiting = self._luggage = None
        order = msgspec.structs.replace(copy.begin(), payload=luggage.memory)
        self._start(msgspec.structs.replace(waiting, order=order))
        luggage.close()  # the group has opened it

    def _drop(self, said: VmDone | AgentTrouble) -> None:
        """Forget an order whose ranks were not started."""
        if self._luggage is not None:
            self._luggage.close()
        self._waiting = self._luggage = None
        self.forget()
        self._say(said)

    def forget(self) -> None:
        """Remove the copy: the run is over here."""
        if self.copy is not None:
            self.copy.close()
            self.copy = None
