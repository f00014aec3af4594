"""A rank's connection to its agent, read by a thread of its own from its first cell on.

So a rank whose main thread is in C code is still heard, and answers. The link carries messages, and
each goes to whom it concerns: what the main thread is at, and is asked, to the
:class:`~taas.rank.main_thread.MainThreadWatch`; who says how the cell ended, to the
:class:`~taas.rank.last_word.LastWord`.

What a cell asks the person at the keyboard goes by the agent into the run's record, where whoever
shows the run in a notebook finds it (notebook/view/live_view.py); the reply comes back by the
agent.
"""

from __future__ import annotations

import builtins
import getpass
import os
import queue
import select
import signal
import socket
import threading
from collections.abc import Callable

from IPython.core.error import StdinNotImplementedError

from taas import adopt
from taas.protocol.framing import Message, MessageReader, pack
from taas.protocol.ranks import (
    Answer,
    Asking,
    GetReady,
    RankEnded,
    RankHears,
    RankRequest,
    RankStage,
    RankStart,
    receive,
    send,
)
from taas.rank.last_word import LastWord
from taas.rank.main_thread import MainThreadWatch
from taas.runs import stacks

_read = MessageReader(RankHears)

Order = tuple[RankStart, int]
"""What to be, and a descriptor of the packed names."""


class AgentLink:
    """What one rank and its agent say to each other.

    Attributes:
        last_word: how the cell ended, and who says that.
    """

    def __init__(self, agent: socket.socket) -> None:
        self._agent, self._pid = agent, os.getpid()
        self._orders: queue.SimpleQueue[Order | None] = queue.SimpleQueue()
        self._answered: Callable[[Answer | None], None]
        self._watch: MainThreadWatch | None = None
        """It is there from the first cell on, as the link's thread is."""
        self.last_word = LastWord(self.send)

    @property
    def in_rank(self) -> bool:
        """Whether this process is the rank, and not one that the cell forked."""
        return os.getpid() == self._pid

    @property
    def in_cell(self) -> bool:
        """Whether this process is the rank, and its cell runs: the agent is heard."""
        return self.in_rank and self.last_word.is_open

    @property
    def broken_off(self) -> bool:
        """Whether the main thread's waiting for other ranks was made to fail in this cell."""
        return self._watch is not None and self._watch.broken_off

    def send(self, message: Message) -> None:
        """Send the agent a message."""
        send(self._agent, pack(message))

    def next_order(self) -> Order | GetReady | None:
        """Return the next order; None: this process may leave. EOFError: the agent is gone.

        Before its first order a process may be told to get ready for that.
        """
        if self._watch is not None:  # the link's thread reads
            return self._orders.get()
        data, descriptors = receive(self._agent)
        said = _read(data)
        return said if isinstance(said, GetReady) else _order(said, descriptors)

    def has_word(self) -> bool:
        """Whether a message of the agent waits, or the agent is gone; before the first cell."""
        poll = select.poll()
        poll.register(self._agent.fileno(), select.POLLIN)
        return bool(poll.poll(0))

    def begin_cell(
        self, pack_names: Callable[..., RankEnded], answered: Callable[[Answer | None], None]
    ) -> None:
        """Answer the agent while a cell runs; called once other threads may start.

        The agent asks nothing of the cell before this rank has said that it begins. So the order
        matters only where something else may come: the last word is open, and the handlers are
        there, before SIGINT works again and before the thread reads.

        Args:
            pack_names: makes the rank's last word with its names as they stand; with
                ``last=False``, one that holds if it says no other.
            answered: takes what the person at the keyboard answered; None: they have interrupted
                the cell.
        """
        self._answered = answered
        watch = self._watch or MainThreadWatch(self.last_word, self.send)
        watch.begin_cell()
        self.last_word.begin_cell(pack_names)
        if self._watch is not None:
            # the end of the last cell has taken it away
            signal.signal(signal.SIGINT, signal.default_int_handler)
            return
        self._watch = watch
        threading.Thread(
            target=self._serve, args=(watch,), name="taas-agent-link", daemon=True
        ).start()

    # ------------------------------------------------------------ the link's thread

    def _serve(self, watch: MainThreadWatch) -> None:
        poll = select.poll()
        poll.register(self._agent.fileno(), select.POLLIN)
        poll.register(watch.source, select.POLLIN)
        while True:
            wait = watch.wait
            ready = dict(poll.poll(None if wait is None else wait * 1000))
            # A sign comes before the message that asks for it, if both are there: see ask_for_sign.
            if watch.source in ready:
                watch.take_sign()
            if self._agent.fileno() in ready:
                try:
                    data, descriptors = receive(self._agent)
                except (EOFError, OSError):  # the agent went, and the system ends this process
                    self._orders.put(None)
                    return
                self._hear(watch, data, descriptors)
            elif watch.wait is not None:
                watch.ask_again()

    def _hear(self, watch: MainThreadWatch, data: bytes, descriptors: list[int]) -> None:
        match said := _read(data):
            case RankRequest(what="notice"):
                self._answered(None)
                watch.ask_for_sign(interrupt_ignored=said.ignored)
            case RankRequest(what="names"):
                watch.ask_for_names()
            case RankRequest(what="taken"):
                self.last_word.forget_names()
            case RankRequest(what="leave") if self.last_word.is_given:
                os._exit(1)  # the main thread is held in a signal handler, or in C code
            case RankRequest(what="collective"):
                stacks.note_collective(adopt.pending_collective())
                self.send(RankStage(stage="wrote"))
            case Answer():
                self._answered(said)
            case _:
                self._orders.put(_order(said, descriptors))


def _order(said: Message, descriptors: list[int]) -> Order | None:
    return (said, descriptors[0]) if isinstance(said, RankStart) else None


class Keyboard:
    """The notebook's keyboard for one cell of a rank: ``input()``, ``getpass`` and debuggers.

    Threads that ask take turns; ``flush`` sends what was printed before a question.
    """

    def __init__(self, rank: int, link: AgentLink, flush: Callable[[], object]) -> None:
        self._rank, self._link, self._flush = rank, link, flush
        self._turn = threading.Lock()
        self._answers: queue.SimpleQueue[Answer | None] = queue.SimpleQueue()
        self._count = 0
        self._interrupted = False
        builtins.input = lambda prompt="", /: self._ask(str(prompt), hidden=False)
        getpass.getpass = lambda prompt="Password: ", stream=None, **_: self._ask(
            prompt, hidden=True
        )

    def answer(self, answer: Answer | None) -> None:
        """Take an answer, or None: nothing is asked any more. One that came too late is dropped."""
        self._interrupted = self._interrupted or answer is None
        self._answers.put(answer)

    def _ask(self, prompt: str, *, hidden: bool) -> str:
        """Ask, and wait.

        Raises:
            EOFError: nobody can answer here, or the cell was interrupted before: a debugger then
                leaves.
            StdinNotImplementedError: the notebook's front end cannot ask.
        """
        if not self._link.in_cell:
            raise EOFError(
                f"{prompt!r} cannot be asked: only the rank itself can ask, while its cell runs"
            )
        with self._turn:
            if self._interrupted:
                raise EOFError("the cell was interrupted")
            self._count += 1
            self._flush()
            self._link.send(
                Asking(rank=self._rank, number=self._count, prompt=prompt, hidden=hidden)
            )
            try:
                while (answer := self._answers.get()) and answer.number != self._count:
                    continue
            finally:
                self._link.send(Asking(rank=self._rank))
        if answer is None:
            raise EOFError("the cell was interrupted")
        if answer.refused:
            raise StdinNotImplementedError(answer.refused)
        return answer.text
