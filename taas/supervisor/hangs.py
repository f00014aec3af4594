"""Detect that a run makes no progress, and which rank is the cause.

At intervals, the watch looks at each rank cheaply and from outside: how much it has written, how
much processor time it has used, and whether it is stopped. Only if this looks suspicious are the
ranks asked for their stacks, by a signal (runs/stacks.py). A run is in trouble if

* a rank is stopped (SIGSTOP) in two successive looks; or
* some ranks have ended the cell, and all others have been waiting in a collective for ten seconds
  (or for the hang timeout, if that is shorter); or
* for the hang timeout, no rank has written anything, used the processor or moved on in its code.
  On GPUs, a rank that waits in a collective may spin, so its processor time proves nothing there.

The run continues: the cell displays what is wrong, and the user decides what to do. While an
interrupted cell is finishing, the cell displays where its ranks are.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Protocol

from taas.base.wording import ranks_in_words
from taas.protocol import deadlines
from taas.protocol.agents import LookAtRanks, RanksSeen
from taas.protocol.clients import Stacks, Submit
from taas.protocol.framing import Message
from taas.protocol.stacks import RankSeen, StackGroup, Trouble
from taas.runs.stacks import fold, is_collective
from taas.supervisor.rank_jobs import Findings, RankJobs
from taas.supervisor.recorder import Recorder
from taas.supervisor.stages import Stage


class WatchedRun(Protocol):
    """The attributes of a run that its watch needs (supervisor/runs.py)."""

    submit: Submit
    recorder: Recorder
    ranks: RankJobs
    found: Findings

    @property
    def stage(self) -> Stage:
        """Return the run's stage."""


