"""The ranks of one run on one VM as a job, which also holds rank 0's variables until received.

The end of a rank is derived from its process's sentinel and from the last message of the rank.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from functools import partial
from pathlib import Path

import msgspec

from taas.agent.job import Job, JobsAgent
from taas.agent.looks import Look, RankUsage, last_words
from taas.agent.processes import ForkedProcess, MadeAhead, RankProcess, bury_orphans
from taas.agent.rank_endings import Ending, Rank
from taas.agent.staging import ProjectArrival, ProjectChanges, output_of
from taas.agent.torchrun import RunStore, rank_environ
from taas.protocol import deadlines
from taas.protocol.agents import How, LookAtRanks, RanksSeen, RanksUse, StartJob
from taas.protocol.chunks import chunks_of
from taas.protocol.framing import Memory, Message, StoreAddress, pack
from taas.protocol.ranks import (
    Answer,
    Asking,
    GetReady,
    Preparation,
    RankEnded,
    RankImported,
    RankKept,
    RankOrder,
    RankRequest,
    RankStage,
    RankStart,
    Staged,
    preparation_of,
)

logger = logging.getLogger(__name__)


def _expected(start: RankStart, modules: tuple[str, ...], scratch: str) -> GetReady:
    """Return the message that turns a spare into a rank like the last one, with another scratch."""
    staged = msgspec.structs.replace(start.staged, scratch=str(Path(scratch) / "ahead"))
    expected = msgspec.structs.replace(start, staged=staged, environ=start.lasting_environ)
    return GetReady(start=expected, modules=modules)


class RankJob(Job):
    """All ranks of a run on this VM; ``stays`` is whether they were kept for the next run."""

    def __init__(self, order: StartJob, agent: JobsAgent) -> None:
        super().__init__(order, agent)
        assert isinstance(order.work, RankOrder)
        self._work = order.work
        self.ranks: list[Rank] = []
        self._starts: list[RankStart] = []
        self.preparation: Preparation | None = None
        self.stays = False
        self._store: RunStore | None = None
        self._look: Look | None = None
        self._folder = Path()
        self._environ: dict[str, str] = {}
        self._answer = -1
        self._stood: Memory | None = None
        self._ending = Ending(order.work)
        each, gpus = order.work.cell.spec.gpus_per_rank, order.work.gpus
        self._usage = RankUsage([gpus[at * each : (at + 1) * each] for at in range(self.size)])

    @property
    def size(self) -> int:
        """The number of ranks."""
        return self._work.local_world_size

    # ------------------------------------------------------------ beginning

    def _before(self) -> ProjectArrival | None:
        return self._agent.kept.project if self._work.continues else None

    def _fork(self, staged: Staged) -> None:
        assert self._staging is not None
        work, agent = self._work, self._agent
        if work.continues and not agent.kept.there:
            self.fail(f"those of {self._order.name} had ended before")
            return
        self._folder, self._environ = Path(staged.output), staged.environ
        numbers = range(work.first_rank, work.first_rank + self.size)
        folders = {number: self._folder / str(number) for number in numbers}
        for folder in folders.values():
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        if agent.config.remote:
            changes = ProjectChanges(
                self._order.workspace.project,
                work,
                staged,
                self._staging.project,
                lambda: self.ended,
            )
            self.sender.add(changes.chunks())
            for number, folder in folders.items():
                self.sender.add(output_of(number, folder, lambda: self.ended))
        self._work = work = msgspec.structs.replace(work, store=self._open_store())
        self.preparation = preparation_of(work, staged)
        spares, kept = agent.spares, agent.kept
        processes = kept.take() if work.continues else spares.take(self.preparation, self.size)
        for local, process in enumerate(processes):
            environ = rank_environ(work, staged, local)
            start = RankStart(order=work, staged=staged, local_rank=local, environ=environ)
            rank = Rank(numbers[local], process)
            self.ranks.append(rank)
            self._starts.append(start)
            self._begin(rank, start)
        self._replace_unfit()

    def _begin(self, rank: Rank, start: RankStart) -> None:
        """Send a process the message that makes it a rank."""
        self.processes.append(rank.process)
        self._agent.on(rank.process.source, partial(self._hear_rank, rank))
        rank.process.tell(pack(start), start.staged.payload.fd)

    def _replace_unfit(self) -> None:
        """Fork a substitute for each process that was made a rank in advance and rejects its job.

        This waits for the replies. Nothing is lost by that, since all processes have got their
        start message, and a message that ends this job meanwhile is handled right afterwards, when
        the ranks are in an ordinary state.
        """
        until = time.monotonic() + deadlines.TAKES_ORDER
        for rank, start in zip(self.ranks, self._starts, strict=True):
            process, source = rank.process, rank.process.source
            if process.ahead is MadeAhead.NOT:
                continue
            if process.takes_order(until):
                # messages that were read here will not make the descriptor readable again
                self._hear_rank(rank)
                continue
            logger.info("process %d does not take its order: another one is forked", process.pid)
            self._agent.off(source)
            self.processes.remove(process)
            process.kill_tree()
            process.disconnect()
            assert self.preparation is not None
            rank.process = RankProcess(self.preparation)
            self._begin(rank, start)

    @property
    def expected_next(self) -> dict[int, GetReady]:
        """The messages for spares to prepare for a next run like this one, by local rank.

        It is empty unless this run ended well. It is also empty on other hosts, where the project
        is a copy that is unpacked for each run, and for runs with data processes, which have their
        own folder in each run: nothing can be prepared there.
        """
        work, config = self._work, self._agent.config
        well = self._how is None and all(
            rank.ended is not None and rank.ended.outcome == "done" for rank in self.ranks
        )
        usual = work.delivery is None and work.restart_count == 0 and not work.continues
        if config.remote or not well or not usual:
            return {}
        found = {}
        for rank, start in zip(self.ranks, self._starts, strict=True):
            if rank.imported and start.staged.at_import.path:
                found[start.local_rank] = _expected(start, rank.imported, config.scratch)
        return found

    def _open_store(self) -> StoreAddress:
        wanted = self._work.store
        if wanted.port:
            return wanted
        self._store = RunStore(
            wanted, self._work.cell.spec.world_size, Path(self._agent.config.scratch)
        )
        self._say(self._store.address)
        return self._store.address

    # -------------------------------------------------- messages from the supervisor and the ranks

    def hear(self, message: Message) -> None:
        """Handle a message of the supervisor."""
        match message:
            case LookAtRanks():
                bury_orphans((self._agent.forkserver.pid,))  # a long run may have many
                processes = {rank.number: rank.process for rank in self.ranks}
                # replaces a look under way
                self._look = Look(processes, self._folder, message)
                self._step_look()
            case Answer():
                for rank in self.ranks:
                    if rank.number == message.rank:
                        rank.tell(message)
            case _:
                super().hear(message)

    def _hear_rank(self, rank: Rank) -> None:
        source = rank.process.source
        for said in rank.process.hear():
            match said:
                case RankEnded(outcome="stood", answer=Memory() as answer):
                    with contextlib.suppress(OSError):  # the rank is gone, which its sentinel shows
                        self._answer, self._stood = answer.open(), answer
                case RankEnded():
                    self._rank_ended(rank, said)
                case RankStage(stage="begun") | Asking():
                    rank.started = True
                    self._say(said)
                case RankStage(stage="at work"):
                    logger.info("rank %d is at work", rank.number)
                    rank.at_work = True
                case RankStage(stage="packing"):
                    logger.info("rank %d packs its names", rank.number)
                    rank.packing = True
                case RankStage(stage="wrote"):
                    rank.process.writes_collective = False
                case RankKept():
                    rank.kept = said
                case RankImported():
                    rank.imported = said.modules
        if rank.process.source < 0:
            self._agent.off(source)

    def _rank_ended(self, rank: Rank, said: RankEnded) -> None:
        if said.answer is not None:
            try:
                said = msgspec.structs.replace(said, answer=self._hold_answer(said.answer))
            except (FileNotFoundError, ProcessLookupError):
                return  # the rank was killed, and its variables are lost; its sentinel shows this
            except OSError as error:
                said = msgspec.structs.replace(said, answer=None)
                self.fail(f"the names that the run made could not be taken: {error}")
        rank.ended, rank.ended_at = said, time.monotonic()
        # a rank that was to be kept, but had to pack its variables early, is stuck: it is not kept
        if not self._work.cell.spec.keep or rank.packing:
            rank.leave()
        elif said.answer is not None:
            rank.tell(RankRequest(what="taken"))
        self._say(said)

    def _hold_answer(self, answer: Memory) -> Memory:
        """Open rank 0's result here, so that the rank may exit; return it for the supervisor."""
        if answer is not self._stood:
            if self._answer >= 0:
                os.close(self._answer)
            self._answer = answer.open()
        held = Memory(os.getpid(), self._answer, answer.nbytes)
        if not self._agent.config.remote:
            return held
        self.sender.add(chunks_of("answer", held))
        return held.from_elsewhere()

    def _step_look(self) -> None:
        if self._look is not None and (seen := self._look.result()) is not None:
            self._say(RanksSeen(look=self._look.number, ranks=seen))
            self._look = None

    # ------------------------------------------------------------ how ranks end, or are kept

    @property
    def ended(self) -> bool:
        """Whether none of its processes is at work: all are gone, or all are kept."""
        return super().ended or (bool(self.ranks) and all(rank.kept for rank in self.ranks))

    def _keep(self) -> tuple[RankKept, ...]:
        staying = {
            rank.number: rank.process for rank in self.ranks if rank.kept and not rank.process.gone
        }
        if len(staying) < self.size or self._how is not None:
            return ()
        for process in staying.values():
            self._agent.off(process.sentinel)
            self._agent.off(process.source)
        assert self._staging is not None
        self.stays = True
        self._agent.kept.keep(staying, self._store, self._staging.leave_to_ranks())
        self._store = None
        kept = tuple(rank.kept for rank in self.ranks if rank.kept)
        self.processes, self.ranks = [], []
        return kept

    def _dismiss(self) -> None:
        """Let the ranks exit that would have been kept, if another rank cannot be kept."""
        if self._how is not None or any(rank.process.gone for rank in self.ranks):
            for rank in self.ranks:
                if rank.kept:
                    rank.leave()

    def _end_processes(self, how: How, *, names: bool) -> None:
        self._ending.begin(how, names=names)

    def _process_gone(self, process: ForkedProcess) -> None:
        rank = next(rank for rank in self.ranks if rank.process is process)
        self._hear_rank(rank)
        self._agent.off(rank.process.source)
        rank.process.disconnect()
        outlived = self._agent.forkserver.outlived(untold=process.untold) and not process.untold
        if rank.ended is None:
            ended = rank.post_mortem(forkserver_outlived=outlived)
            if ended.outcome == "died":
                cell, folder = self._work.cell, self._folder / str(rank.number)
                where = last_words(folder, cell.text, cell.execution_count)
                ended = msgspec.structs.replace(ended, message=ended.message + where)
            if rank.number == 0 and self._stood is not None:
                ended = msgspec.structs.replace(ended, answer=self._hold_answer(self._stood))
            rank.ended = ended
            self._say(ended)

    def step(self) -> None:
        """Do what is due."""
        self._ending.step([rank for rank in self.ranks if not rank.process.gone])
        self._dismiss()
        due = self.ranks and not self.over and (self.ended or self._usage.due)
        if due and (used := self._usage.look(self.ranks, self._environ)):
            self._say(RanksUse(ranks=used))
        if self.ended:
            self._usage.end()
        super().step()
        self._step_look()
        for rank in self.ranks:
            if rank.leaving and time.monotonic() > rank.ended_at + deadlines.RANK_EXITS:
                rank.kill_session()

    def close(self) -> None:
        """Release what the job holds."""
        with contextlib.ExitStack() as last_first:
            last_first.callback(super().close)
            last_first.callback(self._usage.end)
            if self._store is not None:
                last_first.callback(self._store.close)
            if self._answer >= 0:
                last_first.callback(os.close, self._answer)
            for rank in self.ranks:
                rank.process.disconnect()
