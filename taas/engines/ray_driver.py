"""``python -m taas.engines.ray_driver ADDRESS PATIENCE``: the supervisor's Ray driver.

Ray ends a driver whose node or head is lost, and blocks one whose cluster does not reply. Neither
may happen to the supervisor, so the driver is a child of the supervisor. The child ends when its
standard input is closed, or with the head of the cluster. Ray then takes back all resources that
the child held, because nothing here is detached. Apart from the actor on the nodes (ray_vm), only
this module imports ray.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import re
import socket
import sys
import threading
import time
from collections import Counter
from typing import Any

import msgspec
import ray
from ray.exceptions import ActorUnavailableError, RayActorError, RayError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from taas import versions
from taas.base.wording import first_line
from taas.delivery.failures import chain_of
from taas.engines import ray_vm
from taas.engines.driven import Acquire, Asks, ClusterReport, Reporter, VmReport
from taas.engines.ray import bundle, count_fitting, what_is_missing
from taas.errors import EngineError
from taas.protocol import curve
from taas.protocol.engines import AgentConfig, Demand

_LOOK_SECONDS = 1.0
_PARTING_SECONDS = 8.0
_UNNOTICED_SECONDS = 60.0
"""Seconds until Ray notices that a node is lost; until then it places actors on that node."""
_ATTEMPT_SECONDS, _PAUSE_SECONDS = 3.0, 0.5
_ASK_EVERY_SECONDS, _ANSWER_SECONDS = 1.5, 3.0
_SILENCE_SECONDS = 9.0
"""Seconds after which a head that does not reply is given up."""
_RAYS_PATIENCE = "RAY_gcs_rpc_server_reconnect_timeout_s"
"""If this environment variable of Ray is set, the head may be away for that many seconds, and keeps
its state.
"""
_NEVER = (
    "no available node types of Ray's autoscaler, within its limits, can fulfill the placement"
    " group"
)
_OF_TOKEN = re.compile(r"auth\w* ?token|authorization header", re.IGNORECASE)
"""Matches Ray's errors if a cluster has a token, and this process has none or a different one."""
_SET_IT = (
    "Start Jupyter with RAY_AUTH_MODE=token, and with the cluster's token in RAY_AUTH_TOKEN, or in"
    " the file that RAY_AUTH_TOKEN_PATH names"
)


def inner(module: str, *names: str) -> Any:
    """Return an object from inside one of Ray's modules, for which Ray promises no stability.

    Raises:
        EngineError: this version of Ray does not have the object.
    """
    try:
        found: Any = importlib.import_module(module)
        for name in names:
            found = getattr(found, name)
    except (ImportError, AttributeError) as error:
        raise EngineError(
            f"Ray {ray.__version__} has no {'.'.join((module, *names))}, which taas asks for how"
            f" the cluster is ({first_line(error)}). Install an older version of Ray, 2.50 or"
            " later, here and on all nodes, or a newer taas"
        ) from None
    return found


def _nodes() -> list[dict[str, float]]:
    return [node["Resources"] for node in ray.nodes() if node["Alive"]]


def _autoscaler_plans(group: str) -> tuple[bool, str]:
    """Return whether Ray's autoscaler can never make nodes for a group, and what it is doing.

    ``group`` is the id of a placement group. This works for autoscaler v2, which KubeRay uses and
    which ``RAY_enable_autoscaler_v2=1`` selects; v1 provides no such data. The report is Ray's own
    (``src/ray/protobuf/autoscaler.proto``), and no public function of Ray returns all of it.
    """
    reply = inner("ray.core.generated.autoscaler_pb2", "GetClusterStatusReply")()
    client = inner("ray._raylet", "GcsClient")(address=ray.get_runtime_context().gcs_address)
    with contextlib.suppress(RayError):  # another thread watches for the loss of the head
        reply.ParseFromString(client.get_cluster_status(timeout_s=_ANSWER_SECONDS))
    state = reply.autoscaling_state
    coming = Counter(one.ray_node_type_name for one in state.pending_instances)
    for asked in state.pending_instance_requests:
        coming[asked.ray_node_type_name] += asked.count
    does = [f"Ray's autoscaler starts {count} {kind}" for kind, count in sorted(coming.items())]
    does += [
        f"it did not get {one.ray_node_type_name}: {one.reason}"
        for one in state.failed_instance_requests
    ]
    never = any(group in one.details for one in state.infeasible_gang_resource_requests)
    return never, "; ".join(does)


# ---------------------------------------------------------------- VMs


