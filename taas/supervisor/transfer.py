"""The data that are transferred between hosts in one start of a run, for all its jobs.

Payloads and the project are sent to the jobs; results, output and changed files are received.

A job on this host needs no transfer: it opens the memory directly, and writes to the run's folder
and to the project.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import tempfile
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from taas.base.poll_loop import WorkThread
from taas.base.wording import shown_path, size_in_words
from taas.header.options import RunSpec
from taas.project.sync import archive
from taas.project.sync.applier import Applier, unpack
from taas.project.sync.archive import FileState, shared_places
from taas.project.wall.table import TREE
from taas.protocol.agents import JobRequest, OfJob, StartJob
from taas.protocol.chunks import Chunk, Incoming, Sender, Taken, chunks_of, chunks_of_file
from taas.protocol.framing import Memory, Unreadable
from taas.rank_storage import scratch_of
from taas.runs.events import COLLECTED, FILES
from taas.supervisor.vms import Vm

_NAMED = 3


class Transfer:
    """The data of one start of a run that are transferred between hosts.

    ``worker`` writes received data and packs outgoing data. If this fails, ``failed`` is called
    with the number of the job and the reason.
    """

    def __init__(
        self,
        run: str,
        spec: RunSpec,
        output: Path,
        project_sync: ProjectSync,
        worker: WorkThread,
        failed: Callable[[int, str], None],
    ) -> None:
        self._run, self._spec, self._output, self._project_sync = run, spec, output, project_sync
        self.worker, self._failed = worker, failed
        self._senders: dict[int, Sender] = {}
        self._answer: Incoming | None = None
        self._answering = -1
        self._lost_bytes, self._why_lost = 0, "the disk is full"

    def start(self, vm: Vm, order: StartJob) -> None:
        """Start a job; if it is on another host, its payload follows."""
        if not vm.remote:
            vm.send(order)
            return
        path, token = self._project_sync.token()
        payload = order.payload.from_elsewhere()
        vm.send(msgspec.structs.replace(order, payload=payload, token_path=path, token=token))
        sender = self._senders[order.job] = Sender(
            lambda said: vm.send(OfJob(run=self._run, job=order.job, said=said))
        )
        sender.add(chunks_of("payload", order.payload))
        sender.step()

    def lose(self, job: int) -> None:
        """Stop sending to a job, and expect nothing more from it."""
        self._senders.pop(job, None)
        if job == self._answering:
            self._answering = -1

    def expect(self, job: int, answer: Memory) -> None:
        """Expect rank 0's variables from a job.

        Raises:
            OSError: no file descriptor is left for them.
        """
        self._answer, self._answering = Incoming(answer), job

    @property
    def answer(self) -> Memory | None:
        """Rank 0's variables, once they are complete here; otherwise None."""
        return self._answer.memory if self._answer is not None and self._answer.complete else None

    def hear(self, job: int, said: Chunk | Taken | JobRequest) -> None:
        """Handle data that the agent of a job sends, acknowledges or requests."""
        match said:
            case _ if job not in self._senders:
                return  # the job was lost, or is on this host
            case JobRequest(what="file"):
                opened = partial(self._project_sync.open_file, said.path)
                self.worker.do(
                    opened, lambda fd: self._send(job, chunks_of_file(said.path, fd.result()))
                )
            case JobRequest(what="has"):
                self.worker.do(partial(self._project_sync.travelled, job, said.path))
            case JobRequest():
                self.worker.do(self._project_sync.packed, partial(self._go_on, job, said))
            case Taken():
                self._senders[job].taken(said.nbytes)
                self._step(job)
            case Chunk():
                self.worker.do(partial(self._take, job, said), partial(self._go_on, job, said))

    def _take(self, job: int, chunk: Chunk) -> None:
        """Write a received chunk, in the worker thread."""
        match chunk.of:
            case "answer" if self._answer is not None and job == self._answering:
                self._answer.take(chunk)
            case "output":
                self._write(job, chunk)
            case "changes" | "writes" if job < self._spec.vms:
                self._project_sync.take(job, chunk)

    def _go_on(self, job: int, said: Chunk | JobRequest, done: Future[Any]) -> None:
        """Continue with an agent after data were written or packed for it, or this has failed."""
        try:
            result = done.result()
        except (OSError, Unreadable) as error:
            of_answer = isinstance(said, Chunk) and said.of == "answer"
            what = (
                "names that the run made could not be taken"
                if of_answer
                else "project could not travel"
            )
            self._failed(job, f"the {what}: {error}")
        else:
            if isinstance(said, JobRequest):
                self._send(job, chunks_of("project", result))
        # acknowledge even a chunk that could not be kept: otherwise the run would wait for the
        # agent
        if isinstance(said, Chunk) and job in self._senders:
            self._senders[job].acknowledge(said)

    def _send(self, job: int, chunks: Iterator[Chunk]) -> None:
        if job in self._senders:
            self._senders[job].add(chunks)
            self._step(job)

    def _step(self, job: int) -> None:
        try:
            self._senders[job].step()
        except OSError as error:
            self._failed(job, f"the project could not travel: {error}")

    def _write(self, job: int, chunk: Chunk) -> None:
        """Write a job's output to the corresponding file on this host.

        If the disk is full, output is lost, as it would be in a rank.
        """
        if job >= self._spec.vms:  # the data processes of all VMs share one file
            path, flags = self._output / "data.log", os.O_APPEND
        elif chunk.file in (*FILES, COLLECTED):
            path, flags = self._output / str(chunk.rank) / chunk.file, 0
        else:
            return
        self._lost_bytes += len(chunk.data)
        try:
            if not chunk.offset:
                path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | flags, 0o600)
            try:
                # with O_APPEND the data are appended, whatever the offset (pwrite(2), BUGS)
                self._lost_bytes -= os.pwrite(fd, chunk.data, chunk.offset)
            finally:
                os.close(fd)
        except OSError as error:  # reported when the run ends
            self._why_lost = str(error.strerror)

    @property
    def notices(self) -> list[str]:
        """Lines for the user."""
        lost = f"{self._lost_bytes:,} bytes of the run's output could not be kept in {self._output}"
        return [f"{lost}: {self._why_lost}"] if self._lost_bytes else []

    def close(self) -> None:
        """Release the memory that this transfer holds."""
        self._senders.clear()
        if self._answer is not None:
            self._answer.close()
            self._answer = None


