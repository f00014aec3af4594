"""Finding that a run makes no progress, and which rank is the odd one.

From outside, cheaply, every now and then: what each rank has written, the processor time it has used, whether it
is stopped. Only when that gives reason are ranks asked for their stacks, by a signal (rank/stacks.py). A run is in
trouble when

* a rank is stopped (SIGSTOP), seen twice; or
* some ranks have ended the cell, and all others have stood in a collective for ten seconds (or the hang
  timeout, if that is shorter); or
* for the hang timeout no rank has written anything, used the processor or changed its place. On GPUs a rank that
  waits in a collective may spin: there its processor time says nothing.

The run goes on: the cell says what is wrong, and its user decides.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Protocol

from taas.messages.agents import LookAtRanks, RanksSeen
from taas.messages.clients import Stacks, Submit, Troubled
from taas.messages.wire import Message
from taas.stacks import Place, RankSeen, Trouble, fold, is_collective, ranks_in_words
from taas.supervisor.vms import Vm

_SHORTEST, _LONGEST = 0.25, 10.0
_ENDED_OTHERS_SECONDS = 10.0
_OVERDUE_SECONDS = 5.0
_IDLE_SHARE, _IDLE_SECONDS = 0.05, 0.02
"""Processor time a waiting rank may use: a share of the time between two looks, and the clock's grain."""


class Watched(Protocol):
    """What the watch has to know of a run."""

    name: str
    state: str
    submit: Submit

    def busy_vms(self) -> list[tuple[int, Vm]]:
        """Return the VMs that have ranks, with their numbers in the run."""

    def ended_ranks(self) -> set[int]:
        """Return the ranks that have ended the cell."""


class _Asked:
    """A look on its way."""

    def __init__(self, number: int, vms: Iterable[int], reply: Callable[[Message], object] | None) -> None:
        self.number, self.reply = number, reply
        self.missing = set(vms)
        self.ranks: dict[int, RankSeen] = {}
        self.at = time.monotonic()


