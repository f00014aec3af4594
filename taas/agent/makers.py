"""The data side's processes on a VM: planner and keepers, forked from the agent's forkserver.

A maker begins with torch imported, so a run waits for its data workers no longer than they need to make the first
elements. It is tied to its agent and its forkserver as a rank is (rank/lifeline.py), with the session that its
data workers share.
"""

from __future__ import annotations

import contextlib
import io
import multiprocessing
import os
import sys
from pathlib import Path
from typing import Any

import msgspec
import psutil

from taas.agent.endings import kill_tree
from taas.delivery.config import PlannerConfig, WorkerConfig
from taas.messages.agents import StartMaker

__all__ = ["Makers"]


class Makers:
    """All makers of one run on this VM."""

    def __init__(self, run: str) -> None:
        self.run = run
        self._processes: dict[int, Any] = {}

    def start(self, order: StartMaker) -> int:
        """Fork a maker; returns the descriptor that becomes readable when it ends."""
        process = multiprocessing.get_context("forkserver").Process(target=_be_maker, args=(order,))
        process.start()
        self._processes[order.number] = process
        return int(process.sentinel)

    def bury(self, number: int) -> int:
        """Bury a maker whose descriptor became readable; returns its status, minus the signal that killed it."""
        process = self._processes.pop(number)
        process.join()
        code: int = process.exitcode
        process.close()
        return code

    def end(self) -> None:
        """SIGKILL them with all their data workers: what was to be said was said to the coordinator."""
        trees = []
        for process in self._processes.values():
            with contextlib.suppress(psutil.NoSuchProcess):
                trees.append(psutil.Process(process.pid))
        kill_tree(trees)


def _be_maker(order: StartMaker) -> None:
    """Run a planner or a keeper, in a process forked from the forkserver."""
    from taas.rank.lifeline import tie_to_agent

    tie_to_agent()
    Path("/proc/self/comm").write_text(f"taas-{order.role}")
    os.environ.clear()
    os.environ.update(order.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""})  # as a c1.4 is
    _write_to(order.log)
    project = _enter_project(order)
    from threadpoolctl import threadpool_limits

    threadpool_limits(1)  # the variable alone is read at import, which was before the fork
    here = {"payload": order.payload.path, "sys_path": [project], "cwd": project}
    if order.role == "planner":
        from taas.delivery import planner

        plans = msgspec.json.decode(order.config, type=PlannerConfig)
        planner.main(msgspec.structs.replace(plans, **here))
    else:
        from taas.delivery import keeper

        keeps = msgspec.json.decode(order.config, type=WorkerConfig)
        keeper.main(msgspec.structs.replace(keeps, **here))


def _enter_project(order: StartMaker) -> str:
    """Let a copy of the project stand in its place, where there is one; returns where the project is."""
    if not order.replica:
        return order.project
    from taas.travel import replica

    try:
        replica.enter(order.replica, order.project)
    except OSError as error:
        sys.stderr.write(f"absolute paths of the project do not hold here, relative ones do: {error}\n")
        return order.replica
    return order.project


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
