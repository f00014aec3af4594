"""``python -m taas.engines.ray_driver ADDRESS PATIENCE``: the supervisor's Ray driver, a process of its own.

Ray ends a driver whose node or head is lost, and blocks one whose cluster does not answer. Neither may happen to
the supervisor, so it has a child for it. The child ends with its standard input, or with the cluster's head; Ray
then takes back all it held: nothing here is detached. Beside the actor on the nodes (ray_vm), and ray_autoscaler, it
is the only module that imports ray.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import msgspec
import ray
from ray.exceptions import ActorUnavailableError, RayActorError, RayError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from taas.engines import AgentConfig, Demand, ray_vm, versions
from taas.engines.driven import Acquire, Asks, ClusterReport, ReleaseVm, Reports, VmReport
from taas.engines.ray_autoscaler import plans_for
from taas.engines.ray_cluster import SILENCE_SECONDS, bundle, count_fitting, reach, watch, what_is_missing
from taas.wire import short_folder
from taas.wording import first_line

_LOOK_SECONDS = 1.0
_PARTING_SECONDS = 8.0
_UNNOTICED_SECONDS = 60.0
"""So long may Ray take to notice that a node is lost; until then it places actors there."""
_RAYS_PATIENCE = "RAY_gcs_rpc_server_reconnect_timeout_s"
"""Ray's own variable: who sets it has a head that may be away for so long, and keeps what it knew."""


def _nodes() -> list[dict[str, float]]:
    return [node["Resources"] for node in ray.nodes() if node["Alive"]]


# ---------------------------------------------------------------- one VM


class _Vm:
    """A VM that the supervisor asked for."""

    def __init__(self, number: int, config: AgentConfig) -> None:
        self.number, self.config = number, config
        self.actor: Any = None
        self.serves = False
        self.released = False
        self.gone = threading.Event()

    def release(self) -> None:
        """Have its agent end, and take the node from it when it does not."""
        self.released = True
        if self.actor is not None and self.serves:
            with contextlib.suppress(RayError):
                self.actor.end.remote()
            timer = threading.Timer(_PARTING_SECONDS, self.kill)
            timer.daemon = True
            timer.start()
        else:
            self.kill()

    def kill(self) -> None:
        """End its actor; the agent reads end-of-file then."""
        if self.actor is not None and not self.gone.is_set():
            with contextlib.suppress(Exception):  # its node, or the cluster, is gone
                ray.kill(self.actor)


def _wait_until_gone(vms: list[_Vm]) -> None:
    deadline = time.monotonic() + _PARTING_SECONDS
    for vm in vms:
        vm.gone.wait(max(0.0, deadline - time.monotonic()))


class _CannotBeHadError(Exception):
    """The cluster does not give a VM; the text says why."""


