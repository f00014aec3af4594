"""The data side of a run: its coordinator, its planner and its worker pools.

The data side starts before the ranks and ends after them.

The coordinator is a child of the supervisor. The planner is started by an agent on this machine,
and the worker pools by the agents of the data VMs. A worker pool that is lost is replaced, and the
run continues with the remaining ones until the replacement is up. A planner that is lost is not
replaced.
"""

from __future__ import annotations

import logging
import tempfile
import time
from concurrent.futures import Future
from enum import IntEnum, auto
from pathlib import Path

import msgspec

from taas.base.linux import remove_tree
from taas.delivery.slab import slab_size
from taas.delivery.transport import CoordinatorProcess
from taas.errors import RunLost
from taas.protocol.agents import EndJob, JobOver, JobRequest, OfJob, StartJob
from taas.protocol.clients import Submit
from taas.protocol.delivery_messages import (
    Command,
    Failed,
    Final,
    FinishPlans,
    Hello,
    HostLost,
    Note,
    Peer,
    ProgressReport,
    Report,
    holders,
)
from taas.protocol.delivery_orders import (
    ALONE_SECONDS,
    DataOrder,
    Delivered,
    DeliveryConfig,
    ResumePoint,
    new_keys,
)
from taas.supervisor.transfer import Transfer
from taas.supervisor.vms import PLANNER, DataVms, Vm

logger = logging.getLogger(__name__)

_END_SECONDS = 5.0
"""Time that agents have to end data processes before the agents count as stuck. An agent that still
sends what its data processes have printed gets this time again (:meth:`DataSide.postpone_end`).
"""


class Phase(IntEnum):
    """How far a delivery has got; it never goes back."""

    PREPARING = auto()  # the ranks wait for the first batches
    DELIVERING = auto()
    # the ranks have ended, or have all the batches they asked for, so a loss does no harm any more
    FINISHING = auto()
    OVER = auto()  # the coordinator has sent its last report
    CLOSED = auto()  # the data processes are being ended