class _Vm:
    """A VM that the supervisor has requested."""

    def __init__(self, number: int, config: AgentConfig) -> None:
        self.number, self.config = number, config
        self.actor: Any = None
        self.serves = False
        self.released = False
        self.gone = threading.Event()

    def release(self) -> None:
        """Let its agent end; if the agent does not end, free its node."""
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
        """End its actor, which closes the agent's standard input."""
        if self.actor is not None and not self.gone.is_set():
            with contextlib.suppress(Exception):  # its node, or the cluster, is gone
                ray.kill(self.actor)


def _wait_until_gone(vms: list[_Vm]) -> None:
    deadline = time.monotonic() + _PARTING_SECONDS
    for vm in vms:
        vm.gone.wait(max(0.0, deadline - time.monotonic()))


class Group:
    """VMs that were requested together: a placement group with an actor in each of its bundles."""

    def __init__(self, demand: Demand, report: Reporter) -> None:
        self._demand, self._report = demand, report
        self._bundles: dict[int, int] = {}
        self._placement: PlacementGroup | None = None
        self._wanted: dict[str, float] = {}
        self._left = 0
        self._lock = threading.Lock()

    def take(self, ask: Acquire) -> list[_Vm]:
        """Return the VMs that :meth:`run` has to get.

        They are those of a new group, or replacements for lost ones.

        The lost VMs must belong to this group, and other VMs of the group must still exist;
        otherwise nothing is returned. Ray itself moves a bundle whose node is lost to another node,
        and no other group could have that node.
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
        return [
            _Vm(number, config) for number, config in zip(ask.machines, ask.configs, strict=True)
        ]

    @property
    def over(self) -> bool:
        """Return whether all its VMs are gone."""
        return not self._left

    def run(self, vms: list[_Vm], leaving: list[_Vm]) -> None:
        """Get VMs, once those that are leaving are gone; serve until all of them are gone.

        This runs in a thread.
        """
        _wait_until_gone(leaving)
        try:
            if self._placement is None:
                self._place(_nodes(), len(vms))
                self._wait(vms, new=True)
            else:
                self._wait(vms)
        except Exception as error:
            why_not = (
                str(error) if isinstance(error, EngineError) else f"{type(error).__name__}: {error}"
            )
            for vm in vms:
                self._gone(vm, why_not, "EngineError")
            return
        for vm in vms:
            threading.Thread(target=self._serve, args=(vm,), daemon=True).start()

    def _place(self, nodes: list[dict[str, float]], count: int) -> None:
        self._wanted = bundle(self._demand, nodes)
        self._placement = placement_group([self._wanted] * count, strategy="STRICT_SPREAD")

    def _wait(self, vms: list[_Vm], *, new: bool = False) -> None:
        """Wait until all bundles of the placement group have nodes.

        Raises:
            EngineError: the cluster does not provide them.
        """
        deadline = time.monotonic() + self._demand.wait
        said = ""
        assert self._placement is not None
        while not self._placement.wait(_LOOK_SECONDS):
            if all(vm.released for vm in vms):
                raise EngineError("given back")
            nodes = _nodes()
            # nodes have joined, so it is known now whether they have GPUs
            if new and bundle(self._demand, nodes) != self._wanted:
                remove_placement_group(self._placement)
                self._place(nodes, len(vms))
            size = len(set(self._bundles.values()))
            never, does = _autoscaler_plans(self._placement.id.hex())
            missing = what_is_missing(self._wanted, size, nodes, ray.available_resources(), does)
            if never and not count_fitting(self._wanted, nodes):  # otherwise a node may become free
                raise EngineError(f"{_NEVER}: {missing}")
            if time.monotonic() > deadline:
                raise EngineError(
                    "the Ray cluster did not give what the run asks for within"
                    f" {self._demand.wait:g} s ([engine] wait in taas.toml): {missing}"
                )
            if missing != said:
                said = missing
                for vm in vms:
                    self._report(VmReport(vm.number, "waiting", missing))

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

    def _come(self, vm: _Vm) -> None:
        """Start a VM's actor; start it again if Ray only now notices that its node is lost.

        Raises:
            EngineError: the cluster does not provide the VM.
            RayActorError: the VM was lost.
        """
        until = time.monotonic() + _UNNOTICED_SECONDS
        while True:
            vm.actor = self._start_actor(vm)
            ready = vm.actor.__ray_ready__.remote()
            try:
                while not ray.wait([ready], timeout=_LOOK_SECONDS)[0]:
                    self._wait([vm])
                ray.get(ready)
            except RayActorError:
                if vm.released or time.monotonic() > until:
                    raise
                vm.kill()
                time.sleep(_LOOK_SECONDS)
                self._wait([vm])
            else:
                return

    def _serve(self, vm: _Vm) -> None:
        how, error = "lost", "RunLost"
        try:
            self._come(vm)
            if not vm.released:
                vm.serves = True
                self._report(VmReport(vm.number, "waiting", "its agent"))
                line = msgspec.json.encode(vm.config)
                how, error = ray.get(vm.actor.serve.remote(line, versions.versions()))
        except EngineError as why_not:
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
    """Serves one supervisor; ``over`` is set when the supervisor needs nothing any more."""

    def __init__(self, report: Reporter) -> None:
        self.report = report
        self._vms: dict[int, _Vm] = {}
        self._leaving: list[_Vm] = []
        self._groups: list[Group] = []
        self.over = threading.Event()

    def serve(self) -> None:
        """Carry out the requests on standard input until its end; then release all VMs."""
        read = msgspec.json.Decoder(Asks)
        for line in sys.stdin.buffer:
            ask = read.decode(line)
            if isinstance(ask, Acquire):
                self._acquire(ask)
            elif ask.machine in self._vms:
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
    """Connect to the cluster within ``patience`` seconds; return this node's address in it."""
    deadline = time.monotonic() + patience
    host, _, port = address.rpartition(":")  # empty for ``auto``
    while True:
        try:
            if host:  # tried first, because Ray's own attempt takes a minute, or ends the process
                socket.create_connection((host.strip("[]"), int(port)), _ATTEMPT_SECONDS).close()
            ray.init(address=address, namespace="taas", log_to_driver=False)
            return str(ray.util.get_node_ip_address())
        except Exception:
            if time.monotonic() > deadline:
                raise
            ray.shutdown()
            time.sleep(_PAUSE_SECONDS)