class Group:
    """VMs that were asked for together: a placement group, and an actor in each of its bundles."""

    def __init__(self, demand: Demand, report: Callable[[Reports], None]) -> None:
        self._demand, self._report = demand, report
        self._bundles: dict[int, int] = {}
        self._placement: PlacementGroup | None = None
        self._wanted: dict[str, float] = {}
        self._left = 0
        self._lock = threading.Lock()

    def take(self, ask: Acquire) -> list[_Vm]:
        """Return what is to be had by :meth:`run`: a new group's VMs, or such as take the places of lost ones.

        Those must be this group's, and others of it there still; else nothing is returned. Ray moves a bundle whose
        node is lost to another node by itself, and no other group could have that node.
        """
        with self._lock:
            if not self._bundles:
                places = list(range(len(ask.machines)))
            elif ask.lost and self._left and self._bundles.keys() >= set(ask.lost):
                places = [self._bundles[number] for number in ask.lost]
            else:
                return []
            self._bundles |= dict(zip(ask.machines, places, strict=True))
            self._left += len(places)
        return [_Vm(number, config) for number, config in zip(ask.machines, ask.configs, strict=True)]

    @property
    def over(self) -> bool:
        """Whether all its VMs are gone."""
        return not self._left

    def run(self, vms: list[_Vm], leaving: list[_Vm]) -> None:
        """Get VMs, as soon as those that are leaving are gone, and serve until all of them are; a thread's."""
        _wait_until_gone(leaving)
        try:
            new = self._placement is None
            why_not = self._wait(self._placement or self._place(_nodes(), len(vms)), vms, new=new)
        except Exception as error:
            why_not = f"{type(error).__name__}: {error}"
        if why_not is not None:
            for vm in vms:
                self._gone(vm, why_not, "EngineError")
            return
        for vm in vms:
            threading.Thread(target=self._serve, args=(vm,), daemon=True).start()

    def _place(self, nodes: list[dict[str, float]], count: int) -> PlacementGroup:
        self._wanted = bundle(self._demand, nodes)
        self._placement = placement_group([self._wanted] * count, strategy="STRICT_SPREAD")
        return self._placement

    def _wait(self, placement: PlacementGroup, vms: list[_Vm], *, new: bool = False) -> str | None:
        """Wait until all bundles of the placement group have nodes; returns why they will not."""
        deadline = time.monotonic() + self._demand.wait
        said = ""
        while not placement.wait(_LOOK_SECONDS):
            if all(vm.released for vm in vms):
                return "given back"
            nodes = _nodes()
            if new and bundle(self._demand, nodes) != self._wanted:  # nodes came, with GPUs or without
                remove_placement_group(placement)
                placement = self._place(nodes, len(vms))
            size = len(set(self._bundles.values()))
            plans = plans_for(ray.get_runtime_context().gcs_address, placement.id.hex())
            missing = what_is_missing(self._wanted, size, nodes, ray.available_resources(), plans.does)
            if plans.never and not count_fitting(self._wanted, nodes):  # else one may be free some time
                return f"{plans.never}: {missing}"
            if time.monotonic() > deadline:
                return (
                    f"the Ray cluster did not give what the run asks for within {self._demand.wait:g} s "
                    f"([engine] wait in taas.toml): {missing}"
                )
            if missing != said:
                said = missing
                for vm in vms:
                    self._report(VmReport(vm.number, "waiting", missing))
        return None

    def _start_actor(self, vm: _Vm) -> Any:
        assert self._placement is not None
        wanted = self._wanted
        others = {name: amount for name, amount in wanted.items() if name not in ("GPU", "CPU")}
        return (
            ray.remote(ray_vm.VmActor)
            .options(
                num_cpus=wanted.get("CPU", 0),
                num_gpus=wanted.get("GPU", 0),
                resources=others,
                max_concurrency=4,
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    self._placement, placement_group_bundle_index=self._bundles[vm.number]
                ),
            )
            .remote()
        )

    def _come(self, vm: _Vm) -> dict[str, Any]:
        """Start a VM's actor, and return what it sees there; again, where its node is lost and Ray finds out only now.

        Raises:
            _CannotBeHadError: the cluster does not give it.
            RayActorError: it was lost.
        """
        until = time.monotonic() + _UNNOTICED_SECONDS
        while True:
            vm.actor = self._start_actor(vm)
            look = vm.actor.look.remote()
            try:
                while not ray.wait([look], timeout=_LOOK_SECONDS)[0]:
                    self._wait_for_node(vm)
                seen: dict[str, Any] = ray.get(look)
            except RayActorError:
                if vm.released or time.monotonic() > until:
                    raise
                vm.kill()
                time.sleep(_LOOK_SECONDS)
                self._wait_for_node(vm)
            else:
                return seen

    def _wait_for_node(self, vm: _Vm) -> None:
        assert self._placement is not None
        if why_not := self._wait(self._placement, [vm]):
            raise _CannotBeHadError(why_not)

    def _serve(self, vm: _Vm) -> None:
        how, error = "lost", "RunLost"
        try:
            seen = self._come(vm)
            differing = versions.differing_versions(seen["versions"], versions.versions())
            host = seen["host"]
            if differing:
                how, error = f"{differing} (node {host})", "VersionMismatch"
            elif not vm.released:
                vm.serves = True
                self._report(VmReport(vm.number, "there", host=host, gpus=tuple(seen["gpus"])))
                log = ray.get(vm.actor.serve.remote(msgspec.json.encode(vm.config)))
                how = f"ended by itself; its log says: {log}" if log else "ended"
        except _CannotBeHadError as why_not:
            how, error = str(why_not), "EngineError"
        except ActorUnavailableError:
            how = "lost: Ray's connection to its node broke"
        except RayActorError as lost:
            how = f"lost: {first_line(lost)}"
        except Exception as broken:
            how = f"lost: {type(broken).__name__}: {broken}"
        self._gone(vm, how, error)

    def _gone(self, vm: _Vm, how: str, error: str) -> None:
        vm.kill()
        with self._lock:
            self._left -= 1
            last = self._left == 0
        if last and self._placement is not None:
            with contextlib.suppress(Exception):
                remove_placement_group(self._placement)
        self._report(VmReport(vm.number, "gone", how, error=error))
        vm.gone.set()


