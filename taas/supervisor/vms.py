"""The VMs a supervisor has: asked of the engine, leased to runs, kept warm where the engine allows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import zmq

from taas.engines import AgentConfig, Demand, Engine, Machine
from taas.errors import NotEnoughDevices
from taas.messages.agents import Leave
from taas.messages.wire import Message


class Vm:
    """A VM as the supervisor knows it.

    Attributes:
        answered: its agent has said that it is there.
    """

    def __init__(
        self,
        machine: Machine,
        key: str,
        demand: Demand,
        send: Callable[[str, Message], None],
        *,
        remote: bool,
    ) -> None:
        self.machine, self.key, self.demand, self.remote = machine, key, demand, remote
        self.answered = False
        self.gone = False
        self.run: str | None = None
        self.gpus: tuple[str, ...] = ()
        self._send = send

    @property
    def up(self) -> bool:
        """Whether its agent is there, and the engine has said where, and with which GPUs: they come by different ways."""
        return self.answered and bool(self.machine.host)

    def send(self, message: Message) -> None:
        """Send a message to the VM's agent, if it is there."""
        if not self.gone:
            self._send(self.key, message)

    def end(self) -> None:
        """Give it back; its agent is told by both ways there are."""
        if self.remote:
            self._send(self.key, Leave())
        self.machine.end()


class Pool:
    """All VMs that this supervisor has of one engine for ranks, or for data workers."""

    def __init__(
        self,
        engine: Engine,
        address: tuple[str, str],
        scratch: Path,
        send: Callable[[str, Message], None],
        *,
        data: bool = False,
    ) -> None:
        self.engine, self._scratch, self._send, self._data = engine, scratch, send, data
        self._endpoint, self._server_key = address
        self._count = 0
        self.vms: list[Vm] = []

    def start(self, demand: Demand, count: int, lost: Sequence[Vm] = ()) -> list[Vm]:
        """Ask the engine for VMs, in place of lost ones or not; they are up when their agents say so."""
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
        machines = self.engine.start(demand, configs, [vm.machine for vm in lost])
        started = [
            Vm(machine, config.public_key, demand, self._send, remote=self.engine.remote)
            for machine, config in zip(machines, configs, strict=True)
        ]
        self.vms += started
        return started

    def lease(self, run: str, demand: Demand, count: int, gpus: tuple[str, ...]) -> list[Vm]:
        """Give VMs to a run: idle ones first, then new ones.

        Args:
            run: its name.
            demand: what each VM has to have.
            count: how many.
            gpus: this machine's GPUs that are free, for an engine that does not know of GPUs itself.

        Raises:
            NotEnoughDevices: other runs have the GPUs.
        """
        shares = self._share_gpus(count, gpus, demand.gpus)
        leased = [vm for vm in self.vms if vm.run is None and not vm.gone][:count]
        if count > len(leased):
            leased += self.start(demand, count - len(leased))
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
        found = dict(zip(lost, self.start(lost[0].demand, len(lost), lost), strict=True)) if lost else {}
        for vm, new in found.items():
            new.run, new.gpus = vm.run, vm.gpus
        return found

    def release(self, vms: list[Vm]) -> None:
        """Take VMs back from a run."""
        for vm in vms:
            vm.run, vm.gpus = None, ()

    def give_back(self, vm: Vm) -> None:
        """Give an idle VM back to the engine."""
        vm.end()
        vm.gone = True
        self.vms.remove(vm)

    def lose(self, vm: Vm, how: str) -> str:
        """Strike a VM whose agent is gone, or out of reach, as ``how`` says; returns how it ended."""
        vm.gone = True
        self.vms.remove(vm)
        how = how or vm.machine.how_it_ended()
        vm.end()
        return how
