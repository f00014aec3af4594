"""The supervisor's VMs of all engines: leased to runs, idle, holding kept ranks, or released."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import zmq

from taas.base.poll_loop import WorkThread
from taas.base.wording import counted
from taas.engines import Engine
from taas.engines.choice import start_engine
from taas.engines.local import LocalEngine
from taas.errors import EngineError, RanksGone
from taas.header.catalog import DATA_VM
from taas.protocol import deadlines
from taas.protocol.clients import Gpu, Submit
from taas.protocol.engines import AgentConfig, Demand, EngineChoice
from taas.protocol.framing import Alive, Leave
from taas.supervisor.connections import ControlSocket
from taas.supervisor.stages import ENDED
from taas.supervisor.vms import KEPT, DataVms, Vm, demand_of, share_gpus

if TYPE_CHECKING:
    from taas.supervisor.runs import Run


_IN_WORDS = {"world_size": "number", "instance": "instance type", "project": "project folder"}


class Fleet:
    """The VMs of all engines; an engine is started when it is first needed (VMs, or ``Prepare``).

    ``started`` is called when there are new VMs or a new engine, ``strike`` for each VM that is
    about to end, and ``ended`` when the agents of released or lost VMs have exited.
    """

    def __init__(
        self,
        control: ControlSocket,
        scratch: Path,
        started: Callable[[], None],
        strike: Callable[[Vm], None],
        ended: Callable[[], None],
        worker: WorkThread,
    ) -> None:
        self._control, self._scratch, self._started = control, scratch, started
        self._strike, self._ended, self._worker = strike, ended, worker
        self._local = LocalEngine()
        self._engines: dict[tuple[str, str], Engine] = {("local", ""): self._local}
        self._of: dict[Vm, Engine] = {}
        self._by_key: dict[str, Vm] = {}
        self._count, self._next_beat = 0, 0.0

    @property
    def vms(self) -> list[Vm]:
        """All VMs."""
        return list(self._of)

    @property
    def engines(self) -> list[Engine]:
        """The engines that have been used so far, including this machine's."""
        return list(self._engines.values())

    def find(self, key: str) -> Vm | None:
        """Return the VM whose agent has this key."""
        return self._by_key.get(key)

    def warm_up(self, *, idle: bool) -> None:
        """Start an agent on this machine before a run is submitted.

        With ``idle`` no run is expected yet, and the agent starts at idle priority.
        """
        self._start(self._local, Demand(), 1, idle=idle)

    def prepare(self, choice: EngineChoice) -> Engine:
        """Return an engine, and start it if it is not running yet."""
        key = choice.kind, choice.address
        if key not in self._engines:
            self._engines[key] = start_engine(choice, self._control.listen, self._scratch)
            self._started()
        return self._engines[key]

    def _start(
        self,
        engine: Engine,
        demand: Demand,
        count: int,
        lost: Sequence[Vm] = (),
        *,
        data: bool = False,
        idle: bool = False,
    ) -> list[Vm]:
        """Request VMs from an engine, as replacements for the ``lost`` ones if there are any.

        A VM is up when its agent reports so.
        """
        up, numbers = self._control.up, range(self._count, self._count + count)
        self._count += count
        configs = []
        for number in numbers:
            public, secret = zmq.curve_keypair()
            name = f"{'data' if data else 'agent'}-{number}"
            config = AgentConfig(
                endpoint="" if engine.remote else up.endpoint,
                server_key=up.server_key,
                public_key=public.decode(),
                secret_key=secret.decode(),
                scratch=str(self._scratch / name),
                idle=idle,
                remote=engine.remote,
                demand=demand,
                supervisor=os.getpid(),
                name=name,
            )
            configs.append(config)
        machines = engine.start(demand, configs, [vm.machine for vm in lost])
        group = tuple(
            Vm(
                machine,
                config.public_key,
                demand,
                self._control.send,
                remote=engine.remote,
                data=data,
            )
            for machine, config in zip(machines, configs, strict=True)
        )
        for vm in group:
            vm.group = group
            self._of[vm], self._by_key[vm.key] = engine, vm
        self._started()
        return [*group]

    # ------------------------------------------------------------ for runs

    def lease(self, run: str, submit: Submit, kept: Sequence[Vm] = ()) -> list[Vm]:
        """Lease the VMs for a run's ranks: the ``kept`` ones, if any; otherwise idle or new ones.

        Raises:
            EngineError: the VMs cannot be obtained.
        """
        for vm in kept:
            vm.run = run
        if kept:
            return [*kept]
        spec = submit.cell.spec
        demand = demand_of(
            submit, spec.instance, spec.gpus_per_vm, later=submit.delivery is not None
        )
        gpus = () if spec.rehearse else submit.gpus
        return self._lease(self.prepare(submit.engine), run, demand, spec.vms, gpus)

    def _lease(
        self,
        engine: Engine,
        run: str,
        demand: Demand,
        count: int,
        gpus: tuple[Gpu, ...] = (),
        *,
        data: bool = False,
    ) -> list[Vm]:
        """Lease VMs of an engine to a run: idle ones first, then new ones.

        Idle VMs of a cluster that do not fit are released first, so that they do not block new
        ones.
        """
        self.step()
        shares = share_gpus(self.vms, count, gpus, demand.gpus)
        leased = self._fitting(engine, demand, count, data=data)
        if not leased and engine.remote:
            self.give_back(vm for vm in self._idle if self._of[vm] is engine)
        if count > len(leased):
            leased += self._start(engine, demand, count - len(leased), data=data)
        for vm, share in zip(leased, shares, strict=True):
            vm.run, vm.gpus, vm.demand = run, share, demand
        return leased

    def _fitting(self, engine: Engine, demand: Demand, count: int, *, data: bool) -> list[Vm]:
        """Return idle VMs for a run.

        On this machine, return as many as there are, up to ``count``. On a cluster, return a whole
        group of the requested shape and size, or nothing.
        """
        idle = [vm for vm in self._idle if self._of[vm] is engine and vm.data == data]
        if not engine.remote:
            return idle[:count]
        groups = [
            vm.group for vm in idle if vm.demand.shape == demand.shape and len(vm.group) == count
        ]
        return list(groups[0]) if groups else []

    def replace(self, submit: Submit, vms: list[Vm]) -> list[Vm]:
        """Return a run's VMs, with each lost one replaced by a new one, which gets its GPUs.

        Raises:
            EngineError: a new VM cannot be obtained.
        """
        lost = [vm for vm in vms if vm.gone]
        if not lost:
            return vms
        new = self._start(self.prepare(submit.engine), lost[0].demand, len(lost), lost)
        found = dict(zip(lost, new, strict=True))
        for vm, another in found.items():
            another.run, another.gpus = vm.run, vm.gpus
        group = tuple(found.get(vm, vm) for vm in lost[0].group)
        for vm in group:
            vm.group = group
        return [found.get(vm, vm) for vm in vms]

    def lease_data(self, run: str, submit: Submit, vms: list[Vm]) -> DataVms | None:
        """Return the VMs for a run's data, if it has any: those already leased to it, and new ones.

        Raises:
            EngineError: the VMs cannot be obtained.
        """
        if submit.delivery is None:
            return None
        count, demand = submit.cell.spec.data_vms, demand_of(submit, DATA_VM)
        engine = self.prepare(submit.engine)
        if not engine.remote:  # this machine has one agent, and its data VMs are worker pools
            return DataVms([vms[0]] * count, vms[0], lambda: engine.here, lambda: None)
        return DataVms(
            self._own(run, engine, count, demand),
            self._own(run, self._local, 1, demand)[0],
            lambda: engine.here,
            partial(self._another, run, engine, demand),
        )

    def _own(self, run: str, engine: Engine, count: int, demand: Demand) -> list[Vm]:
        """Return ``count`` VMs for a run's data: those already leased to it, and new ones.

        New VMs are requested one at a time, since each of them may come up separately.
        """
        data = engine.remote
        own = [
            vm for vm in self._of if self._of[vm] is engine and vm.data == data and vm.run == run
        ]
        for _ in range(count - len(own)):
            own += self._lease(engine, run, demand, 1, data=data)
        return own

    def _another(self, run: str, engine: Engine, demand: Demand) -> Vm | None:
        try:
            return self._lease(engine, run, demand, 1, data=True)[0]
        except (EngineError, OSError):
            return None

    def keep(self, run: str, vms: list[Vm], idle: float) -> None:
        """Keep a run's ranks on its VMs ``vms``, and take back the run's other VMs."""
        for vm in vms:
            vm.run = KEPT
        self.release(run, idle)

    def release(self, run: str, idle: float = 0.0) -> None:
        """Take back all VMs of a run for the next one; a cluster's stay for ``idle`` seconds."""
        for vm in self._of:
            if vm.run == run:
                vm.run, vm.gpus = None, ()
                vm.until = time.monotonic() + idle if vm.remote else float("inf")
        self.step()

    # ------------------------------------------------------------ idle VMs

    @property
    def _idle(self) -> list[Vm]:
        return [vm for vm in self._of if vm.run is None]

    def step(self) -> None:
        """Release the idle VMs that are of no use any more.

        These are unfit VMs and, on a cluster, VMs that have been idle for too long or whose group
        is no longer complete.
        """
        now, idle = time.monotonic(), self._idle
        groups = {id(vm.group): vm.group for vm in idle if vm.remote}
        torn = {which for which, group in groups.items() if any(map(_leaves, group))}
        self.give_back(
            vm
            for vm in idle
            if vm.unfit or (vm.remote and (now >= vm.until or id(vm.group) in torn))
        )

    def release_idle(self) -> int:
        """Release the VMs that no run uses; return how many."""
        return self.give_back(self._idle)

    def give_back(self, vms: Iterable[Vm]) -> int:
        """Release those of these VMs that are not gone; return how many."""
        there = [vm for vm in vms if not vm.gone]
        for vm in reversed(there):  # a poller removes its last source fastest
            self._strike(vm)
            vm.end(self._worker)
            vm.gone = True
            del self._of[vm], self._by_key[vm.key]
        if there:
            self._worker.after(self._ended)
        return len(there)

    # ------------------------------------------------------------ heartbeats, loss and end

    def beat(self) -> list[Vm]:
        """Check from time to time whether remote agents can be sent messages; return the lost VMs.

        Silence is detected by ZeroMQ, which closes the connection.
        """
        if time.monotonic() < self._next_beat:
            return []
        self._next_beat = time.monotonic() + deadlines.BEAT
        for vm in self._of:
            if vm.remote and vm.up:
                vm.send(Alive())
        return [vm for vm in self._of if self._control.is_out_of_reach(vm.key)]

    def lose(self, vm: Vm, how: str) -> str:
        """Release a VM whose agent is gone or out of reach; return how it ended.

        ``how`` describes it, if that is already known.
        """
        how = how or vm.machine.how_it_ended()
        self.give_back([vm])
        return how

    def close(self) -> None:
        """Release all VMs, and end all engines."""
        for vm in self._of:
            if vm.remote:
                vm.send(Leave())
        self._control.flush()
        for engine in self.engines:
            engine.close()


