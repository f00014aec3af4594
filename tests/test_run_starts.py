"""When the ranks of a run are started, and on what: a run and VMs of a cluster, without their processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from taas.engines import Demand, EngineChoice
from taas.engines.ray import RayMachine
from taas.header import RunSpec
from taas.messages.agents import StartRanks
from taas.messages.clients import DeliveryOrder, RunEnded, StateChanged, Submit
from taas.messages.wire import Memory, Message
from taas.supervisor.data_side import DataVms
from taas.supervisor.runs import Run
from taas.supervisor.vms import Vm


class Beginning:
    """A run of two VMs with two ranks each, and what it says.

    Attributes:
        told: what the VMs were told, with their keys.
        said: what the client was told.

    Args:
        data_vms: that it has, too.
    """

    def __init__(self, project: Path, data_vms: int = 0, **options: Any) -> None:
        self.told: list[tuple[str, Message]] = []
        self.said: list[Message] = []
        self.machines: list[RayMachine] = []
        self.vms = self._vms(2)
        loaders = DeliveryOrder(Memory(0, 0, 0), processes=1, encrypt=True) if data_vms else None
        submit = Submit(
            cell="",
            execution_count=1,
            project=str(project),
            environ={},
            payload=Memory(0, 0, 0),
            spec=RunSpec(instance="g2.2", vms=2, ranks_per_vm=2, data_vms=data_vms, **options),
            gpus=(),
            device="by Ray",
            colors="nocolor",
            waiting=True,
            delivery=loaders,
            engine=EngineChoice("ray"),
        )
        self.run = Run("starts", submit, self.vms, self.data(data_vms), project, self.said.append)

    def _vms(self, count: int) -> list[Vm]:
        machines = [RayMachine(number, lambda number: None) for number in range(count)]
        self.machines += machines
        return [
            Vm(machine, f"vm{number}", Demand(), lambda *told: self.told.append(told), remote=True)
            for number, machine in enumerate(machines)
        ]

    def data(self, count: int) -> DataVms | None:
        """So many data VMs that have yet to come, and one for the planner."""
        if not count:
            return None
        planner, *vms = self._vms(count + 1)
        return DataVms(vms, planner, lambda: "")

    def again(self, data_vms: int) -> None:
        """Start it again."""
        self._end_data()
        self.run = self.run.again(self.vms, self.data(data_vms))

    def started(self) -> list[StartRanks]:
        """The orders to start ranks."""
        return [told for _, told in self.told if isinstance(told, StartRanks)]

    def ended(self) -> RunEnded:
        """End it, and return what its client is told of that."""
        self.run.end()
        self._end_data()
        if self.run.state != "over":
            self.run.conclude()
        ended = self.said[-1]
        assert isinstance(ended, RunEnded)
        return ended

    def _end_data(self) -> None:
        if self.run.data is not None and not self.run.data.closed:
            self.run.data.close()

    def close(self) -> None:
        """End what never ran."""
        self.ended()
        for machine in self.machines:
            machine.end()


@pytest.fixture
def begin(tmp_path: Path) -> Iterator[Callable[..., Beginning]]:
    """Makes a run that waits for its VMs."""
    begun: list[Beginning] = []

    def make(**options: Any) -> Beginning:
        begun.append(Beginning(tmp_path, **options))
        return begun[-1]

    yield make
    for beginning in begun:
        beginning.close()


def test_an_agent_that_is_heard_before_its_place_is_known(begin: Callable[..., Beginning]) -> None:
    """Agents and the cluster speak by different ways: ranks start when it is known where they are, with their GPUs."""
    begun = begin()
    for vm in begun.vms:
        vm.answered = True
        begun.run.look_at_machines()
    assert (begun.run.state, begun.started()) == ("acquiring", [])
    assert begun.said == [StateChanged(run="starts", state="acquiring", detail="the Ray cluster")]
    for number, machine in enumerate(begun.machines, 1):
        machine.come(f"10.0.0.{number}", ("0", "1"))
        begun.run.look_at_machines()
    [start] = begun.started()
    assert (start.order.gpus, start.order.rehearsed, start.order.store.host) == (("0", "1"), 0, "10.0.0.1")
    assert begun.said[-1] == StateChanged(run="starts", state="starting", device="4 GPUs")


def _all_come(begun: Beginning, *gpus: tuple[str, ...]) -> None:
    for number, (vm, machine, given) in enumerate(zip(begun.vms, begun.machines, gpus, strict=True), 1):
        machine.come(f"10.0.0.{number}", given)
        vm.answered = True
        begun.run.look_at_machines()


@pytest.mark.parametrize(("short", "count"), [((), 0), (("0",), 1)])
def test_a_vm_without_the_gpus_it_was_said_to_have(
    begin: Callable[..., Beginning], short: tuple[str, ...], count: int
) -> None:
    """Half of a run is never rehearsed: it ends before any rank starts, and the node is named."""
    begun = begin()
    _all_come(begun, ("0", "1"), short)
    assert begun.started() == []
    assert begun.run.finished
    assert not begun.run.loss
    ended = begun.ended()
    assert (ended.outcome, ended.error) == ("lost", "NotEnoughDevices")
    assert f"g2.2-1 (node 10.0.0.2) has {count} of the 2 GPUs that its ranks need" in ended.message


@pytest.mark.parametrize(("rehearse", "why"), [(False, "no GPU there"), (True, "as --rehearse asks")])
def test_vms_without_any_gpu_are_a_rehearsal(
    begin: Callable[..., Beginning], rehearse: bool, why: str
) -> None:
    """All of them are alike: the run goes on, and its line says on what."""
    begun = begin(rehearse=rehearse)
    _all_come(begun, (), ())
    [start] = begun.started()
    assert (start.order.gpus, start.order.rehearsed) == ((), 2)
    assert begun.said[-1] == StateChanged(run="starts", state="starting", device=f"rehearsed on CPU ({why})")


def test_a_new_start_forgets_no_data_vm_that_was_lost(begin: Callable[..., Beginning]) -> None:
    """The cell names at its end what every start said of its data, in order."""
    begun = begin(data_vms=2, max_restarts=1)
    for restart in range(2):
        data = begun.run.data
        assert data is not None
        data.ready = True  # the first elements are there: the run goes on without this one
        data.vms[1].machine.go(f"no node for start {restart}", "EngineError")
        data.lose(data.vms[1], f"no node for start {restart}", lambda: None)
        if restart == 0:
            begun.again(data_vms=2)
    assert begun.ended().notices == (
        "data VM 1 could not be had: no node for start 0",
        "data VM 1 could not be had: no node for start 1",
    )
