"""The agent's main loop, which serves its supervisor, its jobs and the clock."""

from __future__ import annotations

import contextlib
import logging
import multiprocessing.util
import os
import signal
import sys
import threading
import traceback
from functools import partial
from typing import Any

import msgspec
import zmq

from taas.agent.forkserver import Forkserver
from taas.agent.job import DataJob, Job
from taas.agent.processes import become_subreaper, bury_orphans, sweep_orphans
from taas.agent.rank_job import RankJob
from taas.agent.spares import KeptProcesses, Spares
from taas.agent.staging import environment
from taas.base import linux, process_log
from taas.base.linux import remove_tree
from taas.base.poll_loop import PollLoop, raise_limit
from taas.base.process_log import log_message
from taas.engines.gpus import visible_gpus
from taas.protocol import deadlines
from taas.protocol.agents import AgentHears, AgentUp, JobRequest, StartJob
from taas.protocol.curve import SupervisorLink, make_dealer, set_heartbeat
from taas.protocol.delivery_orders import read_line
from taas.protocol.engines import AgentConfig
from taas.protocol.framing import Alive, Leave, Message, MessageReader, pack
from taas.protocol.ranks import RankOrder

logger = logging.getLogger(__name__)


class Agent:
    """The processes of one VM: jobs of one run at a time.

    Attributes:
        on, off: start and stop watching a descriptor.
    """

    def __init__(self, config: AgentConfig) -> None:
        self._context = zmq.Context()
        self._socket = make_dealer(
            self._context, config.server_key, config.public_key, config.secret_key
        )
        if config.remote:
            set_heartbeat(self._socket)
        self._sources = PollLoop()
        self._read = MessageReader(AgentHears)
        self.on, self.off = self._sources.on, self._sources.off
        needs_gpus = bool(config.demand.gpus) or not config.remote
        self.forkserver = Forkserver(rehearsed=needs_gpus and not visible_gpus(), idle=config.idle)
        self.spares = Spares(self.forkserver, self.on, self.off)
        self.kept = KeptProcesses(self.on, self.off, self.say)
        self._jobs: dict[tuple[str, int], Job] = {}
        self._supervisor_gone, self._why = False, ""
        self.config = config
        self._link = SupervisorLink(self._socket, config.endpoint) if config.remote else None
        self._ending = threading.Event()
        self._socket.connect(config.endpoint)

    def run(self) -> str:
        """Serve until the supervisor is gone, then end all; return why it was unreachable."""
        self._import_ahead()
        self._sources.on(self._socket, self._hear_supervisor)
        self._sources.on(sys.stdin.fileno(), self._lose_supervisor)
        if self._link is not None:
            self._sources.on(self._link.source, partial(self._look_at_link, self._link))
            threading.Thread(target=_die_when_stopped, args=(self._ending,), daemon=True).start()
        gpus = visible_gpus() if self.config.remote else ()
        self.say(AgentUp(host=self.config.host, node=self.config.node, gpus=gpus))
        try:
            while not self._supervisor_gone:
                self._sources.step(self._wait())
                for job in self._jobs.values():
                    job.step()
                if not self._rank_jobs:
                    bury_orphans((self.forkserver.pid,))  # processes that took a while to clean up
                    self.spares.step()
                if self._link is not None:
                    self._look_at_link(self._link)
        finally:
            self._end_all()
        return self._why

    def _import_ahead(self) -> None:
        """Start the forkserver.

        On a cluster, start it with the environment that the first run will need, since a restart
        would take as long as this start.
        """
        config = self.config
        if config.remote:
            environ = environment(config.demand.environ, config.demand.changed, config)
            self.forkserver.fit("", environ, rehearsed=None)
        else:
            self.forkserver.start()

    @property
    def _rank_jobs(self) -> list[RankJob]:
        return [job for job in self._jobs.values() if isinstance(job, RankJob)]

    def _wait(self) -> float | None:
        waits = [deadlines.TICK if self._jobs else self.spares.wait()]
        if self._link is not None:
            waits.append(self._link.wait())
        return min((wait for wait in waits if wait is not None), default=None)

    def say(self, message: Message) -> None:
        """Send a message to the supervisor."""
        log_message(logger, "to the supervisor:", message)
        self._socket.send(pack(message))

    def _hear_supervisor(self) -> None:
        while True:
            try:
                message = self._read(self._socket.recv(zmq.NOBLOCK))
            except zmq.Again:
                return
            log_message(logger, "heard from the supervisor:", message)
            if isinstance(message, Leave):
                self._supervisor_gone = True
            elif isinstance(message, StartJob):
                kind = RankJob if isinstance(message.work, RankOrder) else DataJob
                job = self._jobs[message.run, message.job] = kind(message, self)
                job.begin()
            elif isinstance(message, Alive):
                continue  # zmq's I/O thread answers heartbeats by itself
            elif (message.run, message.job) not in self._jobs:
                continue  # sent before the supervisor knew that the job is over
            elif isinstance(message.said, JobRequest):
                self._forget(self._jobs.pop((message.run, message.job)))
            else:
                self._jobs[message.run, message.job].hear(message.said)

    def _forget(self, job: Job) -> None:
        """Forget a job that is over, and expect the ranks of the next run to be like its ranks."""
        job.close()
        if not isinstance(job, RankJob) or job.stays:
            return
        self.kept.end()  # kept ranks that this run has not used
        if job.preparation is not None and self.forkserver.outlived():
            self.spares.want(job.preparation, job.size, job.expected_next)
        else:
            self.spares.forget()

    def _lose_supervisor(self) -> None:
        self._supervisor_gone = not os.read(sys.stdin.fileno(), 4096)

    def _look_at_link(self, link: SupervisorLink) -> None:
        """End if the connection to a remote supervisor is lost: it gives up this VM, too."""
        if not self._supervisor_gone and (why := link.gone()):
            self._supervisor_gone, self._why = True, why

    def _end_all(self) -> None:
        """End everything, even if a step fails; the system ends what remains."""
        logger.info("ends all that it has started")
        self._ending.set()
        linux.kill_in(deadlines.END_AGENT)
        with contextlib.ExitStack() as last_first:
            last_first.callback(remove_tree, self.config.scratch)
            last_first.callback(self._context.term)
            last_first.callback(self._socket.close, linger=0)
            if self._link is not None:
                last_first.callback(self._link.close)
            for job in self._jobs.values():
                last_first.callback(job.close)
            last_first.callback(sweep_orphans, ())
            last_first.callback(self.kept.end, patient=True)

    def sweep(self) -> None:
        """End processes that dead processes have left behind, unless a cell is running.

        A cell that runs may need its orphans.
        """
        if all(job.ended for job in self._rank_jobs):
            sweep_orphans((self.forkserver.pid,))


def _die_when_stopped(ending: threading.Event) -> None:
    """Let the system kill this process, and so its ranks, if it is stopped for long."""
    linux.kill_in(deadlines.AGENT_STOPPED)
    while not ending.wait(deadlines.SHOW_ALIVE):
        linux.kill_in(deadlines.AGENT_STOPPED)


def main() -> None:
    """Read the configuration from standard input, and serve."""
    linux.begin_afresh()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    line = read_line(sys.stdin.fileno())
    if not line:  # the engine does not need this agent any more
        return
    config = msgspec.json.decode(line, type=AgentConfig)
    process_log.begin(config.supervisor, config.name)
    become_subreaper()
    raise_limit()
    if not config.remote:
        linux.set_parent_death_signal(signal.SIGKILL)
    try:
        why = Agent(config).run()
    except BaseException:
        logger.exception("the agent broke down")
        traceback.print_exc()  # the last line of the traceback is displayed in the cell
        os._exit(1)
    finalizers: Any = multiprocessing.util
    finalizers._run_finalizers()  # removes the folder of the forkserver's socket
    sys.stderr.write(why)
    sys.stderr.flush()
    # it has ended the processes that it started, and nothing may delay its exit
    os._exit(bool(why))
