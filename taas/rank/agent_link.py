"""A rank's connection to its agent, read by a dedicated thread from the rank's first cell on.

A rank whose main thread is in C code therefore still receives messages and replies to them. The
link only carries messages. Those about the main thread's activity go to the
:class:`~taas.rank.main_thread.MainThreadWatch`, those about how the cell ended to the
:class:`~taas.rank.last_word.LastWord`.

When a cell asks the user for keyboard input, the request goes through the agent into the run's
record, where the code that shows the run in a notebook finds it (notebook/view/live_view.py). The
reply comes back through the agent.
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
"""A job, and a file descriptor of the packed variables."""


class AgentLink:
    """The messages between one rank and its agent.

    Attributes:
        last_word: how the cell ended, and which thread reports it.
    """

    def __init__(self, agent: socket.socket) -> None:
        self._agent, self._pid = agent, os.getpid()
        self._orders: queue.SimpleQueue[Order | None] = queue.SimpleQueue()
        self._answered: Callable[[Answer | None], None]
        self._watch: MainThreadWatch | None = None
        """Set from the first cell on, like the link's thread."""
        self.last_word = LastWord(self.send)

    @property
    def in_rank(self) -> bool:
        """Whether this process is the rank itself, not a child that the cell forked."""
        return os.getpid() == self._pid

    @property
    def in_cell(self) -> bool:
        """Whether this process is the rank, and its cell is running.

        Only then may ``Keyboard`` ask the user for input.
        """
        return self.in_rank and self.last_word.is_open

    @property
    def broken_off(self) -> bool:
        """Whether a wait of the main thread for other ranks was aborted in this cell."""
        return self._watch is not None and self._watch.broken_off

    def send(self, message: Message) -> None:
        """Send the agent a message."""
        send(self._agent, pack(message))

    def next_order(self) -> Order | GetReady | None:
        """Return the next job, or None if this process may exit.

        Before its first job, a process may receive :class:`GetReady`, which tells it to prepare
        for that job.

        Raises:
            EOFError: the agent is gone.
        """
        if self._watch is not None:  # the link's thread reads
            return self._orders.get()
        data, descriptors = receive(self._agent)
        said = _read(data)
        return said if isinstance(said, GetReady) else _order(said, descriptors)

    def has_word(self) -> bool:
        """Whether a message from the agent is waiting, or the agent is gone.

        Called before the first cell.
        """
        poll = select.poll()
        poll.register(self._agent.fileno(), select.POLLIN)
        return bool(poll.poll(0))

    def begin_cell(
        self, pack_names: Callable[..., RankEnded], answered: Callable[[Answer | None], None]
    ) -> None:
        """Handle the agent's messages while a cell runs; called once other threads may start.

        The agent requests nothing of the cell before this rank has reported that the cell begins.
        The order therefore matters only for signals and messages from elsewhere: the last word is
        opened and the handlers are installed before SIGINT works again and before the thread
        reads.

        Args:
            pack_names: builds the rank's last word with its variables in their current state; with
                ``last=False``, one that counts only if the rank sends no other.
            answered: receives the user's keyboard input, or None if the user has interrupted the
                cell.
        """
        self._answered = answered
        watch = self._watch or MainThreadWatch(self.last_word, self.send)
        watch.begin_cell()
        self.last_word.begin_cell(pack_names)
        if self._watch is not None:
            # The end of the previous cell removed this handler.
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
            # If a sign and the message that asks for it are both there, the sign is handled first:
            # see ask_for_sign.
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
                os._exit(1)  # the main thread is stuck in a signal handler or in C code
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
    """The notebook's keyboard for one cell of a rank: ``input()``, ``getpass``, debuggers.

    Threads that ask take turns. ``flush`` sends the output that was printed before a question.
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
        """Receive a reply, or None if no further input is possible.

        A reply that comes too late is dropped.
        """
        self._interrupted = self._interrupted or answer is None
        self._answers.put(answer)

    def _ask(self, prompt: str, *, hidden: bool) -> str:
        """Ask the user, and wait for the reply.

        Raises:
            EOFError: nobody can reply here, or the cell was interrupted before; a debugger then
                exits.
            StdinNotImplementedError: the notebook's front end cannot ask for input.
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
