"""The data side of a run: its coordinator, planner and data workers, from before the ranks until after them.

The coordinator is a child of the supervisor. The makers, which need torch and the user's datasets, are started by
agents: the planner by that of the run's first VM, which the run cannot do without anyway, and a keeper with its
data workers by the agent of each data VM. A data VM that is lost is replaced.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from taas.delivery.config import DeliveryConfig, Place, PlannerConfig, RankConfig, WorkerConfig, new_keys
from taas.delivery.reports import Failed, Final, HostLost, Note, Prebuffered, ProgressReport, Report, Serving
from taas.delivery.service import ChildProcess, Service, default_slab
from taas.messages.agents import EndMakers, MakerEnded, StartMaker
from taas.messages.clients import Delivered, Submit
from taas.supervisor.vms import Vm

_REPLACEMENTS = 3
"""So many lost data VMs or keepers are replaced for each that was asked for; then it is the data that kills them."""
_PLANNER = -1


class DataSide:
    """What the supervisor has of a delivery. ``step`` is to be called when ``fileno`` is readable.

    Attributes:
        vms: the data VMs, by their number in the delivery.
        ready: enough is prepared: the ranks may start.
        over: nothing more will be reported.
        failed: why nothing is delivered any more, or "".
        closed: its processes are being ended.
        final: the generators' states, for the notebook.
        notes: lines for the user, in order.
        places: where each loader goes on if the run is started again: as an earlier start left it, until it ends.
    """

    def __init__(
        self,
        run: str,
        submit: Submit,
        vms: list[Vm],
        first: Vm,
        log: str,
        changed: Callable[[], None],
        progressed: Callable[[Delivered], None],
        places: dict[str, Place],
    ) -> None:
        assert submit.delivery is not None
        spec = submit.spec
        units = (
            spec.units if isinstance(spec.units, dict) else {} if spec.units is None else {"*": spec.units}
        )
        self._run, self._submit, self._order, self._log = run, submit, submit.delivery, log
        self._changed, self._progressed = changed, progressed
        self._payload = f"/proc/{submit.delivery.payload.pid}/fd/{submit.delivery.payload.fd}"
        share = default_slab(spec.world_size)
        config = DeliveryConfig(
            new_keys(),
            spec.world_size,
            share if self._order.buffer is None else slab_of(self._order.buffer, spec.world_size),
            uneven=spec.uneven,
            units=units,
            prebuffer=spec.prebuffer,
            hosts=spec.data_vms,
        )
        self._coordinator = ChildProcess("taas.delivery.coordinator", config, reports=True)
        self._service = Service(config, self._coordinator, "", "")
        self._first = first
        self.vms = dict(enumerate(vms))
        self._started: dict[int, Vm] = {}
        self._numbers = len(vms)
        self._to_replace = _REPLACEMENTS * len(vms)
        self._finishing = False
        self.ready = self.over = self.closed = False
        self.failed = ""
        self.final = b""
        self.notes: list[str] = []
        self.places = places

    def fileno(self) -> int:
        """Return the descriptor on which the coordinator reports."""
        assert self._coordinator.process.stdout is not None
        return self._coordinator.process.stdout.fileno()

    def pids(self) -> list[int]:
        """Return the processes that are the supervisor's own children."""
        return [self._coordinator.pid]

    def rank_config(self) -> RankConfig:
        """Return what every rank is told; each fills in its own rank."""
        return self._service.rank_config(0, encrypt=self._order.encrypt, places=self.places)

    # ------------------------------------------------------------ the coordinator

    def step(self) -> None:
        """Take in the coordinator's next report."""
        self._take(self._service.read())
        self._changed()

    def _take(self, report: Report | None) -> None:
        match report:
            case None:
                self.over = True
                self.failed = self.failed or (
                    "" if self.final else "the coordinator of the data workers ended"
                )
            case Serving():
                self._service.endpoint, self._service.slabs = report.endpoint, report.slabs
                self.start_makers()
            case Prebuffered():
                self.ready = True
            case Failed():
                self.failed = report.reason
            case Note():
                self.notes.append(report.text)
            case HostLost():
                self.notes.append(
                    f"data VM {report.vm} was lost ({report.cause}); what it had not delivered was made elsewhere"
                )
            case ProgressReport():
                self._progressed(_all_together(report))
            case Final():
                self.final, self.over = report.states, True

    def ask_for_final(self) -> None:
        """The ranks have ended: ask where the generators are now."""
        self._finishing = True
        self._coordinator.send(msgspec.json.encode({"type": "finish"}))

    # ------------------------------------------------------------ makers

    def start_makers(self) -> None:
        """Start makers on all VMs that are up and have none; call it when one came up."""
        if not self._service.endpoint or self.closed:
            return
        for number, vm in ((_PLANNER, self._first), *self.vms.items()):
            if vm.up and not vm.gone and number not in self._started:
                self._started[number] = vm
                vm.send(self._maker(number))

    def _maker(self, number: int) -> StartMaker:
        submit, service = self._submit, self._service
        path = [submit.project]
        planner = number == _PLANNER
        config: PlannerConfig | WorkerConfig
        if planner:
            keys = service.config.keys.for_peers()
            config = PlannerConfig(
                keys, service.endpoint, self._payload, service.config.ranks, path, submit.project
            )
        else:
            config = service.worker_config(
                self._payload, number, self._order.processes, self._order.encrypt, path, submit.project
            )
        return StartMaker(
            run=self._run,
            number=number,
            role="planner" if planner else "keeper",
            config=msgspec.json.encode(config),
            environ=submit.environ,
            rehearsed=bool(submit.spec.gpus_per_rank and not self._first.gpus) if planner else None,
            log=self._log,
        )

    def maker_ended(self, message: MakerEnded) -> None:
        """A maker is gone. A keeper is started anew; a planner's end is the run's, as the coordinator sees, too."""
        vm = self._started.pop(message.number, None)
        if vm is not None and not (self.closed or self._finishing or self.failed):
            if message.number == _PLANNER:
                said = f"the planner {message.how}; what it printed is in {self._log}"
                self.failed = "" if self.ready else said
            else:
                self.vms.pop(message.number, None)
                self._replace(message.how, lambda: vm)
        self._changed()

    def lose(self, vm: Vm, how: str, another: Callable[[], Vm | None]) -> None:
        """A data VM is lost, ``how`` in words: one that ``another`` leases takes its place."""
        for number in [number for number, mine in self.vms.items() if mine is vm]:
            del self.vms[number]
            self._started.pop(number, None)
            if not (self.closed or self._finishing or self.failed):
                self._replace(how, another)
        self._changed()

    def _replace(self, how: str, another: Callable[[], Vm | None]) -> None:
        """Start a keeper in place of one that is gone, under a new number, as long as that makes sense."""
        vm = another() if self._to_replace > 0 else None
        self._to_replace -= 1
        if vm is not None:
            self.vms[self._numbers] = vm
            self._numbers += 1
            self.start_makers()
        elif not self.vms:
            reason = f"all data VMs were lost, the last one {how}; what they printed is in {self._log}"
            self._coordinator.send(msgspec.json.encode({"type": "fail", "reason": reason}))

    # ------------------------------------------------------------ its end

    def close(self) -> None:
        """End all its processes; agents say when theirs are gone."""
        self.closed = True
        self.places = self.places | self._service.close()
        for vm in {id(vm): vm for vm in self._started.values()}.values():
            vm.send(EndMakers(run=self._run))

    @property
    def gone(self) -> bool:
        """Whether it was closed, and no process of it is left."""
        return self.closed and all(vm.gone for vm in self._started.values())


def slab_of(buffer: int, ranks: int) -> int:
    """Return a rank's share of the buffer that ``[delivery] buffer`` asks for, in bytes; at least 4 MiB."""
    return max(4 << 20, buffer // ranks // (1 << 20) * (1 << 20))


def _all_together(report: ProgressReport) -> Delivered:
    loaders = report.loaders
    return Delivered(
        ready=sum(loader.ready for loader in loaders),
        delivered=sum(loader.delivered for loader in loaders),
        planned=sum(loader.planned if loader.units is None else loader.units for loader in loaders),
        rate=sum(loader.rate for loader in loaders),
        waited=sum(report.waited) / max(1, len(report.waited)),
    )
