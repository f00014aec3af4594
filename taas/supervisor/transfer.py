"""What crosses hosts in one start of a run, for all its jobs: payloads and the project to them, and what they make from them.

A job on this host needs none of it: it opens the memory, and writes to the run's folder and to the project.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from taas.header.grammar import RunSpec
from taas.project_sync import archive
from taas.project_sync.applier import Applier
from taas.project_sync.tree import FileState, Token, decode_all, is_in, shared_places
from taas.rank_storage import scratch_of
from taas.runs.events import FILES
from taas.supervisor.vms import Vm
from taas.wire.agents import JobRequest, OfJob, StartJob
from taas.wire.framing import Memory
from taas.wire.poll_loop import WorkThread
from taas.wire.transfer import Chunk, Incoming, Sender, Taken, chunks_of
from taas.wording import size_in_words

_NAMED = 3


class Transfer:
    """The bytes of one start of a run that cross hosts.

    Args:
        run: its name.
        spec: what was asked for.
        output: where this start's ranks write (``runs.records.output_folder``).
        project_sync: the run's project.
        worker: writes down what comes, and packs what goes.
        failed: is told the job for which that could not be done, and why.
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

    # ------------------------------------------------------------ there

    def start(self, vm: Vm, order: StartJob) -> None:
        """Start a job; on another host, its payload follows."""
        if not vm.remote:
            vm.send(order)
            return
        token = self._project_sync.token()
        vm.send(
            msgspec.structs.replace(
                order,
                payload=order.payload.from_elsewhere(),
                token_path=token.path or "",
                token=token.content,
            )
        )
        sender = self._senders[order.job] = Sender(
            lambda said: vm.send(OfJob(run=self._run, job=order.job, said=said))
        )
        sender.add(chunks_of("payload", order.payload))
        sender.step()

    def lose(self, job: int) -> None:
        """Send nothing more to a job, and expect nothing of it."""
        self._senders.pop(job, None)
        if job == self._answering:
            self._answering = -1

    # ------------------------------------------------------------ and back

    def expect(self, job: int, answer: Memory) -> None:
        """Rank 0's answer will come from a job.

        Raises:
            OSError: there is no descriptor for it.
        """
        self._answer, self._answering = Incoming(answer), job

    @property
    def answer(self) -> Memory | None:
        """Rank 0's names, once they are here."""
        return self._answer.memory if self._answer is not None and self._answer.complete else None

    def hear(self, job: int, said: Chunk | Taken | JobRequest) -> None:
        """Take in what the agent of a job brings, has taken or asks for."""
        match said:
            case _ if job not in self._senders:
                return  # lost meanwhile, or on this host
            case JobRequest():
                self.worker.do(self._project_sync.packed, partial(self._go_on, job, said))
            case Taken():
                self._senders[job].taken(said.nbytes)
                self._step(job)
            case Chunk():
                self.worker.do(partial(self._take, job, said), partial(self._go_on, job, said))

    def _take(self, job: int, chunk: Chunk) -> None:
        """Write a chunk down; the worker's."""
        match chunk.of:
            case "answer" if self._answer is not None and job == self._answering:
                self._answer.take(chunk)
            case "output":
                self._write(job, chunk)
            case "change" if job < self._spec.vms:
                self._project_sync.apply(job, chunk.rank, chunk.data)

    def _go_on(self, job: int, said: Chunk | JobRequest, done: Future[Any]) -> None:
        """Something was written down, or packed, or could not be: let the agent send more, or send it more."""
        try:
            result = done.result()
        except (OSError, msgspec.DecodeError) as error:
            of_answer = isinstance(said, Chunk) and said.of == "answer"
            what = "names that the run made could not be taken" if of_answer else "project could not travel"
            self._failed(job, f"the {what}: {error}")
        else:
            if isinstance(said, JobRequest) and job in self._senders:
                self._senders[job].add(chunks_of("project", result))
                self._step(job)
        if (
            isinstance(said, Chunk) and job in self._senders
        ):  # also where it was not kept: the run's end waits for the agent
            self._senders[job].acknowledge(said)

    def _step(self, job: int) -> None:
        try:
            self._senders[job].step()
        except OSError as error:
            self._failed(job, f"the project could not travel: {error}")

    def _write(self, job: int, chunk: Chunk) -> None:
        """Write what a job wrote to the same place here; a full disk loses output, as it does in a rank."""
        if job >= self._spec.vms:  # data processes of all VMs have one file
            path, flags = self._output / "data.log", os.O_APPEND
        elif chunk.file in FILES:
            path, flags = self._output / str(chunk.rank) / chunk.file, 0
        else:
            return
        self._lost_bytes += len(chunk.data)
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | flags, 0o600)
            try:
                self._lost_bytes -= (
                    os.write(fd, chunk.data) if flags else os.pwrite(fd, chunk.data, chunk.offset)
                )
            finally:
                os.close(fd)
        except OSError as error:  # said when the run ends
            self._why_lost = str(error.strerror)

    @property
    def notices(self) -> list[str]:
        """Lines for the user."""
        if not self._lost_bytes:
            return []
        return [
            f"{self._lost_bytes:,} bytes of the run's output could not be kept in {self._output}: {self._why_lost}"
        ]

    def close(self) -> None:
        """Give back the memory it holds."""
        self._senders.clear()
        if self._answer is not None:
            self._answer.close()
            self._answer = None


