"""A job: a group of processes of one run on this VM.

It lasts from the supervisor's ``StartJob`` message until the supervisor lets the agent forget it.

Staging, forking, watching, mirroring output, ending and reaping are the same for the ranks of a run
(:mod:`taas.agent.rank_job`), for its planner and for its worker pools with their data workers.

A data process starts with torch imported, so a run waits for its data workers only for as long as
they need to make the first batches. Like a rank, a data process is tied to its agent and its
forkserver (rank/lifeline.py), together with the session that its data workers share.
"""

from __future__ import annotations

import io
import logging
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import msgspec

from taas.agent.forkserver import Forkserver, fork
from taas.agent.processes import ForkedProcess
from taas.agent.spares import KeptProcesses, Spares
from taas.agent.staging import ProjectArrival, Staging, log_of
from taas.base.places import no_room
from taas.protocol.agents import WITH_FORKSERVER, EndJob, How, JobOver, JobSays, OfJob, StartJob
from taas.protocol.chunks import Chunk, Sender, Taken
from taas.protocol.delivery_orders import DataOrder
from taas.protocol.engines import AgentConfig
from taas.protocol.framing import Message
from taas.protocol.ranks import RankKept, Staged

logger = logging.getLogger(__name__)

_AS_A_C1_4 = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}


class JobsAgent(Protocol):
    """The attributes of its agent (agent/loop.py) that a job needs."""

    config: AgentConfig
    forkserver: Forkserver
    spares: Spares
    kept: KeptProcesses

    def say(self, message: Message) -> None:
        """Send a message to the supervisor."""

    def on(self, source: Any, call: Callable[[], object]) -> None:
        """Call ``call`` whenever a descriptor is readable."""

    def off(self, source: Any) -> None:
        """Stop watching a descriptor."""

    def sweep(self) -> None:
        """End processes that dead processes have left behind, unless a cell is running."""


class Job:
    """A job: a group of processes of one run that are started, watched and ended together.

    Attributes:
        begun: whether its processes were forked.
        over: whether its end was reported.
        sender: sends output, changed files and results to the notebook's machine; unused if the
            agent is on that machine.
    """

    def __init__(self, order: StartJob, agent: JobsAgent) -> None:
        self.processes: list[ForkedProcess] = []
        self.begun = self.over = self._swept = False
        self.sender = Sender(self._say)
        self._order, self._agent = order, agent
        self._staging: Staging | None = None
        self._how: str | None = None

    def _say(self, said: JobSays) -> None:
        self._agent.say(OfJob(run=self._order.run, job=self._order.job, said=said))

    # ------------------------------------------------------------ overridden by the kinds of jobs

    _UNBEGUN = ""
    """The reason to report for a job that is ended before it has begun; empty if none is reported.
    """

    def _before(self) -> ProjectArrival | None:
        """Return the project of the kept ranks with which this job continues, if any."""
        return None

    def _fork(self, staged: Staged) -> None:
        """Fork the processes, and add each of them to :attr:`processes` at once."""
        raise NotImplementedError

    def _process_gone(self, process: ForkedProcess) -> None:
        """Handle a process that has ended: read its last messages, and report how it ended."""

    def _end_processes(self, how: How, *, names: bool) -> None:
        """Begin to end the processes of this job."""
        raise NotImplementedError

    def _keep(self) -> tuple[RankKept, ...]:
        """Hand over the processes that stay for the next run."""
        return ()

    # ------------------------------------------------------------ beginning

    def begin(self) -> None:
        """Stage the job, and fork its processes as soon as everything has arrived."""
        try:
            self._staging = Staging(self._order, self._agent.config, self._say, self._before())
        except OSError as error:
            self.fail(str(error))
        else:
            self._fork_when_staged()

    def hear(self, message: Message) -> None:
        """Handle a message of the supervisor about this job."""
        match message:
            case Chunk():
                self.sender.acknowledge(message)
                self._take(message)
            case Taken():
                self.sender.taken(message.nbytes)
            case EndJob():
                self.end(message.how, names=message.names)

    def _take(self, chunk: Chunk) -> None:
        on_demand = chunk.of == "file"
        if self._staging is None or (self.begun and not on_demand) or self._how is not None:
            return
        try:
            self._staging.take(chunk)
        except OSError as error:
            self.fail(str(error))
        else:
            if not self.begun:
                self._fork_when_staged()

    def _fork_when_staged(self) -> None:
        assert self._staging is not None
        if not self._staging.complete:
            return
        self.begun = True
        try:
            order, staged, agent = self._order, self._staging.staged, self._agent
            if agent.forkserver.fit(
                order.run, staged.environ, rehearsed=order.work.rehearsed, held=agent.kept.there
            ):
                agent.spares.forget()
            self._fork(staged)
            pids = [process.pid for process in self.processes]
            logger.info("job %d of %s has the processes %s", order.job, order.run, pids)
        except Exception as error:  # whatever the error is, the supervisor reports it in the cell
            logger.exception("job %d could not begin", self._order.job)
            killed = not self._agent.forkserver.outlived(
                untold=isinstance(error, (EOFError, OSError))
            )
            why = ": ".join(filter(None, (type(error).__name__, str(error), no_room(error))))
            self.fail(WITH_FORKSERVER if killed else why)
        for process in self.processes:
            self._agent.on(process.sentinel, partial(self._gone, process))

    # ------------------------------------------------------------ ending

    def end(self, how: How, *, names: bool) -> None:
        """End the job's processes; the processes of a job that has not begun are never forked."""
        if not self.begun:
            self._how = self._how or self._UNBEGUN
        self._end_processes(how, names=names)

    def fail(self, how: str) -> None:
        """End the job at once, for a reason."""
        self._how = how
        self.end("now", names=False)

    def _gone(self, process: ForkedProcess) -> None:
        self._agent.off(process.sentinel)
        process.gone = True
        logger.info(
            "process %d of job %d is gone: %s", process.pid, self._order.job, process.exitcode
        )
        self._process_gone(process)

    @property
    def ended(self) -> bool:
        """Whether none of its processes is left, and none will be forked."""
        return (self.begun or self._how is not None) and all(
            process.gone for process in self.processes
        )

    def step(self) -> None:
        """Do what is due."""
        if self._staging is not None and self._staging.project.on_demand is not None:
            self._staging.project.on_demand.step()
        try:
            self.sender.step()
        except OSError as error:
            self.fail(f"what its processes wrote could not be sent: {error}")
        if self.ended and not self.over:
            if not self._swept:
                self._swept = True
                self._agent.sweep()
            if self.sender.done:
                self.over = True
                kept = self._keep()
                notices = () if self._staging is None else tuple(self._staging.project.notices)
                self._say(JobOver(how=self._how or "", notices=notices, kept=kept))

    def close(self) -> None:
        """Release what the job holds; its processes are gone, or are ended with the agent's."""
        if self._staging is not None:
            self._staging.close()
            self._staging = None


