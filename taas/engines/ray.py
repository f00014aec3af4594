"""The engine whose VMs are nodes of a Ray cluster, as the supervisor has it; Ray itself is in a child (ray_driver)."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

import msgspec

from taas.engines import AgentConfig, Demand, Machine
from taas.errors import EngineError, HeaderError
from taas.wire.child import Child
from taas.wire.framing import Message
from taas.wording import shown

_ADDRESS = re.compile(r"(?:\[[0-9a-fA-F:]+\]|[\w.-]+):\d{1,5}", re.ASCII)


def read_address(address: str, where: str) -> str:
    """Read where the cluster is, as it was typed; ``auto``, or nothing: this machine is a node of it.

    Raises:
        HeaderError: it is no such address.
    """
    if address.startswith("ray://"):
        raise HeaderError(
            f"{where} ray {shown(address)}: Ray Client addresses are not used, since other nodes have to reach this "
            "machine; make it a node (ray start --address=HEAD:6379 --num-cpus=0), and type ray HEAD:6379"
        )
    address = "" if address == "auto" else address
    if address and not _ADDRESS.fullmatch(address):
        raise HeaderError(
            f"{where} ray {shown(address)}: allowed is HOST:PORT of the cluster's head; type ray {shown(address)}:6379"
        )
    return address


def check_installed() -> None:
    """Refuse this engine where there is no Ray.

    Raises:
        EngineError: with the command that installs it.
    """
    if importlib.util.find_spec("ray") is None:
        raise EngineError(
            "the Ray engine needs Ray, which is not installed here. Run `pip install 'jupyter-taas[ray]'`, with the "
            "version of Ray that the cluster has, or type %taas engine local."
        )


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
        state: ``waiting``; ``there``: its agent starts; ``gone``, or it cannot be had.
        text: what it waits for, or how it went, in words that go on after "the agent of g2.8-0 was".
        host: its address.
        gpus: its GPUs, as CUDA_VISIBLE_DEVICES names them.
        error: the class of :mod:`taas.errors` for one that is gone.
    """

    machine: int
    state: Literal["waiting", "there", "gone"]
    text: str = ""
    host: str = ""
    gpus: tuple[str, ...] = ()
    error: str = "RunLost"


Asks = Acquire | ReleaseVm
Reports = ClusterReport | VmReport


# ---------------------------------------------------------------- the supervisor's side

_END_SECONDS = 12.0
_LOG_TAIL = 500


class RayMachine:
    """A VM that was asked of the Ray cluster."""

    pid = 0

    def __init__(self, number: int, give_back: Callable[[int], None]) -> None:
        self.number = number
        self.host = self.place = ""
        self.gpus: tuple[str, ...] | None = ()
        self.waiting = "the Ray cluster"
        self.error = "RunLost"
        self._how = ""
        self._give_back = give_back
        self._gone, self._signal = os.pipe2(os.O_CLOEXEC)

    def fileno(self) -> int:
        """Return the reading end of a pipe that is written to when the VM is gone."""
        return self._gone

    def come(self, host: str, gpus: tuple[str, ...]) -> None:
        """Take in where it is."""
        self.host, self.gpus, self.waiting = host, gpus, "its agent"
        self.place = f"node {host}"

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


class RayEngine:
    """VMs of a Ray cluster.

    Args:
        address: where the cluster is; empty: the one that this machine is a node of.
        listen: makes the supervisor listen on an address of this machine; returns the endpoint.
        scratch: folder for what the driver writes to its standard error.
    """

    remote = True

    def __init__(self, address: str, listen: Callable[[str], str], scratch: Path) -> None:
        self._listen, self._log = listen, scratch / "ray.log"
        self._address = address or "auto"
        self._machines: dict[int, RayMachine] = {}
        self._count = 0
        self._endpoint = self.here = ""
        self._early: list[Acquire] = []
        self._why = ""
        self._reached = False
        self._driver: Child | None = None
        self._leaving: list[Child] = []
        self._start_driver(0.0)

    def _start_driver(self, patience: float) -> None:
        arguments = ["-m", "taas.engines.ray_driver", self._address, str(patience)]
        with self._log.open("ab") as log:
            self._driver = Child(arguments, Reports, stderr=log, start_new_session=True)

    def pids(self) -> list[int]:
        """Return the process ids of the driver, and of those that are on their way out."""
        drivers = [*self._leaving, *([] if self._driver is None else [self._driver])]
        return [driver.process.pid for driver in drivers if driver.process.poll() is None]

    def start(
        self, demand: Demand, configs: Sequence[AgentConfig], lost: Sequence[Machine] = ()
    ) -> Sequence[RayMachine]:
        """Ask the cluster for VMs; a driver that went is replaced, a cluster that was there is waited for."""
        if self._driver is None:
            self._start_driver(demand.wait if self._reached else 0.0)
        machines = [RayMachine(self._count + number, self._give_back) for number in range(len(configs))]
        if self._reached and not self._endpoint:
            for machine in machines:
                machine.waiting = f"the Ray cluster at {self._address} to be back"
        self._count += len(machines)
        self._machines |= {machine.number: machine for machine in machines}
        ask = Acquire(
            tuple(machine.number for machine in machines),
            demand,
            tuple(configs),
            tuple(machine.number for machine in lost if isinstance(machine, RayMachine)),
        )
        if self._endpoint:
            self._ask(ask)
        else:
            self._early.append(ask)
        return machines

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
            for ask in self._early:
                self._ask(ask)
            self._early.clear()
        elif self._endpoint:
            self._why = f"lost: {report.why_not}"
        else:
            self._why = (
                f"the Ray cluster at {self._address} cannot be reached: {report.why_not}. Is it running (`ray status`), "
                "and is this machine one of its nodes (`ray start --address=HOST:PORT --num-cpus=0`)?"
            )

    def _take_of_vm(self, report: VmReport) -> None:
        machine = self._machines.get(report.machine)
        if machine is None:
            return  # given back meanwhile
        if report.state == "waiting":
            machine.waiting = report.text
        elif report.state == "there":
            machine.come(report.host, report.gpus)
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
        for ask in self._early:
            if number in ask.machines:  # nobody asked the cluster yet
                self._early.remove(ask)
                break
        else:
            self._ask(ReleaseVm(number))

    def _lose_driver(self) -> None:
        """The driver has ended: it could not connect, or its node, or the cluster's head, is gone."""
        self._end_driver()
        if self._endpoint:
            why, error = f"lost: Ray ended this notebook's driver ({self._last_words()})", "RunLost"
        else:
            why, error = (
                f"this notebook's Ray driver ended while it connected: {self._last_words()}",
                "EngineError",
            )
        why = self._why or why
        self._endpoint = self._why = ""
        self._early.clear()
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
