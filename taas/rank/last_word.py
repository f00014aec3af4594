"""The last word of a rank: the report of how its cell ended, sent once by one of two threads.

* The **main thread** runs the cell, and reports at its end how it ended
  (:meth:`LastWord.end_cell`).
* When the agent requests the variables in their current state, the cell is **stopped**: it runs no
  other line. A signal handler does that in the main thread, before its next line of Python. While
  the main thread sleeps in C code, the **link's thread** does it (rank/main_thread.py): a main
  thread that sleeps there changes no variables. The thread that stops the cell packs the variables
  and sends the last word; the agent then ends the process.

Both may be about to happen at the same moment. :data:`STEPS` is the table of allowed transitions,
and a lock makes "check the stage, then change it" atomic, so the thread that is first sends the
last word. The other thread does not return to the cell.

**Why the lock cannot deadlock.** A Python signal handler runs in the main thread between any two
of its bytecodes, even while that thread holds the lock; a handler that acquired the lock then
would wait for itself. Only the handler of :data:`STOP` acquires it. The main thread therefore
acquires the lock only while a different handler is installed for that signal: before
:meth:`begin_cell` has installed this one, and after :meth:`end_cell`, or the handler itself, has
replaced it. Reading ``is_open`` takes no lock: it reads one attribute, and a cell may need it
anywhere (``input()``, even in ``__del__``).
"""

from __future__ import annotations

import enum
import os
import signal
import threading
from collections.abc import Callable
from typing import NoReturn

from taas.protocol.framing import Message
from taas.protocol.ranks import NOTICE, RankEnded, RankStage

STOP = NOTICE + 1
"""Stops the cell before the main thread's next line of Python. Only the link's thread sends it."""


class WordStage(enum.Enum):
    """Which thread sends the last word of a rank's cell, and how far it has got."""

    NO_CELL = "no cell"  # no cell has begun
    OPEN = "open"  # the cell runs, and no thread has claimed the last word
    AT_END = "at its end"  # the main thread has claimed it: the cell is over
    # the cell no longer runs, and the thread that stopped it packs its variables
    STOPPED = "stopped"
    GIVEN = "given"  # these variables are packed; the agent may end this process


STEPS: dict[WordStage, frozenset[WordStage]] = {
    WordStage.NO_CELL: frozenset({WordStage.OPEN}),
    WordStage.OPEN: frozenset({WordStage.AT_END, WordStage.STOPPED}),
    WordStage.AT_END: frozenset({WordStage.OPEN}),  # the next cell of a kept rank
    WordStage.STOPPED: frozenset({WordStage.GIVEN}),
    WordStage.GIVEN: frozenset(),
}
"""The allowed transitions; ARCHITECTURE.md explains them.

A rank has no log, since its loggers belong to the user. Its agent logs the messages that show
these transitions.
"""