class HangWatch:
    """Looks at one run's ranks."""

    def __init__(self, run: Watched, tell: Callable[[Message], None]) -> None:
        self._run, self._tell = run, tell
        self._timeout = run.submit.spec.hang_timeout
        self._period = min(max(self._timeout / 8, _SHORTEST), _LONGEST)
        elsewhere = run.submit.engine.kind != "local"
        self._spins = (elsewhere or bool(run.submit.gpus)) and not run.submit.spec.rehearse
        self._next = time.monotonic() + self._period
        self._count = 0
        self._asked: dict[int, _Asked] = {}
        self._before: dict[int, RankSeen] = {}
        self._before_at = time.monotonic()
        self._quiet_since = time.monotonic()
        self._ended: set[int] = set()
        self._suspicious = False
        self._trouble: Trouble | None = None

    # ------------------------------------------------------------ looking

    def wait(self) -> float | None:
        """Return the seconds until :meth:`step` has something to do."""
        return max(0.0, self._next - time.monotonic()) if self._run.state == "running" else None

    def step(self) -> None:
        """Look, if it is time."""
        if self.wait() == 0.0:
            own = [asked for asked in self._asked.values() if asked.reply is None]
            if any(time.monotonic() < asked.at + _OVERDUE_SECONDS for asked in own):
                self._next = time.monotonic() + self._period
                return
            for asked in own:
                del self._asked[asked.number]
            self._look(stacks=self._suspicious, reply=None)

    def ask(self, reply: Callable[[Message], object]) -> None:
        """Have somebody told where the ranks stand."""
        self._look(stacks=True, reply=reply)

    def _look(self, *, stacks: bool, reply: Callable[[Message], object] | None) -> None:
        self._count += 1
        self._next = time.monotonic() + self._period
        vms = self._run.busy_vms()
        asked = self._asked[self._count] = _Asked(self._count, (number for number, _ in vms), reply)
        for _, vm in vms:
            vm.send(LookAtRanks(run=self._run.name, look=self._count, stacks=stacks))
        if not vms:
            self._complete(asked)

    def take(self, seen: RanksSeen) -> None:
        """Take in what an agent saw."""
        asked = self._asked.get(seen.look)
        if asked is None:
            return  # too late
        asked.ranks.update((rank.rank, rank) for rank in seen.ranks)
        asked.missing.discard(seen.vm)
        if not asked.missing:
            self._complete(asked)

    def lose_vm(self, number: int) -> None:
        """A VM will not answer any more."""
        for asked in list(self._asked.values()):
            asked.missing.discard(number)
            if not asked.missing:
                self._complete(asked)

    def _complete(self, asked: _Asked) -> None:
        del self._asked[asked.number]
        if asked.reply is None:
            self._judge(asked.ranks)
        else:
            seen = [rank for rank in asked.ranks.values() if rank.rank not in self._run.ended_ranks()]
            asked.reply(Stacks(run=self._run.name, places=self._fold(seen)))

    # ------------------------------------------------------------ judging

    def _judge(self, seen: dict[int, RankSeen]) -> None:
        now, ended = time.monotonic(), self._run.ended_ranks()
        there = {n: rank for n, rank in seen.items() if n not in ended and rank.status != "gone"}
        moved = ended != self._ended or any(
            self._progressed(self._before.get(number), rank, now - self._before_at)
            for number, rank in there.items()
        )
        if moved or not there:
            self._quiet_since = now
        stopped = [
            number
            for number, rank in there.items()
            if rank.status == "stopped"
            and number in self._before
            and self._before[number].status == "stopped"
        ]
        headline = self._headline(there, ended, stopped, now - self._quiet_since)
        self._before, self._before_at, self._ended = seen, now, ended
        self._suspicious = bool(stopped or ended or now - self._quiet_since >= self._timeout / 2)
        if headline is not None:
            self._say(Trouble(headline, self._fold(there.values())))
        elif moved:
            self._say(None)

    def _say(self, trouble: Trouble | None) -> None:
        if trouble != self._trouble:
            self._trouble = trouble
            self._tell(Troubled(run=self._run.name, trouble=trouble))

    def _fold(self, ranks: Iterable[RankSeen]) -> tuple[Place, ...]:
        submit = self._run.submit
        return fold(
            ranks,
            cell=submit.cell,
            execution_count=submit.execution_count,
            ended=self._run.ended_ranks(),
        )

    def _progressed(self, old: RankSeen | None, new: RankSeen, seconds: float) -> bool:
        if old is None or new.written > old.written:
            return True
        known = old.frames is not None and new.frames is not None
        if known and old.frames != new.frames:
            return True
        if self._spins and new.frames is not None and is_collective(new.frames):
            return False
        return new.cpu - old.cpu > _IDLE_SHARE * seconds + _IDLE_SECONDS

    def _headline(
        self, there: dict[int, RankSeen], ended: set[int], stopped: list[int], quiet: float
    ) -> str | None:
        """Say what is wrong, or None."""
        if stopped:
            verb = "is" if len(stopped) == 1 else "are"
            return f"{ranks_in_words(stopped)} {verb} stopped: somebody sent SIGSTOP"
        placed = [rank for rank in there.values() if rank.frames]
        if not there or len(placed) < len(there):
            return None
        waiting = all(is_collective(rank.frames or ()) for rank in placed)
        if ended and waiting and quiet >= min(self._timeout, _ENDED_OTHERS_SECONDS):
            return (
                f"{ranks_in_words(ended)} ended the cell, and {ranks_in_words(there)} "
                f"wait{'s' if len(there) == 1 else ''} in a collective that cannot end"
            )
        if quiet >= self._timeout:
            return f"no rank has made progress for {self._timeout:g} s (no output, no processor time)"
        return None
