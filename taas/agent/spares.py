"""Processes that wait for a start message (``RankStart``): spare processes, and kept ranks.

A fork from the forkserver and a rank's own start take more processor time than everything that
follows until the cell runs. Therefore, once a run is over, the agent makes as many processes as
that run had ranks, one after the other. Each of them does all work that does not depend on the run:
it ties itself to its agent, and builds the IPython shell. The next run takes these spares. Missing
processes are forked then, and do the same work: the only difference is when they were forked.

If the ranks of the last run have imported many modules, the spares become, one after the other, the
ranks that are expected next, and import these modules (rank/ready_ahead.py). This costs memory, and
relies on a comparison between the expected run and the next one, so spares are not prepared in this
way for other runs. Such a spare accepts a start message like the one that it expects; otherwise it
is ended, and the job is given to a process that is forked then. A spare that is still importing
when its start message comes has :data:`deadlines.TAKES_ORDER` to finish the import.

A spare was prepared for one environment, project and forkserver; it is ended if the next run has
another one. Spares are also ended if they have not been used for a while, or if the machine runs
short of memory. If a spare cannot be made, or dies, this costs the next run only the time of a
fork.

After a ``--keep`` cell its ranks stay until the next such cell, until they die, or until the VM is
released.
"""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from taas.agent.forkserver import Forkserver
from taas.agent.processes import MadeAhead, RankProcess, sweep_orphans, wait_for_all
from taas.agent.staging import ProjectArrival
from taas.agent.torchrun import RunStore
from taas.base.memory_limits import memory_left
from taas.protocol import deadlines
from taas.protocol.agents import KeptGone
from taas.protocol.framing import Message, pack
from taas.protocol.ranks import GetReady, Preparation, RankReady, RankRequest, Readiness

logger = logging.getLogger(__name__)

MOST = max(8, os.cpu_count() or 1)
"""The maximum number of spares on a VM."""
_LEFT_FOR_OTHERS = 0.25
"""The share of memory that must stay free after spares have imported modules. The imports take
hundreds of MB in each of them, for a cell that may never come, and the notebook's next cell may
load a model.
"""
On = Callable[[Any, Callable[[], None]], None]


class _Surroundings(NamedTuple):
    """The conditions whose change a rank prepared in advance cannot notice itself.

    These are the number of ranks, the project and the mounts.
    """

    ranks: int
    project: tuple[int, int]
    mounts: bytes

    @classmethod
    def now(cls, project: str, ranks: int) -> _Surroundings | None:
        """Return the present conditions; None if they cannot be determined."""
        try:
            status = Path(project).stat()
            mounts = Path("/proc/self/mountinfo").read_bytes()
        except OSError:
            return None
        return cls(ranks, (status.st_dev, status.st_ino), mounts)


