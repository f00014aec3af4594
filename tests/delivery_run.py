"""A whole delivery with real processes on this machine, without the supervisor.

Tests and benchmarks use it.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import select
import shutil
import signal
import time
import traceback
import warnings
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cloudpickle
import torch
from msgspec.structs import replace

from taas.base import linux
from taas.capture import capture
from taas.capture.moves.arriving import arrive
from taas.delivery import loader as rank_side
from taas.delivery import planner, worker_pool
from taas.delivery.registered import Registration, delivering
from taas.delivery.transport import CoordinatorProcess
from taas.protocol.curve import make_short_folder
from taas.protocol.delivery_messages import (
    PLANNER,
    Failed,
    Final,
    FinishPlans,
    Hello,
    HostLost,
    Peer,
    ProgressReport,
    Report,
    holders,
)
from taas.protocol.delivery_orders import DataOrder, DeliveryConfig, ResumePoint, new_keys

PATIENCE = 150.0
"""Seconds within which ranks end on the most loaded machine; below the suite's own limit for a
test.
"""


def _let_go_of_inherited() -> None:
    """Turn inherited descriptors into /dev/null.

    Objects of the parent own their numbers, and may yet close them.
    """
    null = os.open(os.devnull, os.O_RDWR)
    for number in {int(entry.name) for entry in Path("/proc/self/fd").iterdir()} - {0, 1, 2, null}:
        os.dup2(null, number)


class Child:
    """A planner or a worker pool, forked from this process, which has torch imported already."""

    def __init__(self, main: Callable[[Any], None], config: Any) -> None:
        with warnings.catch_warnings():
            # the warning is about this process's threads: the child uses none
            warnings.simplefilter("ignore", DeprecationWarning)
            self.pid = os.fork()
        if self.pid == 0:
            try:
                linux.set_parent_death_signal(signal.SIGKILL)
                _let_go_of_inherited()
                main(config)
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(0)

        self.pidfd = os.pidfd_open(self.pid)

    def end(self) -> None:
        """Wait until it has quit, as it was told, and kill it if it does not."""
        if not select.select([self.pidfd], [], [], 5.0)[0]:
            os.kill(self.pid, signal.SIGKILL)
        os.close(self.pidfd)
        os.waitpid(self.pid, 0)


class Rank:
    """A forked rank that runs ``body(rank, loaders)``."""

    def __init__(
        self, config: DeliveryConfig, rank: int, payload: int, body: Callable[..., Any]
    ) -> None:
        self._reader, writer = multiprocessing.Pipe(duplex=False)
        self.pid = os.fork()
        if self.pid == 0:
            torch.set_num_threads(1)  # an OpenMP pool is not there after a fork; asked, it hangs
            try:
                rank_side.connect(config, rank, "127.0.0.1")
                names: dict[str, Any] = {}
                arrive(payload, names, device=None)
                outcome = (True, body(rank, names["loaders"]))
            except BaseException as error:
                outcome = (False, (error, traceback.format_exc()))
            try:
                data = cloudpickle.dumps(outcome)
            except Exception:
                data = cloudpickle.dumps((False, (RuntimeError(outcome[1][1]), outcome[1][1])))
            rank_side.disconnect()
            writer.send_bytes(data)
            os._exit(0)
        writer.close()

    def result(self, deadline: float) -> tuple[bool, Any]:
        try:
            if not self._reader.poll(max(0.0, deadline - time.monotonic())):
                os.kill(self.pid, signal.SIGKILL)
                raise TimeoutError("a rank did not end")
            return pickle.loads(self._reader.recv_bytes())
        finally:
            self._reader.close()
            os.waitpid(self.pid, 0)


class DeliveryRun:
    """A delivery that ``with DeliveryRun({"train": loader}, ranks=2) as run`` starts.

    ``run.ranks(body)`` runs ranks; ``run.places`` is then where it was.
    """

    def __init__(
        self,
        loaders: dict[str, Any],
        ranks: int = 1,
        vms: int = 1,
        processes: int = 1,
        slab: int = 16 << 20,
        encrypt: bool = True,
        wait: bool = True,
        shared: bool = True,
        places: dict[str, ResumePoint] | None = None,
        **config: Any,
    ) -> None:
        self.registrations = [Registration(name, loader) for name, loader in loaders.items()]
        self.n = ranks
        with delivering(self.registrations):
            self._captured = capture("loaders", {"loaders": loaders}, None, project=Path.cwd())
        self._folder = make_short_folder()
        folder = self._folder if shared else ""
        self.config = DeliveryConfig(
            new_keys(holders(ranks, vms + 1)),
            ranks,
            slab,
            folder,
            encrypt=encrypt,
            hosts=vms,
            **config,
        )
        self._places = places
        self.payload = f"/proc/{os.getpid()}/fd/{self._captured.fd}"
        self.reports: list[Report] = []
        self._unheard: deque[Report] = deque()
        self._seen_ended: set[int] = set()
        self.coordinator = CoordinatorProcess()
        self.children: list[Child] = []
        self.children = self._start(processes)
        if wait:
            self.wait_until_ready()

    def _start(self, processes: int) -> list[Child]:
        """Start the coordinator, then the planner and the worker pools of all data VMs."""
        self.coordinator.send(self.config)
        [serving, *_] = self.coordinator.read() or ()
        assert isinstance(serving, Hello)
        self._endpoint = serving.address
        plan = DataOrder(common=self.told(PLANNER), payload=self.payload)
        pools = [
            replace(plan, common=self.told(Peer("pool", vm)), vm=vm, processes=processes)
            for vm in range(self.config.hosts)
        ]
        return [Child(planner.main, plan), *(Child(worker_pool.main, pool) for pool in pools)]

    def told(self, peer: Peer) -> DeliveryConfig:
        """What a peer is told, its key among it."""
        return self.config.for_peers(self._endpoint, peer.holder)

    def wait_until_ready(self) -> Report:
        """Wait until the ranks may begin, or nothing will be delivered; returns what said so."""
        while True:
            report = self.wait_for((ProgressReport, Failed))
            if isinstance(report, Failed) or report.prebuffered:
                return report

    def wait_for(self, kinds: Any) -> Any:
        """Return the next report of these kinds; those before it are in ``reports``."""
        while True:
            while self._unheard:
                report = self._unheard.popleft()
                self.reports.append(report)
                if (
                    isinstance(report, HostLost)
                    and self.config.folder
                    and report.vm not in self._seen_ended
                ):
                    child = self.children[1 + report.vm]  # which its agent would end now
                    os.kill(child.pid, signal.SIGKILL)
                    select.select([child.pidfd], [], [])
                    self._see_ends()
                if isinstance(report, kinds):
                    return report
            self._see_ends()
            if select.select([self.coordinator.fileno()], [], [], 0.05)[0]:
                said = self.coordinator.read()
                assert said is not None, "the coordinator ended"
                self._unheard += said

    def _see_ends(self) -> None:
        """Tell the coordinator which data processes have ended, as the supervisor would."""
        for vm, child in enumerate(self.children, -1) if self.config.folder else ():
            if vm not in self._seen_ended and select.select([child.pidfd], [], [], 0)[0]:
                self._seen_ended.add(vm)
                self.coordinator.send(HostLost(vm=vm, cause="ended"))

    def start_ranks(self, body: Callable[..., Any]) -> list[Rank]:
        configs = [
            replace(self.told(Peer("rank", rank)), places=self._places or {})
            for rank in range(self.n)
        ]
        return [Rank(config, rank, self._captured.fd, body) for rank, config in enumerate(configs)]

    def results(self, ranks: list[Rank], timeout: float = PATIENCE) -> list[Any]:
        deadline = time.monotonic() + timeout
        outcomes = [rank.result(deadline) for rank in ranks]
        for good, value in outcomes:
            if not good:
                error, text = value
                error.add_note(text)
                raise error
        return [value for _, value in outcomes]

    def ranks(self, body: Callable[..., Any], timeout: float = PATIENCE) -> list[Any]:
        return self.results(self.start_ranks(body), timeout)

    def finish(self) -> Final:
        """Return the loaders' final states, when the ranks have ended."""
        self.coordinator.send(FinishPlans())
        return self.wait_for(Final)

    def __enter__(self) -> DeliveryRun:
        return self

    def __exit__(self, *_: object) -> None:
        self.reports += [*self._unheard, *self.coordinator.close()]
        self.places = [
            report.places for report in self.reports if isinstance(report, ProgressReport)
        ][-1]
        for child in self.children:
            child.end()
        self._captured.close()
        shutil.rmtree(self._folder)


def wait_for_delivery(run: DeliveryRun, count: int) -> None:
    """Wait until the coordinator counts so many elements of the first loader as delivered."""
    while True:
        report = run.wait_for(ProgressReport)
        if report.delivered.delivered >= count:
            return