def _why_not(error: Exception) -> ClusterReport:
    """Return the report of an error that kept this process from connecting.

    Ray's own error may contain nothing except the cluster's address. The first error in the chain
    has the cause.
    """
    first, *later = reversed([one for one, _ in chain_of(error)])
    for one in (first, *later):
        if _OF_TOKEN.search(str(one)):
            fact = first_line(one).rstrip(".")
            return ClusterReport(why_not=f"{fact}. {_SET_IT}", advised=True)
    cause = f": {first_line(first)}" if later else ""
    return ClusterReport(why_not=f"{first_line(error)}{cause}")


def _watch_head(driver: Driver, head: Any) -> None:
    """End this process when the head is lost.

    This runs in a thread, because Ray itself would wait for a minute.
    """
    context = ray.get_runtime_context()
    this_node = ray.NodeID.from_hex(context.get_node_id())
    silence = float(os.environ.get(_RAYS_PATIENCE) or _SILENCE_SECONDS)
    heard, why = time.monotonic(), ""
    while not why:
        if driver.over.wait(_ASK_EVERY_SECONDS):
            return
        left = max(heard + silence - time.monotonic(), 0.1)
        try:
            belongs = head.check_alive([this_node], timeout=min(_ANSWER_SECONDS, left))[0]
        except RayError as error:
            belongs = "WrongClusterID" not in str(error)
            if belongs and time.monotonic() > heard + silence:
                why = f"has not answered for {silence:g} s"
        else:
            heard = time.monotonic()
        if not belongs:
            why = "was started anew, or counts this machine as lost"
    driver.report(
        ClusterReport(why_not=f"the head of the Ray cluster at {context.gcs_address} {why}")
    )
    os._exit(1)


def main() -> None:
    """Connect to the cluster, and serve."""
    report = Reporter()
    try:
        for module in (ray_vm, versions, curve):
            ray.cloudpickle.register_pickle_by_value(module)
        here = _connect(sys.argv[1], float(sys.argv[2]))
        # every connected driver has it
        head = inner("ray._private.worker", "global_worker", "gcs_client")
        report(ClusterReport(here))
    except EngineError as error:
        report(ClusterReport(why_not=str(error), advised=True))
        return
    except Exception as error:
        report(_why_not(error))
        return
    driver = Driver(report)
    threading.Thread(target=_watch_head, args=(driver, head), daemon=True).start()
    driver.serve()
    ray.shutdown()
    os._exit(0)  # threads that wait for lost nodes must not keep the process alive


if __name__ == "__main__":
    main()
