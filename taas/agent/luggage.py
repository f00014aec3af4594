"""What an order needs before it can be carried out on a VM that is not the notebook's machine."""

from __future__ import annotations

import os
from collections.abc import Callable

import msgspec

from taas.agent.project_arrival import ProjectArrival
from taas.agent.remote import Stay
from taas.messages.hosts import Piece, ProjectPacked
from taas.messages.wire import Memory, Message
from taas.pieces import Fetch

__all__ = ["Luggage"]


class Luggage:
    """A memory of the notebook's machine on its way here, and the project where this VM does not see its disk.

    Args:
        stay: what the messages carry.
        memory: what is to be fetched.
        what: it, in words.
        arrival: the project.
        say: sends a message to the supervisor.
    """

    def __init__(
        self,
        stay: Stay,
        memory: Memory,
        what: str,
        arrival: ProjectArrival,
        say: Callable[[Message], None],
    ) -> None:
        self._fetch = Fetch(stay.run, stay.number, memory, say)
        self._what, self._arrival = what, arrival

    @property
    def complete(self) -> bool:
        """Whether all of it is here."""
        return self._fetch.complete and self._arrival.ready

    @property
    def memory(self) -> Memory:
        """The memory, as processes of this VM get at it until :meth:`close`."""
        return self._fetch.memory

    def hear(self, message: Message) -> bool:
        """Take in a message; returns whether it was about this.

        Raises:
            OSError: what it brought cannot be kept; the text says what.
        """
        what = self._what
        try:
            if isinstance(message, Piece) and self._fetch.wants(message):
                self._fetch.take(message)
            elif isinstance(message, Piece | ProjectPacked) and self._arrival.wants(message):
                what = "the project"
                self._arrival.take(message)
            else:
                return False
        except (OSError, msgspec.DecodeError) as error:
            raise OSError(f"{what} could not be taken: {error}") from error
        return True

    def close(self) -> None:
        """Give the memory back."""
        os.close(self._fetch.fd)