# ---------------------------------------------------------------- the driver


class Driver:
    """Serves one supervisor.

    Attributes:
        over: set when the supervisor wants nothing any more.
    """

    def __init__(self, out: int) -> None:
        self._out = out
        self._lock = threading.Lock()
        self._vms: dict[int, _Vm] = {}
        self._leaving: list[_Vm] = []
        self._groups: list[Group] = []
        self.over = threading.Event()

    def report(self, line: Reports) -> None:
        """Tell the supervisor something; it may be gone."""
        with self._lock, contextlib.suppress(OSError):
            data = memoryview(msgspec.json.encode(line) + b"\n")
            while data:
                data = data[os.write(self._out, data) :]

    def serve(self) -> None:
        """Do what standard input says, until its end; then give all VMs back."""
        read = msgspec.json.Decoder(Asks)
        for line in sys.stdin.buffer:
            ask = read.decode(line)
            if isinstance(ask, Acquire):
                self._acquire(ask)
            elif isinstance(ask, ReleaseVm) and ask.machine in self._vms:
                self._release(ask.machine)
        self.over.set()
        for number in list(self._vms):
            self._release(number)
        _wait_until_gone(self._leaving)

    def _release(self, number: int) -> None:
        vm = self._vms.pop(number)
        self._leaving = [one for one in self._leaving if not one.gone.is_set()] + [vm]
        vm.release()

    def _acquire(self, ask: Acquire) -> None:
        self._groups = [group for group in self._groups if not group.over]
        for group in self._groups:
            if vms := group.take(ask):
                break
        else:
            group = Group(ask.demand, self.report)
            vms = group.take(ask)
            self._groups.append(group)
        self._vms |= {vm.number: vm for vm in vms}
        threading.Thread(target=group.run, args=(vms, self._leaving), daemon=True).start()


def _connect(address: str, patience: float) -> str:
    """Become a driver of the cluster; returns this node's address in it.

    Args:
        address: where it is, or ``auto``.
        patience: seconds for which it is tried again.
    """
    deadline = time.monotonic() + patience
    while True:
        try:
            reach(address, deadline - time.monotonic())
            ray.init(address=address, namespace="taas", log_to_driver=False)
            return str(ray.util.get_node_ip_address())
        except Exception:
            if time.monotonic() > deadline:
                raise
            ray.shutdown()


def _watch_head(address: str, driver: Driver) -> None:
    """End this process when the head is lost; a thread's. Ray itself waits for a minute."""
    worker: Any = ray._private.worker.global_worker
    head = worker.gcs_client
    this_node = ray.NodeID.from_hex(ray.get_runtime_context().get_node_id())

    def ask(seconds: float) -> bool | None:
        try:
            return bool(head.check_alive([this_node], timeout=seconds)[0])
        except RayError as error:
            return False if "WrongClusterID" in str(error) else None

    silence = float(os.environ.get(_RAYS_PATIENCE) or SILENCE_SECONDS)
    why = watch(ask, silence, driver.over)
    if why:
        driver.report(ClusterReport(why_not=f"the head of the Ray cluster at {address} {why}"))
        os._exit(1)


def main() -> None:
    """Become a driver of the cluster, and serve."""
    out = os.dup(1)
    os.dup2(2, 1)  # Ray prints
    address, patience = sys.argv[1], float(sys.argv[2])
    driver = Driver(out)
    try:
        for module in (ray_vm, versions, short_folder):
            ray.cloudpickle.register_pickle_by_value(module)
        driver.report(ClusterReport(_connect(address, patience)))
    except Exception as error:
        driver.report(ClusterReport(why_not=first_line(error)))
        return
    where = ray.get_runtime_context().gcs_address
    threading.Thread(target=_watch_head, args=(where, driver), daemon=True).start()
    driver.serve()
    ray.shutdown()
    os._exit(0)  # threads that wait for lost nodes must not hold it


if __name__ == "__main__":
    main()
