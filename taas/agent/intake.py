"""An order for ranks on a VM that is not the notebook's machine: what they need is fetched before they start."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial

import msgspec

from taas.agent.project_copy import ProjectCopy
from taas.agent.remote import localized, run_root
from taas.engines import AgentConfig
from taas.messages.agents import AgentTrouble, EndRanks, StartRanks, VmDone
from taas.messages.hosts import Piece, ProjectPacked
from taas.messages.wire import Message
from taas.pieces import Fetch

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
        self._names: Fetch | None = None
        self.copy: ProjectCopy | None = None

    def order(self, message: StartRanks) -> None:
        """Start ranks: at once, where their names are on this host."""
        if not message.order.payload.elsewhere:
            self._start(message)
            return
        order = localized(message.order, self._config)
        self._waiting = msgspec.structs.replace(message, order=order)
        self._names = Fetch(message.run, message.vm, order.payload, self._say)
        if order.files is not None:
            root = run_root(self._config, order)
            self.copy = ProjectCopy(message.run, message.vm, order, root, self._say)
        self._start_when_complete()

    def hear(self, message: Message) -> bool:
        """Take in a message; returns whether it was about the order that is waiting."""
        waiting = self._waiting
        if waiting is None or getattr(message, "run", "") != waiting.run:
            return False
        match message:
            case Piece() if self._names is not None and self._names.wants(message):
                self._take(waiting, partial(self._names.take, message), "the cell's names")
            case Piece() if self.copy is not None and self.copy.wants(message):
                self._take(waiting, partial(self.copy.take, message), "the project")
            case ProjectPacked() if self.copy is not None:
                self._take(waiting, partial(self.copy.take_packed, message), "the project")
            case EndRanks():
                self._drop(VmDone(run=waiting.run, vm=waiting.vm))
            case _:
                return False
        return True

    def _take(self, waiting: StartRanks, take: Callable[[], None], what: str) -> None:
        try:
            take()
        except (OSError, msgspec.DecodeError) as error:
            trouble = f"{what} could not be taken: {error}"
            self._drop(AgentTrouble(run=waiting.run, vm=waiting.vm, message=trouble))
        else:
            self._start_when_complete()

    def _start_when_complete(self) -> None:
        waiting, names, copy = self._waiting, self._names, self.copy
        if waiting is None or names is None or not names.complete or (copy is not None and not copy.ready):
            return
        self._waiting = self._names = None
        order = waiting.order if copy is None else copy.order()
        order = msgspec.structs.replace(order, payload=names.memory)
        self._start(msgspec.structs.replace(waiting, order=order))
        os.close(names.fd)  # the group has opened it

    def _drop(self, said: VmDone | AgentTrouble) -> None:
        """Forget an order whose ranks were not started."""
        if self._names is not None:
            os.close(self._names.fd)
        self._waiting = self._names = None
        self.forget()
        self._say(said)

    def forget(self) -> None:
        """Remove the copy: the run is over here."""
        if self.copy is not None:
            self.copy.close()
            self.copy = None
