"""The project on a VM: the notebook's disk itself, where this VM sees it, else a copy whose changes are sent back."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from time import monotonic

import msgspec

from taas.messages.hosts import FileChange, Piece, ProjectPacked, WantProject
from taas.messages.ranks import RankOrder
from taas.messages.wire import Message
from taas.pieces import Fetch
from taas.rank_storage import scratch_of
from taas.travel import parcel, replica
from taas.travel.changes import Change, encode
from taas.travel.same_disk import read_token
from taas.travel.watcher import Watcher

__all__ = ["ProjectCopy"]

_WINDOW = 8 << 20
"""Bytes of changes on their way before they are taken."""
_PAUSE = 1.0


class ProjectCopy:
    """The project of one run on this VM, which is not the notebook's machine.

    Args:
        run: name of the run.
        vm: number of the VM in the run.
        order: what its ranks are told.
        root: the run's folder on this VM.
        say: sends a message to the supervisor.

    Attributes:
        ready: whether the ranks can start.
        notices: lines for the user.
    """

    def __init__(
        self, run: str, vm: int, order: RankOrder, root: Path, say: Callable[[Message], None]
    ) -> None:
        assert order.files is not None
        self._run, self._vm, self._order, self._root, self._say = run, vm, order, root, say
        self._fetch: Fetch | None = None
        self._room: replica.Room | None = None
        self._window = _WINDOW
        self._watched: list[tuple[int, Watcher]] = []
        self._coming: Iterator[tuple[int, Change]] | None = None
        self._next_look = 0.0
        self._last = self._over = False
        self.notices: list[str] = []
        self.ready = bool(order.files.token) and read_token(order.files.path) == order.files.token
        if not self.ready:
            self._say(WantProject(run=run, vm=vm))

    # ------------------------------------------------------------ the project comes

    def take_packed(self, packed: ProjectPacked) -> None:
        """The supervisor has packed the project."""
        self._fetch = Fetch(self._run, self._vm, packed.parcel, self._say)
        self._unpack_when_complete()

    def wants(self, piece: Piece) -> bool:
        """Whether a piece is of the packed project."""
        return self._fetch is not None and self._fetch.wants(piece)

    def take(self, piece: Piece) -> None:
        """Write a piece down.

        Raises:
            OSError: there is no room for it.
            msgspec.DecodeError: it is no project.
        """
        assert self._fetch is not None
        self._fetch.take(piece)
        self._unpack_when_complete()

    def _unpack_when_complete(self) -> None:
        assert self._fetch is not None
        if not self._fetch.complete:
            return
        copy, project = self._root / "project", self._order.project
        copy.mkdir(mode=0o700)
        self.notices += parcel.unpack(self._fetch.fd, str(copy))
        self._drop_fetch()
        replica.make_places(str(copy), project)
        try:
            self._room = replica.Room(project)
        except OSError as error:
            self.notices.append(
                f"absolute paths of the project do not hold on VM {self._order.vm}: {project} may not be made "
                f"there ({error.strerror}); relative paths do"
            )
            self._order = msgspec.structs.replace(self._order, project=str(copy))
        else:
            self._order = msgspec.structs.replace(self._order, replica=str(copy))
        if self._order.first_rank == 0:
            self._watched.append((0, Watcher(str(copy))))
        elif shared := self._shared_places():
            self._watched.append((0, Watcher(str(copy), only=shared)))
        self.ready = True

    def _shared_places(self) -> list[str]:
        """The ``--shared`` directories in the project, where the ranks of every VM write."""
        paths = [os.path.join(self._order.project, path) for path in self._order.spec.shared]  # noqa: PTH118
        inside = [Path(path) for path in paths if Path(path).is_relative_to(self._order.project)]
        return [str(path.relative_to(self._order.project)) for path in inside]

    def order(self) -> RankOrder:
        """What the ranks are told, now that it is known where the project is."""
        return self._order

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
            self._say(FileChange(run=self._run, vm=self._vm, rank=rank, change=data))
        return False

    def _changes(self, *, last: bool) -> Iterator[tuple[int, Change]]:
        watched = list(self._watched)
        if last:
            watched += self._scratches()
        for rank, watcher in watched:
            for change in watcher.changes(last):
                yield rank, change
            self.notices += [
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
        self._drop_fetch()
        if self._room is not None:
            self._room.leave()

    def _drop_fetch(self) -> None:
        if self._fetch is not None:
            os.close(self._fetch.fd)
            self._fetch = None
