"""A rank's connection to its agent, read by a thread of its own from its first cell on.

So a rank whose main thread is in C code can still be asked:

* It is interrupted. A real-time signal follows the SIGINT; its Python-level handler, which runs as
  soon as the main thread runs Python code, proves that the interrupt is noticed, whatever handler
  of SIGINT the cell has. A main thread that uses the processor in C code (it saves a large model)
  has the time it needs. One that has slept for a second may wait for other ranks: that is broken
  off (:mod:`taas.adopt.waits`), and the KeyboardInterrupt comes out. While C code holds the GIL
  nobody answers.
* It is to pack its names as they stand: the main thread does so before its next line of Python, or
  this one while the main one sleeps in C code, which changes nothing then. The first of the two
  says the rank's last word.

What a cell asks the person at the keyboard goes by the agent into the run's record, where whoever
shows the run in a notebook finds it (notebook/live_view.py); the answer comes back by the agent.
"""

from __future__ import annotations

import builtins
import getpass
import os
import queue
import select
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from IPython.core.error import StdinNotImplementedError

from taas import adopt
from taas.runs import stacks
from taas.wire import deadlines
from taas.wire.framing import Message, MessageReader, pack
from taas.wire.ranks import (
    NOTICE,
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

_NAMES = NOTICE + 1
_read = MessageReader(RankHears)

Order = tuple[RankStart, int]
"""What to be, and a descriptor of the packed names."""


class AgentLink:
    """What one rank and its agent say to each other.

    Attributes:
        answer: the descriptor of the packed names, until the agent has them; else -1.
        broken_off: whether the main thread's waiting for other ranks was made to fail in this cell.
    """

    def __init__(self, agent: socket.socket) -> None:
        self._agent, self._pid = agent, os.getpid()
        self._main_thread = threading.get_ident()
        self._speaker: dict[str, int] = {}
        self._given = False
        self._asked: _Sleep | None = None
        self._names_asked = self._noticed_before_asked = self._interrupt_ignored = False
        self._orders: queue.SimpleQueue[Order | None] = queue.SimpleQueue()
        self._noticed = -1
        self._pack_names: Callable[..., RankEnded]
        self._answered: Callable[[Answer | None], None]
        self.answer = self._ahead = -1
        self.broken_off = False

    @property
    def in_rank(self) -> bool:
        """Whether this process is the rank, and not one that the cell forked."""
        return os.getpid() == self._pid

    def send(self, message: Message) -> None:
        """Send the agent a message."""
        send(self._agent, pack(message))

    def next_order(self) -> Order | GetReady | None:
        """Return the next order; None: this process may leave. EOFError: the agent is gone.

        Before its first order a process may be told to get ready for that.
        """
        if self._noticed >= 0:
            return self._orders.get()
        data, descriptors = receive(self._agent)
        said = _read(data)
        return said if isinstance(said, GetReady) else _order(said, descriptors)

    def has_word(self) -> bool:
        """Whether a message of the agent waits, or the agent is gone; before the first cell."""
        poll = select.poll()
        poll.register(self._agent.fileno(), select.POLLIN)
        return bool(poll.poll(0))

    @property
    def in_cell(self) -> bool:
        """Whether this process is the rank, and its cell runs: the agent is heard."""
        return self.in_rank and self._noticed >= 0 and not self._speaker

    def begin_cell(
        self, pack_names: Callable[..., RankEnded], answered: Callable[[Answer | None], None]
    ) -> None:
        """Answer the agent while a cell runs; called once other threads may start.

        Args:
            pack_names: makes the rank's last word with its names as they stand; with
                ``last=False``, one that holds if it says no other.
            answered: takes what the person at the keyboard answered; None: they have interrupted
                the cell.
        """
        self._pack_names, self._answered, self.broken_off = pack_names, answered, False
        if self._noticed >= 0:
            self._speaker.clear()
            self._noticed_before_asked = self._interrupt_ignored = False
            signal.signal(signal.SIGINT, signal.default_int_handler)
            return
        self._noticed = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        signal.signal(NOTICE, lambda number, frame: self._notice())
        signal.signal(_NAMES, lambda number, frame: self._stop_here())
        threading.Thread(target=self._serve, name="taas-agent-link", daemon=True).start()

    def _notice(self) -> None:
        """Say that the main thread runs Python code; raise an interrupt that C code ignored."""
        os.eventfd_write(self._noticed, 1)
        handler = signal.getsignal(signal.SIGINT)
        if self._interrupt_ignored and callable(handler):
            self._interrupt_ignored = False
            handler(signal.SIGINT, sys._getframe())

    def _repeat_interrupt(self) -> None:
        """Raise an interrupt that C code ignored, once the main thread runs Python code again.

        What the cell itself ignores stays ignored, and the interrupt of a cell that is over is
        none.
        """
        if self._speaker or signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
            return
        self._interrupt_ignored = True
        signal.pthread_kill(self._main_thread, NOTICE)

    def _speaks(self) -> bool:
        """Whether this thread says how the cell ended: the first one that asks."""
        me = threading.get_ident()
        return self._speaker.setdefault("thread", me) == me

    def _stop_here(self) -> None:
        """Give the names in the main thread, unless the other one does; the cell runs no more."""
        if self._speaker.get("thread") == self._main_thread:
            return  # it is at its end, and packs them anyhow
        signal.signal(signal.SIGINT, _take_no_notice)
        if self._speaks():
            self._give_names()
        while True:
            signal.pause()

    def _give_names(self) -> None:
        """Pack the names as they stand, and say the last word; the agent then ends this process."""
        self.send(RankStage(stage="packing"))
        ended, self._given = self._pack_names(), True
        self.send(ended)

    def end_cell(self) -> None:
        """Let interrupts change nothing from now on, and have the last word; for the main thread.

        Does not return if the other thread has the last word already: it ends the process.
        """
        while signal.getsignal(signal.SIGINT) is not _take_no_notice:
            try:
                signal.signal(signal.SIGINT, _take_no_notice)
            except KeyboardInterrupt:  # the last that came
                continue
        while not self._speaks():
            signal.pause()

    # ------------------------------------------------------------ the other thread

    def _serve(self) -> None:
        poll = select.poll()
        poll.register(self._agent.fileno(), select.POLLIN)
        poll.register(self._noticed, select.POLLIN)
        while True:
            ready = dict(poll.poll(None if self._asked is None else deadlines.ASK_AGAIN * 1000))
            if self._noticed in ready:
                os.eventfd_read(self._noticed)
                self._noticed_before_asked = self._asked is None
                self._asked = None
                self.send(RankStage(stage="at work"))
            if self._agent.fileno() in ready:
                try:
                    data, descriptors = receive(self._agent)
                except (EOFError, OSError):  # the agent went, and the system ends this process
                    self._orders.put(None)
                    return
                self._hear(data, descriptors)
            elif self._asked is not None:
                self._ask_again(self._asked)

    def _hear(self, data: bytes, descriptors: list[int]) -> None:
        match said := _read(data):
            case RankRequest(what="notice"):
                self._answered(None)
                if said.ignored:
                    self._repeat_interrupt()
                if not self._noticed_before_asked:
                    self._ask_main_thread(NOTICE, "at work")
            case RankRequest(what="names"):
                self._names_asked = True
                self._ask_main_thread(_NAMES, "packing")
            case RankRequest(what="taken"):
                for fd in {self.answer, self._ahead} - {-1}:
                    os.close(fd)
                self.answer = self._ahead = -1
            case RankRequest(what="leave") if self._given:
                os._exit(1)
            case RankRequest(what="collective"):
                stacks.note_collective(adopt.pending_collective())
                self.send(RankStage(stage="wrote"))
            case Answer():
                self._answered(said)
            case _:
                self._orders.put(_order(said, descriptors))

    def _ask_main_thread(self, number: int, at_its_end: Literal["at work", "packing"]) -> None:
        """Ask the main thread for something; if the cell is over, it does it already."""
        if self._speaker:
            self.send(RankStage(stage=at_its_end))
            return
        self._asked = self._asked or _Sleep()
        signal.pthread_kill(self._main_thread, number)

    def _ask_again(self, asked: _Sleep) -> None:
        if not self._names_asked and self._handles_interrupt():
            os.eventfd_write(self._noticed, 1)
            return
        slept = asked.seconds()
        if slept < deadlines.BREAK_OFF and adopt.waits_at_full_speed(self._main_thread):
            slept = asked.age
        if slept == 0.0:  # it will do what it is asked when it comes back
            if not asked.told and asked.age >= deadlines.BREAK_OFF:
                asked.told = True
                self.send(RankStage(stage="at work"))
            return
        # again: a signal that comes between the last line of Python and a system call ends no
        # system call
        signal.pthread_kill(self._main_thread, NOTICE)
        if slept >= deadlines.BREAK_OFF and not self.broken_off:
            self.broken_off = True
            threading.Thread(target=self._break_off, name="taas-breaks-off", daemon=True).start()
        elif (
            slept >= deadlines.STILL and self._names_asked and not self._speaker and self._speaks()
        ):
            self._give_names()

    def _handles_interrupt(self) -> bool:
        """Tell whether the main thread handles an interrupt; it may wait for other ranks there."""
        handled = sys._current_exceptions().get(self._main_thread)
        error = handled[1] if isinstance(handled, tuple) else handled  # before Python 3.12
        return isinstance(error, KeyboardInterrupt)

    def _break_off(self) -> None:
        """Let the main thread's waits fail; the agent has the names first, as NCCL may abort."""
        try:
            if adopt.waits_on_gpus():
                packing = threading.Thread(
                    target=self._give_names_ahead, name="taas-packs", daemon=True
                )
                packing.start()
                packing.join(deadlines.NAMES_AHEAD)
            adopt.break_off()
        except Exception:  # no descriptor left, NCCL: the wait lasts
            traceback.print_exc()

    def _give_names_ahead(self) -> None:
        ended = self._pack_names(last=False)
        if ended.answer is not None:
            self._ahead = ended.answer.fd
            self.send(ended)


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


class _Sleep:
    """How long the main thread has slept since this was made.

    ``told``: the agent knows that it is at work.
    """

    def __init__(self) -> None:
        self._began = self._since = time.monotonic()
        self._used = _main_thread()[1]
        self.told = False

    @property
    def age(self) -> float:
        return time.monotonic() - self._began

    def seconds(self) -> float:
        """Return for how many seconds it has slept; 0: it uses the processor, or a disk."""
        now, (state, used) = time.monotonic(), _main_thread()
        idle = deadlines.IDLE_SHARE * (now - self._since) + deadlines.CLOCK_GRAIN
        if state != "S" or used - self._used > idle:
            self._since, self._used = now, used
        return now - self._since


def _main_thread() -> tuple[str, float]:
    """Return the main thread's state (proc(5)), and its processor time in seconds.

    Where no file can be opened any more, it is taken to sleep.
    """
    try:
        stat = Path(f"/proc/self/task/{os.getpid()}/stat").read_bytes()
    except OSError:
        return "S", 0.0
    fields = stat.rpartition(b")")[2].split()
    return fields[0].decode(), (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _order(said: Message, descriptors: list[int]) -> Order | None:
    return (said, descriptors[0]) if isinstance(said, RankStart) else None


def _take_no_notice(number: int, frame: object) -> None:
    """Handle SIGINT once the cell is over; ``SIG_IGN`` would complain of one under way."""
