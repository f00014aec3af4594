"""Find out, from another thread, what a rank's main thread is doing while a cell runs.

The main thread runs the cell, and may be in C code for seconds or forever. It can receive two
requests, each by a real-time signal whose handler runs before the main thread's next line of
Python:

* to give a **sign** (:data:`~taas.protocol.ranks.NOTICE`) that it runs Python code, so that an
  interrupt is noticed, whatever SIGINT handler the cell has;
* to **stop** the cell and pack the variables (:data:`~taas.rank.last_word.STOP`).

While it does neither, it is in C code, and :meth:`MainThreadWatch.ask_again` finds out what that
code does. Code that uses the processor or a disk (for example, to save a large model) gets the
time that it needs. Code that sleeps may be waiting for other ranks. While C code holds the GIL,
nothing here can run.

The main thread runs :meth:`~MainThreadWatch.begin_cell` and, as a signal handler,
:meth:`~MainThreadWatch._give_sign`. A separate thread aborts waits, since NCCL's abort takes
seconds. The link's thread runs everything else.
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
    UNASKED = "unasked"  # given before the link's thread had asked
    ASKED = "asked"  # asked for (or asked to stop), and not given since
    GIVEN = "given"  # given after it was asked for


class MainThreadWatch:
    """The watch over the main thread, which creates it.

    Args:
        word: the last word of the rank.
        send: sends the agent a message.

    Attributes:
        source: a descriptor that is readable when the main thread has given its sign.
        broken_off: whether a wait of the main thread for other ranks was aborted in this cell.
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
        """Reset the state of the last cell, and give signs from now on.

        The link's thread makes no requests meanwhile, since the last word is not open.
        """
        self._sign = Sign.NONE
        self._repeats_interrupt = self.broken_off = False
        signal.signal(NOTICE, lambda number, frame: self._give_sign())

    def _give_sign(self) -> None:
        """Report that this thread runs Python code, and raise an interrupt that C code ignored.

        It is the handler of NOTICE. An eventfd carries the sign, because writing to it neither
        blocks nor needs a lock: the handler may interrupt any code.
        """
        os.eventfd_write(self.source, 1)
        handler = signal.getsignal(signal.SIGINT)
        if self._repeats_interrupt and callable(handler):
            self._repeats_interrupt = False
            handler(signal.SIGINT, sys._getframe())

    # ------------------------------------------------------------ the link's thread asks

    @property
    def wait(self) -> float | None:
        """The seconds until :meth:`ask_again` is due, or None if no request is open."""
        return deadlines.ASK_AGAIN if self._sign is Sign.ASKED else None

    def take_sign(self) -> None:
        """Record that the main thread has given its sign, and report it to the agent."""
        os.eventfd_read(self.source)
        self._sign = Sign.GIVEN if self._sign is Sign.ASKED else Sign.UNASKED
        self._send(RankStage(stage="at work"))

    def ask_for_sign(self, *, interrupt_ignored: bool) -> None:
        """Ask the main thread, which was sent a SIGINT, for its sign.

        The agent sends the process SIGINT, then NOTICE, then the message that leads to this call.
        A main thread that runs Python code gives its sign at that NOTICE, possibly before this
        thread reads the message. In that case it is not asked again: it has noticed the interrupt,
        and the cell's ``except`` may by now be waiting for other ranks, as it should. If it were
        asked there, it could not give another sign, would be taken for stuck, and its wait would
        be aborted. A sign that comes after the message is the reply to it. If a sign and a message
        are both there, the link's thread handles the sign first.
        """
        if interrupt_ignored:
            self._repeat_interrupt()
        if self._sign is not Sign.UNASKED:
            self._ask(NOTICE, "at work")

    def ask_for_names(self) -> None:
        """Ask the main thread to stop the cell and pack the variables."""
        self._names_wanted = True
        self._ask(STOP, "packing")

    def _ask(self, number: int, at_its_end: Literal["at work", "packing"]) -> None:
        """Send the main thread a signal; if the cell is over, report what it is doing anyway.

        The cell may end right after the check of the last word. The signal then finds the main
        thread in :meth:`LastWord.end_cell` or later: a sign is given, and means what it always
        does; a STOP is ignored, as the variables are being packed anyhow.
        """
        if not self._word.is_open:
            self._send(RankStage(stage=at_its_end))
            return
        if self._sign is not Sign.ASKED:  # otherwise, its sleep counts from the first request
            self._sleep = _Sleep()
            # Before the signal, so that the sign counts as asked for.
            self._sign = Sign.ASKED
        signal.pthread_kill(self._thread, number)

    def _repeat_interrupt(self) -> None:
        """Raise an interrupt that C code ignored, once the main thread runs Python code again.

        system(3) ignores SIGINT while its program runs, and the agent saw that the process ignored
        it when it sent one. The flag is set before the signal is sent, because the handler checks
        it. If the cell itself ignores SIGINT, the interrupt stays ignored; if the cell is over,
        there is nothing to interrupt.
        """
        if not self._word.is_open or signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
            return
        self._repeats_interrupt = True
        signal.pthread_kill(self._thread, NOTICE)

    # ------------------------------------------------------------ repeated requests

    def ask_again(self) -> None:
        """Find out what an unresponsive main thread is doing, and make it respond.

        It is called every tenth of a second, from the request to the sign. The main thread goes on
        running all the while, so whatever is found out here may have changed a moment later. That
        is why each branch does what is right in both cases:

        1. *It handles a KeyboardInterrupt.* SIGINT was raised in it before NOTICE's handler could
           run, and its ``except`` or ``finally`` has entered C code since, perhaps a collective in
           which ranks meet. It has noticed the interrupt, so this counts as its sign, and nothing
           is aborted. If it has left that C code meanwhile, it gives the sign itself, and a second
           sign makes no difference. When the variables are requested, handling an interrupt does
           not count: patience is over.
        2. *It uses the processor or a disk.* It carries out the request when it returns. The agent
           is told once that the main thread is at work, after the time that a sleeping one is
           given.
        3. *It sleeps.* NOTICE is sent again in any case. A signal ends a system call with EINTR,
           after which Python runs the handler, only if it arrives during the call. The first one
           may have arrived after the last line of Python and before the call: its handler is due,
           but the call sleeps on. A second one arrives while it sleeps.
        4. *It has slept for a second.* No signal wakes it, so it waits inside C code, most
           probably for other ranks. That wait is aborted, once in a cell. If it returns by itself
           at that moment, its next collective fails instead, and the cell is about to end anyhow.
        5. *The variables are requested, and it has slept for long enough.* This thread packs them.
           The main thread may wake at this very moment. But STOP was sent to it when the variables
           were requested, and a signal that has arrived is never lost: before its next line of
           Python it runs :meth:`LastWord._stop_here`. Whichever thread is first claims the last
           word. If it is the main thread, this one has nothing to do; if it is this one, the main
           thread waits there and changes no variables while they are packed.
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
            # Set before the thread starts: the main thread may fail, and read this, before start()
            # returns.
            self.broken_off = True
            threading.Thread(target=self._break_off, name="taas-breaks-off", daemon=True).start()
        elif slept >= deadlines.STILL and self._names_wanted and self._word.stop_cell():
            self._word.give_names()

    def _handles_interrupt(self) -> bool:
        """Whether the main thread handles an interrupt; it may be waiting for other ranks there."""
        handled = sys._current_exceptions().get(self._thread)
        error = handled[1] if isinstance(handled, tuple) else handled  # a tuple before Python 3.12
        return isinstance(error, KeyboardInterrupt)

    def _seconds_asleep(self) -> float:
        """Return how many seconds the main thread has slept since the request; 0 if it works.

        NCCL waits in a busy loop. A main thread that waits like this counts as asleep since the
        request.
        """
        slept = self._sleep.seconds()
        if slept < deadlines.BREAK_OFF and adopt.waits_at_full_speed(self._thread):
            return self._sleep.age
        return slept

    def _tell_once_that_it_works(self) -> None:
        if not self._sleep.told and self._sleep.age >= deadlines.BREAK_OFF:
            self._sleep.told = True
            self._send(RankStage(stage="at work"))

    # ------------------------------------------------------------ a separate thread

    def _break_off(self) -> None:
        """Make the main thread's waits fail.

        On GPUs the agent gets the variables first, as NCCL may abort the process. That has a time
        limit: copies from a hung GPU never end. A later report replaces these variables.
        """
        try:
            if adopt.waits_on_gpus():
                packing = threading.Thread(
                    target=self._word.give_names_ahead, name="taas-packs", daemon=True
                )
                packing.start()
                packing.join(deadlines.NAMES_AHEAD)
            adopt.break_off()
        except Exception:  # no descriptor left, or an error of NCCL: the wait goes on
            traceback.print_exc()


class _Sleep:
    """How long the main thread has slept since this object was created.

    ``told``: whether the agent has been told that the main thread is at work.
    """

    def __init__(self) -> None:
        self._began = self._since = time.monotonic()
        self._used = _main_thread()[1]
        self.told = False

    @property
    def age(self) -> float:
        return time.monotonic() - self._began

    def seconds(self) -> float:
        """Return for how many seconds it has slept, or 0 if it uses the processor or a disk."""
        now = time.monotonic()
        state, used = _main_thread()
        idle = deadlines.IDLE_SHARE * (now - self._since) + deadlines.CLOCK_GRAIN
        if state != "S" or used - self._used > idle:
            self._since, self._used = now, used
        return now - self._since


def _main_thread() -> tuple[str, float]:
    """Return the main thread's state (proc(5)), and its processor time in seconds.

    If no file can be opened any more, it counts as asleep.
    """
    try:
        stat = Path(f"/proc/self/task/{os.getpid()}/stat").read_bytes()
    except OSError:
        return "S", 0.0
    fields = stat.rpartition(b")")[2].split()
    state = fields[0].decode()
    ticks = int(fields[11]) + int(fields[12])
    return state, ticks / os.sysconf("SC_CLK_TCK")
