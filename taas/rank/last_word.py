"""The last word of a rank: how its cell ended. It is said once, by one of two threads.

* The **main thread** runs the cell, and says at its end how it ended (:meth:`LastWord.end_cell`).
* When the agent asks for the names as they stand, the cell is **stopped**: it runs no other line.
  A signal handler does that in the main thread, before its next line of Python. While the main
  thread sleeps in C code, the **link's thread** does it (rank/main_thread.py): a main thread that
  sleeps there changes no names. Whoever stops the cell packs the names, and says the last word; the
  agent then ends the process.

Two of these may be about to happen at the same moment. :data:`STEPS` is the table of what may
follow what, and a lock makes "look into it, then go on" one step, so the first one has the last
word. Whoever comes second does not return to the cell.

**Why the lock cannot block itself.** A Python signal handler runs in the main thread between any
two of its bytecodes, also while it holds the lock; a handler that asked for the lock then would
wait for itself. Only the handler of :data:`STOP` asks for it. So the main thread takes the lock
only while another handler is in place of that one: before :meth:`begin_cell` has installed it, and
after :meth:`end_cell`, or the handler itself, has taken it away. Reading ``is_open`` takes no lock:
it reads one attribute, and a cell may ask for it anywhere (``input()``, also in ``__del__``).
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
    """Who says the last word of a rank's cell, and how far that is."""

    NO_CELL = "no cell"  # none has begun
    OPEN = "open"  # the cell runs, and nobody has the last word
    AT_END = "at its end"  # the main thread has it: the cell is over
    STOPPED = "stopped"  # the cell runs no more, and who has stopped it packs its names
    GIVEN = "given"  # these names are packed; the agent may end this process


STEPS: dict[WordStage, frozenset[WordStage]] = {
    WordStage.NO_CELL: frozenset({WordStage.OPEN}),
    WordStage.OPEN: frozenset({WordStage.AT_END, WordStage.STOPPED}),
    WordStage.AT_END: frozenset({WordStage.OPEN}),  # the next cell of a rank that was kept
    WordStage.STOPPED: frozenset({WordStage.GIVEN}),
    WordStage.GIVEN: frozenset(),
}
"""Which stage may follow which; ARCHITECTURE.md explains them.

A rank has no log, as its loggers are the user's. Its agent logs the messages by which these steps
are seen.
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
        """Whether the cell runs, and nobody has the last word."""
        return self._stage is WordStage.OPEN

    @property
    def is_given(self) -> bool:
        """Whether the names of a stopped cell are packed: nothing else is to be done here."""
        return self._stage is WordStage.GIVEN

    def _go_on(self, to: WordStage) -> None:
        """Take a step, with the lock held.

        Raises:
            RuntimeError: no such step is in the table.
        """
        if to not in STEPS[self._stage]:
            raise RuntimeError(f"{self!r} has no step to {to.value!r}")
        self._stage = to

    # ------------------------------------------------------------ the main thread

    def begin_cell(self, pack_names: Callable[..., RankEnded]) -> None:
        """Leave the last word open.

        Args:
            pack_names: makes the last word of a cell that is stopped, with its names as they stand;
                with ``last=False``, one that holds if no other is said.
        """
        self._pack_names = pack_names
        with self._lock:
            self._go_on(WordStage.OPEN)
        signal.signal(STOP, lambda number, frame: self._stop_here())

    def end_cell(self) -> None:
        """Have the last word, and let no interrupt change that; at the end of the cell.

        It does not return if the other thread has the last word.
        """
        ignore_interrupts()
        # A STOP from here on comes too late: this thread is about to say how the cell ended, and
        # packs the names for that. One that came before this line has run _stop_here, which does
        # not return.
        signal.signal(STOP, _take_no_notice)
        with self._lock:
            if self._stage is WordStage.OPEN:
                self._go_on(WordStage.AT_END)
            # It was at its end before if a handler of the cell's own has raised in this method.
            is_ours = self._stage is WordStage.AT_END
        if not is_ours:
            _wait_for_the_end()

    def _stop_here(self) -> NoReturn:
        """Stop the cell at this line, as the handler of STOP.

        The names are given here, unless the link's thread does that already: it saw this thread
        asleep, and stopped the cell a moment before this thread woke. Neither thread waits for the
        other, and the cell's next line is never run.
        """
        # A KeyboardInterrupt that was raised here would let the cell go on.
        ignore_interrupts()
        # A second STOP would come here again, find the last word taken, and wait below for good,
        # in the midst of packing.
        signal.signal(STOP, _take_no_notice)
        if self.stop_cell():
            self.give_names()
        _wait_for_the_end()

    # ------------------------------------------------------------ either thread

    def stop_cell(self) -> bool:
        """Take the last word of a cell that runs, and stop it thereby; False: it is too late.

        The link's thread may do so only while the main thread is in C code and STOP was sent to it:
        then that waits for it before its next line of Python, and :meth:`_stop_here` holds it.
        """
        with self._lock:
            if self._stage is not WordStage.OPEN:
                return False
            self._go_on(WordStage.STOPPED)
            return True

    def give_names(self) -> None:
        """Pack the names as they stand, and say the last word; for the thread that has it."""
        self._send(RankStage(stage="packing"))
        ended = self._pack_names()
        # This comes before the message: the agent answers it with "leave", which the link's thread
        # may hear before this thread has returned from sending. It leaves only if they are given.
        with self._lock:
            self._go_on(WordStage.GIVEN)
        self.say(ended)

    def give_names_ahead(self) -> None:
        """Let the agent have the names as they stand now, in case that nothing is said later."""
        ended = self._pack_names(last=False)
        if ended.answer is not None:
            self.say(ended)

    def say(self, ended: RankEnded) -> None:
        """Tell the agent how the cell ended; packed names stay open until it has them."""
        # Held before they are told: the agent opens them by this process's descriptor, and answers
        # "taken", which the link's thread may hear before this one has returned from sending.
        if ended.answer is not None:
            self._held.add(ended.answer.fd)
        self._send(ended)

    # ------------------------------------------------------------ the link's thread

    def forget_names(self) -> None:
        """Close the packed names: the agent has them."""
        while self._held:
            os.close(self._held.pop())


def ignore_interrupts() -> None:
    """Let no SIGINT do anything from now on; for the main thread.

    ``SIG_IGN`` will not do: when Python finds it in the place of the handler of a SIGINT that is
    under way, it complains.
    """
    while signal.getsignal(signal.SIGINT) is not _take_no_notice:
        try:
            signal.signal(signal.SIGINT, _take_no_notice)
        except KeyboardInterrupt:  # one that was under way
            continue


def _take_no_notice(number: int, frame: object) -> None:
    """Handle a signal that comes too late."""


def _wait_for_the_end() -> NoReturn:
    """Wait until the agent ends this process; handlers of signals run meanwhile."""
    while True:
        signal.pause()
