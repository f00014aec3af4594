"""The launching cell waits for its run: it shows output, relays interrupts, receives variables."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

from taas import errors
from taas.capture import Capture
from taas.errors import RunLost, TaasError
from taas.notebook.kernel_memory import kernel_memory_lines
from taas.notebook.supervisor_client import SupervisorClient
from taas.notebook.view.cell_output import say
from taas.notebook.view.live_view import RunView
from taas.protocol.clients import Refused, RunRequest, RunState, Submit
from taas.protocol.ranks import Answer
from taas.protocol.records import RunRecord
from taas.runs.reader import POLL_SECONDS, build_interrupt

_LOOK_ROUND_MS = 50
"""The longest time, in ms, until an interrupt is noticed."""
_FINAL = 2
"""From this number of interrupts on, the kernel checks whether the supervisor answers."""
_SILENCE_SECONDS = 10.0
"""A supervisor that does not answer for this time (because it is stopped, for example) is killed,
together with all its runs.
"""


class Interrupts:
    """A context manager that counts SIGINTs, so that they do not raise at arbitrary points.

    Otherwise, a second SIGINT would raise during the clean-up after the first one. No signals are
    delivered in threads other than the main thread; there, this context manager does nothing.
    """

    def __init__(self) -> None:
        self.count, self._last = 0, sys.maxsize
        self._asked, self._asked_at = 0, 0.0

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGINT, self._press)
        return self

    def __exit__(self, *_: object) -> None:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, self._before)

    def _press(self, number: int, frame: object) -> None:
        self.count += 1
        if self.count >= self._last:
            raise build_interrupt(
                "interrupted while the run's names were unpacked: some of them may have come"
            )

    @contextlib.contextmanager
    def raise_at(self, presses: int) -> Iterator[None]:
        """Raise a KeyboardInterrupt in the body after this many more interrupts."""
        self._last = self.count + presses
        try:
            yield
        finally:
            self._last = sys.maxsize

    def check(self, supervisor: SupervisorClient) -> None:
        """From the second interrupt on, check that the supervisor answers; otherwise kill it.

        Raises:
            KeyboardInterrupt: the supervisor did not answer, and was killed.
        """
        now = time.monotonic()
        if self.count >= _FINAL and self.count > self._asked:
            if supervisor.heard_at >= self._asked_at:
                self._asked_at = now
            self._asked = self.count
            supervisor.say(RunRequest(what="stacks"))
        if self._asked and supervisor.heard_at < self._asked_at < now - _SILENCE_SECONDS:
            supervisor.kill()
            raise build_interrupt("the supervisor did not answer, and was killed with all its runs")


def _begin(supervisor: SupervisorClient, submit: Submit, interrupts: Interrupts) -> RunRecord:
    """Submit a run; return its record once the supervisor has accepted it.

    Raises:
        TaasError: the supervisor has rejected the run.
    """
    supervisor.say(submit)
    while True:
        for message in supervisor.hear(_LOOK_ROUND_MS):
            if isinstance(message, Refused):
                raise getattr(errors, message.error, TaasError)(message.message)
            if isinstance(message, RunState) and message.record.live:
                if not submit.left_to:  # kept ranks reported it at their first cell
                    say(*kernel_memory_lines(submit.gpus, message.record.gpus))
                return message.record
        interrupts.check(supervisor)


def start_background(
    supervisor: SupervisorClient, submit: Submit, interrupts: Interrupts
) -> RunRecord:
    """Submit a background run; interrupt it if an interrupt arrived before it began."""
    record = _begin(supervisor, submit, interrupts)
    if interrupts.count:
        supervisor.say(RunRequest(run=record.name, what="interrupt"))
        raise build_interrupt(f"{record.name} was interrupted before it had begun")
    return record


def run_in_foreground(
    supervisor: SupervisorClient,
    submit: Submit,
    interrupts: Interrupts,
    captured: Capture,
    shell: Any,
) -> RunState:
    """Submit a run, show its output in its cell, and apply its answer; return how the run ended."""
    record = _begin(supervisor, submit, interrupts)
    try:
        with _Foreground(record, shell, supervisor, interrupts) as view:
            return view.run(captured)
    except BaseException:
        if supervisor.alive:  # neither this cell nor any other will receive the variables
            supervisor.say(RunRequest(run=record.name, what="let go"))
        raise


class _Foreground(RunView):
    """The view of a run whose cell waits for it; it receives the variables when the run is over."""

    def __init__(
        self, record: RunRecord, shell: Any, supervisor: SupervisorClient, interrupts: Interrupts
    ) -> None:
        super().__init__(record, shell, live=True)
        self._supervisor, self._interrupts = supervisor, interrupts
        self._relayed = 0
        self._ended: RunState | None = None
        self._answer = -1

    def __exit__(self, *exception: object) -> None:
        super().__exit__(*exception)
        if self._answer >= 0:
            os.close(self._answer)

    def run(self, captured: Capture) -> RunState:
        self.follow()
        while self._ended is None:  # the record is complete before the supervisor's message arrives
            self._hear(_LOOK_ROUND_MS)
        try:
            if self._ended.answer is not None:
                self._apply_answer(self._ended.record, captured)
        finally:
            self.collect()
            self.end()
        return self._ended

    def look(self, record: RunRecord) -> None:
        super().look(record)
        self._hear(0)

    def wait(self, seconds: float) -> None:
        self._hear(int(min(seconds, POLL_SECONDS) * 1000))

    def send(self, answer: Answer) -> None:
        self._supervisor.say(answer)

    def ask(self, record: RunRecord) -> bool:
        """Ask the user; an interrupt instead of a reply interrupts the run."""
        if self._interrupts.count:
            return False
        with self._interrupts.raise_at(1), contextlib.suppress(KeyboardInterrupt):
            return super().ask(record)
        return True

    def _hear(self, timeout_ms: int) -> None:
        """Handle the supervisor's messages and the user's interrupts."""
        for message in self._supervisor.hear(timeout_ms):
            if isinstance(message, RunState) and message.record.id == self.reader.record.id:
                self._end(message)  # a message about another run is about an abandoned one
        if self._ended is not None:
            self.reader.end(self._ended.record)
        self._relay_interrupts()

    def _end(self, ended: RunState) -> None:
        """Open the answer at once, so that the run's machines are released while output is shown.

        The variables are unpacked later.
        """
        self._ended = ended
        if ended.answer is not None:
            with contextlib.suppress(OSError):  # the agent that held the answer was killed
                self._answer = ended.answer.open()
            self._supervisor.say(RunRequest(run=ended.record.name, what="let go"))

    def _relay_interrupts(self) -> None:
        name = self.reader.record.name
        while self._relayed < self._interrupts.count:
            self._relayed += 1
            if self._ended is None:
                self._supervisor.say(RunRequest(run=name, what="interrupt"))
            elif self.reader.skip():  # the run is over, and the user wants the prompt
                self.output.send()
                say(f"the rest of its output stays in its folder; %taas logs {name} shows it")
        if self._ended is None:
            self._interrupts.check(self._supervisor)

    def _apply_answer(self, record: RunRecord, captured: Capture) -> None:
        if self._answer < 0:
            lost = "the agent that held the run's names was killed before they were taken"
            if record.outcome == "done":
                raise RunLost(f"{lost}. Nothing came back; the next cell starts anew.")
            record.names = f"no names came back: {lost}"  # the run's own failure is raised
            return
        # Unpacking runs code of the notebook's classes, and may not terminate. The first interrupt
        # may have been meant for the run.
        presses = self._interrupts.count
        with self._interrupts.raise_at(2):
            applied = captured.apply(self._answer)
        self.take(applied)
        # At most the object that was being unpacked is missing, but the user wants Run All to stop.
        if self._interrupts.count >= presses + 2:
            raise build_interrupt(
                "interrupted while the run's names were unpacked: what did not come is named above"
            )
