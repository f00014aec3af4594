"""The ranks that this VM keeps after a `--keep` cell, until the next one, until they die, or until the VM is given back."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterable
from functools import partial
from multiprocessing.connection import wait
from typing import Any

from taas.agent.processes import RankProcess
from taas.agent.run_store import RunStore
from taas.agent.staging import ProjectArrival
from taas.wire import deadlines
from taas.wire.agents import KeptGone
from taas.wire.framing import Message, pack
from taas.wire.ranks import RankRequest


class KeptProcesses:
    """None at first.

    Args:
        on, off: begin and end to watch a descriptor.
        say: sends a message to the supervisor.

    Attributes:
        project: what they see as the project.
    """

    def __init__(
        self,
        on: Callable[[Any, Callable[[], None]], None],
        off: Callable[[Any], None],
        say: Callable[[Message], None],
    ) -> None:
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
            _wait_for_end(process.sentinel for process in processes)
        for process in processes:
            process.kill_tree()
            process.disconnect()
        while self._stores:
            self._stores.pop().close()
        if self.project is not None:
            self.project.close()
            self.project = None


def _wait_for_end(sentinels: Iterable[int]) -> None:
    left, until = set(sentinels), time.monotonic() + deadlines.LEAVE_KEPT
    while left and (seconds := until - time.monotonic()) > 0:
        left.difference_update(wait(left, seconds))