def _leaves(vm: Vm) -> bool:
    """Return whether a VM of a cluster is lost to its group."""
    return vm.gone or vm.unfit or bool(vm.machine.ending) or not vm.up


class KeptRanks:
    """The ranks that a notebook keeps between two ``--keep`` cells, with their VMs."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._run: Run | None = None
        self._why_gone = "their supervisor ended"
        self._until = float("inf")

    def keep(self, run: Run) -> None:
        """Keep the ranks of a run that is over."""
        self._fleet.keep(run.name, run.vms, run.submit.engine.idle)
        self._run, self._until = run, time.monotonic() + run.submit.keep_idle
        if run.ranks.lost:
            self.end(run.ranks.lost)

    def find(self, submit: Submit) -> Run | None:
        """Return the run whose kept ranks a cell has to run in, if there is one.

        Raises:
            RanksGone: the cell needs variables that only the kept ranks had, and these ranks are
                gone.
            EngineError: the kept ranks differ from those that the cell asks for.
        """
        run = self._run if submit.cell.spec.keep else None
        if submit.left_to and (run is None or run.recorder.record.id != submit.left_to):
            raise RanksGone(RanksGone.in_words(self._why_gone))
        if run is not None:
            _check_alike(run, submit)
        return run

    def hand_over(self) -> None:
        """Record that another run has the ranks now."""
        self._leave("another cell has them")

    def _leave(self, why: str) -> None:
        if self._run is not None:
            self._run.recorder.note(kept_ranks=None, ranks_gone=why)
        self._run, self._until = None, float("inf")

    def end(self, why: str) -> int:
        """End the kept ranks, if there are any; return how many."""
        run = self._run
        if run is None:
            return 0
        self._leave(why)
        self._why_gone = why
        self._fleet.give_back(run.vms)
        return run.submit.cell.spec.world_size

    def lose(self, vm: Vm, run: Run | None, how: str) -> None:
        """End the kept ranks, since some of them died on this VM.

        A run that has ended, but whose client is still receiving its variables, is marked: its
        ranks will not be kept.
        """
        if self._run is not None and vm in self._run.vms:
            self.end(how)
        elif run is not None and run.stage in ENDED:
            run.ranks.lost = how

    def step(self) -> None:
        """End the kept ranks if no cell has used them in time."""
        if time.monotonic() > self._until:
            self.end("no cell came for the time that [keep] idle in taas.toml gives")


def _check_alike(run: Run, submit: Submit) -> None:
    mine, asked = _lasting(run.submit), _lasting(submit)
    other = next((name for name in mine if mine[name] != asked[name]), None)
    if other is not None:
        what = _IN_WORDS.get(other, f"--{other.replace('_', '-')}")
        raise EngineError(
            f"--keep: {counted(run.submit.cell.spec.world_size, 'rank')} of this notebook, kept"
            f" since {run.name}, have another {what} ({_said(mine[other])}) than this cell asks for"
            f" ({_said(asked[other])}). Type the header that made them, or %taas release, which"
            " ends them."
        )


def _lasting(submit: Submit) -> dict[str, object]:
    """Return the properties that two cells must have in common to run in the same ranks."""
    return {
        "world_size": submit.cell.spec.world_size,
        **submit.cell.spec.of_ranks(),
        "engine": f"{submit.engine.kind} {submit.engine.address}".rstrip(),
        "project": submit.workspace.project,
    }


def _said(value: object) -> str:
    return "none" if value in (None, (), "") else str(value)
