"""An engine whose cluster is spoken with by a child of the supervisor, its driver: what both say, and the supervisor's side.

A cluster may be slow, block, or end who speaks with it. None of this may happen to the supervisor. A driver ends with its
standard input, and gives back all that it has; the engines differ in their drivers, and in words.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

import msgspec

from taas.engines import AgentConfig, Demand, Machine
from taas.wire.child import Child
from taas.wire.framing import Message

# ---------------------------------------------------------------- what the two say: one JSON line each


class Acquire(Message, frozen=True):
    """Get a VM for each configuration, each on a node of its own.

    Attributes:
        machines: their numbers.
        lost: the numbers of those whose places they take, if they do.
    """

    machines: tuple[int, ...]
    demand: Demand
    configs: tuple[AgentConfig, ...]
    lost: tuple[int, ...] = ()


class ReleaseVm(Message, frozen=True):
    """Give a VM back, or stop waiting for it."""

    machine: int


class ClusterReport(Message, frozen=True):
    """The driver is part of the cluster, or none, and ends.

    Attributes:
        host: this node's address there.
        why_not: why the driver could not become part of it, or is no part of it any more, in words.
    """

    host: str = ""
    why_not: str = ""


class VmReport(Message, frozen=True):
    """How a VM stands.

    Attributes:
        state: ``waiting``; ``there``: its agent starts; ``ending``: it will be taken away; ``gone``, or it cannot be had.
        text: what it waits for, why it will go, or how it went, in words that go on after "the agent of g2.8-0 was".
        host: its address.
        node: the name of its node; empty: its address.
        gpus: its GPUs, as CUDA_VISIBLE_DEVICES names them.
        error: the class of :mod:`taas.errors` for one that is gone.
    """

    machine: int
    state: Literal["waiting", "there", "ending", "gone"]
    text: str = ""
    host: str = ""
    node: str = ""
    gpus: tuple[str, ...] = ()
    error: str = "RunLost"


Asks = Acquire | ReleaseVm
Reports = ClusterReport | VmReport


# ---------------------------------------------------------------- the supervisor's side

_END_SECONDS = 12.0
_LOG_TAIL = 500


class DrivenMachine:
    """A VM that was asked of a cluster."""

    pid = 0

    def __init__(
        self, number: int, want: Callable[[int], None], give_back: Callable[[int], None], waiting: str
    ) -> None:
        self.number = number
        self.host = self.place = self.ending = ""
        self.gpus: tuple[str, ...] | None = ()
        self.waiting = waiting
        self.error = "RunLost"
        self._how = ""
        self._want, self._give_back = want, give_back
        self._gone, self._signal = os.pipe2(os.O_CLOEXEC)

    def fileno(self) -> int:
        """Return the reading end of a pipe that is written to when the VM is gone."""
        return self._gone

    def want(self) -> None:
        """Have the cluster asked for it, if it was not."""
        self._want(self.number)

    def come(self, host: str, gpus: tuple[str, ...], node: str = "") -> None:
        """Take in where it is."""
        self.host, self.gpus, self.waiting = host, gpus, "its agent"
        self.place = f"node {node or host}"

    def go(self, how: str, error: str) -> None:
        """Take in that it is gone."""
        if not self._how and self._signal >= 0:
            self._how, self.error = how, error
            os.write(self._signal, b".")

    def how_it_ended(self) -> str:
        """Return what the cluster said."""
        return self._how or "lost"

    def end(self) -> None:
        """Give it back; its agent ends what it started."""
        if self._signal >= 0:
            self._give_back(self.number)
            os.close(self._signal)
            os.close(self._gone)
            self._signal = -1


class DrivenEngine:
    """VMs of a cluster.

    Args:
        address: where the cluster is, or what is asked of it: the driver's first argument.
        listen: makes the supervisor listen on an address of this machine; returns the endpoint.
        scratch: folder for what the driver writes to its standard error.

    Attributes:
        driver: the driver's module.
        kind: what it is a driver of, for messages.
        cluster: what the cluster is called.
        advice: what to look at when it cannot be reached.
    """

    remote = True
    driver = kind = cluster = advice = ""

    def __init__(self, address: str, listen: Callable[[str], str], scratch: Path) -> None:
        self._listen, self._log = listen, scratch / f"{self.kind.lower()}.log"
        self._address = address
        self._machines: dict[int, DrivenMachine] = {}
        self._count = 0
        self._endpoint = self.here = ""
        self._early: list[Acquire] = []
        self._later: list[Acquire] = []
        self._why = ""
        self._reached = False
        self._driver: Child | None = None
        self._leaving: list[Child] = []
        self._start_driver(0.0)

    def _start_driver(self, patience: float) -> None:
        arguments = ["-m", self.driver, self._address, str(patience)]
        with self._log.open("ab") as log:
            self._driver = Child(arguments, Reports, stderr=log, start_new_session=True)

    def pids(self) -> list[int]:
        """Return the process ids of the driver, and of those that are on their way out."""
        drivers = [*self._leaving, *([] if self._driver is None else [self._driver])]
        return [driver.process.pid for driver in drivers if driver.process.poll() is None]

    def start(
        self, demand: Demand, configs: Sequence[AgentConfig], lost: Sequence[Machine] = ()
    ) -> Sequence[DrivenMachine]:
        """Ask the cluster for VMs; a driver that went is replaced, a cluster that was there is waited for."""
        if self._driver is None:
            self._start_driver(demand.wait if self._reached else 0.0)
        waiting = f"{self.cluster} to be back" if self._reached and not self._endpoint else self.cluster
        waiting = "the first elements of its loaders" if demand.later else waiting
        machines = [
            DrivenMachine(self._count + number, self._want, self._give_back, waiting)
            for number in range(len(configs))
        ]
        self._count += len(machines)
        self._machines |= {machine.number: machine for machine in machines}
        ask = Acquire(
            tuple(machine.number for machine in machines),
            demand,
            tuple(configs),
            tuple(machine.number for machine in lost if isinstance(machine, DrivenMachine)),
        )
        (self._later if demand.later else self._early).append(ask)
        self._ask_early()
        return machines

    def _want(self, number: int) -> None:
        for ask in self._later:
            if number in ask.machines:
                self._later.remove(ask)
                self._early.append(ask)
                break
        self._ask_early()

    def _ask_early(self) -> None:
        """Ask for what was wanted before the cluster was reached, if it is."""
        while self._endpoint and self._early:
            self._ask(self._early.pop(0))

    def fileno(self) -> int:
        """Return the driver's standard output; -1 while there is no driver."""
        return -1 if self._driver is None else self._driver.fileno()

    def step(self) -> None:
        """Read what the driver said."""
        assert self._driver is not None
        reports = self._driver.read()
        if reports is None:
            self._lose_driver()
        for report in reports or ():
            self._take(report)

    def _take(self, report: ClusterReport | VmReport) -> None:
        if isinstance(report, VmReport):
            self._take_of_vm(report)
        elif report.host:
            self._endpoint, self.here, self._reached = self._listen(report.host), report.host, True
            self._ask_early()
        elif self._endpoint:
            self._why = f"lost: {report.why_not}"
        else:
            self._why = f"{self.cluster} cannot be reached: {report.why_not}. {self.advice}"

    def _take_of_vm(self, report: VmReport) -> None:
        machine = self._machines.get(report.machine)
        if machine is None:
            return  # given back meanwhile
        if report.state == "waiting":
            machine.waiting = report.text
        elif report.state == "ending":
            machine.ending = report.text
        elif report.state == "there":
            machine.come(report.host, report.gpus, report.node)
        else:
            del self._machines[report.machine]
            machine.go(report.text, report.error)

    def _ask(self, ask: Acquire | ReleaseVm) -> None:
        if isinstance(ask, Acquire):
            configs = (msgspec.structs.replace(config, endpoint=self._endpoint) for config in ask.configs)
            ask = msgspec.structs.replace(ask, configs=tuple(configs))
        if self._driver is not None:
            self._driver.send(ask)

    def _give_back(self, number: int) -> None:
        self._machines.pop(number, None)
        for waiting in (self._early, self._later):
            for ask in waiting:
                if number in ask.machines:  # nobody asked the cluster yet
                    waiting.remove(ask)
                    return
        self._ask(ReleaseVm(number))

    def _lose_driver(self) -> None:
        """The driver has ended: it could not connect, or its node, or the cluster's head, is gone."""
        self._end_driver()
        if self._endpoint:
            why, error = f"lost: this notebook's {self.kind} driver ended ({self._last_words()})", "RunLost"
        else:
            why, error = (
                f"this notebook's {self.kind} driver ended while it connected: {self._last_words()}",
                "EngineError",
            )
        why = self._why or why
        self._endpoint = self._why = ""
        self._early.clear()
        self._later.clear()
        machines, self._machines = list(self._machines.values()), {}
        for machine in machines:
            machine.go(why, error)

    def _last_words(self) -> str:
        with contextlib.suppress(OSError):
            lines = self._log.read_text(errors="replace")[-_LOG_TAIL * 4 :].strip().splitlines()
            if lines:
                return lines[-1][-_LOG_TAIL:]
        return "it said nothing"

    def close(self) -> None:
        """Give everything back, and end the driver."""
        if self._driver is not None:
            if not self._endpoint:  # it still tries to connect, and holds nothing
                self._driver.process.kill()
            self._end_driver().join()

    def _end_driver(self) -> threading.Thread:
        """Let the driver end, and forget it; it may have ended. Returns the thread that waits for that."""
        driver, self._driver = self._driver, None
        assert driver is not None
        self._leaving.append(driver)
        waits = threading.Thread(target=driver.close, args=(_END_SECONDS,), daemon=True)
        waits.start()
        return waits
