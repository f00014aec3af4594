"""What the main thread of a rank is at, asked and measured from beside it while a cell runs.

The main thread runs the cell, and may be in C code for seconds or for ever. It is asked two things,
each by a real-time signal whose handler runs before the main thread's next line of Python:

* to give a **sign** (:data:`~taas.protocol.ranks.NOTICE`): it runs Python code, so an interrupt is
  noticed, whatever handler of SIGINT the cell has;
* to **stop** the cell and give the names (:data:`~taas.rank.last_word.STOP`).

While it does neither, it is in C code, and :meth:`MainThreadWatch.ask_again` finds out in which
kind. Code that uses the processor or a disk (it saves a large model) has the time that it needs.
Code that sleeps may wait for other ranks. While C code holds the GIL nothing here can run.

Who runs what: the main thread runs :meth:`~MainThreadWatch.begin_cell`, and as a signal handler
:meth:`~MainThreadWatch._give_sign`. A thread of its own breaks waits off, since NCCL's abort takes
seconds. The link's thread runs all else.
"""

from __future__ import annotations

import enum
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from taas import adopt
from taas.protocol import deadlines
from taas.protocol.framing import Message
from taas.protocol.ranks import NOTICE, RankStage
from taas.rank.last_word import STOP, LastWord


class Sign(enum.Enum):
    """Whether the main thread has given its sign in this cell."""

    NONE = "none"
    UNASKED = "unasked"  # it gave it before the link's thread had asked
    ASKED = "asked"  # it was asked, for it or to stop, and has not given it since
    GIVEN = "given"  # it gave it when it was asked