class DataSide:
    """The supervisor's part of a delivery; call ``step`` when ``fileno`` is readable.

    Data processes print to ``log``. ``places`` holds the point from which each loader resumes if
    the run is started again: until this start ends, the points that the previous start reached.
    """

    def __init__(
        self,
        run: str,
        submit: Submit,
        vms: DataVms,
        transfer: Transfer,
        log: Path,
        sockets: Path,
        places: dict[str, ResumePoint],
    ) -> None:
        assert submit.delivery is not None
        self._run, self._submit, self._order = run, submit, submit.delivery
        self.vms, self._transfer, self._log = vms, transfer, str(log)
        self._coordinator, self.places = CoordinatorProcess(), places
        self._config, self._endpoint = self._coordinator_config(sockets), ""
        self.phase = Phase.PREPARING
        self.final = b""  # the states of the generators, for the notebook
        self.failed = ""  # why nothing can be delivered any more
        self.error = RunLost.__name__  # the name of the class in taas.errors for this failure
        # the failure is the loss of processes or VMs, and not an error of the cell's code
        self.lost = False
        self.planner_lost = ""  # how the planner was lost; ranks learn of it at their next batch
        self.deserted = False  # no process is left that could report the failure to the ranks
        self.delivered: Delivered | None = None
        self._reached: dict[str, ResumePoint] = {}
        self.notes: list[str] = []  # lines for the user, in order of their occurrence
        self._last_lost, self._gone_by = "", float("inf")
        self._configure()

    def _coordinator_config(self, sockets: Path) -> DeliveryConfig:
        spec, elsewhere = self._submit.cell.spec, self.vms.elsewhere
        units = spec.units or {}
        return DeliveryConfig(
            new_keys(holders(spec.world_size, self.vms.most)),
            spec.world_size,
            slab_size(self._order.buffer, spec.world_size),
            host="",  # until the address is known
            encrypt=self._order.encrypt,
            uneven=spec.uneven,
            units=units if isinstance(units, dict) else {"*": units},
            prebuffer=spec.prebuffer,
            hosts=spec.data_vms,
            folder="" if elsewhere else tempfile.mkdtemp(prefix="data-", dir=sockets),
            alone=ALONE_SECONDS + (self._submit.engine.wait if elsewhere else 0.0),
            places=self.places,
        )

    def fileno(self) -> int:
        """Return the file descriptor on which the coordinator reports."""
        return self._coordinator.fileno()

    def pids(self) -> list[int]:
        """Return the process ids of those data processes that are children of the supervisor."""
        return [self._coordinator.process.pid]

    @property
    def ready(self) -> bool:
        """Whether enough batches are prepared for the ranks to start."""
        return self.phase >= Phase.DELIVERING

    @property
    def over(self) -> bool:
        """Whether the coordinator will report nothing more."""
        return self.phase >= Phase.OVER

    @property
    def closed(self) -> bool:
        """Whether the data processes are being ended."""
        return self.phase is Phase.CLOSED

    @property
    def waiting(self) -> str:
        """What the run waits for if it has lost all of its data VMs and others are coming up.

        It is empty if at least one data VM is up.
        """
        if (coming := self.vms.starting) is None:
            return ""
        return f"another data VM, since {self._last_lost}: {coming.machine.waiting or 'it starts'}"

    def rank_config(self, number: int) -> DeliveryConfig:
        """Return the delivery configuration for the ranks on the run's VM with this number."""
        width = self._submit.cell.spec.ranks_per_vm
        ranks = (Peer("rank", rank).holder for rank in range(number * width, (number + 1) * width))
        return self._config.for_peers(self._endpoint, *ranks)

    # ------------------------------------------------------------ the coordinator

    def _configure(self) -> None:
        """Let the coordinator listen, as soon as this machine's address is known."""
        if (here := self.vms.here()) and not self._config.host:
            self._config = msgspec.structs.replace(self._config, host=here)
            self._coordinator.send(self._config)

    def _command(self, command: Command) -> None:
        if self._config.host and not self.closed:
            self._coordinator.send(command)

    def _reach(self, phase: Phase) -> None:
        if phase > self.phase:
            names = self.phase.name.lower(), phase.name.lower()
            logger.info("%s: its data side: %s -> %s", self._run, *names)
            self.phase = phase

    def step(self) -> None:
        """Process the coordinator's reports."""
        reports = self._coordinator.read()
        if reports is None:
            if not self.final and not self.failed:
                self.deserted = self.phase < Phase.FINISHING
                self.failed, self.lost = "the coordinator of the data workers ended", True
            self._reach(Phase.OVER)
        for report in reports or ():
            self._take(report)

    def _take(self, report: Report) -> None:
        match report:
            case Hello():
                self._endpoint = report.address
                self.start_data_processes()
            case Failed():
                self.failed = self.failed or report.reason
            case Note():
                self.notes.append(report.text)
            case HostLost():
                self.notes.append(
                    f"{self.vms.name(report.vm)} was lost ({report.cause}); what it had not"
                    " delivered was made elsewhere"
                )
                # if the agent is still there; it then starts another worker pool
                self._end_job(report.vm)
            case ProgressReport():
                if report.prebuffered:
                    self._reach(Phase.DELIVERING)
                if report.over:
                    self._reach(Phase.FINISHING)
                self.delivered, self._reached = report.delivered, report.places
            case Final():
                self.final = report.states
                self._reach(Phase.OVER)

    def ask_for_final(self) -> None:
        """Ask for the final states of the generators, now that the ranks have ended."""
        self._reach(Phase.FINISHING)
        self._command(FinishPlans())

    def fail(self, why: str) -> None:
        """Record that nothing can be delivered any more, and why."""
        self.failed = self.failed or why
        self._command(Failed(reason=self.failed))

    # ------------------------------------------------------------ data processes

    def start_data_processes(self) -> None:
        """Start data processes on all VMs that are up and have none.

        Call this whenever a VM has come up.
        """
        if self.closed:
            return
        self._configure()
        for number, vm in list(self.vms.startable()) if self._endpoint else ():
            self.vms.started[number] = vm
            self._transfer.start(vm, self._data_process(number))

    def _job(self, number: int) -> int:
        """Return the job number of a data process.

        The jobs of the ranks come first, then the planner's, then those of the worker pools.
        """
        return self._submit.cell.spec.vms + number - PLANNER

    def has(self, vm: Vm, job: int) -> bool:
        """Return whether this VM was told to start a data process with this job number."""
        return self.vms.started.get(job - self._job(0)) is vm

    def _end_job(self, number: int) -> None:
        if (vm := self.vms.started.get(number)) is not None:
            vm.send(OfJob(run=self._run, job=self._job(number), said=EndJob()))

    def _data_process(self, number: int) -> StartJob:
        submit, planner = self._submit, number == PLANNER
        peer = Peer("planner") if planner else Peer("pool", number)
        rehearsed = bool(submit.cell.spec.gpus_per_rank and not self.vms.planner.gpus)
        return StartJob(
            run=self._run,
            job=self._job(number),
            name="the planner's VM" if planner else f"data VM {number}",
            payload=self._order.payload,
            workspace=submit.workspace,
            output=self._log,
            work=DataOrder(
                common=self._config.for_peers(self._endpoint, peer.holder),
                vm=max(0, number),
                processes=0 if planner else self._order.processes,
                rehearsed=None if self.vms.elsewhere else rehearsed,
            ),
        )

    @property
    def _misses(self) -> bool:
        return self.phase < Phase.FINISHING and not self.failed

    def process_over(self, job: int, over: JobOver) -> None:
        """Handle the end of a data process: a worker pool is replaced, a planner is not."""
        number = job - self._job(0)
        misses, vm = self._misses, self.vms.started[number]
        self.vms.lose(number)
        self._transfer.lose(job)
        vm.send(OfJob(run=self._run, job=job, said=JobRequest(what="forget")))
        if number == PLANNER:
            self._command(HostLost(vm=PLANNER, cause=over.how))
            killed = over.how.startswith("killed")
            if misses and not self.ready:
                self.failed = f"the planner {over.how}; what it printed is in {self._log}"
                self.lost = killed
            elif misses and killed:
                self.planner_lost = f"the planner was {over.how}"
        elif misses:
            self._tell_lost(number, over.how)
            self._replace(over.how, vm)

    def _tell_lost(self, number: int, how: str) -> None:
        cause = how.removeprefix("lost: ")
        self._last_lost = f"{self.vms.name(number)} was lost ({cause})"
        self._command(HostLost(vm=number, cause=cause))

    def lose(self, vm: Vm, how: str, *, replace: bool = True) -> None:
        """Handle the loss of a data VM, which ``how`` describes; replace it if requested."""
        for number in self.vms.of(vm):
            misses = self._misses
            self.vms.lose(number)
            self._transfer.lose(self._job(number))
            if number == PLANNER:
                self._command(HostLost(vm=PLANNER, cause=how))
                self.lost = self.lost or not self.failed
                self.failed = self.failed or f"the agent of the planner was {how}"
            elif misses and (vm.up or vm.machine.error == RunLost.__name__):
                self._tell_lost(number, how)
                if replace:
                    self._replace(how)
            elif misses:
                self._do_without(number, how.removeprefix("lost: "), vm.machine.error)

    def _do_without(self, number: int, why: str, error: str) -> None:
        """Handle a data VM that cannot be obtained.

        A run that has not begun fails; any other run continues with the data VMs that it has.
        """
        if not self.ready:
            self.failed, self.error = why, error
        elif self.vms.by_number:
            self.notes.append(f"{self.vms.name(number)} could not be had: {why}")
        else:
            self._command(
                Failed(reason=f"all data VMs were lost, and no other could be had: {why}")
            )

    def _replace(self, how: str, vm: Vm | None = None) -> None:
        """Replace a worker pool that is gone: on this VM if one is given, else on another VM."""
        if self.vms.replace(vm):
            self.start_data_processes()
        elif not self.vms.by_number:
            reason = (
                f"all data VMs were lost, the last one {how}; what they printed is in {self._log}"
            )
            if not self._config.host and not self.failed:
                self.failed, self.lost = reason, True
            self._command(Failed(reason=reason))

    # ------------------------------------------------------------ the end of the data side

    def close(self) -> None:
        """End all data processes.

        The agents report when theirs have ended. The worker thread ends the coordinator, since that
        takes a while.
        """
        self._reach(Phase.CLOSED)
        self._transfer.worker.do(self._coordinator.close, self._take_last)

    def _take_last(self, done: Future[list[Report]]) -> None:
        for report in done.result():
            self._take(report)
        self.places = self.places | self._reached
        if self._config.folder:
            remove_tree(self._config.folder)
        self.postpone_end()
        for number in self.vms.started:
            self._end_job(number)

    def postpone_end(self) -> None:
        """Restart the agents' deadline, since data of the run still arrive."""
        self._gone_by = time.monotonic() + _END_SECONDS

    @property
    def overdue(self) -> list[Vm]:
        """The VMs that have not ended their data processes in time."""
        late = self.closed and time.monotonic() > self._gone_by
        return [vm for vm in dict.fromkeys(self.vms.started.values()) if late and not vm.gone]

    @property
    def gone(self) -> bool:
        """Whether the data side was closed and none of its processes is left."""
        return self.closed and all(vm.gone for vm in self.vms.started.values())
