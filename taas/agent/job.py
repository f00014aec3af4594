"""A job: a group of processes of one run on this VM, from its order until the supervisor may forget it.

Staged in, forked, watched, mirrored, ended, reaped: that is the same for the ranks of a run, for its planner and for
its worker pools. What differs stands in :mod:`taas.agent.rank_job` and :mod:`taas.agent.data_job`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from taas.agent.forkserver import Forkserver
from taas.agent.processes import ForkedProcess
from taas.agent.spares import KeptProcesses, Spares
from taas.agent.staging import ProjectArrival, Staging
from taas.engines import AgentConfig
from taas.wire.agents import EndJob, How, JobOver, JobSays, OfJob, StartJob
from taas.wire.framing import Message
from taas.wire.ranks import RankKept, Staged
from taas.wire.transfer import Chunk, Sender, Taken


@dataclass(frozen=True)
class Services:
    """What a job has of its VM.

    Attributes:
        config: the agent's.
        forkserver: what its processes are forked from.
        spares: processes that wait for the order to be a rank.
        kept: ranks that wait for the order to run another cell.
        on, off: begin and end to watch a descriptor.
        grows: tells of a folder in which files grow that are to be sent.
        say: sends a message to the supervisor.
        renewed: the forkserver was started anew: forget what was forked from the old one.
        sweep: end what processes that are gone have left, if no cell runs: it may have orphans that it needs.
    """

    config: AgentConfig
    forkserver: Forkserver
    spares: Spares
    kept: KeptProcesses
    on: Callable[[Any, Callable[[], None]], None]
    off: Callable[[Any], None]
    grows: Callable[[Path], None]
    say: Callable[[Message], None]
    renewed: Callable[[], None]
    sweep: Callable[[], None]


class Job:
    """One job.

    Args:
        order: the supervisor's.
        services: what it has of this VM.

    Attributes:
        name: what messages call its VM.
        processes: its processes.
        begun: whether they were forked.
        over: whether its end was said.
        swept: whether nothing that they left is there.
        sender: what sends home what they write, change and answer; on the notebook's machine there is nothing to send.
    """

    def __init__(self, order: StartJob, services: Services) -> None:
        self.run, self.number, self.name = order.run, order.job, order.name
        self.processes: list[ForkedProcess] = []
        self.begun = self.over = self.swept = False
        self.sender = Sender(self._say)
        self._order, self._services = order, services
        self._staging: Staging | None = None
        self._how: str | None = None

    def _say(self, said: JobSays) -> None:
        self._services.say(OfJob(run=self.run, job=self.number, said=said))

    # ------------------------------------------------------------ what differs

    def _rehearsed(self) -> bool | None:
        """Whether the forkserver has to be one that rehearses; None: as it is."""
        raise NotImplementedError

    def _before(self) -> ProjectArrival | None:
        """Return the project of kept ranks that this job continues with."""
        return None

    def _fork(self, staged: Staged) -> None:
        """Fork the processes, each a member of :attr:`processes` at once."""
        raise NotImplementedError

    def _process_gone(self, process: ForkedProcess) -> None:
        """Say what became of a process, which was reaped."""

    def _end_processes(self, how: How, *, names: bool) -> None:
        """Begin to end the processes that there are."""
        raise NotImplementedError

    def _keep(self) -> tuple[RankKept, ...]:
        """Hand over the processes that stay for the next run."""
        return ()

    # ------------------------------------------------------------ beginning

    def begin(self) -> None:
        """Stage it in, and fork its processes as soon as all is there."""
        try:
            self._staging = Staging(self._order, self._services.config, self._say, self._before())
        except OSError as error:
            self.fail(str(error))
        else:
            self._fork_when_staged()

    def hear(self, message: Message) -> None:
        """Take in what the supervisor says about this job."""
        match message:
            case Chunk():
                self.sender.acknowledge(message)
                self._take(message)
            case Taken():
                self.sender.taken(message.nbytes)
            case EndJob():
                self.end(message.how, names=message.names)

    def _take(self, chunk: Chunk) -> None:
        if self._staging is None or self.begun or self._how is not None:
            return
        try:
            self._staging.take(chunk)
        except OSError as error:
            self.fail(str(error))
        else:
            self._fork_when_staged()

    def _fork_when_staged(self) -> None:
        assert self._staging is not None
        if not self._staging.complete:
            return
        self.begun = True
        try:
            staged = self._staging.staged
            services, held = self._services, self._services.kept.there
            if services.forkserver.fit(self.run, staged.environ, rehearsed=self._rehearsed(), held=held):
                services.renewed()
            self._fork(staged)
        except Exception as error:  # whatever it was, the supervisor says so in the cell
            self.fail(f"{type(error).__name__}: {error}")
        for process in self.processes:
            self._services.on(process.sentinel, partial(self._gone, process))

    # ------------------------------------------------------------ ending

    def end(self, how: How, *, names: bool) -> None:
        """End its processes; those of one that has yet to begin are never forked."""
        if not self.begun:
            self._how = self._how or ""
        self._end_processes(how, names=names)

    def fail(self, how: str) -> None:
        """End it at once, for a reason."""
        self._how = how
        self.end("now", names=False)

    def _gone(self, process: ForkedProcess) -> None:
        self._services.off(process.sentinel)
        self._before_gone(process)
        process.gone = True
        self._process_gone(process)

    def _before_gone(self, process: ForkedProcess) -> None:
        """A process is dead: take in what it said last."""

    @property
    def ended(self) -> bool:
        """Whether no process of it is left, and none will be forked."""
        return (self.begun or self._how is not None) and all(process.gone for process in self.processes)

    def step(self) -> None:
        """Do what is due."""
        try:
            self.sender.step()
        except OSError as error:
            self.fail(f"what its processes wrote could not be sent: {error}")
        if self.ended and not self.over:
            if not self.swept:
                self.swept = True
                self._services.sweep()
            if self.sender.done:
                self.over = True
                kept = self._keep()
                notices = () if self._staging is None else tuple(self._staging.project.notices)
                self._say(JobOver(how=self._how or "", notices=notices, kept=kept))

    def wait(self) -> float | None:
        """Return the seconds until :meth:`step` has something to do, if nothing is heard; None: never."""
        return None

    def close(self) -> None:
        """Give back what it held; its processes are gone, or are ended with the agent's."""
        if self._staging is not None:
            self._staging.close()
            self._staging = None