class MainThreadWatch:
    """The watch over the main thread, which makes it.

    Args:
        word: the last word of the rank.
        send: sends the agent a message.

    Attributes:
        source: a descriptor that is readable when the main thread has given its sign.
        broken_off: whether its waiting for other ranks was made to fail in this cell.
    """

    def __init__(self, word: LastWord, send: Callable[[Message], None]) -> None:
        self._word, self._send = word, send
        self._thread = threading.get_ident()
        self.source = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._sign = Sign.NONE
        self._sleep = _Sleep()
        self._names_wanted = False
        self._repeats_interrupt = False
        self.broken_off = False

    # ------------------------------------------------------------ the main thread

    def begin_cell(self) -> None:
        """Forget the last cell, and give signs from now on.

        The link's thread asks nothing meanwhile, since the last word is not open.
        """
        self._sign = Sign.NONE
        self._repeats_interrupt = self.broken_off = False
        signal.signal(NOTICE, lambda number, frame: self._give_sign())

    def _give_sign(self) -> None:
        """Say that this thread runs Python code, and raise an interrupt that C code ignored.

        It is the handler of NOTICE. An eventfd carries the sign, because writing to it neither
        waits nor needs a lock: the handler may have come in the midst of anything.
        """
        os.eventfd_write(self.source, 1)
        handler = signal.getsignal(signal.SIGINT)
        if self._repeats_interrupt and callable(handler):
            self._repeats_interrupt = False
            handler(signal.SIGINT, sys._getframe())

    # ------------------------------------------------------------ the link's thread asks

    @property
    def wait(self) -> float | None:
        """The seconds until :meth:`ask_again` is due; None: nothing is asked."""
        return deadlines.ASK_AGAIN if self._sign is Sign.ASKED else None

    def take_sign(self) -> None:
        """Take in that the main thread has given its sign, and tell the agent."""
        os.eventfd_read(self.source)
        self._sign = Sign.GIVEN if self._sign is Sign.ASKED else Sign.UNASKED
        self._send(RankStage(stage="at work"))

    def ask_for_sign(self, *, interrupt_ignored: bool) -> None:
        """Ask the main thread, which was sent a SIGINT, for its sign.

        The agent sends the process SIGINT, then NOTICE, then the message that brings this thread
        here. A main thread that runs Python code gives its sign at that NOTICE, which may be before
        this thread hears the message. Then nothing is asked: the interrupt is noticed, and the
        cell's ``except`` may wait for other ranks by now, as it should. Asked, it could not give
        another sign there, would be taken for stuck, and its wait be broken off. If the sign comes
        after the message, it is the answer. Of a sign and a message that are there together, the
        link's thread takes the sign first.
        """
        if interrupt_ignored:
            self._repeat_interrupt()
        if self._sign is not Sign.UNASKED:
            self._ask(NOTICE, "at work")

    def ask_for_names(self) -> None:
        """Ask the main thread to stop the cell and give the names."""
        self._names_wanted = True
        self._ask(STOP, "packing")

    def _ask(self, number: int, at_its_end: Literal["at work", "packing"]) -> None:
        """Send the main thread a signal; if the cell is over, say what it does by itself.

        The cell may come to its end right after the look at the last word. Then the signal finds
        the main thread in :meth:`LastWord.end_cell` or later: a sign is given, and means what it
        always does; a STOP is not taken notice of, as the names are being packed anyhow.
        """
        if not self._word.is_open:
            self._send(RankStage(stage=at_its_end))
            return
        if self._sign is not Sign.ASKED:  # else it sleeps since it was asked first
            self._sleep = _Sleep()
            # Before the signal, so that the sign is one that was asked for.
            self._sign = Sign.ASKED
        signal.pthread_kill(self._thread, number)

    def _repeat_interrupt(self) -> None:
        """Raise an interrupt that C code ignored, once the main thread runs Python code again.

        system(3) ignores SIGINT while its program runs, and the agent has seen that the process did
        so when it sent one. The mark is set before the signal, because the signal's handler looks
        for it. What the cell itself ignores stays ignored, and the interrupt of a cell that is over
        is none.
        """
        if not self._word.is_open or signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
            return
        self._repeats_interrupt = True
        signal.pthread_kill(self._thread, NOTICE)

    # ------------------------------------------------------------ and asks again

    def ask_again(self) -> None:
        """Find out what a main thread is in that has not answered, and do what helps it out.

        It is called every tenth of a second, from the question to the sign. The main thread runs
        on all the while, so that whatever is found out here may be otherwise a moment later. That
        is why each branch does what is right in both cases:

        1. *It handles a KeyboardInterrupt.* SIGINT was raised in it before NOTICE's handler could
           run, and its ``except`` or ``finally`` has entered C code since, perhaps a collective in
           which ranks meet. It has noticed, so this is its sign, and nothing is broken off. If it
           has come out of there meanwhile, it gives the sign itself: one more tells nothing new.
           When the names are wanted, it does not count: patience is over.
        2. *It uses the processor or a disk.* It does what it is asked when it comes back. The agent
           is told once that it is at work, after as long as a sleeping one is given.
        3. *It sleeps.* NOTICE is sent once more in any case. A signal ends a system call with
           EINTR, and Python then runs its handler, only if it comes during the call. The first one
           may have come when the last line of Python had been run and the call not begun: its
           handler is due, but the call sleeps on. A second one while it sleeps finds it there.
        4. *It has slept for a second.* No signal wakes it, so it waits inside C code, most probably
           for other ranks: that is broken off, once in a cell. If it just comes back by itself, its
           next collective fails instead, and the cell is about to end anyhow.
        5. *The names are wanted, and it has slept for long enough.* This thread gives them. It may
           wake at this very moment. But STOP was sent to it when the names were asked for, and a
           signal that came is never forgotten: before its next line of Python it runs
           :meth:`LastWord._stop_here`. There, or here, the first one takes the last word. If it
           is the main thread, this one has nothing to do; if it is this one, the main thread waits
           there and changes no names while they are packed.
        """
        if not self._names_wanted and self._handles_interrupt():
            os.eventfd_write(self.source, 1)
            return
        slept = self._seconds_asleep()
        if slept == 0.0:
            self._tell_once_that_it_works()
            return
        signal.pthread_kill(self._thread, NOTICE)
        if slept >= deadlines.BREAK_OFF and not self.broken_off:
            # Before the thread: the main one may fail, and ask for this, before start() returns.
            self.broken_off = True
            threading.Thread(target=self._break_off, name="taas-breaks-off", daemon=True).start()
        elif slept >= deadlines.STILL and self._names_wanted and self._word.stop_cell():
            self._word.give_names()

    def _handles_interrupt(self) -> bool:
        """Tell whether the main thread handles an interrupt; it may wait for other ranks there."""
        handled = sys._current_exceptions().get(self._thread)
        error = handled[1] if isinstance(handled, tuple) else handled  # before Python 3.12
        return isinstance(error, KeyboardInterrupt)

    def _seconds_asleep(self) -> float:
        """Return for how long the main thread has slept since it was asked; 0: it works.

        NCCL waits at full speed. A main thread that waits so is taken to sleep since it was asked.
        """
        slept = self._sleep.seconds()
        if slept < deadlines.BREAK_OFF and adopt.waits_at_full_speed(self._thread):
            return self._sleep.age
        return slept

    def _tell_once_that_it_works(self) -> None:
        if not self._sleep.told and self._sleep.age >= deadlines.BREAK_OFF:
            self._sleep.told = True
            self._send(RankStage(stage="at work"))

    # ------------------------------------------------------------ a thread of its own

    def _break_off(self) -> None:
        """Let the main thread's waits fail.

        On GPUs the agent has the names before, as NCCL may abort the process. That has a limit:
        copies from a hung GPU never end. What is said afterwards counts in their place.
        """
        try:
            if adopt.waits_on_gpus():
                packing = threading.Thread(
                    target=self._word.give_names_ahead, name="taas-packs", daemon=True
                )
                packing.start()
                packing.join(deadlines.NAMES_AHEAD)
            adopt.break_off()
        except Exception:  # no descriptor left, NCCL: the wait lasts
            traceback.print_exc()


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
        now = time.monotonic()
        state, used = _main_thread()
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
    state = fields[0].decode()
    ticks = int(fields[11]) + int(fields[12])
    return state, ticks / os.sysconf("SC_CLK_TCK")
