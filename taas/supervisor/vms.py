"""A VM as the supervisor knows it, its share of this machine's GPUs, and a run's data VMs.

A data VM has a number in the run's delivery, which is given once: a VM, or a worker pool on it,
that takes the place of a lost one has the next number.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
from collections.abc import Callable, Iterable, Iterator, Sequence

from filelock import FileLock, Timeout

from taas.agent.forkserver import read_at_import
from taas.base.places import runtime_folder
from taas.base.poll_loop import WorkThread
from taas.base.process_log import log_message
from taas.engines import Machine
from taas.engines.local import LocalMachine
from taas.errors import EngineError, NotEnoughDevices
from taas.protocol import deadlines
from taas.protocol.agents import AgentUp
from taas.protocol.clients import Gpu, Submit
from taas.protocol.engines import Demand
from taas.protocol.framing import Leave, Message
from taas.protocol.records import RunRecord
from taas.runs.records import read_records

logger = logging.getLogger(__name__)

KEPT = "%kept"  # stands for a run's name in a VM with kept ranks
PLANNER = -1  # the planner's number
_REPLACEMENTS = 3
"""Lost data VMs or worker pools that are replaced, for each that was asked for. If more are lost,
the data kill them.
"""


class Vm:
    """A VM, from the moment it is asked for until it is given back or lost.

    Attributes:
        data: it is a cluster's VM for data workers.
        unfit: its agent could not do what it was told: a cleaner may have removed its folder.
        up: its agent is there, and has said what the VM has: ``host``, ``place`` and GPUs.
        run: the name of the run that has it; None: it is idle.
        gpus: those of this machine's GPUs that the run has.
        until: when an idle VM is given back; this machine's never is.
        group: the VMs that the engine gave together, this one included, in the order of their run.
    """

    def __init__(
        self,
        machine: Machine,
        key: str,
        demand: Demand,
        send: Callable[[str, Message], None],
        *,
        remote: bool,
        data: bool = False,
    ) -> None:
        self.machine, self.key, self.demand = machine, key, demand
        self.remote, self.data = remote, data
        self.up = self.unfit = self.gone = False
        self.host = self.place = ""
        self._own_gpus: tuple[str, ...] = ()
        self.run: str | None = None
        self.until = float("inf")
        self.group: tuple[Vm, ...] = (self,)
        self.gpus: tuple[Gpu, ...] = ()
        self._send = send

    @property
    def given(self) -> tuple[str, ...]:
        """The GPUs that its run has there, as CUDA_VISIBLE_DEVICES names them.

        None: ranks that need some are rehearsed.
        """
        return self._own_gpus if self.remote else tuple(gpu.name for gpu in self.gpus)

    @property
    def label(self) -> str:
        """Its name in the log."""
        return (
            f"agent {self.machine.pid}" if self.machine.pid else self.place or "an agent elsewhere"
        )

    def take(self, said: AgentUp) -> None:
        """Take in what the agent says about its VM."""
        self.up, self.host, self._own_gpus = True, said.host, said.gpus
        self.place = f"node {said.node}" if said.node else ""

    def send(self, message: Message) -> None:
        """Send a message to its agent, if the VM is not gone."""
        if not self.gone:
            log_message(logger, f"to {self.label}:", message)
            self._send(self.key, message)

    def kill(self) -> None:
        """SIGKILL its agent, if that is a process of this machine, and so a child of this one."""
        if self.machine.pid and not self.gone:
            logger.warning("SIGKILL to %s", self.label)
            os.kill(self.machine.pid, signal.SIGKILL)

    def end(self, worker: WorkThread) -> None:
        """Give the VM back: its agent is told by the socket and by its engine.

        An agent of this machine is reaped by the worker thread.
        """
        logger.info("%s is given back", self.label)
        self._send(self.key, Leave())
        self.machine.end()
        if isinstance(self.machine, LocalMachine):
            worker.do(self.machine.reap)


def demand_of(
    submit: Submit, instance: str | None, gpus: int = 0, *, later: bool = False
) -> Demand:
    """Return what a run demands of each VM: instance type, GPUs, and the rest.

    ``later``: as :class:`taas.protocol.engines.Demand` has it.
    """
    return Demand(
        instance,
        gpus,
        submit.cell.spec.rehearse,
        submit.engine.wait,
        read_at_import(submit.workspace.environ),
        submit.workspace.changed,
        later,
    )


@contextlib.contextmanager
def choosing(gpus: tuple[Gpu, ...]) -> Iterator[None]:
    """Keep other supervisors from choosing among this machine's GPUs.

    What is taken in the body is written down at its end, for them to see.
    """
    if not gpus:
        yield
        return
    try:
        with FileLock(runtime_folder("locks") / "gpus", timeout=deadlines.CHOOSE_GPUS):
            yield
    except Timeout:
        raise EngineError(
            "another notebook has been choosing among this machine's GPUs for"
            f" {deadlines.CHOOSE_GPUS:.0f} s: its supervisor may be stopped. Run the cell again;"
            " `%taas status` shows who has GPUs."
        ) from None


def share_gpus(
    vms: Sequence[Vm], count: int, gpus: tuple[Gpu, ...], gpus_per_vm: int
) -> list[tuple[Gpu, ...]]:
    """Divide this machine's free GPUs among ``count`` VMs of a run.

    Others of these ``vms`` may have some of them. Without ``gpus`` the run needs none, or the
    engine assigns them. Notebooks may name the same GPUs differently: devices are compared.

    Raises:
        NotEnoughDevices: other runs, of this kernel or of others, have them.
    """
    if not gpus:
        return [()] * count
    others = _of_other_notebooks()
    taken = {gpu.device for vm in vms if vm.run is not None for gpu in vm.gpus}
    taken |= {device for record in others for device in record.gpus}
    free = [gpu for gpu in gpus if gpu.device not in taken]
    if len(free) < count * gpus_per_vm:
        named = f" ({', '.join(record.name for record in others)})" if others else ""
        advice = (
            "ranks that this notebook keeps have some. `%taas release` ends them."
            if keep_gpus(vms)
            else (
                f"other runs have the rest{named}. `%taas status` shows them; wait for one, or"
                " `%taas stop` it. Ranks that are kept end with a `%taas release` in their"
                " notebook."
            )
        )
        raise NotEnoughDevices(
            f"GPUs needed: {count * gpus_per_vm}; free of this machine's {len(gpus)}: {len(free)};"
            f" {advice}"
        )
    return [tuple(free[i * gpus_per_vm : (i + 1) * gpus_per_vm]) for i in range(count)]


def keep_gpus(vms: Iterable[Vm]) -> bool:
    """Tell whether kept ranks on these VMs hold GPUs of this machine."""
    return any(vm.run == KEPT and vm.gpus for vm in vms)


def _of_other_notebooks() -> list[RunRecord]:
    """Return the runs of other supervisors that have GPUs of this machine."""
    holding = [record for record in read_records() if record.holds and record.gpus]
    return [record for record in holding if record.supervisor.pid != os.getpid()]


class DataVms:
    """Where the data processes of one start of a run are.

    Attributes:
        by_number: those for worker pools that are there or come; at ``most`` so many numbers are
            given.
        started: the VMs that were told to start the data process of a number, and have not said
            that it is gone.
        here: tells the address under which the ranks' VMs and these reach this machine; empty while
            it is not known.
    """

    def __init__(
        self, vms: list[Vm], planner: Vm, here: Callable[[], str], another: Callable[[], Vm | None]
    ) -> None:
        self.by_number = dict(enumerate(vms))
        self.started: dict[int, Vm] = {}
        self.elsewhere = any(vm.remote for vm in vms)
        self.here, self._another, self.planner = here, another, planner
        self._all = dict(self.by_number)
        self.most = (1 + _REPLACEMENTS) * len(vms)

    def startable(self) -> Iterator[tuple[int, Vm]]:
        """Give the numbers that have no data process yet, on VMs that are up."""
        for number, vm in ((PLANNER, self.planner), *self.by_number.items()):
            if vm.up and not vm.gone and number not in self.started:
                yield number, vm

    def of(self, vm: Vm) -> list[int]:
        """Return the numbers that a VM has."""
        planner = [PLANNER] if vm is self.planner else []
        return planner + [number for number, mine in self.by_number.items() if mine is vm]

    def name(self, number: int) -> str:
        """Return the name of a data VM in messages."""
        place = number in self._all and self._all[number].place
        return f"data VM {number} ({place})" if place else f"data VM {number}"

    def lose(self, number: int) -> None:
        """Remove a number."""
        self.by_number.pop(number, None)
        self.started.pop(number, None)

    def replace(self, vm: Vm | None = None) -> bool:
        """Take a VM in place of a lost one: this one, or another; returns whether there is one."""
        number = len(self._all)
        if number >= self.most or (vm := vm or self._another()) is None:
            return False
        self.by_number[number] = self._all[number] = vm
        return True

    @property
    def starting(self) -> Vm | None:
        """The first of the data VMs, if all are on their way; else None."""
        coming = list(self.by_number.values())
        return None if any(vm.up for vm in coming) else next(iter(coming), None)
