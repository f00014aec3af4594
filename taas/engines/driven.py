"""An engine with a driver: a child of the supervisor that communicates with the cluster.

This module contains the messages between driver and supervisor, and the supervisor's side.

A cluster may be slow, and may block or end a process that communicates with it. Neither may happen
to the supervisor. A driver ends when its standard input is closed, and then releases everything
that it holds. The engines differ in their drivers, and in the wording of their messages.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

import msgspec

from taas.base.poll_loop import Child
from taas.engines import Machine
from taas.header.catalog import Catalog
from taas.protocol.engines import AgentConfig, Demand
from taas.protocol.framing import Message

# ------------------------------------------------------------- the messages: one JSON line each


class Acquire(Message, frozen=True):
    """Get VMs with these numbers, each on a separate node.

    They replace the ``lost`` ones, if there are any.
    """

    machines: tuple[int, ...]
    demand: Demand
    configs: tuple[AgentConfig, ...]
    lost: tuple[int, ...] = ()


class ReleaseVm(Message, frozen=True):
    """Release a VM, or stop waiting for it."""

    machine: int


class ClusterReport(Message, frozen=True):
    """The driver has joined the cluster, or cannot join it and ends.

    ``host`` is this machine's address in the cluster; ``why_not`` is the reason why the driver
    could not join. With ``advised``, ``why_not`` also contains advice.
    """

    host: str = ""
    why_not: str = ""
    advised: bool = False


States = Literal["waiting", "ending", "gone"]


class VmReport(Message, frozen=True):
    """The state of a VM.

    Attributes:
        state: ``waiting``; ``ending``: it will be taken away; ``gone``: it has ended, or the
            cluster cannot provide it.
        text: what it waits for, why it will end, or how it ended, in words that continue "the agent
            of g2.8-0 was …".
        error: the name of the class in :mod:`taas.errors` for a VM that is gone.
    """

    machine: int
    state: States
    text: str
    error: str = "RunLost"


Asks = Acquire | ReleaseVm
Reports = ClusterReport | VmReport


# ---------------------------------------------------------------- the driver's side


class Reporter:
    """Sends reports to the supervisor through standard output.

    Once this object exists, nothing else writes to the original standard output: prints of
    libraries go to the log.
    """

    def __init__(self) -> None:
        self._out = os.dup(1)
        os.dup2(2, 1)
        self._lock = threading.Lock()

    def __call__(self, line: Reports) -> None:
        """Send a report; the supervisor may be gone."""
        with self._lock, contextlib.suppress(OSError):
            data = memoryview(msgspec.json.encode(line) + b"\n")
            while data:
                data = data[os.write(self._out, data) :]


# ---------------------------------------------------------------- the supervisor's side

_END_SECONDS = 12.0
_LOG_TAIL = 500


class DrivenMachine:
    """A VM that was requested from a cluster."""

    pid = 0
    ending = ""
    error = "RunLost"

    def __init__(self, number: int, engine: DrivenEngine, waiting: str) -> None:
        self.number, self.waiting = number, waiting
        self._engine = engine
        self._how = "lost"
        self._gone, self._signal = os.pipe2(os.O_CLOEXEC)

    def fileno(self) -> int:
        """Return the read end of a pipe, which becomes readable when the VM is gone."""
        return self._gone

    def want(self) -> None:
        """Request the VM from the cluster, if that has not been done yet."""
        self._engine.want(self.number)

    def take(self, report: VmReport) -> None:
        """Record the state in a report."""
        if report.state == "waiting":
            self.waiting = report.text
        elif report.state == "ending":
            self.ending = report.text
        else:
            self._how, self.error = report.text, report.error
            os.write(self._signal, b".")

    def how_it_ended(self) -> str:
        """Return the cluster's description."""
        return self._how

    def end(self) -> None:
        """Release the VM; its agent ends the processes that it started."""
        if self._signal >= 0:
            self._engine.give_back(self.number)
            os.close(self._signal)
            os.close(self._gone)
            self._signal = -1


