"""``python -m taas.engines.slurm_driver SETTINGS PATIENCE``: the supervisor's Slurm driver, a process of its own.

It submits jobs, follows them in the queue, and is who their nodes (slurm_vm) speak with: over a CURVE socket of its own, with
a key pair for each job. It ends with its standard input, and gives all jobs back; nodes that miss it end their agents and
themselves, and with the last one a job ends.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import sys
import time
from collections.abc import Iterable

import msgspec
import zmq

from taas.engines import AgentConfig
from taas.engines.driven import Acquire, Asks, ClusterReport, ReleaseVm, Reporter, VmReport
from taas.engines.slurm import (
    GONE,
    WAITS,
    Settings,
    Standing,
    elapsed,
    look,
    own_address,
    script,
    seconds_of,
    settings_of,
    slurm,
)
from taas.engines.versions import differing_versions, versions
from taas.errors import EngineError
from taas.wire.curve import Gate, make_router, set_heartbeat
from taas.wire.framing import Alive, Leave, MessageReader, pack
from taas.wire.poll_loop import PollLoop
from taas.wording import counted

_SBATCH = "sbatch --parsable --no-kill --no-requeue --job-name=taas --output=/dev/null --chdir=/ --ntasks-per-node=1"
_LOOK_SECONDS, _QUIET_SECONDS = 2.0, 30.0
"""Between two looks at the queue: while something is awaited, and while nothing is."""
_LOSS_LOOK_SECONDS, _LOSS_SECONDS = 0.3, 1.2
"""Between two looks after a loss, and how long Slurm has to say why: the supervisor waits a little longer."""
_BEAT_SECONDS = 1.0
_PARTING_SECONDS = 9.0
_NOTICE_SECONDS = 60.0
"""So long before the time limit a cell is interrupted; half the limit, where that is shorter."""


# ---------------------------------------------------------------- one job


class _JobNode:
    """A node of a job, as the supervisor asked for it."""

    def __init__(self, number: int, config: AgentConfig) -> None:
        self.number, self.config = number, config
        self.route, self.node = b"", ""
        self.released = self.gone = False
        self.lost, self.lost_at = "", 0.0


class _Job:
    """A Slurm job."""

    def __init__(self, ask: Acquire) -> None:
        self.vms = [
            _JobNode(number, config) for number, config in zip(ask.machines, ask.configs, strict=True)
        ]
        self.demand, self.asked = ask.demand, time.monotonic()
        self.id = self.said = ""
        self.notice_at = self.end_by = float("inf")
        self.noticed = False

    @property
    def left(self) -> list[_JobNode]:
        """The VMs that somebody still wants."""
        return [vm for vm in self.vms if not vm.released and not vm.gone]


# ---------------------------------------------------------------- the driver


class SlurmDriver:
    """Serves one supervisor on a machine that nodes reach as ``host``."""

    def __init__(self, report: Reporter, settings: Settings, host: str) -> None:
        self._report, self._settings = report, settings
        self._jobs: dict[str, _Job] = {}
        self._context = zmq.Context()
        self._gate = Gate(self._context, lambda key: key.decode() in self._jobs)
        public, secret = zmq.curve_keypair()
        self._socket = make_router(self._context, public, secret)
        set_heartbeat(self._socket)
        port = self._socket.bind_to_random_port(f"tcp://{host}")
        self._words = {"endpoint": f"tcp://{host}:{port}", "server_key": public.decode()}
        self._read = MessageReader(VmReport)
        self._ask = msgspec.json.Decoder(Asks)
        self._unread = b""
        self._over_by = float("inf")
        self._next_look = self._next_beat = 0.0
        self._loop = PollLoop()
        self._loop.on(self._gate.socket, self._gate.answer)
        self._loop.on(self._socket, self._hear)
        self._loop.on(sys.stdin.fileno(), self._hear_supervisor)

    def serve(self) -> None:
        """Do what standard input says, until its end; then give all jobs back."""
        while time.monotonic() < self._over_by and (self._jobs or self._over_by == float("inf")):
            self._loop.step(self._wait())
            self._beat()
            self._look()
        self._cancel(self._jobs.values())

    def _wait(self) -> float | None:
        if not self._jobs:
            return None
        return max(0.0, min(self._next_look, self._next_beat) - time.monotonic())

    # ------------------------------------------------------------ what the supervisor asks

    def _hear_supervisor(self) -> None:
        data = os.read(sys.stdin.fileno(), 1 << 16)
        *lines, self._unread = (self._unread + data).split(b"\n")
        for line in lines:
            ask = self._ask.decode(line)
            if isinstance(ask, Acquire):
                self._acquire(ask)
            else:
                self._release(ask)
        if not data:
            self._loop.off(sys.stdin.fileno())
            self._over_by = time.monotonic() + _PARTING_SECONDS
            for job in list(self._jobs.values()):
                for vm in job.vms:
                    self._let_go(vm)
                self._end_unwanted(job)

    def _acquire(self, ask: Acquire) -> None:
        job = _Job(ask)
        public, secret = (key.decode() for key in zmq.curve_keypair())
        words = {**self._words, "public_key": public, "secret_key": secret}
        asked = (f"--nodes={len(job.vms)}", *self._settings.asked_for(ask.demand))
        try:
            said = slurm(*_SBATCH.split(), *asked, given=script(self._settings.python, words))
        except EngineError as error:
            why = f"Slurm refuses the job: {error}. It was asked for {shlex.join(asked)}."
            for vm in job.vms:
                self._gone(vm, why, "EngineError")
            return
        job.id = said.strip().partition(";")[0]
        self._jobs[public] = job
        self._next_look = time.monotonic() + _LOSS_LOOK_SECONDS

    def _release(self, ask: ReleaseVm) -> None:
        for job in list(self._jobs.values()):
            for vm in job.vms:
                if vm.number == ask.machine:
                    self._let_go(vm)
                    self._end_unwanted(job)

    def _let_go(self, vm: _JobNode) -> None:
        vm.released = True
        if vm.route:
            self._tell(vm, Leave())

    def _end_unwanted(self, job: _Job) -> None:
        """End a job of which nobody wants anything: at once if no node came, else when it has had its time to end by itself."""
        if job.left:
            return
        came = any(vm.route for vm in job.vms)
        there = any(vm.route and not vm.gone for vm in job.vms)
        patience = _PARTING_SECONDS - 1 if there else _LOOK_SECONDS if came else 0.0
        job.end_by = min(job.end_by, time.monotonic() + patience)
        self._next_look = 0.0

    def _cancel(self, jobs: Iterable[_Job]) -> None:
        if ids := [job.id for job in jobs]:
            with contextlib.suppress(EngineError):  # they are over; or Slurm is, and nodes end by themselves
                slurm("scancel", *ids)

    # ------------------------------------------------------------ what nodes say

    def _hear(self) -> None:
        while self._socket.poll(0):
            route, frame = self._socket.recv_multipart(copy=False)
            job = self._jobs.get(str(frame.get("User-Id")))
            report: VmReport = self._read(frame.buffer)
            if job is None or not 0 <= report.machine < len(job.vms):
                continue  # it was struck meanwhile
            vm = job.vms[report.machine]
            if report.state == "there":
                self._come(job, vm, route.bytes, report)
            elif vm.route == route.bytes:
                self._lose(job, vm, report.text)

    def _come(self, job: _Job, vm: _JobNode, route: bytes, there: VmReport) -> None:
        vm.route, vm.node = route, there.node
        if differing := differing_versions(there.versions, versions()):
            self._tell(vm, Leave())
            self._gone(vm, f"{differing} (node {there.node})", "VersionMismatch")
            self._end_unwanted(job)
        elif vm.released:
            self._tell(vm, Leave())
        else:
            gpus = () if job.demand.rehearse else there.gpus[: job.demand.gpus]
            self._report(VmReport(vm.number, "there", host=there.host, node=there.node, gpus=gpus))
            visible = {"CUDA_VISIBLE_DEVICES": ",".join(gpus)}
            self._tell(vm, msgspec.structs.replace(vm.config, environ=visible))

    def _tell(self, vm: _JobNode, message: msgspec.Struct) -> bool:
        try:
            self._socket.send_multipart([vm.route, pack(message)])
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            return False
        return True

    def _beat(self) -> None:
        """See whether the nodes are within reach: zmq closes connections on which there is no sign of life."""
        if time.monotonic() < self._next_beat:
            return
        self._next_beat = time.monotonic() + _BEAT_SECONDS
        for job in list(self._jobs.values()):
            for vm in job.vms:
                if vm.route and not vm.gone and not self._tell(vm, Alive()):
                    self._lose(job, vm, f"lost: node {vm.node} does not answer any more")

    def _lose(self, job: _Job, vm: _JobNode, how: str) -> None:
        """A node has no agent any more; the queue may say why."""
        if vm.released:
            vm.gone = True
            self._end_unwanted(job)
        elif not vm.lost and not vm.gone:
            vm.lost, vm.lost_at = how, time.monotonic()
            self._next_look = 0.0

    # ------------------------------------------------------------ the queue

    def _look(self) -> None:
        if time.monotonic() < self._next_look or not self._jobs:
            return
        found = look(job.id for job in self._jobs.values())
        if found is None:  # Slurm does not answer: jobs may be as they were
            self._next_look = time.monotonic() + _LOOK_SECONDS
            return
        for key, job in list(self._jobs.items()):
            now = found.get(job.id, GONE)
            for vm in job.left:
                self._tell_loss(job, vm, now)
            self._give_notice(job, now)
            self._tell_waiting(job, now)
            if now.over:
                del self._jobs[key]
            elif not job.left and time.monotonic() > job.end_by:
                job.end_by = time.monotonic() + _LOOK_SECONDS
                self._cancel([job])
            elif not job.left:
                self._end_unwanted(job)
        self._next_look = time.monotonic() + self._until_next_look()

    def _until_next_look(self) -> float:
        vms = [vm for job in self._jobs.values() for vm in job.vms if not vm.gone]
        if any(vm.lost for vm in vms):
            return _LOSS_LOOK_SECONDS
        awaited = any(not vm.route for vm in vms) or any(not job.left for job in self._jobs.values())
        notice = min((job.notice_at for job in self._jobs.values()), default=float("inf")) - time.monotonic()
        return max(_LOSS_LOOK_SECONDS, min(_LOOK_SECONDS if awaited else _QUIET_SECONDS, notice))

    def _tell_loss(self, job: _Job, vm: _JobNode, now: Standing) -> None:
        """Say that a node will not come, or is lost, as soon as Slurm says why, or has had its time to."""
        why = now.why_over(job.id)
        if now.over and not vm.route:
            self._gone(vm, why, "EngineError" if now.comment or now.state == "FAILED" else "RunLost")
        elif now.over or (vm.lost and why):
            self._gone(vm, f"lost: {why}", "RunLost")
        elif vm.lost and (now.state == "RUNNING" or time.monotonic() > vm.lost_at + _LOSS_SECONDS):
            ends = f"lost: Slurm ends its job {job.id}: it was cancelled (scancel), or preempted"
            self._gone(vm, ends if now.state == "COMPLETING" else vm.lost, "RunLost")

    def _tell_waiting(self, job: _Job, now: Standing) -> None:
        """Say what nodes wait for that have not come, or that they have waited for too long."""
        waits = time.monotonic() - job.asked
        said = f"Slurm job {job.id}: {now.state}" + (f" ({now.reason})" if now.state in WAITS else "")
        coming = [vm for vm in job.left if not vm.route]
        if now.state in WAITS and waits > job.demand.wait:
            nodes, waited = counted(len(job.vms), "node"), elapsed(job.demand.wait)
            text = (
                f"Slurm did not give {nodes} within {waited} ([engine] wait in taas.toml). {said}. "
                "`squeue --start` tells when it may."
            )
            for vm in coming:
                self._gone(vm, text, "EngineError")
        elif f"{said}, {elapsed(waits)}" != job.said:
            job.said = f"{said}, {elapsed(waits)}"
            for vm in coming:
                self._report(VmReport(vm.number, "waiting", job.said))

    def _give_notice(self, job: _Job, now: Standing) -> None:
        """Tell of the time limit while there is time for a cell to save what it has."""
        if now.state != "RUNNING" or job.noticed:
            return
        left, notice = seconds_of(now.left), min(_NOTICE_SECONDS, seconds_of(now.limit) / 2)
        job.noticed = left <= notice
        job.notice_at = float("inf") if job.noticed else time.monotonic() + left - notice
        if job.noticed:
            text = f"Slurm: its job {job.id} reaches the time limit ({now.limit}) in {left:.0f} s; --time asks for more"
            for vm in job.left:
                self._report(VmReport(vm.number, "ending", text))

    def _gone(self, vm: _JobNode, how: str, error: str) -> None:
        vm.gone = True
        self._report(VmReport(vm.number, "gone", how, error=error))


def main() -> None:
    """Reach Slurm, and serve."""
    report = Reporter()
    settings, until = settings_of(sys.argv[1]), time.monotonic() + float(sys.argv[2])
    while True:
        try:
            host = own_address(settings)
            break
        except EngineError as error:
            if time.monotonic() > until:
                report(ClusterReport(why_not=str(error)))
                return
            time.sleep(min(_LOOK_SECONDS, max(0.0, until - time.monotonic())))
    driver = SlurmDriver(report, settings, host)
    report(ClusterReport(host))
    driver.serve()
    os._exit(0)


if __name__ == "__main__":
    main()
