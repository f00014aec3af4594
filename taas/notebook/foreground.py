"""A run begins, and its cell waits for it: what the supervisor says, what the person at the keyboard wants, the answer."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

from taas import errors
from taas.capture import Capture
from taas.errors import RunLost, TaasError
from taas.notebook.cell_output import say
from taas.notebook.live_view import RunView
from taas.notebook.supervised import Supervised
from taas.runs.reader import interrupted
from taas.runs.records import RunRecord
from taas.wire.clients import Refused, RunRequest, RunState, Submit

_LOOK_ROUND_MS = 50
"""So long at most a press of the interrupt button waits to be seen."""
_FINAL = 2
"""So many interrupts end a run, whatever its supervisor does: it is asked whether it is there."""
_SILENCE_SECONDS = 10.0
"""If it does not answer for so long (it is stopped, say), it is killed, and with it all its runs."""


class Interrupts:
    """SIGINTs, counted instead of raised in the middle of something. A context manager.

    The second one would otherwise raise inside the clean-up of the first. In a thread other than the main one no signal
    arrives, and nothing is changed.
    """

    def __init__(self) -> None:
        self.count = 0
        self._asked = 0
        self._silent_since: float | None = None
        self._last, self._fact = sys.maxsize, ""

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
            raise interrupted(self._fact)

    @contextlib.contextmanager
    def raised(self, presses: int = 1, fact: str = "") -> Iterator[None]:
        """Let one more interrupt, or so many more, raise in the body, besides being counted."""
        self._last, self._fact = self.count + presses, fact
        try:
            yield
        finally:
            self._last = sys.maxsize

    def heard(self) -> None:
        """Note that the supervisor said something."""
        self._silent_since = None

    def check(self, supervisor: Supervised) -> None:
        """Ask a supervisor whether it is there, at the second interrupt and each later one; kill it if it is silent.

        Raises:
            KeyboardInterrupt: it was killed.
        """
        now = time.monotonic()
        if self.count >= _FINAL and self.count > self._asked:
            self._asked, self._silent_since = self.count, self._silent_since or now
            supervisor.say(RunRequest(what="stacks"))
        if self._silent_since is not None and now > self._silent_since + _SILENCE_SECONDS:
            supervisor.kill()
            raise interrupted("the supervisor did not answer, and was killed with all its runs")


def _begin(supervisor: Supervised, submit: Submit, interrupts: Interrupts) -> RunRecord:
    """Submit a run; returns its record once the supervisor has accepted it, and raises what it refused it for."""
    supervisor.say(submit)
    while True:
        for message in supervisor.hear(_LOOK_ROUND_MS):
            interrupts.heard()
            if isinstance(message, Refused):
                raise getattr(errors, message.error, TaasError)(message.message)
            if isinstance(message, RunState) and message.record.live:
                return message.record
        interrupts.check(supervisor)


def start_background(supervisor: Supervised, submit: Submit, interrupts: Interrupts) -> RunRecord:
    """Submit a run that goes on by itself.

    Raises:
        KeyboardInterrupt: it was interrupted before it had begun, and was ended.
    """
    record = _begin(supervisor, submit, interrupts)
    if interrupts.count:
        supervisor.say(RunRequest(run=record.name, what="interrupt"))
        raise interrupted(f"{record.name} was interrupted before it had begun")
    return record


class Foreground:
    """A run whose cell waits for it: the cell reads the run's folder, and takes the answer when it is over."""

    def __init__(self, supervisor: Supervised, shell: Any, interrupts: Interrupts) -> None:
        self._supervisor, self._shell, self._interrupts = supervisor, shell, interrupts
        self._relayed = 0
        self._ended: RunState | None = None
        self._answer = -1

    def follow(self, submit: Submit, captured: Capture) -> RunState:
        """Submit the run, show its output, apply its answer; returns how it ended."""
        record = _begin(self._supervisor, submit, self._interrupts)
        try:
            with RunView(record, self._shell, self._supervisor.say, live=True) as view:
                return self._follow(view, captured)
        except BaseException:
            if self._supervisor.alive:  # nobody else will show it
                self._supervisor.say(RunRequest(run=record.name, what="let go"))
            raise
        finally:
            if self._answer >= 0:
                os.close(self._answer)

    def _follow(self, view: RunView, captured: Capture) -> RunState:
        reader = view.reader
        try:
            view.follow(
                lambda: self._hear(0, view),
                lambda seconds: self._hear(min(int(seconds * 1000), _LOOK_ROUND_MS), view),
                partial(self._ask, view),
            )
            while self._ended is None:  # its record says it already
                self._hear(_LOOK_ROUND_MS, view)
        except RunLost:
            while self._interrupts.count == self._relayed and (items := reader.read()):
                view.output.show(items)  # what its ranks had written until then
            view.output.send()
            raise
        try:
            if self._ended.answer is not None:
                self._apply_answer(self._ended.record, captured, view)
        finally:
            view.collect()
            view.end()
        return self._ended

    def _ask(self, view: RunView, record: RunRecord) -> bool:
        """Put what a rank asks to the person; one who interrupts in place of an answer means the run."""
        if self._interrupts.count:
            return False
        with self._interrupts.raised():
            try:
                return view.ask(record)
            except KeyboardInterrupt:
                return True

    def _hear(self, timeout_ms: int, view: RunView) -> None:
        """Take in what the supervisor says, and what the person at the keyboard wants."""
        reader = view.reader
        for message in self._supervisor.hear(timeout_ms, reader):
            self._interrupts.heard()
            if isinstance(message, RunState) and message.record.id == reader.record.id:
                self._end(message)  # that of another run was abandoned
        if self._ended is not None:
            reader.end(self._ended.record)
        self._relay_interrupts(view)

    def _end(self, ended: RunState) -> None:
        """Open the answer at once: the run's machines are free while its output is shown and its names are unpacked."""
        self._ended = ended
        if ended.answer is not None:
            with contextlib.suppress(OSError):  # whoever held it was killed
                self._answer = ended.answer.open()
            self._supervisor.say(RunRequest(run=ended.record.name, what="let go"))

    def _relay_interrupts(self, view: RunView) -> None:
        name = view.reader.record.name
        while self._relayed < self._interrupts.count:
            self._relayed += 1
            if self._ended is None:
                self._supervisor.say(RunRequest(run=name, what="interrupt"))
            elif view.reader.skip():  # the person wants the prompt, and the run is over
                view.output.send()
                say(f"the rest of its output stays in its folder; %taas logs {name} shows it")
        if self._ended is None:
            self._interrupts.check(self._supervisor)

    def _apply_answer(self, record: RunRecord, captured: Capture, view: RunView) -> None:
        if self._answer < 0:
            lost = "the agent that held the run's names was killed before they were taken"
            if record.outcome == "done":
                raise RunLost(f"{lost}. Nothing came back; the next cell starts anew.")
            record.names = f"no names came back: {lost}"  # beside what it failed of
            return
        # Unpacking runs code of the notebook's classes, and may not end; the first press may have been meant for the run.
        unpacking, presses = "interrupted while the run's names were unpacked", self._interrupts.count
        with self._interrupts.raised(2, f"{unpacking}: some of them may have come"):
            applied = captured.apply(self._answer)
        view.take(applied)
        # it may have cost what was unpacked just then, and that alone; a person who presses wants no further cell to run
        if self._interrupts.count >= presses + 2:
            raise interrupted(f"{unpacking}: what did not come is named above")
