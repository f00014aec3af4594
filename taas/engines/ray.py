"""The engine whose VMs are nodes of a Ray cluster, as the supervisor has it; Ray itself is in a child (ray_driver)."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from taas.engines import AgentConfig, Demand, Machine, ray_wire
from taas.engines.ray_wire import Acquire, Connected, Gone, Got, Release, Severed, Unreachable, Waiting

__all__ = ["RayEngine"]

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
    """VMs of a Ray cluster; every one is given back when its run ends.

    Args:
        address: where the cluster is; empty: the one that this machine is a node of.
        listen: makes the supervisor listen on an address of this machine; returns the endpoint.
        log: where the driver's standard error goes.
    """

    keeps_warm = False
    remote = True

    def __init__(self, address: str, listen: Callable[[str], str], log: Path) -> None:
        self._listen, self._log = listen, log
        self._address = address or "auto"
        self._machines: dict[int, RayMachine] = {}
        self._count = 0
        self._endpoint = self.here = ""
        self._early: list[Acquire] = []
        self._rest = b""
        self._read = ray_wire.decoder(ray_wire.Reports)
        self._why_not = self._why_lost = ""
        self._reached = False
        self._driver: subprocess.Popen[bytes] | None = None
        self._start_driver(0.0)

    def _start_driver(self, patience: float) -> None:
        with self._log.open("ab") as log:
            self._driver = subprocess.Popen(
                [sys.executable, "-m", "taas.engines.ray_driver", self._address, str(patience)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,
            )
        assert self._driver.stdout is not None
        os.set_blocking(self._driver.stdout.fileno(), False)

    def pids(self) -> list[int]:
        """Return the driver's process id."""
        return [self._driver.pid] if self._driver is not None else []

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
        there = {"remote": True, "ahead": demand.environ, "changed": demand.changed}
        ask = Acquire(
            tuple(machine.number for machine in machines),
            demand,
            tuple(msgspec.structs.replace(config, **there) for config in configs),
            tuple(machine.number for machine in lost if isinstance(machine, RayMachine)),
        )
        if self._endpoint:
            self._ask(ask)
        else:
            self._early.append(ask)
        return machines

    def fileno(self) -> int:
        """Return the driver's standard output; -1 while there is no driver."""
        if self._driver is None:
            return -1
        assert self._driver.stdout is not None
        return self._driver.stdout.fileno()

    def step(self) -> None:
        """Read what the driver said."""
        try:
            data = os.read(self.fileno(), 1 << 16)
        except BlockingIOError:
            return
        if not data:
            self._lose_driver()
            return
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            self._take(self._read.decode(line))

    def _take(self, report: Any) -> None:
        if isinstance(report, Connected):
            self._endpoint, self.here, self._reached = self._listen(report.host), report.host, True
            for ask in self._early:
                self._ask(ask)
            self._early.clear()
        elif isinstance(report, Unreachable):
            self._why_not = (
                f"the Ray cluster at {self._address} cannot be reached: {report.message}. Is it running (`ray status`), "
                "and is this machine one of its nodes (`ray start --address=HOST:PORT --num-cpus=0`)?"
            )
        elif isinstance(report, Severed):
            self._why_lost = f"lost: {report.message}"
        elif (machine := self._machines.get(report.machine)) is None:
            return  # given back meanwhile
        elif isinstance(report, Waiting):
            machine.waiting = report.text
        elif isinstance(report, Got):
            machine.come(report.host, report.gpus)
        elif isinstance(report, Gone):
            del self._machines[report.machine]
            machine.go(report.how, report.error)

    def _ask(self, ask: Acquire | Release) -> None:
        if isinstance(ask, Acquire):
            configs = (msgspec.structs.replace(config, endpoint=self._endpoint) for config in ask.configs)
            ask = msgspec.structs.replace(ask, configs=tuple(configs))
        if self._driver is not None and self._driver.stdin is not None:
            with contextlib.suppress(BrokenPipeError):  # its standard output says the same
                self._driver.stdin.write(ray_wire.encode(ask) + b"\n")
                self._driver.stdin.flush()

    def _give_back(self, number: int) -> None:
        self._machines.pop(number, None)
        for ask in self._early:
            if number in ask.machines:  # nobody asked the cluster yet
                self._early.remove(ask)
                break
        else:
            self._ask(Release(number))

    def _lose_driver(self) -> None:
        """The driver has ended: it could not connect, or its node, or the cluster's head, is gone."""
        driver, self._driver = self._driver, None
        assert driver is not None and driver.stdin is not None and driver.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            driver.stdin.close()
        driver.stdout.close()
        driver.wait()
        if self._endpoint:
            error = "RunLost"
            why = self._why_lost or f"lost: Ray ended this notebook's driver ({self._last_words()})"
        else:
            error = "EngineError"
            why = (
                self._why_not or f"this notebook's Ray driver ended while it connected: {self._last_words()}"
            )
        self._endpoint, self._why_not, self._why_lost, self._rest = "", "", "", b""
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
        if self._driver is None:
            return
        assert self._driver.stdin is not None and self._driver.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._driver.stdin.close()
        if not self._endpoint:  # it still tries to connect, and holds nothing
            self._driver.kill()
        try:
            self._driver.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self._driver.kill()
            self._driver.wait()
        self._driver.stdout.close()
        self._driver = None
