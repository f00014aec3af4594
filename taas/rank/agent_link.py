"""A rank's connection to its agent, read by a thread of its own from its first cell on.

So a rank whose main thread is stuck in C code can still be asked:

* It is interrupted. A real-time signal, whose Python-level handler runs as soon as the main thread runs Python code,
  proves that the interrupt is noticed, whatever handler of SIGINT the cell has. A main thread that has not noticed after
  a second may wait for other ranks in C code: that is broken off (:mod:`taas.adopt.membership`), and the KeyboardInterrupt
  comes out. While C code holds the GIL nobody answers, and the agent's patience ends.
* It is to pack its names as they stand. The main thread is parked before its next line of Python, or the names would
  change while they are packed; one that is in C code stays there. Then this thread says the rank's last word.
"""

from __future__ import annotations

import _thread
import os
import queue
import select
import signal
import threading
import time
import traceback
from collections.abc import Callable
from typing import NoReturn

from taas import adopt
from taas.wire.framing import Message, MessageReader, pack
from taas.wire.rank_connection import AgentConnection
from taas.wire.ranks import Answer, RankEnded, RankHears, RankRequest, RankStage, RankStart

_NOTICE, _PARK = signal.SIGRTMIN + 12, signal.SIGRTMIN + 13
"""Real-time signals that neither glibc, CUDA nor profilers use; the stacks' is the one before."""
_BREAK_OFF_SECONDS = 1.0
_ASK_AGAIN_SECONDS = 0.1
_PARKING_SECONDS = 0.1
_read = MessageReader(RankHears)

Order = tuple[RankStart, int]
"""What to be, and a descriptor of the packed names."""


class AgentLink:
    """What one rank and its agent say to each other.

    Args:
        agent: the connection.

    Attributes:
        answer: the descriptor of the packed names, until the agent has them; else -1.
        broken_off: whether the main thread's waiting for other ranks was made to fail in this cell.
    """

    def __init__(self, agent: AgentConnection) -> None:
        self._agent, self._pid = agent, os.getpid()
        self._main_thread = threading.get_ident()
        self._last_word = threading.Lock()
        self._parked = threading.Event()
        self._orders: queue.SimpleQueue[Order | None] = queue.SimpleQueue()
        self._noticed = -1
        self._pack_names: Callable[[], RankEnded]
        self._answered: Callable[[Answer | None], None]
        self.answer = -1
        self.broken_off = False

    @property
    def in_rank(self) -> bool:
        """Whether this process is the rank, and not one that the cell forked."""
        return os.getpid() == self._pid

    def send(self, message: Message) -> None:
        """Send the agent a message."""
        self._agent.send(pack(message))

    def next_order(self) -> Order | None:
        """Return the next order for this process, with a descriptor of its names; None: there is none, and it may leave.

        Raises:
            EOFError: the agent is gone.
        """
        if self._noticed >= 0:
            return self._orders.get()
        return _order(*self._agent.receive())

    @property
    def in_cell(self) -> bool:
        """Whether this process is the rank, and its cell runs: the agent is heard."""
        return self.in_rank and self._noticed >= 0 and not self._last_word.locked()

    def begin_cell(
        self, pack_names: Callable[[], RankEnded], answered: Callable[[Answer | None], None]
    ) -> None:
        """Let the agent be answered while a cell runs; called by the main thread, once it need not be the only one.

        Args:
            pack_names: makes the rank's last word with its names as they stand.
            answered: takes what the person at the keyboard answered; None: they have interrupted the cell.
        """
        self._pack_names, self._answered, self.broken_off = pack_names, answered, False
        if self._noticed >= 0:
            self._last_word.release()
            signal.signal(signal.SIGINT, signal.default_int_handler)
            return
        self._noticed = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        signal.signal(_NOTICE, lambda number, frame: os.eventfd_write(self._noticed, 1))
        signal.signal(_PARK, lambda number, frame: self._park())
        threading.Thread(target=self._serve, name="taas-agent-link", daemon=True).start()

    def _park(self) -> NoReturn:
        """Stand still until the process ends, in the main thread: its names are being packed."""
        signal.signal(signal.SIGINT, _take_no_notice)
        self._parked.set()
        while True:
            signal.pause()

    def end_cell(self) -> None:
        """Let interrupts change nothing from now on, and have the last word; called by the main thread.

        Does not return if the other thread has the last word already: it ends the process.
        """
        while signal.getsignal(signal.SIGINT) is not _take_no_notice:
            try:
                signal.signal(signal.SIGINT, _take_no_notice)
            except KeyboardInterrupt:  # the last that came
                continue
        self._last_word.acquire()

    # ------------------------------------------------------------ the other thread

    def _serve(self) -> None:
        poll = select.poll()
        poll.register(self._agent.fileno(), select.POLLIN)
        poll.register(self._noticed, select.POLLIN)
        asked: float | None = None  # since when the main thread has been asked to notice
        while True:
            ready = dict(poll.poll(None if asked is None else _ASK_AGAIN_SECONDS * 1000))
            if self._noticed in ready:
                os.eventfd_read(self._noticed)
                asked = None
                self.send(RankStage(stage="noticed"))
            if self._agent.fileno() in ready:
                try:
                    data, descriptors = self._agent.receive()
                except (EOFError, OSError):  # the agent went, and the system ends this process
                    self._orders.put(None)
                    return
                match said := _read(data):
                    case RankRequest(what="notice"):
                        self._answered(None)
                        asked = self._ask_main_thread()
                    case RankRequest(what="names"):
                        self._take_names()
                    case RankRequest(what="taken"):
                        os.close(self.answer)
                        self.answer = -1
                    case Answer():
                        self._answered(said)
                    case _:
                        self._orders.put(_order(data, descriptors))
            elif asked is not None:
                if not self.broken_off and time.monotonic() >= asked + _BREAK_OFF_SECONDS:
                    self.broken_off = True
                    _break_off()
                # again: a signal that comes between the last line of Python and a system call ends no system call
                signal.pthread_kill(self._main_thread, _NOTICE)

    def _ask_main_thread(self) -> float | None:
        """Ask the main thread to notice; returns since when it is asked, or None: it need not."""
        if self._last_word.locked():  # the cell is over: it packs, or leaves
            self.send(RankStage(stage="noticed"))
            return None
        signal.pthread_kill(self._main_thread, _NOTICE)
        return time.monotonic()

    def _take_names(self) -> None:
        """Pack the names, say the last word and end the process; leave it to the main thread if that is at its end."""
        self.send(RankStage(stage="packing"))
        if not self._last_word.acquire(blocking=False):
            return
        _thread.interrupt_main(_PARK)  # type: ignore[arg-type]  # no member of the enum has its number
        self._parked.wait(_PARKING_SECONDS)
        self.send(self._pack_names())
        while _read(self._agent.receive()[0]) != RankRequest(what="leave"):
            continue  # the memory lives in this process until the agent holds it, too
        os._exit(1)


def _order(data: bytes, descriptors: list[int]) -> Order | None:
    said = _read(data)
    return (said, descriptors[0]) if isinstance(said, RankStart) else None


def _break_off() -> None:
    try:
        adopt.break_off()
    except Exception:  # no descriptor left, NCCL: the wait lasts, and this thread is needed all the more
        traceback.print_exc()


def _take_no_notice(number: int, frame: object) -> None:
    """Handle SIGINT once the cell is over; ``SIG_IGN`` would complain of one that is just being handled."""
