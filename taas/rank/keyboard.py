"""What a cell asks the person at the keyboard: ``input()``, ``getpass`` and every debugger, which asks by ``input()``.

The question goes by the agent into the run's record, where whoever shows the run in a notebook finds it
(notebook/live_view.py); the answer comes back by the agent.
"""

from __future__ import annotations

import builtins
import getpass
import queue
import threading
from collections.abc import Callable
from typing import Any

from IPython.core.error import StdinNotImplementedError

from taas.wire.framing import Message
from taas.wire.ranks import Answer, Asking


class Keyboard:
    """The keyboard of the notebook, as one rank has it; threads that ask take turns.

    Args:
        rank: its number.
        flush: sends what was printed before a question.
        send: tells the agent.
        may_ask: whether this process is the rank, and its cell runs.
    """

    def __init__(
        self,
        rank: int,
        flush: Callable[[], None],
        send: Callable[[Message], None],
        may_ask: Callable[[], bool],
    ) -> None:
        self._rank, self._flush, self._send, self._may_ask = rank, flush, send, may_ask
        self._turn = threading.Lock()
        self._answers: queue.SimpleQueue[Answer | None] = queue.SimpleQueue()
        self._count = 0
        self._interrupted = False

    def install(self) -> None:
        """Let this process ask."""
        builtins.input = self.input
        getpass.getpass = self.getpass

    def input(self, prompt: object = "", /) -> str:
        """Stand in for ``input``."""
        return self._ask(str(prompt), hidden=False)

    def getpass(self, prompt: str = "Password: ", stream: object = None, **_: Any) -> str:
        """Stand in for ``getpass.getpass``."""
        return self._ask(prompt, hidden=True)

    def answer(self, answer: Answer | None) -> None:
        """Take an answer, or None: nothing is asked any more. One that came too late is dropped."""
        self._interrupted = self._interrupted or answer is None
        self._answers.put(answer)

    def _ask(self, prompt: str, *, hidden: bool) -> str:
        """Ask, and wait.

        Raises:
            EOFError: nobody can answer here, or the cell was interrupted before: a debugger then leaves.
            StdinNotImplementedError: the notebook's front end cannot ask.
        """
        if not self._may_ask():
            raise EOFError(f"{prompt!r} cannot be asked: only the rank itself can ask, while its cell runs")
        with self._turn:
            if self._interrupted:
                raise EOFError("the cell was interrupted")
            self._count += 1
            self._flush()
            self._send(Asking(rank=self._rank, number=self._count, prompt=prompt, hidden=hidden))
            try:
                while (answer := self._answers.get()) and answer.number != self._count:
                    continue
            finally:
                self._send(Asking(rank=self._rank))
        if answer is None:
            raise EOFError("the cell was interrupted")
        if answer.refused:
            raise StdinNotImplementedError(answer.refused)
        return answer.text