class ProjectSync:
    """What goes to the VMs of one run, and what comes back.

    Args:
        run: its name.
        project: the notebook's directory.
        scratch: the run's folder for what ranks other than 0 write in the project's place.
        spec: what was asked for.
        known: what an earlier run has left on its VMs, where their ranks were kept for this one.
    """

    def __init__(
        self,
        run: str,
        project: str,
        scratch: Path,
        spec: RunSpec,
        known: Mapping[bytes, FileState] | None = None,
    ) -> None:
        self._known = dict(known or {})
        self._run, self._project, self._scratch, self._width = run, project, scratch, spec.ranks_per_vm
        self._shared = shared_places(project, spec.shared)
        self._token: Token | None = None
        self._archive: archive.Archive | None = None
        self._appliers: dict[int, Applier] = {}
        """By rank: of the project for rank 0, for others of their scratch."""
        self._along: frozenset[bytes] = frozenset()

    @property
    def known(self) -> dict[bytes, FileState]:
        """What the VMs have, each file as it stands here."""
        if 0 not in self._appliers:
            return self._known
        return {path: seen for path, seen in self._appliers[0].expected.items() if seen is not None}

    @property
    def written(self) -> frozenset[bytes]:
        """Files of the project that the run wrote: when it starts again, it goes on from them."""
        return self._along | self._appliers[0].written if 0 in self._appliers else self._along

    def take_along(self, written: frozenset[bytes]) -> None:
        """Let these files travel whatever their size."""
        self._along = written

    def token(self) -> Token:
        """Return what a VM is told, to find out whether it sees the project's disk."""
        if self._token is None:
            self._token = Token(self._project)
        return self._token

    def all_started(self) -> None:
        """No VM looks for the disk any more."""
        if self._token is not None:
            self._token.remove()

    def packed(self) -> Memory:
        """Return the packed project, for a VM that does not see it.

        Raises:
            OSError: it cannot be packed.
        """
        if self._archive is None:
            self._archive = archive.pack(self._project, always=self._along, known=self._known)
            self._known = self._archive.found
        return Memory(os.getpid(), self._archive.fd, self._archive.nbytes)

    def apply(self, vm: int, rank: int, change: bytes) -> None:
        """Put a change that a VM brings into its place.

        Args:
            vm: the VM, by its number.
            rank: 0: it is a change of the project, which rank 0's VM makes, or of a ``--shared`` directory in it, where
                ranks of all VMs write; else of what this rank has in its scratch.
            change: encoded.

        Raises:
            OSError: it cannot be written at all.
        """
        if rank and rank // self._width != vm:
            return  # this VM may not say such a thing
        if rank not in self._appliers:
            self._appliers[rank] = self._applier(rank)
        for decoded in decode_all(change):
            if rank or vm == 0 or is_in(self._shared, decoded):
                self._appliers[rank].take(decoded, vm)

    def _applier(self, rank: int) -> Applier:
        if rank == 0:
            found, stayed = ({}, ()) if self._archive is None else (self._archive.found, self._archive.stayed)
            return Applier(self._project, found, self._run, stayed)
        folder = scratch_of(self._scratch, rank)
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        return Applier(str(folder), {}, self._run)

    def lose(self, vm: int) -> None:
        """A VM is gone: what it was sending does not count."""
        for applier in self._appliers.values():
            applier.lose(vm)

    def notices(self, *, well: bool) -> list[str]:
        """Lines for the user.

        Args:
            well: the run succeeded.
        """
        said = [notice for _, applier in sorted(self._appliers.items()) for notice in applier.notices]
        missed = not well or (0 in self._appliers and self._appliers[0].replaced)
        if missed and self._archive is not None and (self._archive.left_out or not self._archive.whole):
            said.append(_left_out(self._archive))
        return said

    def close(self) -> None:
        """Give back what it holds."""
        self.all_started()
        for applier in self._appliers.values():
            applier.close()
        if self._archive is not None:
            os.close(self._archive.fd)
            self._archive = None


def _left_out(packed: archive.Archive) -> str:
    """What did not travel: a run that failed, or made it anew, may have missed it."""
    named = [f"{path} ({size_in_words(size)})" for path, size in [*packed.left_out.items()][:_NAMED]]
    more = len(packed.left_out) - len(named)
    if more:
        named.append(f"{more} more")
    if not packed.whole:
        named.append(f"all beyond the first {archive.ENTRIES:,} files")
    return (
        f"not on the VMs, which do not see this disk: {', '.join(named)}. Modules travel, and other files up to "
        f"{size_in_words(archive.LARGE)}; put data on a disk that the VMs see, or let the cell download it"
    )