class DataJob(Job):
    """The job of one data process."""

    _UNBEGUN = "ended before it began"

    def __init__(self, order: StartJob, agent: JobsAgent) -> None:
        super().__init__(order, agent)
        assert isinstance(order.work, DataOrder)
        self._work = order.work

    def _fork(self, staged: Staged) -> None:
        assert self._staging is not None
        if self._agent.config.remote:
            log = Path(staged.output)
            log.write_text("".join(f"{notice}\n" for notice in self._staging.project.notices))
            self.sender.add(log_of(log, lambda: self.ended))
        self.processes.append(ForkedProcess(fork(_be_data_process, self._work, staged)))

    def _end_processes(self, how: How, *, names: bool) -> None:
        """Send SIGKILL to the data process and all its data workers.

        Everything that they had to report has been sent to the coordinator by now.
        """
        for process in self.processes:
            process.kill_tree()

    def _process_gone(self, process: ForkedProcess) -> None:
        code = process.exitcode or 0
        how = f"killed by signal {-code}" if code < 0 else f"ended with status {code}"
        # the forkserver is dead, so that its processes are the agent's children; there may already
        # be another forkserver
        if not self._agent.forkserver.outlived(untold=process.untold) or process.untold:
            how = WITH_FORKSERVER
        self._how = self._how or how


def _be_data_process(order: DataOrder, staged: Staged) -> None:
    # imported here, since a data process needs these modules and an agent does not
    from threadpoolctl import threadpool_limits

    from taas.project import sync
    from taas.project.sync import files_on_demand
    from taas.rank.lifeline import name_process, tie_to_agent

    tie_to_agent()
    name_process("taas-planner" if order.plans else "taas-pool")
    os.environ.clear()
    os.environ.update(staged.environ | _AS_A_C1_4)
    _write_to(staged.output)
    project = sync.enter_replica(
        staged.replica, staged.project, lambda text: sys.stderr.write(f"{text}\n")
    )
    files_on_demand.use(staged.on_demand, staged.project, staged.replica)
    os.chdir(project)
    sys.path[:0] = [] if project in sys.path else [project]
    threadpool_limits(1)  # setting the variable is too late: it is read at import, before the fork
    order = msgspec.structs.replace(order, payload=staged.payload.path)
    if order.plans:
        from taas.delivery import planner

        planner.main(order)
    else:
        from taas.delivery import worker_pool

        worker_pool.main(order)


def _write_to(log: str) -> None:
    """Redirect the output of user code to a file; if that fails, it stays in the agent's log.

    Output is line-buffered, since a data worker is killed at the end of the run, and loses
    everything that it has not written yet.
    """
    assert isinstance(sys.stdout, io.TextIOWrapper)
    sys.stdout.reconfigure(line_buffering=True)
    try:
        Path(log).parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        fd = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    except OSError:
        return
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    os.close(fd)