class ProjectSync:
    """The project's files that are sent to the VMs of one run, and those received from them.

    ``scratch`` is the folder of the run for files that ranks other than 0 write instead of writing
    to the project. ``known`` are the files that an earlier run has left on its VMs, if their ranks
    were kept.
    """

    def __init__(
        self,
        run: str,
        project: str,
        scratch: Path,
        spec: RunSpec,
        known: Mapping[bytes, FileState] | None = None,
    ) -> None:
        self._known = known or {}
        self._run, self._project, self._scratch = run, project, scratch
        self._width = spec.ranks_per_vm
        self._shared = shared_places(project, spec.shared)
        self._token: Any = None
        self._archive: archive.Archive | None = None
        self._applier: Applier | None = None
        self._coming: dict[tuple[int, str], Incoming] = {}
        self._along: set[bytes] = set()
        self._aside = scratch_of(scratch, 0) / TREE
        self._said: list[str] = []

    @property
    def known(self) -> Mapping[bytes, FileState]:
        """The project's files on at least one of the VMs, each with its state on this host."""
        return self._known if self._applier is None else self._applier.known

    @property
    def written(self) -> set[bytes]:
        """The files that the run wrote in the project; a new start continues from them."""
        return self._along if self._applier is None else self._along | self._applier.written

    def follow(self, earlier: ProjectSync) -> None:
        """Take over from an earlier start of the same run.

        Files that the earlier start wrote are sent whatever their size. Files that it could not
        apply to the project here are set aside in the same folder again.
        """
        self._along, self._aside = earlier.written, earlier._aside

    def token(self) -> tuple[str, bytes]:
        """Return the path of a file with random content, and that content.

        A VM on which the file has this content shares the project's disk. If the project is not
        writable, the path is empty, and all VMs count as not sharing the disk.
        """
        if self._token is None:
            self._content = secrets.token_bytes(32)
            with contextlib.suppress(OSError):
                self._token = tempfile.NamedTemporaryFile(  # noqa: SIM115  closed by `all_started`
                    dir=self._project, prefix=".taas-disk-"
                )
                self._token.write(self._content)
                self._token.flush()
                os.fsync(self._token.fileno())
        return ("" if self._token is None else self._token.name), self._content

    def all_started(self) -> None:
        """Remove the file of :meth:`token`, since no VM looks for it any more."""
        if self._token is not None:
            with contextlib.suppress(OSError):  # the file was removed by someone else
                self._token.close()

    def packed(self) -> Memory:
        """Return the packed project, for a VM that does not share its disk.

        Raises:
            OSError: the project cannot be packed.
        """
        if self._archive is None:
            packed = self._archive = archive.pack(
                self._project, always=self._along, known=self._known
            )
            self._applier = Applier(
                self._project, packed.found, packed.stayed, self._run, self._aside
            )
        return Memory(os.getpid(), self._archive.fd, os.fstat(self._archive.fd).st_size)

    def open_file(self, name: str) -> int:
        """Open a file of the project that a job requests; return its descriptor.

        The descriptor is negative if the file is gone, or has changed since the project was packed.
        """
        path, packed = os.fsencode(name), self._archive
        try:
            flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            fd = os.open(Path(self._project, name), flags)
        except OSError:
            return -1
        stands = FileState.of(os.fstat(fd))
        if packed is not None and stands in (packed.stayed.get(path), packed.found.get(path)):
            return fd
        os.close(fd)
        return -1

    def travelled(self, job: int, name: str) -> None:
        """Note that a file was sent to a job's VM, so that rank 0's version counts as a change."""
        path, packed = os.fsencode(name), self._archive
        if packed is not None and self._applier is not None and job == 0 and path in packed.stayed:
            packed.found[path] = self._applier.expected[path] = packed.stayed.pop(path)

    def take(self, vm: int, chunk: Chunk) -> None:
        """Process a part of a VM's changes, and apply the changes once all parts have come.

        ``changes`` are changes in the project itself, made on rank 0's VM or, in a ``--shared``
        directory, by ranks on any VM. ``writes`` are the files in the scratch folders of a VM's
        ranks. Changes for which there is no space are reported in :attr:`notices`.

        Raises:
            Unreadable: the data are not an archive.
        """
        key, place = (vm, chunk.of), str(self._scratch)
        try:
            if not chunk.offset:
                self._give_up(key)
                self._coming[key] = Incoming(Memory(0, 0, chunk.size), self._scratch)
            elif key not in self._coming:
                return  # the rest of an archive that was given up
            coming = self._coming[key]
            coming.take(chunk)
            if not coming.complete:
                return
            if chunk.of == "writes":
                self._said += unpack(
                    coming.fd, str(self._scratch), lambda entry: self._is_of(vm, entry)
                )
            elif self._applier is not None:
                place = self._project
                self._applier.take(coming.fd, lambda entry: vm == 0 or self._is_shared(entry))
        except OSError as error:
            self._said.append(
                f"what ranks of VM {vm} wrote in the project did not all come back:"
                f" {error.strerror or error} ({place}). See to that, and run the cell again"
            )
        self._give_up(key)

    def _give_up(self, key: tuple[int, str]) -> None:
        if (coming := self._coming.pop(key, None)) is not None:
            coming.close()

    def _is_of(self, vm: int, entry: archive.ArchiveEntry) -> bool:
        ranks = range(max(1, vm * self._width), (vm + 1) * self._width)
        places = [str(scratch_of(Path(), rank)) for rank in ranks]
        return archive.is_in(places, entry.path, directory=False)

    def _is_shared(self, entry: archive.ArchiveEntry) -> bool:
        directory = entry.state is not None and entry.state.kind == "directory"
        return archive.is_in(self._shared, entry.path, directory=directory)

    def notices(self, *, well: bool) -> list[str]:
        """Return lines for the user; ``well`` is whether the run went well."""
        said, packed, applier = [*dict.fromkeys(self._said)], self._archive, self._applier
        if packed is None or applier is None:
            return said
        made_anew = packed.stayed.keys() & applier.expected.keys()
        missed = (made_anew or not well) and (packed.stayed or not packed.whole)
        return [*applier.notices, *said, *([_left_out(packed)] if missed else [])]

    def close(self) -> None:
        """Release the files and memory that this object holds."""
        self.all_started()
        for key in list(self._coming):
            self._give_up(key)
        if self._archive is not None:
            os.close(self._archive.fd)
            self._archive = None


def _left_out(packed: archive.Archive) -> str:
    largest = sorted(packed.stayed.items(), key=lambda item: -item[1].size)
    named = [f"{shown_path(path)} ({size_in_words(seen.size)})" for path, seen in largest[:_NAMED]]
    if more := len(largest) - len(named):
        named.append(f"{more} more")
    if not packed.whole:
        named.append(f"all beyond the first {archive.ENTRIES:,} files")
    return (
        f"not on the VMs, which do not see this disk: {', '.join(named)}. Of what is larger than"
        f" {size_in_words(archive.LARGE)} only modules travel ahead; other files come when Python"
        " opens them, not when C code does, or lists a directory. Put data on a disk that the VMs"
        " see, or let the cell download it"
    )
