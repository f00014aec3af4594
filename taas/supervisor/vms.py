"""The VMs a supervisor has: asked of the engine, leased to runs, kept warm where the engine allows."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import zmq

from taas.engines import AgentConfig, Engine, Machine
from taas.errors import NotEnoughDevices
from taas.messages import Message


class Vm:
    """A VM as the supervisor knows it."""

    def __init__(
        self, machine: Machine, key: str, instance: str | None, send: Callable[[str, Message], None]
    ) -> None:
        self.machine, self.key, self.instance = machine, key, instance
        self.up = False
        self.gone = False
        self.run: str | None = None
        self.gpus: tuple[str, ...] = ()
        self._send = send

    def send(self, message: Message) -> None:
        """Send a message to the VM's agent, if it is there."""
        if not self.gone:
            self._send(self.key, message)


class Pool:
    """All VMs of this supervisor for ranks, or all of its data VMs."""

    def __init__(
        self,
        engine: Engine,
        address: tuple[str, str],
        scratch: Path,
        send: Callable[[str, Message], None],
        *,
        data: bool = False,
    ) -> None:
        self._engine, self._scratch, self._send, self._data = engine, scratch, send, data
        self._endpoint, self._server_key = address
        self._count = 0
        self.vms: list[Vm] = []

    @property
    def keys(self) -> set[str]:
        """Public keys of all agents that may connect."""
        return {vm.key for vm in self.vms}

    def start(self, instance: str | None, count: int) -> list[Vm]:
        """Ask the engine for VMs; they are up when their agents say so."""
        pairs = [zmq.curve_keypair() for _ in range(count)]
        configs = [
            AgentConfig(
                endpoint=self._endpoint,
                server_key=self._server_key,
                public_key=public.decode(),
                secret_key=secret.decode(),
                scratch=str(self._scratch / f"{'data' if self._data else 'agent'}-{self._count + number}"),
                data=self._data,
            )
            for number, (public, secret) in enumerate(pairs)
        ]
        self._count += count
        machines = self._engine.start(instance, configs)
        started = [
            Vm(machine, config.public_key, instance, self._send)
            for machine, config in zip(machines, configs, strict=True)
        ]
        self.vms += started
        return started

    def lease(
        self, run: str, instance: str | None, count: int, gpus: tuple[str, ...], gpus_per_vm: int
    ) -> list[Vm]:
        """Give VMs to a run: idle ones first, then new ones.

        Raises:
            NotEnoughDevices: other runs have the GPUs.
        """
        shares = self._share_gpus(count, gpus, gpus_per_vm)
        leased = [vm for vm in self.vms if vm.run is None and not vm.gone][:count]
        leased += self.start(instance, count - len(leased))
        for vm, share in zip(leased, shares, strict=True):
            vm.run, vm.gpus = run, share
        return leased

    def _share_gpus(self, count: int, gpus: tuple[str, ...], gpus_per_vm: int) -> list[tuple[str, ...]]:
        if not gpus:
            return [()] * count
        busy = {gpu for vm in self.vms if vm.run is not None for gpu in vm.gpus}
        free = [gpu for gpu in gpus if gpu not in busy]
        if len(free) < count * gpus_per_vm:
            raise NotEnoughDevices(
                f"GPUs needed: {count * gpus_per_vm}; free of this machine's {len(gpus)}: {len(free)}; "
                "other runs have the rest. `%taas status` shows them; wait for one, or `%taas stop` it."
            )
        return [tuple(free[i * gpus_per_vm : (i + 1) * gpus_per_vm]) for i in range(count)]

    def replace(self, lost: list[Vm]) -> dict[Vm, Vm]:
        """Give a run new VMs for those it lost, with the GPUs those had."""
        found: dict[Vm, Vm] = {}
        for vm in lost:
            [new] = self.start(vm.instance, 1)
            new.run, new.gpus = vm.run, vm.gpus
            found[vm] = new
        return found

    def release(self, vms: list[Vm]) -> None:
        """Take VMs back from a run."""
        for vm in vms:
            vm.run, vm.gpus = None, ()
            if not self._engine.keeps_warm:
                vm.machine.end()

    def give_back(self, vm: Vm) -> None:
        """Give an idle VM back to the engine."""
        vm.gone = True
        self.vms.remove(vm)
        vm.machine.end()

    def lose(self, vm: Vm) -> str:
        """Strike a VM whose agent is gone; returns how it ended."""
        vm.gone = True
        self.vms.remove(vm)
        how = vm.machine.how_it_ended()
        vm.machine.end()
        return how
