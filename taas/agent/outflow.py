"""What a job's processes do on a VM elsewhere, on its way to the notebook's machine.

Bytes of output files, as they grow, and changes to the copy of the project: each is a source for the job's
:class:`taas.wire.transfer.Sender`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from time import monotonic

from taas.agent.staging import ProjectArrival
from taas.project_sync.tree import encode, shared_places
from taas.project_sync.watcher import Watcher
from taas.rank_storage import scratch_of
from taas.runs.events import EVENTS, STDERR, STDOUT
from taas.wire.ranks import RankOrder, Staged
from taas.wire.transfer import CHUNK, Chunk

_PAUSE = 1.0
"""Seconds between two looks at the project, at least."""


def output_of(rank: int, folder: Path, ended: Callable[[], bool]) -> Iterator[Chunk | None]:
    """Read what a rank writes into its folder, the raw files first: a record in the events counts on them.

    It ends with a last look, begun when ``ended`` says that nobody writes there any more.
    """
    sent = dict.fromkeys((STDOUT, STDERR, EVENTS), 0)
    last = False
    while not last:
        last, events = ended(), _size(folder / EVENTS)
        for name in sent:
            size = events if name == EVENTS else _size(folder / name)
            for offset, data in _read(folder / name, sent[name], size):
                yield Chunk(of="output", rank=rank, file=name, offset=offset, data=data)
                sent[name] = offset + len(data)
        if not last:  # else it is over: nothing might wake this process for another step
            yield None


def log_of(log: Path, ended: Callable[[], bool]) -> Iterator[Chunk | None]:
    """Read what a data process prints. Those of several VMs are one file there, so lines are sent whole."""
    sent, last = 0, False
    while not last:
        last = ended()
        for offset, piece in _read(log, sent, _size(log)):
            data = piece if last or len(piece) == CHUNK else piece[: piece.rfind(b"\n") + 1]
            if data:
                yield Chunk(of="output", offset=offset, data=data)
                sent = offset + len(data)
        if not last:
            yield None


def _read(path: Path, offset: int, size: int) -> Iterator[tuple[int, bytes]]:
    """Read a file up to a size; gives chunks, with where they are."""
    if offset >= size:
        return
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        while offset < size and (data := os.pread(fd, min(CHUNK, size - offset), offset)):
            yield offset, data
            offset += len(data)
    finally:
        os.close(fd)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


class ProjectChanges:
    """What ranks do to the copy of the project on their VM, and to the ``--shared`` directories in it.

    Args:
        home: absolute path of the project on the notebook's machine.
        order: what the ranks were told.
        staged: what they have here.
        arrival: how the project came here.
        ended: whether all ranks have ended.
    """

    def __init__(
        self,
        home: str,
        order: RankOrder,
        staged: Staged,
        arrival: ProjectArrival,
        ended: Callable[[], bool],
    ) -> None:
        self._order, self._staged = order, staged
        self._arrival, self._ended = arrival, ended
        self._watched: list[tuple[int, Watcher]] = []
        self._next_look = 0.0
        copy = arrival.copy
        if copy is not None and order.first_rank == 0:
            self._watched.append((0, Watcher(str(copy))))
        elif copy is not None and (shared := shared_places(home, order.cell.spec.shared)):
            self._watched.append((0, Watcher(str(copy), only=shared)))

    def wait(self) -> float | None:
        """Return the seconds until the next look; None: nothing is to be seen."""
        return max(0.0, self._next_look - monotonic()) if self._watched else None

    def chunks(self) -> Iterator[Chunk | None]:
        """Look every now and then, and once when the ranks have ended."""
        last = False
        while not last:
            last = self._ended()
            if last or monotonic() >= self._next_look:
                yield from self._look(last=last)
                pause = max((watcher.pause for _, watcher in self._watched), default=_PAUSE)
                self._next_look = monotonic() + max(_PAUSE, pause)
            if not last:
                yield None

    def _look(self, *, last: bool) -> Iterator[Chunk]:
        for rank, watcher in [*self._watched, *(self._scratches() if last else ())]:
            for change in watcher.changes(last):
                yield Chunk(of="change", rank=rank, data=encode(change))
            self._arrival.notices += [
                f"{path} did not come back from VM {self._order.vm}: it was still being written"
                for path in watcher.unsent
            ]

    def _scratches(self) -> Iterator[tuple[int, Watcher]]:
        """What ranks other than 0 wrote in the project's place; it is sorted on the notebook's machine."""
        first = self._order.first_rank
        for rank in range(max(1, first), first + self._order.local_world_size):
            scratch = scratch_of(Path(self._staged.scratch), rank)
            if scratch.is_dir():
                yield rank, Watcher(str(scratch), only=["tree", "gone"], afresh=True)
