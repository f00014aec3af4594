"""What ranks do to the copy of the project on their VM, sent back to the notebook's disk."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from time import monotonic

import msgspec

from taas.agent.project_arrival import ProjectArrival
from taas.agent.remote import Stay
from taas.messages.hosts import FileChange
from taas.messages.ranks import RankOrder
from taas.messages.wire import Message
from taas.rank_storage import scratch_of
from taas.travel.changes import Change, encode
from taas.travel.watcher import Watcher

__all__ = ["ProjectCopy"]

_WINDOW = 8 << 20
"""Bytes of changes on their way before they are taken."""
_PAUSE = 1.0


class ProjectCopy:
    """The project of one run on this VM, which is not the notebook's machine.

    Args:
        stay: what the messages carry.
        order: what its ranks are told.
        arrival: how the project comes here.
        say: sends a message to the supervisor.
    """

    def __init__(
        self, stay: Stay, order: RankOrder, arrival: ProjectArrival, say: Callable[[Message], None]
    ) -> None:
        self._stay, self._order, self._arrival, self._say = stay, order, arrival, say
        self._window = _WINDOW
        self._watched: list[tuple[int, Watcher]] = []
        self._coming: Iterator[tuple[int, Change]] | None = None
        self._next_look = 0.0
        self._last = self._over = False

    @property
    def notices(self) -> list[str]:
        """Lines for the user."""
        return self._arrival.notices

    def begin(self) -> RankOrder:
        """Watch the copy from now on, if it is one; returns what its ranks are told."""
        copy = self._arrival.copy
        if copy is not None and self._order.first_rank == 0:
            self._watched.append((0, Watcher(str(copy))))
        elif copy is not None and (shared := self._shared_places()):
            self._watched.append((0, Watcher(str(copy), only=shared)))
        return msgspec.structs.replace(
            self._order, project=self._arrival.project, replica=self._arrival.replica
        )

    def _shared_places(self) -> list[str]:
        """The ``--shared`` directories in the project, where the ranks of every VM write."""
        paths = [os.path.join(self._order.project, path) for path in self._order.spec.shared]  # noqa: PTH118
        inside = [Path(path) for path in paths if Path(path).is_relative_to(self._order.project)]
        return [str(path.relative_to(self._order.project)) for path in inside]

    # ------------------------------------------------------------ changes go back

    def acknowledge(self, size: int) -> None:
        """So many bytes were taken."""
        self._window += size

    def wait(self) -> float | None:
        """Seconds until the next look; None while nothing is to be seen, or the supervisor has to take some first."""
        if self._over or self._window <= 0 or not (self._watched or self._coming):
            return None
        return 0.0 if self._coming else max(0.0, self._next_look - monotonic())

    def step(self, *, last: bool) -> bool:
        """Send what has changed, as far as the supervisor has taken what was sent before.

        Args:
            last: all ranks have ended.

        Returns:
            Whether, after the last look, all was sent.
        """
        while not self._over:
            if self._coming is None:
                if last and not self._last:
                    self._last = True
                    self._coming = self._changes(last=True)
                elif last:
                    self._end()
                    break
                elif monotonic() < self._next_look:
                    break
                else:
                    self._coming = self._changes(last=False)
            if not self._send():
                break
        return self._over

    def _send(self) -> bool:
        """Send what the window allows; returns whether nothing is left."""
        assert self._coming is not None
        while self._window > 0:
            found = next(self._coming, None)
            if found is None:
                self._coming = None
                pause = max((watcher.pause for _, watcher in self._watched), default=_PAUSE)
                self._next_look = monotonic() + max(_PAUSE, pause)
                return True
            rank, change = found
            data = encode(change)
            self._window -= len(data)
            self._say(FileChange(run=self._stay.run, vm=self._stay.number, rank=rank, change=data))
        return False

    def _changes(self, *, last: bool) -> Iterator[tuple[int, Change]]:
        watched = list(self._watched)
        if last:
            watched += self._scratches()
        for rank, watcher in watched:
            for change in watcher.changes(last):
                yield rank, change
            self._arrival.notices += [
                f"{path} did not come back from VM {self._order.vm}: it was still being written"
                for path in watcher.unsent
            ]

    def _scratches(self) -> Iterator[tuple[int, Watcher]]:
        """What ranks other than 0 wrote in the project's place; it is sorted on the notebook's machine."""
        first = self._order.first_rank
        for rank in range(max(1, first), first + self._order.local_world_size):
            scratch = scratch_of(Path(self._order.scratch), rank)
            if scratch.is_dir():
                yield rank, Watcher(str(scratch), only=["tree", "gone"], afresh=True)

    def _end(self) -> None:
        self._over = True
        self.close()

    def close(self) -> None:
        """Remove what was made for the project outside the run's folder."""
        self._arrival.close()