class DrivenEngine:
    """The VMs of a cluster.

    Args:
        address: the address of the cluster, or the options of the request: the first argument of
            the module ``driver``.
        listen: lets the supervisor listen on an address of this machine, and returns the endpoint.
        scratch: the folder for the driver's standard error.
    """

    remote = True
    driver = kind = cluster = advice = ""

    def __init__(self, address: str, listen: Callable[[str], str], scratch: Path) -> None:
        self._listen, self._log = listen, scratch / f"{self.kind.lower()}.log"
        self._address = address
        self._machines: dict[int, DrivenMachine] = {}
        self._count = 0
        self._endpoint = self.here = self._why = ""
        self._asks: list[Acquire] = []  # requests that were not sent to the cluster yet
        self._wanted: set[int] = set()
        self._driver: Child | None = None
        self._leaving: list[Child] = []
        self._start_driver(0.0)

    @staticmethod
    def read_address(words: list[str], where: str, configured: Catalog) -> str:
        """Parse the typed words; the other settings come from ``taas.toml``.

        ``where`` describes where they were typed. A HeaderError reports what is wrong.
        """
        raise NotImplementedError

    @staticmethod
    def check_installed() -> None:
        """Raise an EngineError with advice if this machine lacks what the engine needs."""
        raise NotImplementedError

    def _start_driver(self, patience: float) -> None:
        arguments = ["-m", self.driver, self._address, str(patience)]
        with self._log.open("ab") as log:
            self._driver = Child(arguments, Reports, stderr=log, start_new_session=True)

    def pids(self) -> list[int]:
        """Return the process ids of the driver and of drivers that are ending."""
        drivers = [*self._leaving, *([] if self._driver is None else [self._driver])]
        return [driver.process.pid for driver in drivers if driver.process.poll() is None]

    def start(
        self, demand: Demand, configs: Sequence[AgentConfig], lost: Sequence[Machine] = ()
    ) -> Sequence[DrivenMachine]:
        """Request VMs from the cluster.

        A driver that has ended is replaced. If the cluster was reached before, the new driver waits
        for it.
        """
        if self._driver is None:
            self._start_driver(demand.wait if self.here else 0.0)
        waiting = f"{self.cluster} to be back" if self.here and not self._endpoint else self.cluster
        waiting = "the first elements of its loaders" if demand.later else waiting
        numbers = range(self._count, self._count + len(configs))
        machines = {number: DrivenMachine(number, self, waiting) for number in numbers}
        self._count += len(machines)
        self._machines |= machines
        places = tuple(machine.number for machine in lost if isinstance(machine, DrivenMachine))
        self._asks.append(Acquire(tuple(machines), demand, tuple(configs), places))
        self._ask()
        return [*machines.values()]

    def want(self, number: int) -> None:
        """Request a VM now, together with the VMs of the same request."""
        self._wanted.add(number)
        self._ask()

    def _ask(self) -> None:
        """Send the requests that are due, if the cluster has been reached."""
        for ask in [*self._asks]:
            if self._endpoint and (not ask.demand.later or self._wanted.intersection(ask.machines)):
                self._asks.remove(ask)
                configs = [
                    msgspec.structs.replace(config, endpoint=self._endpoint)
                    for config in ask.configs
                ]
                self._tell(msgspec.structs.replace(ask, configs=tuple(configs)))

    def _tell(self, ask: Asks) -> None:
        if self._driver is not None:
            self._driver.send(ask)

    def give_back(self, number: int) -> None:
        """Release a VM, or withdraw its request with all VMs of that request."""
        self._machines.pop(number, None)
        unasked = [ask for ask in self._asks if number in ask.machines]
        for ask in unasked:
            self._asks.remove(ask)
        if not unasked:
            self._tell(ReleaseVm(number))

    def fileno(self) -> int:
        """Return the descriptor of the driver's standard output; -1 while there is no driver."""
        return -1 if self._driver is None else self._driver.fileno()

    def step(self) -> None:
        """Handle the driver's reports."""
        assert self._driver is not None
        reports = self._driver.read()
        if reports is None:
            self._lose_driver()
        for report in reports or ():
            if isinstance(report, ClusterReport):
                self._take(report)
            elif report.machine in self._machines:  # otherwise it was released meanwhile
                gone = report.state == "gone"
                machine = (
                    self._machines.pop(report.machine) if gone else self._machines[report.machine]
                )
                machine.take(report)

    def _take(self, report: ClusterReport) -> None:
        if report.host:
            self._endpoint, self.here = self._listen(report.host), report.host
            self._ask()
        elif self._endpoint:
            self._why = f"lost: {report.why_not}"
        elif report.advised:
            self._why = f"{self.cluster} cannot be used: {report.why_not}."
        else:
            self._why = f"{self.cluster} cannot be reached: {report.why_not}. {self.advice}"

    def _lose_driver(self) -> None:
        """Handle the end of the driver.

        It could not connect, or its node or the head of the cluster is gone.
        """
        self._end_driver()
        said, error = self._last_words(), "RunLost" if self._endpoint else "EngineError"
        ended = f"this notebook's {self.kind} driver ended"
        why = f"lost: {ended} ({said})" if self._endpoint else f"{ended} while it connected: {said}"
        why = self._why or why
        self._endpoint = self._why = ""
        self._asks.clear()
        machines, self._machines = self._machines, {}
        for number, machine in machines.items():
            machine.take(VmReport(number, "gone", why, error=error))

    def _last_words(self) -> str:
        with contextlib.suppress(OSError):
            lines = self._log.read_text(errors="replace")[-_LOG_TAIL * 4 :].strip().splitlines()
            if lines:
                return lines[-1][-_LOG_TAIL:]
        return "it said nothing"

    def close(self) -> None:
        """Release everything, and end the driver."""
        if self._driver is not None:
            if not self._endpoint:  # the driver is still connecting, and holds nothing
                self._driver.process.kill()
            self._end_driver().join()

    def _end_driver(self) -> threading.Thread:
        """Let the driver end, and forget it; return the thread that waits for its end.

        The driver may have ended already.
        """
        driver, self._driver = self._driver, None
        assert driver is not None
        self._leaving.append(driver)
        waits = threading.Thread(target=driver.close, args=(_END_SECONDS,), daemon=True)
        waits.start()
        return waits