class Spares:
    """The spare processes of one agent; ``on`` and ``off`` start and stop watching a descriptor."""

    def __init__(self, forkserver: Forkserver, on: On, off: Callable[[Any], None]) -> None:
        self._forkserver, self._on, self._off = forkserver, on, off
        self._waiting: list[RankProcess] = []
        self._wanted = 0
        self._preparation: Preparation | None = None
        self._from = self._until = 0.0
        self._ahead: dict[int, GetReady] = {}
        self._in_vain: set[tuple[str, ...]] = set()
        self._surroundings: _Surroundings | None = None
        self._import_until, self._import_took = 0.0, 0

    def want(
        self, preparation: Preparation, count: int, ahead: Mapping[int, GetReady] | None = None
    ) -> None:
        """Expect a run with ``count`` ranks on this VM.

        ``ahead`` has the messages by which spares prepare for it, by local rank.
        """
        self._expect(preparation, min(count, MOST))
        now = time.monotonic()
        self._from, self._until = now + deadlines.SPARES_REST, now + deadlines.SPARES_IDLE
        tried = any(order.modules in self._in_vain for order in (ahead or {}).values())
        if ahead and not tried and count == self._wanted:  # a run is as slow as its slowest rank
            self._ahead = dict(ahead)
        self._surroundings = _Surroundings.now(preparation.project, count)

    def _expect(self, preparation: Preparation, count: int) -> None:
        if preparation != self._preparation:
            self.end()
            self._in_vain.clear()
        self._preparation, self._wanted = preparation, count
        self._ahead = {}

    def take(self, preparation: Preparation, count: int) -> Iterator[RankProcess]:
        """Yield ``count`` unwatched processes for a run, by local rank: its spares, then others.

        A spare that was made a rank in advance reports whether it accepts the job. No more spares
        are made until the next :meth:`want`.

        Raises:
            OSError, EOFError: a process could not be forked.
        """
        self._expect(preparation, 0)
        self._waiting = [process for process in self._waiting if process.alive]
        now = _Surroundings.now(preparation.project, count)
        if now is None or now != self._surroundings:
            for spare in [one for one in self._waiting if one.ahead is not MadeAhead.NOT]:
                self._end_one(spare)
        for local in range(count):
            yield self._take_one(local) or RankProcess(preparation)

    def _take_one(self, local: int) -> RankProcess | None:
        """Return the spare that is this rank already, or else one that can be any rank."""
        fitting = [spare for spare in self._waiting if spare.local_rank == local]
        fitting += [spare for spare in self._waiting if spare.ahead is MadeAhead.NOT]
        if not fitting:
            return None
        self._waiting.remove(fitting[0])
        self._off(fitting[0].sentinel)
        self._off(fitting[0].source)
        return fitting[0]

    def step(self) -> None:
        """Make or prepare the next spare if it is time; end all if unused or short of memory."""
        if not self._waiting and not self._wanted:
            return
        now = time.monotonic()
        if now > self._until or memory_left().is_scarce:
            self.end()
        elif self._missing:
            if now >= self._from:
                self._make_one()
        elif importing := self._importing:
            if now > self._import_until:
                self._give_up(importing, "takes too long to import")
        elif self._ahead:
            self._let_one_get_ready()

    @property
    def _missing(self) -> bool:
        return len(self._waiting) < self._wanted

    @property
    def _importing(self) -> RankProcess | None:
        """The spare that is importing: one at a time, since the user's work goes on."""
        return next((one for one in self._waiting if one.ahead is MadeAhead.IMPORTING), None)

    def _make_one(self) -> None:
        assert self._preparation is not None
        try:
            spare = RankProcess(self._preparation)
        except (OSError, EOFError):
            # no process or descriptor is left; if this lasts, the next run will report it
            self._wanted, self._ahead = 0, {}
            return
        self._waiting.append(spare)
        self._from = time.monotonic() + deadlines.SPARES_APART
        self._on(spare.sentinel, partial(self._lose, spare))

    def _let_one_get_ready(self) -> None:
        """Prepare the next rank if memory allows; it needs about as much as the last one."""
        left = memory_left()
        spare = next((one for one in self._waiting if one.ahead is MadeAhead.NOT), None)
        if spare is None or left.free - self._import_took < _LEFT_FOR_OTHERS * left.total:
            self._ahead = {}
            return
        local = min(self._ahead)
        self._on(spare.source, partial(self._hear, spare))
        spare.get_ready(self._ahead.pop(local))
        self._import_until = time.monotonic() + deadlines.IMPORTS_AHEAD
        logger.info("spare %d becomes the local rank %d ahead of its order", spare.pid, local)

    def _hear(self, spare: RankProcess) -> None:
        source = spare.source
        for said in spare.hear():
            if not isinstance(said, RankReady):
                continue
            if said.state is Readiness.IMPORTED:
                spare.ahead, self._import_took = MadeAhead.READY, said.nbytes
            else:
                self._give_up(spare, said.unfit)
        if spare.source < 0:
            self._off(source)

    def _give_up(self, spare: RankProcess, why: str) -> None:
        """End a spare that cannot be prepared; make an ordinary one, and prepare no others."""
        logger.info("spare %d is ended: it %s", spare.pid, why)
        if spare.expected is not None:
            self._in_vain.add(spare.expected.modules)
        self._ahead = {}
        self._end_one(spare)

    def wait(self) -> float | None:
        """Return the seconds until :meth:`step` has something to do, if no message comes before."""
        now = time.monotonic()
        if self._missing:
            return max(0.0, self._from - now)
        if self._importing is not None:
            return max(0.0, min(self._import_until - now, deadlines.SPARES_LOOK))
        if self._ahead:
            return 0.0
        return deadlines.SPARES_LOOK if self._waiting else None

    def _lose(self, spare: RankProcess) -> None:
        """Handle the end of a spare, for whatever reason: make no others in its place."""
        if spare.ahead is MadeAhead.IMPORTING and spare in self._waiting:
            self._hear(spare)  # the end of a process may be noticed before its last message
            if spare not in self._waiting:
                return  # it has reported why
        if spare.ahead is MadeAhead.IMPORTING and spare.expected is not None:
            # an import has ended it, or has used up the memory
            self._in_vain.add(spare.expected.modules)
        self._off(spare.sentinel)
        self._off(spare.source)
        spare.disconnect()
        if spare in self._waiting:
            self._waiting.remove(spare)
        self._wanted, self._ahead = 0, {}
        if not self._forkserver.outlived(untold=spare.untold):
            sweep_orphans((self._forkserver.pid,))

    def _end_one(self, spare: RankProcess) -> None:
        """End a spare, with any processes that its imports may have started."""
        self._waiting.remove(spare)
        self._off(spare.sentinel)
        self._off(spare.source)
        if spare.ahead is not MadeAhead.NOT:
            spare.kill_tree()
        spare.send(signal.SIGKILL)
        spare.disconnect()

    def end(self) -> None:
        """End all spares."""
        for spare in [*self._waiting]:
            self._end_one(spare)
        self._wanted, self._ahead = 0, {}

    def forget(self) -> None:
        """Discard the spares of an earlier forkserver, which ended with it, and reap them."""
        self.end()
        sweep_orphans((self._forkserver.pid,))


class KeptProcesses:
    """The ranks of this VM that stay after a ``--keep`` cell, with their ``project``."""

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
        """Keep ranks whose cell has ended, by number, with their project and their store."""
        self._processes, self.project = dict(processes), project
        self._stores += [store] if store is not None else []
        for number, process in processes.items():
            self._on(process.sentinel, partial(self._lose, number))

    def take(self) -> list[RankProcess]:
        """Hand the ranks over to the next run, and stop watching them."""
        taken, self._processes = self._processes, {}
        for process in taken.values():
            self._off(process.sentinel)
        return list(taken.values())

    def _lose(self, number: int) -> None:
        """Handle the death of a rank: the state of the other ranks is of no use without it."""
        code = self._processes[number].exitcode
        self.end()
        how = f"was killed by {signal.Signals(-code).name}" if code and code < 0 else "left"
        self._say(KeptGone(how=f"rank {number} {how}"))

    def end(self, *, patient: bool = False) -> None:
        """End the ranks; if ``patient``, they run their exit functions first."""
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
