"""All VMs that the supervisor has, of all engines: leased to runs, replaced, taken back."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from taas.agent.forkserver import read_at_import
from taas.catalog import DATA_VM
from taas.engines import Demand, Engine, EngineChoice
from taas.engines.local import LocalEngine
from taas.errors import NotEnoughDevices
from taas.messages.agents import Leave
from taas.messages.clients import Submit
from taas.messages.hosts import Beat
from taas.records import read_records
from taas.supervisor.data_side import DataVms
from taas.supervisor.door import Door
from taas.supervisor.vms import Pool, Vm


class Fleet:
    """The pools of all engines that were asked for; an engine is started when it is first asked for.

    Args:
        door: where agents come in.
        scratch: folder for the agents' own.
        strike: called with each VM that is about to be given back.
    """

    def __init__(self, door: Door, scratch: Path, strike: Callable[[Vm], None]) -> None:
        self._door, self._scratch, self._strike = door, scratch, strike
        address = (door.up.endpoint, door.up.server_key)
        self._local = Pool(LocalEngine(), address, scratch, door.send)
        self._local_data = Pool(self._local.engine, address, scratch, door.send, data=True)
        self._pools = {"local": self._local, "local data": self._local_data}

    @property
    def vms(self) -> list[Vm]:
        """All of them."""
        return [vm for pool in self._pools.values() for vm in pool.vms]

    @property
    def engines(self) -> list[Engine]:
        """Those that have been asked for."""
        return list(dict.fromkeys(pool.engine for pool in self._pools.values()))

    @property
    def has_remote(self) -> bool:
        """Whether one of them is on another machine."""
        return any(vm.remote for vm in self.vms)

    def find(self, key: str) -> Vm | None:
        """Return the VM whose agent has this key."""
        return next((vm for vm in self.vms if vm.key == key), None)

    def warm_up(self) -> None:
        """Start a VM here: whoever starts a supervisor is about to submit a run."""
        self._local.start(Demand(), 1)

    def prepare(self, choice: EngineChoice) -> None:
        """Start an engine."""
        self._pool_of(choice)

    def _pool_of(self, choice: EngineChoice, *, data: bool = False) -> Pool:
        """Return the VMs of an engine for ranks, or for data."""
        name = "local" if choice.kind == "local" else f"{choice.kind} {choice.address}"
        if name not in self._pools:
            from taas.engines.ray import RayEngine

            engine = RayEngine(choice.address, self._door.listen, self._scratch / "ray.log")
            address = ("", self._door.up.server_key)
            self._pools[name] = Pool(engine, address, self._scratch, self._door.send)
            self._pools[f"{name} data"] = Pool(engine, address, self._scratch, self._door.send, data=True)
        return self._pools[f"{name} data" if data else name]

    # ------------------------------------------------------------ for runs

    def lease(self, run: str, submit: Submit) -> list[Vm]:
        """Give a run the VMs for its ranks.

        Raises:
            EngineError: they cannot be had.
        """
        spec = submit.spec
        gpus = () if spec.rehearse else _not_elsewhere(submit.gpus)
        demand = _demand(submit, spec.instance, spec.ranks_per_vm * spec.gpus_per_rank)
        return self._pool_of(submit.engine).lease(run, demand, spec.vms, gpus)

    def replace(self, submit: Submit, vms: list[Vm]) -> list[Vm]:
        """Return a run's VMs, with new ones in place of those it lost.

        Raises:
            EngineError: they cannot be had.
        """
        new = self._pool_of(submit.engine).replace([vm for vm in vms if vm.gone])
        return [new.get(vm, vm) for vm in vms]

    def lease_data(self, run: str, submit: Submit, vms: list[Vm]) -> DataVms | None:
        """Return VMs for the data of a run, if it has any: those that it has already, and others.

        Raises:
            EngineError: they cannot be had.
        """
        if submit.delivery is None:
            return None
        pool = self._pool_of(submit.engine, data=True)
        demand = _demand(submit, DATA_VM)
        planner = vms[0] if pool is self._local_data else _own(run, self._local_data, 1, demand)[0]
        data_vms = _own(run, pool, submit.spec.data_vms, demand)
        return DataVms(data_vms, planner, lambda: pool.engine.here)

    def lease_data_vm(self, run: str, submit: Submit) -> Vm:
        """Give a run one more VM for its data.

        Raises:
            EngineError: it cannot be had.
        """
        [vm] = self._pool_of(submit.engine, data=True).lease(run, _demand(submit, DATA_VM), 1, ())
        return vm

    def release(self, run: str) -> None:
        """Take all VMs of a run back."""
        for pool in self._pools.values():
            mine = [vm for vm in pool.vms if vm.run == run]
            pool.release(mine)
            if not pool.engine.keeps_warm:
                for vm in mine:
                    self._give_back(pool, vm)

    def release_idle(self) -> int:
        """Give back the VMs that no run uses; returns how many."""
        idle = [(pool, vm) for pool in self._pools.values() for vm in pool.vms if vm.run is None]
        for pool, vm in idle:
            self._give_back(pool, vm)
        return len(idle)

    def _give_back(self, pool: Pool, vm: Vm) -> None:
        self._strike(vm)
        pool.give_back(vm)

    # ------------------------------------------------------------ life and death

    def beat(self) -> list[Vm]:
        """Send signs of life to remote agents; returns the VMs that are out of reach."""
        for vm in self.vms:
            if vm.remote and vm.up:
                vm.send(Beat())
        return [vm for vm in self.vms if self._door.is_out_of_reach(vm.key)]

    def lose(self, vm: Vm, how: str) -> str:
        """Strike a VM whose agent is gone, or out of reach, as ``how`` says; returns how it ended."""
        return next(pool for pool in self._pools.values() if vm in pool.vms).lose(vm, how)

    def close(self) -> None:
        """Give back everything."""
        for vm in self.vms:
            if vm.remote:
                vm.send(Leave())
        for engine in self.engines:
            engine.close()


def _demand(submit: Submit, instance: str | None, gpus: int = 0) -> Demand:
    return Demand(
        instance,
        gpus,
        submit.spec.rehearse,
        submit.engine.wait,
        read_at_import(submit.environ),
        submit.changed,
    )


def _own(run: str, pool: Pool, count: int, demand: Demand) -> list[Vm]:
    """Return so many VMs of a run: those that it has, and others, asked for one by one, since each may come alone."""
    own = [vm for vm in pool.vms if vm.run == run]
    for _ in range(count - len(own)):
        own += pool.lease(run, demand, 1, ())
    return own


def _not_elsewhere(gpus: tuple[str, ...]) -> tuple[str, ...]:
    """Return the GPUs that no run of another kernel has.

    Raises:
        NotEnoughDevices: there is none.
    """
    if not gpus:
        return gpus
    mine = os.getpid()
    others = [record for record in read_records() if record.live and record.supervisor.pid != mine]
    taken = {gpu for record in others for gpu in record.gpus}
    free = tuple(gpu for gpu in gpus if gpu not in taken)
    if taken and not free:
        names = ", ".join(record.name for record in others)
        raise NotEnoughDevices(
            f"runs of other notebooks have all {len(gpus)} GPUs ({names}). `%taas status` shows them; wait for "
            "one, or `%taas stop` it."
        )
    return free
