"""What a job needs on its VM before its processes are forked: payload, project and environment.

Also, what a remote VM sends back: the growth of output files, and archives of files that were
changed in its copy of the project. Each of these is a source for the job's
:class:`taas.protocol.chunks.Sender`.

On the notebook's machine, the same classes take a shortcut: the payload's memory is opened there,
and everything else is in place already. On other machines the payload comes in chunks; so does the
project, if the VM does not share the notebook's disk.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from time import monotonic
from typing import Literal

from taas.base.linux import remove_tree
from taas.project import sync
from taas.project.sync.applier import unpack
from taas.project.sync.archive import Changes, entries, only, shared_places
from taas.project.sync.files_on_demand import FilesOnDemand
from taas.project.wall.boundary import clock_of
from taas.protocol.agents import JobRequest, StartJob
from taas.protocol.chunks import CHUNK, Chunk, Incoming, chunks_of
from taas.protocol.engines import AgentConfig
from taas.protocol.framing import Memory, Unreadable
from taas.protocol.ranks import RankOrder, Staged
from taas.rank_storage import scratch_of
from taas.runs.events import COLLECTED, EVENTS, STDERR, STDOUT, size_of

_COPY = "project"


def environment(
    notebook: dict[str, str], changed: Iterable[str], config: AgentConfig
) -> dict[str, str]:
    """Return the environment of ranks on this VM.

    Variables that the notebook itself set or removed (``changed``) have the notebook's values.
    Other variables of the notebook are used only if this VM has no variable of that name: PATH,
    HOME and the like are the VM's.
    """
    own = {name: value for name, value in config.environ.items() if name not in changed}
    return {**notebook, **own}


def _empty_folder(wanted: Path) -> Path:
    """Return a folder for a job: that of earlier jobs with the same number, if it is empty.

    It may contain the copy of the project, which is the working directory of spares.
    """
    wanted.mkdir(mode=0o700, exist_ok=True)
    left = [path for path in wanted.rglob("*") if path != wanted / _COPY]
    return Path(tempfile.mkdtemp(prefix="job-", dir=wanted.parent)) if left else wanted


class Staging:
    """What one job needs, while it arrives at this VM and until :meth:`close`.

    Args:
        order: the message that starts the job.
        config: the agent's configuration.
        say: sends the supervisor a message about the job.
        before: the project of the ranks that this VM has kept; None if there are none.

    Raises:
        OSError: there is no space for it, or the process that holds the payload is gone.
    """

    def __init__(
        self,
        order: StartJob,
        config: AgentConfig,
        say: Callable[[JobRequest], None],
        before: ProjectArrival | None = None,
    ) -> None:
        self._order = order
        self._root: Path | None = None
        self._stays = False
        self._environ = order.workspace.environ
        self._output, self._scratch = order.output, order.scratch
        self._payload = Incoming(order.payload)
        if config.remote:
            root = before.root if before is not None else None
            self._root = root = root or _empty_folder(Path(config.scratch) / f"job-{order.job}")
            self._environ = environment(order.workspace.environ, order.workspace.changed, config)
            self._output = str(root / Path(order.output).name)
            self._scratch = str(root / "writes")
            Path(self._scratch).mkdir(mode=0o700, exist_ok=True)
        self.project = before or ProjectArrival(self._root, Path(config.scratch) / "files")
        self.project.expect(order, say)
        if not self.project.ready:
            say(JobRequest(what="project"))

    @property
    def complete(self) -> bool:
        """Whether everything has arrived."""
        return self._payload.complete and self.project.ready

    @property
    def staged(self) -> Staged:
        """The locations of everything that was staged."""
        on_demand = self.project.on_demand
        return Staged(
            payload=self._payload.memory,
            project=self.project.path,
            replica=self.project.replica,
            on_demand="" if on_demand is None else str(on_demand.folder),
            environ=self._environ,
            output=self._output,
            scratch=self._scratch,
            since_ns=self.project.since_ns,
            at_import=self._order.workspace.at_import,
        )

    def take(self, chunk: Chunk) -> None:
        """Process a chunk that the supervisor sends; an OSError says what could not be stored."""
        if chunk.of != "payload":
            what = "the project"
        elif isinstance(self._order.work, RankOrder):
            what = "the cell's names"
        else:
            what = "the registered loaders"
        try:
            (self._payload if chunk.of == "payload" else self.project).take(chunk)
        except (OSError, Unreadable) as error:
            raise OSError(f"{what} could not be taken: {error}") from error

    def leave_to_ranks(self) -> ProjectArrival:
        """Leave the project to ranks that are kept.

        Files that they diverted are removed: the notebook's machine has them by now.
        """
        self._stays = True
        if self._root is not None:
            for diverted in Path(self._scratch).glob("rank*/tree"):
                remove_tree(diverted)
        return self.project

    def close(self) -> None:
        """Release the memory, and remove the files made on this VM, except those of kept ranks."""
        with contextlib.ExitStack() as last_first:
            if self._root is not None and self._stays:
                last_first.callback(remove_tree, self._output)
            elif self._root is not None:
                if self.project.copy is not None:
                    last_first.callback(self.project.copy.mkdir, parents=True, exist_ok=True)
                last_first.callback(remove_tree, self._root)
            last_first.callback(self.project.close)
            last_first.callback(self._payload.close)


class ProjectArrival:
    """The project on a VM: on the notebook's disk, if the VM shares that disk, otherwise a copy.

    Args:
        root: a folder of this VM, which its owner removes; None on the notebook's machine.
        cache: a folder for large files of projects, which lasts as long as the agent.

    Attributes:
        on_demand: the files that are missing in the copy, and are sent on demand; None without a
            copy.
        ready: whether the present version of the project is here.
        copy: the folder into which the project was unpacked; None if the VM shares the notebook's
            disk.
        path: the path at which the job's processes find the project.
        since_ns: a time by the clock of the project's file system; a file that was modified later
            was changed by the run.
        replica: the folder that these processes have to see at ``path``
            (:func:`taas.project.sync.enter_replica`); empty if ``path`` already is the project.
        notices: lines for the user.
    """

    def __init__(self, root: Path | None, cache: Path) -> None:
        self.root, self._cache = root, cache
        self.on_demand: FilesOnDemand | None = None
        self._say: Callable[[JobRequest], None] = lambda said: None
        self._vm = ""
        self._packed: Incoming | None = None
        self.path = self.replica = ""
        self.copy: Path | None = None
        self.since_ns = 0
        self.notices: list[str] = []
        self.ready = False

    def expect(self, order: StartJob, say: Callable[[JobRequest], None]) -> None:
        """Expect the project for a job; the copy of an earlier job is brought up to date."""
        self._vm, self._say = order.name, say
        self._packed, self.notices = None, []
        self.since_ns = order.since_ns
        self.path = self.path or order.workspace.project
        self.ready = self.root is None or (self.copy is None and _sees_disk(order))

    def take(self, chunk: Chunk) -> None:
        """Process a part of the packed project, or of a file that was requested.

        Raises:
            OSError: there is no space for it.
            Unreadable: the data are not a project.
        """
        if chunk.of == "file":
            if self.on_demand is not None:
                self.on_demand.take(chunk)
            return
        if self._packed is None:
            self._packed = Incoming(Memory(0, 0, chunk.size))
        self._packed.take(chunk)
        if self._packed.complete:
            self._unpack(self._packed.fd)
            self._packed.close()
            self.ready = True

    def _unpack(self, fd: int) -> None:
        assert self.root is not None
        there, self.copy = self.copy is not None, self.root / _COPY
        self.copy.mkdir(mode=0o700, exist_ok=True)
        self.notices += unpack(fd, str(self.copy))
        self.on_demand = FilesOnDemand(self.root / "on-demand", self._cache, self._say)
        self.on_demand.expect(
            self.copy,
            {entry.path: entry.state for entry, _ in entries(fd) if entry.bare and entry.state},
        )
        self.since_ns = clock_of(str(self.copy))
        if there:
            return
        sync.make_places(str(self.copy), self.path)
        try:
            Path(self.path).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            self.notices.append(
                f"absolute paths of the project do not hold on {self._vm}: {self.path} may not be"
                f" made there ({error.strerror}); relative paths do"
            )
            self.path = str(self.copy)
        else:
            self.replica = str(self.copy)

    def close(self) -> None:
        """Release parts that have been received; may be called twice."""
        if self._packed is not None:
            self._packed.close()


def _sees_disk(order: StartJob) -> bool:
    """Return whether this VM shares the notebook's disk, proved by a file that has the job's token.

    Names, sizes and times of files would prove nothing: a VM may have a copy of that disk.
    """
    with contextlib.suppress(OSError):
        return bool(order.token) and Path(order.token_path).read_bytes() == order.token
    return False


# ---------------------------------------------------------------- what is sent back

_EVERY_SECONDS = 30.0
"""The interval at which changes in the project are sent while the cell runs."""
_PACKED_AT_ONCE = 64


def output_of(rank: int, folder: Path, ended: Callable[[], bool]) -> Iterator[Chunk | None]:
    """Yield what a rank writes into its folder: raw output before the events that refer to it.

    The iterator ends with a last look, which begins after ``ended`` returns that nothing more will
    be written.
    """
    files = dict.fromkeys((STDOUT, STDERR, EVENTS, COLLECTED), 0)
    last = False
    while not last:
        last, events = ended(), size_of(folder / EVENTS)
        for name, sent in files.items():
            size = events if name == EVENTS else size_of(folder / name)
            for offset, data in _read(folder / name, sent, size):
                yield Chunk(of="output", rank=rank, file=name, offset=offset, data=data)
                files[name] = offset + len(data)
        # otherwise it is over, and nothing might wake up this process for another step
        if not last:
            yield None


def log_of(log: Path, ended: Callable[[], bool]) -> Iterator[Chunk | None]:
    """Yield what a data process prints, in whole lines, as several processes share a file."""
    sent, last = 0, False
    while not last:
        last = ended()
        for offset, piece in _read(log, sent, size_of(log)):
            data = piece if last or len(piece) == CHUNK else piece[: piece.rfind(b"\n") + 1]
            if data:
                yield Chunk(of="output", offset=offset, data=data)
                sent = offset + len(data)
        if not last:
            yield None


def _read(path: Path, offset: int, size: int) -> Iterator[tuple[int, bytes]]:
    """Yield the chunks of a file up to a size, each with its offset."""
    if offset < size:
        with path.open("rb", buffering=0) as file:
            while offset < size and (
                data := os.pread(file.fileno(), min(CHUNK, size - offset), offset)
            ):
                yield offset, data
                offset += len(data)


class ProjectChanges:
    """What ranks change in their VM's copy of the project and in ``--shared``, as archives.

    ``home`` is the path of the project on the notebook's machine. ``ended`` returns whether all
    ranks have ended.
    """

    def __init__(
        self,
        home: str,
        order: RankOrder,
        staged: Staged,
        arrival: ProjectArrival,
        ended: Callable[[], bool],
    ) -> None:
        self._order, self._scratch = order, staged.scratch
        self._arrival, self._ended = arrival, ended
        shared = shared_places(home, order.cell.spec.shared)
        own = order.first_rank == 0
        sends = arrival.copy is not None and (own or shared)
        self._project = Changes(str(arrival.copy), only(() if own else shared)) if sends else None
        self._next_look = monotonic() + _EVERY_SECONDS

    def chunks(self) -> Iterator[Chunk | None]:
        """Look for changes at intervals, and once when the ranks have ended."""
        while not self._ended():
            if self._project is not None and monotonic() >= self._next_look:
                yield from self._archive("changes", self._project, last=False)
                self._next_look = monotonic() + _EVERY_SECONDS
            yield None
        if self._project is not None:
            yield from self._archive("changes", self._project, last=True)
        # Files that ranks other than 0 wrote are sorted on the notebook's machine.
        numbers = range(
            max(1, self._order.first_rank), self._order.first_rank + self._order.local_world_size
        )
        places = [f"{scratch_of(Path(), rank)}/tree" for rank in numbers]
        if places:
            writes = Changes(str(self._scratch), only(places), afresh=True)
            yield from self._archive("writes", writes, last=True)

    def _archive(
        self, of: Literal["changes", "writes"], changes: Changes, *, last: bool
    ) -> Iterator[Chunk | None]:
        """Pack and send changes; if there is no space for that, they are left to the next look."""
        try:
            if self._arrival.on_demand is not None and of == "changes":
                changes.know(self._arrival.on_demand.came)
            with tempfile.TemporaryFile(dir=self._scratch) as archive:
                for step, _ in enumerate(changes.pack(archive.fileno(), last=last)):
                    if step % _PACKED_AT_ONCE == 0:
                        yield None
                if size := os.fstat(archive.fileno()).st_size:
                    memory = Memory(os.getpid(), archive.fileno(), size)
                    yield from chunks_of(of, memory, self._order.first_rank)
            lost = [(path, "it was still being written") for path in changes.unsent]
        except OSError as error:
            why = f"{error.strerror} ({self._scratch} there). See to that, and run the cell again"
            lost = [("what ranks wrote in the project", why)]
        if last:
            vm = self._order.vm
            self._arrival.notices += [
                f"{what} did not come back from VM {vm}: {why}" for what, why in lost
            ]