class LastWord:
    """The last word of each cell of one rank; ``send`` sends its agent a message."""

    def __init__(self, send: Callable[[Message], None]) -> None:
        self._send = send
        self._lock = threading.Lock()
        self._stage = WordStage.NO_CELL
        self._pack_names: Callable[..., RankEnded]
        self._held: set[int] = set()

    def __repr__(self) -> str:
        return f"<last word: {self._stage.value}>"

    @property
    def is_open(self) -> bool:
        """Whether the cell is running, and no thread has claimed the last word."""
        return self._stage is WordStage.OPEN

    @property
    def is_given(self) -> bool:
        """Whether a stopped cell's variables are packed, so that nothing is left to do here."""
        return self._stage is WordStage.GIVEN

    def _go_on(self, to: WordStage) -> None:
        """Make a transition; the caller holds the lock.

        Raises:
            RuntimeError: the table does not allow this transition.
        """
        if to not in STEPS[self._stage]:
            raise RuntimeError(f"{self!r} has no step to {to.value!r}")
        self._stage = to

    # ------------------------------------------------------------ the main thread

    def begin_cell(self, pack_names: Callable[..., RankEnded]) -> None:
        """Open the last word.

        Args:
            pack_names: builds the last word of a cell that is stopped, with its variables in their
                current state; with ``last=False``, one that counts only if no other is sent.
        """
        self._pack_names = pack_names
        with self._lock:
            self._go_on(WordStage.OPEN)
        signal.signal(STOP, lambda number, frame: self._stop_here())

    def end_cell(self) -> None:
        """Claim the last word at the end of the cell, and ignore later interrupts.

        It does not return if the other thread has claimed the last word.
        """
        ignore_interrupts()
        # A STOP from here on comes too late: this thread is about to report how the cell ended,
        # and packs the variables for that. A STOP that came before this line has run _stop_here,
        # which does not return.
        signal.signal(STOP, _take_no_notice)
        with self._lock:
            if self._stage is WordStage.OPEN:
                self._go_on(WordStage.AT_END)
            # The stage is AT_END already if a handler that the cell has set raised in this method.
            is_ours = self._stage is WordStage.AT_END
        if not is_ours:
            _wait_for_the_end()

    def _stop_here(self) -> NoReturn:
        """Stop the cell at this line; the handler of STOP.

        The variables are packed here, unless the link's thread is already doing that: it saw this
        thread asleep, and stopped the cell a moment before this thread woke. Neither thread waits
        for the other, and the cell's next line is never run.
        """
        # A KeyboardInterrupt raised here would let the cell go on.
        ignore_interrupts()
        # A second STOP would enter this handler again, find the last word claimed, and wait below
        # forever, in the middle of packing.
        signal.signal(STOP, _take_no_notice)
        if self.stop_cell():
            self.give_names()
        _wait_for_the_end()

    # ------------------------------------------------------------ either thread

    def stop_cell(self) -> bool:
        """Claim the last word of a running cell, which stops the cell.

        Return False if it is too late.

        The link's thread may do so only while the main thread is in C code and has been sent STOP:
        that signal is then handled before the main thread's next line of Python, and
        :meth:`_stop_here` keeps the main thread from going on.
        """
        with self._lock:
            if self._stage is not WordStage.OPEN:
                return False
            self._go_on(WordStage.STOPPED)
            return True

    def give_names(self) -> None:
        """Pack the current variables and send the last word.

        Called by the thread that has claimed it.
        """
        self._send(RankStage(stage="packing"))
        ended = self._pack_names()
        # This comes before the message: the agent replies with "leave", which the link's thread
        # may read before this thread has returned from sending. It exits only in stage GIVEN.
        with self._lock:
            self._go_on(WordStage.GIVEN)
        self.say(ended)

    def give_names_ahead(self) -> None:
        """Give the agent the current variables, in case nothing is sent later."""
        ended = self._pack_names(last=False)
        if ended.answer is not None:
            self.say(ended)

    def say(self, ended: RankEnded) -> None:
        """Report to the agent how the cell ended.

        Packed variables stay open until the agent has them.
        """
        # Added before the message is sent: the agent opens the variables through this process's
        # descriptor and replies "taken", which the link's thread may read before this thread has
        # returned from sending.
        if ended.answer is not None:
            self._held.add(ended.answer.fd)
        self._send(ended)

    # ------------------------------------------------------------ the link's thread

    def forget_names(self) -> None:
        """Close the packed variables: the agent has them."""
        while self._held:
            os.close(self._held.pop())


def ignore_interrupts() -> None:
    """Make every later SIGINT have no effect; for the main thread.

    ``SIG_IGN`` is not suitable: if Python finds it in place of the handler of a SIGINT that is
    pending, it prints an error.
    """
    while signal.getsignal(signal.SIGINT) is not _take_no_notice:
        try:
            signal.signal(signal.SIGINT, _take_no_notice)
        except KeyboardInterrupt:  # one that was pending
            continue


def _take_no_notice(number: int, frame: object) -> None:
    """Ignore a signal that comes too late."""


def _wait_for_the_end() -> NoReturn:
    """Wait until the agent ends this process; signal handlers run meanwhile."""
    while True:
        signal.pause()
