"""The VMs of a notebook: what runs get, what waits for the next one, and what is given back to the engine."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from taas.engines import AgentConfig, Demand, EngineChoice
from taas.header.options import RunSpec
from taas.supervisor import fleet as fleet_module
from taas.supervisor.fleet import Fleet
from taas.supervisor.vms import Vm
from taas.wire.clients import DeliveryOrder, Submit
from taas.wire.framing import Memory
from taas.wire.poll_loop import PollLoop, WorkThread
from taas.wire.ranks import Cell, Workspace


class Engine:
    """Gives machines elsewhere, and notes which it has got back."""

    remote, here = True, "10.0.0.1"

    def __init__(self) -> None:
        self.asked: list[AgentConfig] = []
        self.ended: list[str] = []

    def start(self, demand: Demand, configs: Sequence[AgentConfig], lost: Sequence[Any] = ()) -> list[Any]:
        self.asked += configs
        return [
            SimpleNamespace(
                host="10.0.0.2",
                pid=0,
                gpus=("0",),
                place="",
                waiting="",
                ending="",
                error="RunLost",
                end=lambda name=Path(config.scratch).name: self.ended.append(name),
                how_it_ended=lambda: "lost",
            )
            for config in configs
        ]

    def close(self) -> None:
        self.ended.append("engine")


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Engine:
    made = Engine()
    monkeypatch.setattr(fleet_module, "start_engine", lambda *_: made)
    return made


@pytest.fixture
def fleet(engine: Engine, tmp_path: Path) -> Iterator[Fleet]:
    control: Any = SimpleNamespace(
        send=lambda *_: None,
        up=SimpleNamespace(endpoint="ipc://here", server_key="key"),
        listen=lambda host: host,
        is_out_of_reach=lambda key: False,
    )
    worker = WorkThread(PollLoop().soon)
    yield Fleet(control, tmp_path, lambda: None, lambda vm: None, lambda: None, worker)
    worker.close()


def submit(vms: int = 2, gpus: int = 1, data_vms: int = 0) -> Submit:
    payload = Memory(os.getpid(), 0, 0)
    spec = RunSpec(vms=vms, ranks_per_vm=1, gpus_per_rank=gpus, data_vms=data_vms)
    return Submit(
        cell=Cell("", 1, spec, "nocolor"),
        workspace=Workspace("/", {}),
        payload=payload,
        gpus=(),
        device="",
        delivery=DeliveryOrder(payload, processes=1, encrypt=True) if data_vms else None,
        engine=EngineChoice("ray"),
    )


def up(vms: list[Vm]) -> list[Vm]:
    for vm in vms:
        vm.answered = True
    return vms


def test_a_run_of_the_same_shape_gets_the_warm_group(fleet: Fleet, engine: Engine) -> None:
    """Agents elsewhere are told no endpoint: their engine knows it."""
    first = up(fleet.lease("r1", submit()))
    fleet.release("r1", idle=60)
    assert fleet.wait() is not None
    assert fleet.lease("r2", submit()) == first
    assert [config.endpoint for config in engine.asked] == ["", ""]
    assert engine.ended == []


def test_an_idle_group_of_another_shape_makes_room(fleet: Fleet, engine: Engine) -> None:
    up(fleet.lease("r1", submit()))
    fleet.release("r1", idle=60)
    assert len(fleet.lease("r2", submit(vms=1))) == 1
    assert sorted(engine.ended) == ["agent-0", "agent-1"] and len(fleet.vms) == 1


def test_a_group_goes_as_a_whole(fleet: Fleet, engine: Engine) -> None:
    """One whose time is over, which is not whole any more, or a VM of which will be taken away, is given back."""
    first = up(fleet.lease("r1", submit()))
    assert fleet.lose(first[0], "") == "lost"
    fleet.release("r1", idle=60)
    assert fleet.vms == [] and sorted(engine.ended) == ["agent-0", "agent-1"]
    up(fleet.lease("r2", submit()))
    fleet.release("r2", idle=0)
    assert fleet.vms == []
    third = up(fleet.lease("r3", submit()))
    third[0].machine.ending = "its time limit"
    fleet.release("r3", idle=60)
    assert fleet.vms == []


def test_a_lost_vm_is_replaced(fleet: Fleet) -> None:
    """The new one has its place in the run, and in the group that waits for the next one."""
    vms = up(fleet.lease("r1", submit()))
    fleet.lose(vms[0], "")
    again = up(fleet.replace(submit(), vms))
    assert again[0] is not vms[0] and again[1] is vms[1] and again[0].run == "r1"
    fleet.release("r1", idle=60)
    assert fleet.lease("r2", submit()) == again


def test_vms_for_data_are_others(fleet: Fleet, engine: Engine) -> None:
    """Those that a run has are its own when it starts again; ranks do not get them."""
    ranks = up(fleet.lease("r1", submit(data_vms=2)))
    fleet._local = engine  # type: ignore[assignment]  # the planner's
    data = fleet.lease_data("r1", submit(data_vms=2), ranks)
    assert data is not None and len({*data.by_number.values()} - {*ranks}) == 2
    again = fleet.lease_data("r1", submit(data_vms=2), ranks)
    assert again is not None and again.by_number == data.by_number
    up(fleet.vms)
    fleet.release("r1", idle=60)
    assert fleet.lease("r2", submit()) == ranks
    assert fleet.release_idle() == 2


def test_kept_ranks_have_their_vms(fleet: Fleet) -> None:
    """They are not idle; a VM that is asked for beside them says so while it waits."""
    kept = up(fleet.lease("r1", submit()))
    fleet.keep("r1", kept, 60)
    beside = fleet.lease("r2", submit(vms=1))
    assert "ranks that this notebook keeps have 2 VMs" in beside[0].waiting
    assert fleet.lease("r3", submit(), kept) == kept and {vm.run for vm in kept} == {"r3"}
    assert fleet.give_back(kept) == 2 == 3 - len(fleet.vms)
