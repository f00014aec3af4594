"""Spare ranks: processes forked ahead, while nothing runs, which wait for the order of the next run.

A fork of the forkserver and a rank's own start cost more processor time than all that follows until the cell runs.
So once a run is over, the agent makes as many processes as that run had ranks, one after the other, and each does
what no order changes: it ties itself to its agent, builds the shell. A run takes them, and forks what is missing.

A spare was prepared for one environment, project and forkserver; a run with another one does not use it, it is
ended. Spares are ended too when nothing has used them for a while, or the machine's memory becomes scarce. That one
cannot be made, or dies, costs the next run the time of a fork and nothing else.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

import psutil

from taas.agent.processes import RankProcess, start_spare
from taas.messages.ranks import Preparation, SpareStart
from taas.rank.copied_pages import Pages

MOST = max(8, os.cpu_count() or 1)
"""So many spares a VM has at most."""
IDLE_SECONDS = 15 * 60.0
"""So long spares wait for a run."""
_SURVEYS = 3
_LOOK_SECONDS = 20.0
_REST_SECONDS = 0.1
"""After a run, what follows it at once comes first: the next cell of Run All, or the end of everything."""
_FREE_SHARE = 0.1


class Spares:
    """The spare processes of one agent.

    Args:
        control: name of the agent's socket, to which they connect.
        watch: called with each new one.
        unwatch: called with each that is ended here.
    """

    def __init__(
        self, control: str, watch: Callable[[RankProcess], None], unwatch: Callable[[RankProcess], None]
    ) -> None:
        self._control, self._watch, self._unwatch = control, watch, unwatch
        self._waiting: list[RankProcess] = []
        self._wanted = 0
        self._preparation: Preparation | None = None
        self._from = self._until = 0.0
        self._pages: Pages = ()
        self._surveys = 0

    def forget(self) -> None:
        """Begin anew: the forkserver is another one."""
        self.end()
        self._pages, self._surveys = (), 0

    @property
    def survey(self) -> bool:
        """Whether to ask a rank of the next run which pages it copies: the first runs tell."""
        return self._surveys < _SURVEYS

    def learn(self, pages: Pages) -> None:
        """Let the spares to come copy these pages ahead, if they are more than those known."""
        self._surveys += 1
        self._pages = max(pages, self._pages, key=_nbytes)

    def want(self, preparation: Preparation, count: int) -> None:
        """Expect a run with so many ranks here, like the last one."""
        if preparation != self._preparation:
            self.end()
        self._preparation, self._wanted = preparation, min(count, MOST)
        now = time.monotonic()
        self._from, self._until = now + _REST_SECONDS, now + IDLE_SECONDS

    def take(self, preparation: Preparation, count: int) -> list[RankProcess]:
        """Give a run up to ``count`` spares that were prepared for it; make no more until the next :meth:`want`."""
        if preparation != self._preparation:
            self.end()
        self._wanted = 0
        alive = [process for process in self._waiting if process.alive]
        taken, self._waiting = alive[:count], alive[count:]
        return taken

    def find(self, pid: int) -> RankProcess | None:
        """Return the spare with this process id that has not connected yet."""
        return next((spare for spare in self._waiting if spare.pid == pid and spare.connection is None), None)

    def step(self) -> None:
        """Make the next one, if it is time; end all, if nobody comes or memory is short."""
        if not self._waiting and not self._wanted:
            return
        now = time.monotonic()
        if now > self._until or _memory_is_short():
            self.end()
        elif self._lacking and now >= self._from and all(spare.ready for spare in self._waiting):
            self._make_one()

    @property
    def _lacking(self) -> bool:
        return len(self._waiting) < self._wanted

    def _make_one(self) -> None:
        assert self._preparation is not None
        try:
            ahead = SpareStart(preparation=self._preparation, pages=self._pages)
            spare = start_spare(self._control, ahead)
        except (OSError, EOFError):  # no process, no descriptor: the next run will say so if it lasts
            self._wanted = 0
            return
        self._waiting.append(spare)
        self._watch(spare)

    def wait(self) -> float | None:
        """Return the seconds until :meth:`step` has something to do, if nothing is heard."""
        rest = self._from - time.monotonic()
        if self._lacking and rest > 0:
            return rest
        return _LOOK_SECONDS if self._waiting else None

    def lose(self, process: RankProcess) -> None:
        """One is gone, for whatever reason: make no others in its place."""
        self._unwatch(process)
        process.disconnect()
        self._wanted = 0
        if process in self._waiting:
            self._waiting.remove(process)

    def end(self) -> None:
        """End all."""
        self._wanted = 0
        for process in self._waiting:
            self._unwatch(process)
            process.send(signal.SIGKILL)
            process.disconnect()
        self._waiting.clear()


def _nbytes(pages: Pages) -> int:
    return sum(length for _, length in pages)


def _memory_is_short() -> bool:
    memory = psutil.virtual_memory()
    return bool(memory.available < _FREE_SHARE * memory.total)
