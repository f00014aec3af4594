"""A process of the data side as a job: a planner, or a worker pool with its data workers.

It begins with torch imported, so a run waits for its data workers no longer than they need to make the first
elements. It is tied to its agent and its forkserver as a rank is (rank/lifeline.py), with the session that its data
workers share.
"""

from __future__ import annotations

import io
import os
import sys
from pathlib import Path

import msgspec

from taas.agent.forkserver import fork
from taas.agent.job import Job, Services
from taas.agent.outflow import log_of
from taas.agent.processes import ForkedProcess
from taas.delivery.config import DataOrder
from taas.wire.agents import How, StartJob
from taas.wire.ranks import Staged

_AS_A_C1_4 = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}


class DataJob(Job):
    """One data process."""

    def __init__(self, order: StartJob, services: Services) -> None:
        super().__init__(order, services)
        assert isinstance(order.work, DataOrder)
        self._work = order.work

    def _rehearsed(self) -> bool | None:
        return self._work.rehearsed

    def _fork(self, staged: Staged) -> None:
        assert self._staging is not None
        if self._services.config.remote:
            log = Path(staged.output)
            log.write_text("".join(f"{notice}\n" for notice in self._staging.project.notices))
            self.sender.add(log_of(log, lambda: self.ended))
            self._services.grows(log.parent)
        self.processes.append(ForkedProcess(fork(_be_data_process, self._work, staged)))

    def end(self, how: How, *, names: bool) -> None:
        """End it, also before it began."""
        if not self.begun:
            self._how = self._how or "ended before it began"
        super().end(how, names=names)

    def _end_processes(self, how: How, *, names: bool) -> None:
        """SIGKILL it with all its data workers: what was to be said was said to the coordinator."""
        for process in self.processes:
            process.kill_tree()

    def _process_gone(self, process: ForkedProcess) -> None:
        code = process.exitcode or 0
        self._services.forkserver.outlived(code)  # or is dead now, and its processes are the agent's children
        self._how = self._how or (f"killed by signal {-code}" if code < 0 else f"ended with status {code}")


def _be_data_process(order: DataOrder, staged: Staged) -> None:
    """Be a planner or a worker pool, in a process forked from the forkserver."""
    from threadpoolctl import threadpool_limits  # as all that a data process needs and an agent does not

    from taas import project_sync
    from taas.rank.lifeline import tie_to_agent

    tie_to_agent()
    Path("/proc/self/comm").write_text("taas-planner" if order.plans else "taas-pool")
    os.environ.clear()
    os.environ.update(staged.environ | _AS_A_C1_4)
    _write_to(staged.output)
    project = project_sync.entered(staged.replica, staged.project, lambda text: sys.stderr.write(f"{text}\n"))
    os.chdir(project)
    sys.path[:0] = [] if project in sys.path else [project]
    threadpool_limits(1)  # the variable alone is read at import, which was before the fork
    order = msgspec.structs.replace(order, payload=staged.payload.path)
    if order.plans:
        from taas.delivery import planner

        planner.main(order)
    else:
        from taas.delivery import worker_pool

        worker_pool.main(order)


def _write_to(log: str) -> None:
    """Let what user code prints there go to the run's folder; where it cannot, it goes to the agent's log.

    Each line at once: a data worker is killed at the run's end, with all that it has not written yet.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)
    try:
        Path(log).parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        fd = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    except OSError:
        return
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    os.close(fd)