class HangWatch:
    """Watches the ranks of one run."""

    def __init__(self, run: WatchedRun) -> None:
        self._run = run
        self._timeout = run.submit.cell.spec.hang_timeout
        self._period = min(
            max(self._timeout / 8, deadlines.HANG_LOOK_SHORTEST), deadlines.HANG_LOOK_LONGEST
        )
        elsewhere = run.submit.engine.kind != "local"
        self._spins = (elsewhere or bool(run.submit.gpus)) and not run.submit.cell.spec.rehearse
        self._next = time.monotonic() + self._period
        self._look_number, self._looked_at = 0, 0.0
        self._missing: set[int] = set()
        self._seen: dict[int, RankSeen] = {}
        self._askers: list[Callable[[Message], object]] = []
        self._before: dict[int, RankSeen] = {}
        self._before_at = self._quiet_since = time.monotonic()
        self._ended: set[int] = set()
        self._suspicious = False

    def watch_finish(self) -> None:
        """Check the ranks every ``FINISHING_LOOK`` seconds, now that the run is finishing."""
        self._period = deadlines.FINISHING_LOOK
        self._next = time.monotonic() + self._period

    def step(self) -> None:
        """Look at the ranks if it is time; wait for a look under way unless it is overdue."""
        looks = self._run.stage in (Stage.RUNNING, Stage.FINISHING)
        if looks and time.monotonic() >= self._next:
            if self._missing and time.monotonic() < self._looked_at + deadlines.HANG_LOOK_OVERDUE:
                self._next = time.monotonic() + self._period
            else:
                finishing = self._run.stage is Stage.FINISHING
                self._look(stacks=finishing or self._suspicious or bool(self._askers))

    def ask(self, reply: Callable[[Message], object]) -> None:
        """Send the ranks' positions to a client when they are known, by calling ``reply``."""
        self._askers.append(reply)
        self._look(stacks=True)

    def _look(self, *, stacks: bool) -> None:
        """Begin a look, which replaces any look under way."""
        self._look_number += 1
        self._looked_at = time.monotonic()
        self._next = self._looked_at + self._period
        self._missing, self._seen = set(self._run.ranks.busy), {}
        for number in tuple(self._missing):
            self._run.ranks.tell(number, LookAtRanks(look=self._look_number, stacks=stacks))
        if not self._missing:
            self._complete()

    def take(self, job: int, seen: RanksSeen) -> None:
        """Process what an agent has seen."""
        if seen.look == self._look_number:  # otherwise it comes too late
            self._seen |= {rank.rank: rank for rank in seen.ranks}
            self.lose_vm(job)

    def lose_vm(self, number: int) -> None:
        """Stop waiting for a VM that has nothing more to report or will not reply any more."""
        if number in self._missing:
            self._missing.discard(number)
            if not self._missing:
                self._complete()

    def _complete(self) -> None:
        if self._run.stage is Stage.RUNNING:
            self._judge(self._seen)
        askers, self._askers = self._askers, []
        finishing = self._run.stage is Stage.FINISHING
        if not askers and not finishing:
            return
        seen = [rank for rank in self._seen.values() if rank.rank not in self._run.found.ended]
        places = self._fold(seen)
        if finishing:
            at_work = [
                f"{ranks_in_words(place.ranks)}: {place.where}" for place in places if place.stack
            ]
            self._run.recorder.note(waiting="; ".join(at_work))
        for reply in askers:
            reply(Stacks(places=places))

    def _judge(self, seen: dict[int, RankSeen]) -> None:
        now, ended = time.monotonic(), set(self._run.found.ended)
        there = {n: rank for n, rank in seen.items() if n not in ended and rank.status != "gone"}
        moved = ended != self._ended or any(
            self._progressed(self._before.get(number), rank, now - self._before_at)
            for number, rank in there.items()
        )
        # the rank waits for a person, and the other ranks wait for that rank
        asks = bool(self._run.recorder.record.questions)
        if moved or not there or asks:
            self._quiet_since = now
        were = {number for number, rank in self._before.items() if rank.status == "stopped"}
        stopped = [
            number for number, rank in there.items() if rank.status == "stopped" and number in were
        ]
        silent = now - self._quiet_since
        headline = None if asks else self._headline(there, ended, stopped, silent)
        self._before, self._before_at, self._ended = seen, now, ended
        self._suspicious = bool(stopped or ended or now - self._quiet_since >= self._timeout / 2)
        if headline is not None:
            self._run.recorder.note(trouble=Trouble(headline, self._fold(there.values())))
        elif moved:
            self._run.recorder.note(trouble=None)

    def _fold(self, ranks: Iterable[RankSeen]) -> tuple[StackGroup, ...]:
        cell = self._run.submit.cell
        ended = self._run.found.ended
        return fold(ranks, cell=cell.text, execution_count=cell.execution_count, ended=ended)

    def _progressed(self, old: RankSeen | None, new: RankSeen, seconds: float) -> bool:
        if old is None or new.written > old.written:
            return True
        if None not in (old.frames, new.frames) and old.frames != new.frames:
            return True
        if self._spins and new.frames is not None and is_collective(new.frames):
            return False
        return new.cpu - old.cpu > deadlines.IDLE_SHARE * seconds + deadlines.CLOCK_GRAIN

    def _headline(
        self, there: dict[int, RankSeen], ended: set[int], stopped: list[int], silent: float
    ) -> str | None:
        if stopped:
            verb = "is" if len(stopped) == 1 else "are"
            return f"{ranks_in_words(stopped)} {verb} stopped: somebody sent SIGSTOP"
        placed = [rank for rank in there.values() if rank.frames]
        if not there or len(placed) < len(there):
            return None
        waiting = all(is_collective(rank.frames or ()) for rank in placed)
        if ended and waiting and silent >= min(self._timeout, deadlines.ENDED_OTHERS):
            return (
                f"{ranks_in_words(ended)} ended the cell, and {ranks_in_words(there)} "
                f"wait{'s' if len(there) == 1 else ''} in a collective that cannot end"
            )
        if silent >= self._timeout:
            return (
                f"no rank has made progress for {self._timeout:g} s (no output, no processor time)"
            )
        return None
