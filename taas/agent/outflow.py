"""What a job's processes do on a VM elsewhere, on its way to the notebook's machine.

Bytes of output files, as they grow, and archives of what was changed in the copy of the project: each is a source for
the job's :class:`taas.wire.transfer.Sender`.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from time import monotonic
from typing import Literal

from taas.agent.staging import ProjectArrival
from taas.project_sync.archive import Changes, only, shared_places
from taas.rank_storage import scratch_of
from taas.runs.events import COLLECTED, EVENTS, STDERR, STDOUT
from taas.wire.framing import Memory
from taas.wire.ranks import RankOrder, Staged
from taas.wire.transfer import CHUNK, Chunk, chunks_of

_EVERY_SECONDS = 30.0
"""So often is what was changed in the project sent while the cell runs."""


def output_of(rank: int, folder: Path, ended: Callable[[], bool]) -> Iterator[Chunk | None]:
    """Read what a rank writes into its folder, the raw files first: a record in the events counts on them.

    It ends with a last look, begun when ``ended`` says that nobody writes there any more.
    """
    sent = dict.fromkeys((STDOUT, STDERR, EVENTS, COLLECTED), 0)
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
    """What ranks do to the copy of the project on their VM, and to the ``--shared`` directories in it, as archives.

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
        self._order, self._scratch, self._arrival, self._ended = order, staged.scratch, arrival, ended
        shared = shared_places(home, order.cell.spec.shared)
        own = order.first_rank == 0
        self._project: Changes | None = None
        if arrival.copy is not None and (own or shared):
            self._project = Changes(str(arrival.copy), only(() if own else shared))
        self._next_look = monotonic() + _EVERY_SECONDS
        self._packing = False

    def wait(self) -> float | None:
        """Return the seconds until there is something to do; None: there is not."""
        if self._packing:
            return 0.0
        looks = self._project is not None and not self._ended()
        return max(0.0, self._next_look - monotonic()) if looks else None

    def chunks(self) -> Iterator[Chunk | None]:
        """Look every now and then, and once when the ranks have ended."""
        while not self._ended():
            if self._project is not None and monotonic() >= self._next_look:
                yield from self._archive("changes", self._project, last=False)
                self._next_look = monotonic() + _EVERY_SECONDS
            yield None
        if self._project is not None:
            yield from self._archive("changes", self._project, last=True)
        # What ranks other than 0 wrote in the project's place is sorted on the notebook's machine.
        numbers = range(max(1, self._order.first_rank), self._order.first_rank + self._order.local_world_size)
        places = [f"{scratch_of(Path(), rank)}/{folder}" for rank in numbers for folder in ("tree", "gone")]
        if places:
            yield from self._archive(
                "writes", Changes(str(self._scratch), only(places), afresh=True), last=True
            )

    def _archive(
        self, of: Literal["changes", "writes"], changes: Changes, *, last: bool
    ) -> Iterator[Chunk | None]:
        """Pack what has changed, and send it; where there is no room for that, the next look has it."""
        self._packing = True
        try:
            if self._arrival.late is not None and of == "changes":
                changes.know(self._arrival.late.came)
            with tempfile.TemporaryFile(dir=self._scratch) as archive:
                yield from changes.pack(archive.fileno(), last=last)
                self._packing = False
                if size := os.fstat(archive.fileno()).st_size:
                    memory = Memory(os.getpid(), archive.fileno(), size)
                    yield from chunks_of(of, memory, self._order.first_rank)
            lost = [(path, "it was still being written") for path in changes.unsent]
        except OSError as error:
            why = f"{error.strerror} ({self._scratch} there). See to that, and run the cell again"
            lost = [("what ranks wrote in the project", why)]
        self._packing = False
        if last:
            vm = self._order.vm
            self._arrival.notices += [f"{what} did not come back from VM {vm}: {why}" for what, why in lost]
