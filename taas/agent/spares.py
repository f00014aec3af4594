"""Processes that wait for the order to be a rank: spare ones, forked ahead while nothing runs, and ranks that stay.

A fork of the forkserver and a rank's own start cost more processor time than all that follows until
the cell runs. So once a run is over, the agent makes as many processes as that run had ranks, one
after the other, and each does what no order changes: it ties itself to its agent, builds the shell.
A run takes them; what is missing is forked then, and does the same: the two differ in nothing but
when they were forked.

A spare was prepared for one environment, project and forkserver; a run with another one does not
use it, it is ended. Spares are ended too when nothing has used them for a while, or the machine's
memory becomes scarce. That one cannot be made, or dies, costs the next run the time of a fork and
nothing else.

After a `--keep` cell its ranks stay until the next one, until they die, or until the VM is given
back.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from taas.agent.forkserver import Forkserver
from taas.agent.processes import RankProcess, sweep_orphans, wait_for_all
from taas.agent.staging import ProjectArrival
from taas.agent.torchrun import RunStore
from taas.memory_limits import memory_left
from taas.wire import deadlines
from taas.wire.agents import KeptGone
from taas.wire.framing import Message, pack
from taas.wire.ranks import Preparation, RankRequest

MOST = max(8, os.cpu_count() or 1)
"""So many spares a VM has at most."""
On = Callable[[Any, Callable[[], None]], None]


class Spares:
    """The spare processes of one agent; ``on`` and ``off`` begin and end to watch a descriptor."""

    def __init__(self, forkserver: Forkserver, on: On, off: Callable[[Any], None]) -> None:
        self._forkserver, self._on, self._off = forkserver, on, off
        self._waiting: list[RankProcess] = []
        self._wanted = 0
        self._preparation: Preparation | None = None
        self._from = self._until = 0.0

    def want(self, preparation: Preparation, count: int) -> None:
        """Expect a run with so many ranks here, like the last one."""
        self._expect(preparation, min(count, MOST))
        now = time.monotonic()
        self._from, self._until = now + deadlines.SPARES_REST, now + deadlines.SPARES_IDLE

    def _expect(self, preparation: Preparation, count: int) -> None:
        if preparation != self._preparation:
            self.end()
        self._preparation, self._wanted = preparation, count

    def take(self, preparation: Preparation, count: int) -> Iterator[RankProcess]:
        """Give a run ``count`` processes, no longer watched: spares that were prepared for it, then fresh ones.

        No more spares are made until the next :meth:`want`.

        Raises:
            OSError, EOFError: one could not be forked.
        """
        self._expect(preparation, 0)
        self._waiting = [process for process in self._waiting if process.alive]
        for _ in range(count):
            if self._waiting:
                process = self._waiting.pop(0)
                self._off(process.sentinel)
            else:
                process = RankProcess(preparation)
            yield process

    def step(self) -> None:
        """Make the next one, if it is time; end all, if nobody comes or memory is short."""
        if not self._waiting and not self._wanted:
            return
        now = time.monotonic()
        if now > self._until or memory_left().is_scarce:
            self.end()
        elif self._missing and now >= self._from:
            self._make_one()

    @property
    def _missing(self) -> bool:
        return len(self._waiting) < self._wanted

    def _make_one(self) -> None:
        assert self._preparation is not None
        try:
            spare = RankProcess(self._preparation)
        except (
            OSError,
            EOFError,
        ):  # no process, no descriptor: the next run will say so if it lasts
            self._wanted = 0
            return
        self._waiting.append(spare)
        self._from = time.monotonic() + deadlines.SPARES_APART
        self._on(spare.sentinel, partial(self._lose, spare))

    def wait(self) -> float | None:
        """Return the seconds until :meth:`step` has something to do, if nothing is heard."""
        if self._missing:
            return max(0.0, self._from - time.monotonic())
        return deadlines.SPARES_LOOK if self._waiting else None

    def _lose(self, spare: RankProcess) -> None:
        """One is gone, for whatever reason: make no others in its place."""
        self._off(spare.sentinel)
        spare.disconnect()
        if spare in self._waiting:
            self._waiting.remove(spare)
        self._wanted = 0
        if not self._forkserver.outlived(untold=spare.untold):
            sweep_orphans((self._forkserver.pid,))

    def end(self) -> None:
        """End all."""
        for spare in self._waiting:
            self._off(spare.sentinel)
            spare.send(signal.SIGKILL)
            spare.disconnect()
        self._waiting.clear()
        self._wanted = 0

    def forget(self) -> None:
        """Let go of those of another forkserver, which ended with it, and bury them."""
        self.end()
        sweep_orphans((self._forkserver.pid,))


class KeptProcesses:
    """The ranks of this VM that stay after a ``--keep`` cell, and what they see as the ``project``; none at first."""

    def __init__(self, on: On, off: Callable[[Any], None], say: Callable[[Message], None]) -> None:
        self._on, self._off, self._say = on, off, say
        self._processes: dict[int, RankProcess] = {}
        self._stores: list[RunStore] = []
        self.project: ProjectArrival | None = None

    @property
    def there(self) -> bool:
        """Whether there are any."""
        return bool(self._processes)

    def keep(
        self, processes: dict[int, RankProcess], store: RunStore | None, project: ProjectArrival
    ) -> None:
        """Keep ranks whose cell has ended, by their numbers, with the project, and the store that their groups may use."""
        self._processes, self.project = dict(processes), project
        self._stores += [store] if store is not None else []
        for number, process in processes.items():
            self._on(process.sentinel, partial(self._lose, number))

    def take(self) -> list[RankProcess]:
        """Give the next run its ranks, no longer watched."""
        taken, self._processes = self._processes, {}
        for process in taken.values():
            self._off(process.sentinel)
        return list(taken.values())

    def _lose(self, number: int) -> None:
        """One has died, and what the others know is of no use without it."""
        code = self._processes[number].exitcode
        self.end()
        how = f"was killed by {signal.Signals(-code).name}" if code and code < 0 else "left"
        self._say(KeptGone(how=f"rank {number} {how}"))

    def end(self, *, patient: bool = False) -> None:
        """End them; patient: they run their exit functions before."""
        processes = list(self._processes.values())
        for process in processes:
            self._off(process.sentinel)
            if patient:
                process.tell(pack(RankRequest(what="leave")))
        self._processes = {}
        if patient:
            wait_for_all([process.sentinel for process in processes], deadlines.LEAVE_KEPT)
        for process in processes:
            process.kill_tree()
            process.disconnect()
        while self._stores:
            self._stores.pop().close()
        self.project = None
