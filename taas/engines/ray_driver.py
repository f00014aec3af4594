"""``python -m taas.engines.ray_driver ADDRESS PATIENCE``: the supervisor's Ray driver, a process of its own.

Ray ends a driver whose node or head is lost, and blocks one whose cluster does not answer. Neither may happen to
the supervisor, so it has a child for it. The child ends with its standard input, or with the cluster's head; Ray
then takes back all it held: nothing here is detached. Beside the actor on the nodes (ray_vm) it is the only module that
imports ray.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
import time
from typing import Any

import msgspec
import ray
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from taas.engines import AgentConfig, ray_vm, versions
from taas.engines.driven import Acquire, Asks, ClusterReport, Reporter, VmReport
from taas.engines.ray import bundle, what_is_missing
from taas.errors import EngineError
from taas.wire import curve
from taas.wording import first_line

_LOOK_SECONDS = 1.0
_PARTING_SECONDS = 8.0
_ATTEMPT_SECONDS, _PAUSE_SECONDS = 3.0, 0.5
_RAYS_PATIENCE = "RAY_gcs_rpc_server_reconnect_timeout_s"
"""Ray's own variable: so many seconds may its head be away, before Ray ends this process."""
_SILENCE_SECONDS = 9


def _nodes() -> list[dict[str, float]]:
    return [node["Resources"] for node in ray.nodes() if node["Alive"]]


# ---------------------------------------------------------------- VMs


class _Vm:
    """A VM that the supervisor asked for."""

    def __init__(self, number: int, config: AgentConfig) -> None:
        self.number, self.config = number, config
        self.actor: Any = None
        self.released = False
        self.gone = threading.Event()

    def release(self) -> None:
        """Have its agent end, and take the node from it when it does not. Twice is harmless."""
        if self.released:
            return
        self.released = True
        if self.actor is not None:
            with contextlib.suppress(RayError):
                self.actor.end.remote()
            timer = threading.Timer(_PARTING_SECONDS, self.kill)
            timer.daemon = True
            timer.start()

    def kill(self) -> None:
        """End its actor; the agent reads end-of-file then."""
        if self.actor is not None and not self.gone.is_set():
            with contextlib.suppress(Exception):  # its node, or the cluster, is gone
                ray.kill(self.actor)


class Group:
    """VMs that were asked for together: a placement group, and an actor in each of its bundles."""

    def __init__(self, ask: Acquire, report: Reporter) -> None:
        self.vms = [_Vm(number, config) for number, config in zip(ask.machines, ask.configs, strict=True)]
        self._demand, self._report = ask.demand, report
        self._placement: PlacementGroup | None = None
        self._wanted: dict[str, float] = {}
        self._left = len(self.vms)
        self._lock = threading.Lock()

    def run(self) -> None:
        """Get the VMs, and serve until all of them are gone; a thread's."""
        try:
            self._wait()
        except Exception as error:
            why_not = str(error) if isinstance(error, EngineError) else f"{type(error).__name__}: {error}"
            for vm in self.vms:
                self._gone(vm, why_not, "EngineError")
            return
        for place, vm in enumerate(self.vms):
            threading.Thread(target=self._serve, args=(vm, place), daemon=True).start()

    def _wait(self) -> None:
        """Ask for a placement group, and wait until all its bundles have nodes.

        Raises:
            EngineError: the cluster does not give them.
        """
        deadline, said = time.monotonic() + self._demand.wait, ""
        self._wanted = bundle(self._demand, _nodes())
        self._placement = placement_group([self._wanted] * len(self.vms), strategy="STRICT_SPREAD")
        while not self._placement.wait(_LOOK_SECONDS):
            if all(vm.released for vm in self.vms):
                raise EngineError("given back")
            missing = what_is_missing(self._wanted, len(self.vms), _nodes(), ray.available_resources())
            if time.monotonic() > deadline:
                raise EngineError(
                    f"the Ray cluster did not give what the run asks for within {self._demand.wait:g} s "
                    f"([engine] wait in taas.toml): {missing}"
                )
            if missing != said:
                said = missing
                for vm in self.vms:
                    self._report(VmReport(vm.number, "waiting", missing))

    def _start_actor(self, place: int) -> Any:
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
                    self._placement, placement_group_bundle_index=place
                ),
            )
            .remote()
        )

    def _serve(self, vm: _Vm, place: int) -> None:
        how, error = "lost", "RunLost"
        try:
            vm.actor = self._start_actor(place)
            self._report(VmReport(vm.number, "waiting", "its agent"))
            line = msgspec.json.encode(vm.config)
            how, error = ray.get(vm.actor.serve.remote(line, versions.versions()))
        except Exception as lost:
            how = f"lost: {first_line(lost)}"
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


def _serve_supervisor(report: Reporter) -> None:
    """Do what standard input says, until its end; then give all VMs back."""
    vms: dict[int, _Vm] = {}
    read = msgspec.json.Decoder(Asks)
    for line in sys.stdin.buffer:
        ask = read.decode(line)
        if isinstance(ask, Acquire):
            group = Group(ask, report)
            vms |= {vm.number: vm for vm in group.vms}
            threading.Thread(target=group.run, daemon=True).start()
        else:
            vms[ask.machine].release()
    deadline = time.monotonic() + _PARTING_SECONDS
    for vm in vms.values():
        vm.release()
    for vm in vms.values():
        vm.gone.wait(max(0.0, deadline - time.monotonic()))


def _connect(address: str, patience: float) -> str:
    """Become a driver of the cluster, for so many seconds if need be; returns this node's address in it."""
    deadline = time.monotonic() + patience
    host, _, port = address.rpartition(":")  # of ``auto`` none
    while True:
        try:
            if host:  # Ray's own attempt takes a minute, or ends the process
                socket.create_connection((host.strip("[]"), int(port)), _ATTEMPT_SECONDS).close()
            ray.init(address=address, namespace="taas", log_to_driver=False)
            return str(ray.util.get_node_ip_address())
        except Exception:
            if time.monotonic() > deadline:
                raise
            ray.shutdown()
            time.sleep(_PAUSE_SECONDS)


def main() -> None:
    """Become a driver of the cluster, and serve."""
    report = Reporter()
    os.environ.setdefault(_RAYS_PATIENCE, str(_SILENCE_SECONDS))
    try:
        for module in (ray_vm, versions, curve):
            ray.cloudpickle.register_pickle_by_value(module)
        report(ClusterReport(_connect(sys.argv[1], float(sys.argv[2]))))
    except Exception as error:
        report(ClusterReport(why_not=first_line(error)))
        return
    _serve_supervisor(report)
    ray.shutdown()
    os._exit(0)  # threads that wait for lost nodes must not hold it


if __name__ == "__main__":
    main()
