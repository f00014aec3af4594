"""A VM as the supervisor sees it, its share of this machine's GPUs, and the data VMs of a run.

A VM is a machine (host or node) on which an agent runs. The number of a data VM in a delivery is
never used again: a VM that replaces a lost one, or a worker pool on it, gets the next number.
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

KEPT = "%kept"  # instead of a run's name, for a VM with kept ranks
PLANNER = -1  # the planner's number
_REPLACEMENTS = 3
"""Number of lost data VMs or worker pools that are replaced, for each one that was requested. If
more are lost, the data themselves are taken to be the cause.
"""


class Vm:
    """A VM, from the moment it is requested until it is released or lost.

    Attributes:
        data: whether it is a cluster's VM for data workers.
        unfit: whether its agent failed to do what it was told, for example because a cleaner has
            removed the agent's folder.
        up: whether its agent is up, and has reported the VM's ``host``, ``place`` and GPUs.
        run: the name of the run to which it is leased; None if it is idle.
        gpus: the GPUs of this machine that are assigned to the run.
        until: the time at which an idle VM is released; infinite for this machine's.
        group: the VMs that the engine allocated together, including this one, in the order of their
            run.
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
        """The GPUs that its run has on this VM, as named in CUDA_VISIBLE_DEVICES.

        If there are none, ranks that need GPUs are rehearsed.
        """
        return self._own_gpus if self.remote else tuple(gpu.name for gpu in self.gpus)

    @property
    def label(self) -> str:
        """The VM's name in the log."""
        return (
            f"agent {self.machine.pid}" if self.machine.pid else self.place or "an agent elsewhere"
        )

    def take(self, said: AgentUp) -> None:
        """Store what the agent reports about its VM."""
        self.up, self.host, self._own_gpus = True, said.host, said.gpus
        self.place = f"node {said.node}" if said.node else ""

    def send(self, message: Message) -> None:
        """Send a message to the VM's agent, if the VM is not gone."""
        if not self.gone:
            log_message(logger, f"to {self.label}:", message)
            self._send(self.key, message)

    def kill(self) -> None:
        """Send SIGKILL to the agent, if it is a process of this machine (a child of this one)."""
        if self.machine.pid and not self.gone:
            logger.warning("SIGKILL to %s", self.label)
            os.kill(self.machine.pid, signal.SIGKILL)

    def end(self, worker: WorkThread) -> None:
        """Release the VM; its agent is told through the socket and by the engine.

        The worker thread reaps an agent of this machine.
        """
        logger.info("%s is given back", self.label)
        self._send(self.key, Leave())
        self.machine.end()
        if isinstance(self.machine, LocalMachine):
            worker.do(self.machine.reap)


def demand_of(
    submit: Submit, instance: str | None, gpus: int = 0, *, later: bool = False
) -> Demand:
    """Return what a run demands of each VM: instance type, GPUs and the rest.

    ``later`` is described in :class:`taas.protocol.engines.Demand`.
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
    """Prevent other supervisors from assigning this machine's GPUs at the same time.

    GPUs that are assigned in the body must be recorded before it ends, for other supervisors to
    see.
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

    Some of the GPUs may belong to runs on ``vms``. If ``gpus`` is empty, the run needs none, or the
    engine assigns them. Since notebooks may name the same GPUs differently, devices are compared.

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
    """Return whether kept ranks on these VMs hold GPUs of this machine."""
    return any(vm.run == KEPT and vm.gpus for vm in vms)


def _of_other_notebooks() -> list[RunRecord]:
    """Return the runs of other supervisors that hold GPUs of this machine."""
    holding = [record for record in read_records() if record.holds and record.gpus]
    return [record for record in holding if record.supervisor.pid != os.getpid()]


class DataVms:
    """The VMs of the data processes in one start of a run.

    Attributes:
        by_number: the VMs for worker pools that are up or coming up.
        most: how many numbers may be assigned in all.
        started: by number, the VMs that were told to start a data process, and have not reported
            its end.
        here: returns the address at which the ranks' VMs and these VMs reach this machine; empty
            while it is not known.
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
        """Yield the numbers that have no data process yet, with their VMs, which are up."""
        for number, vm in ((PLANNER, self.planner), *self.by_number.items()):
            if vm.up and not vm.gone and number not in self.started:
                yield number, vm

    def of(self, vm: Vm) -> list[int]:
        """Return the numbers of a VM."""
        planner = [PLANNER] if vm is self.planner else []
        return planner + [number for number, mine in self.by_number.items() if mine is vm]

    def name(self, number: int) -> str:
        """Return the name of a data VM for messages."""
        place = number in self._all and self._all[number].place
        return f"data VM {number} ({place})" if place else f"data VM {number}"

    def lose(self, number: int) -> None:
        """Remove a number."""
        self.by_number.pop(number, None)
        self.started.pop(number, None)

    def replace(self, vm: Vm | None = None) -> bool:
        """Replace a lost VM by ``vm`` or, if None, by another; return whether there is one."""
        number = len(self._all)
        if number >= self.most or (vm := vm or self._another()) is None:
            return False
        self.by_number[number] = self._all[number] = vm
        return True

    @property
    def starting(self) -> Vm | None:
        """The first of the data VMs, if none of them is up yet; otherwise None."""
        coming = list(self.by_number.values())
        return None if any(vm.up for vm in coming) else next(iter(coming), None)
