"""The data side of a run: its coordinator, planner and data workers, from before the ranks until after them.

The coordinator is a child of the supervisor. The makers, which need torch and the user's datasets, are started by
agents: the planner by one of this machine, and a keeper with its data workers by the agent of each data VM. A data VM
that is lost is replaced; until another one is there, the run goes on with those that are left.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from taas.delivery.config import DeliveryConfig, Place, PlannerConfig, RankConfig, WorkerConfig, new_keys
from taas.delivery.reports import (
    Failed,
    Final,
    HostLost,
    Note,
    Places,
    Prebuffered,
    ProgressReport,
    Report,
    Serving,
)
from taas.delivery.service import ChildProcess, Service, default_slab
from taas.errors import RunLost
from taas.messages.agents import EndMakers, MakerEnded, StartMaker
from taas.messages.clients import Delivered, Submit
from taas.messages.hosts import WantPiece, WantProject, Wrote
from taas.messages.wire import Message
from taas.supervisor.data_carriage import DataCarriage
from taas.supervisor.homecoming import Homecoming
from taas.supervisor.vms import Vm

_REPLACEMENTS = 3
"""So many lost data VMs or keepers are replaced for each that was asked for; then it is the data that kills them."""
_ALONE_SECONDS = 300.0
_PLANNER = -1


@dataclass(frozen=True)
class DataVms:
    """VMs for the data of a run.

    Attributes:
        vms: those with data workers.
        planner: one of this machine, which runs the planner.
        here: tells the address under which the ranks' VMs and these reach this machine; empty while it is not known.
    """

    vms: list[Vm]
    planner: Vm
    here: Callable[[], str]

    @property
    def elsewhere(self) -> bool:
        """Whether they are, or may be, other hosts."""
        return any(vm.remote for vm in self.vms)


class DataSide:
    """What the supervisor has of a delivery. ``step`` is to be called when ``fileno`` is readable.

    Attributes:
        vms: the data VMs, by their number in the delivery.
        ready: enough is prepared: the ranks may start.
        over: nothing more will be reported.
        failed: why nothing is delivered any more, or "".
        error: the class of :mod:`taas.errors` for that.
        elsewhere: whether data VMs are, or may be, other hosts.
        closed: its processes are being ended.
        final: the generators' states, for the notebook.
        places: where each loader goes on if the run is started again: as an earlier start left it, until it ends.
    """

    def __init__(
        self,
        run: str,
        submit: Submit,
        data: DataVms,
        homecoming: Homecoming,
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
        self._carriage = DataCarriage(run, submit.delivery.payload, homecoming, log)
        self._here, self.elsewhere = data.here, data.elsewhere
        share = default_slab(spec.world_size)
        config = DeliveryConfig(
            new_keys(),
            spec.world_size,
            share if self._order.buffer is None else slab_of(self._order.buffer, spec.world_size),
            uneven=spec.uneven,
            units=units,
            prebuffer=spec.prebuffer,
            hosts=spec.data_vms,
            shared=not self.elsewhere,
            alone=_ALONE_SECONDS + (submit.engine.wait if self.elsewhere else 0.0),
        )
        self._coordinator = ChildProcess("taas.delivery.coordinator", reports=True)
        self._service = Service(config, self._coordinator, "", "")
        self._configured = False
        self._planner = data.planner
        self.vms = dict(enumerate(data.vms))
        self._named = dict(self.vms)
        self._started: dict[int, Vm] = {}
        self._numbers = len(self.vms)
        self._to_replace = _REPLACEMENTS * len(self.vms)
        self._finishing = False
        self.ready = self.over = self.closed = False
        self.failed, self.error = "", RunLost.__name__
        self.final = b""
        self.places = places
        self._notes: list[str] = []
        self._last_lost = ""
        self._configure()

    def fileno(self) -> int:
        """Return the descriptor on which the coordinator reports."""
        assert self._coordinator.process.stdout is not None
        return self._coordinator.process.stdout.fileno()

    def pids(self) -> list[int]:
        """Return the processes that are the supervisor's own children."""
        return [self._coordinator.pid]

    @property
    def notes(self) -> list[str]:
        """Lines for the user, in order."""
        return [*self._notes, *self._carriage.notices]

    @property
    def waiting(self) -> str:
        """What a run waits for that had data VMs and has none left; empty where one is there."""
        coming = next(iter(self.vms.values()), None)
        if coming is None or any(vm.up for vm in self.vms.values()):
            return ""
        return f"another data VM, since {self._last_lost}: {coming.machine.waiting or 'it starts'}"

    def rank_config(self, host: str) -> RankConfig:
        """Return what every rank of a VM with this address is told; each fills in its own rank."""
        return self._service.rank_config(0, host, encrypt=self._order.encrypt, places=self.places)

    # ------------------------------------------------------------ the coordinator

    def _configure(self) -> None:
        """Let the coordinator listen, as soon as it is known where."""
        here = self._here()
        if here and not self._configured:
            self._configured = True
            self._service.config = msgspec.structs.replace(self._service.config, host=here)
            self._coordinator.send(msgspec.json.encode(self._service.config))

    def _command(self, kind: str, **what: str | int) -> None:
        if self._configured:
            self._coordinator.send(msgspec.json.encode({"type": kind, **what}))

    def step(self) -> None:
        """Take in what the coordinator has reported."""
        reports = self._service.read()
        if reports is None:
            self.over = True
            self.failed = self.failed or ("" if self.final else "the coordinator of the data workers ended")
        for report in reports or ():
            self._take(report)
        self._changed()

    def _take(self, report: Report) -> None:
        match report:
            case Serving():
                self._service.endpoint, self._service.slabs = report.endpoint, report.slabs
                self.start_makers()
            case Prebuffered():
                self.ready = True
            case Failed():
                self.failed = report.reason
            case Note():
                self._notes.append(report.text)
            case HostLost():
                lost = self._lost(report.vm, report.cause)
                self._notes.append(f"{lost}; what it had not delivered was made elsewhere")
                silent = self._started.get(report.vm)
                if self.elsewhere and silent is not None:  # its agent is there, and starts another keeper
                    silent.send(EndMakers(run=self._run))
            case ProgressReport():
                self._progressed(_all_together(report))
            case Final():
                self.final, self.over = report.states, True
            case Places():
                self.places = self.places | report.places

    def ask_for_final(self) -> None:
        """The ranks have ended: ask where the generators are now."""
        self._finishing = True
        self._command("finish")

    # ------------------------------------------------------------ makers

    def start_makers(self) -> None:
        """Start makers on all VMs that are up and have none; call it when one came up."""
        if self.closed:
            return
        self._configure()
        if not self._service.endpoint:
            return
        for number, vm in ((_PLANNER, self._planner), *self.vms.items()):
            if vm.up and not vm.gone and number not in self._started:
                self._started[number] = vm
                vm.send(self._maker(number, elsewhere=vm.remote))

    def _maker(self, number: int, *, elsewhere: bool) -> StartMaker:
        submit, service = self._submit, self._service
        planner = number == _PLANNER
        config: PlannerConfig | WorkerConfig
        if planner:
            keys = service.config.keys.for_peers()
            config = PlannerConfig(keys, service.endpoint, "", service.config.ranks)
        else:
            config = service.worker_config("", number, self._order.processes, self._order.encrypt, [], "")
        rehearsed = bool(submit.spec.gpus_per_rank and not self._planner.gpus)
        with_ranks = planner and not self.elsewhere
        return StartMaker(
            run=self._run,
            number=number,
            role="planner" if planner else "keeper",
            config=msgspec.json.encode(config),
            payload=self._carriage.payload if elsewhere else self._order.payload,
            project=submit.project,
            environ=submit.environ,
            rehearsed=rehearsed if with_ranks else None,
            log=self._log,
            changed=submit.changed,
            files=self._carriage.files() if elsewhere else None,
        )

    def hear(self, vm: Vm, message: Message) -> None:
        """Take in what the agent of a data VM elsewhere asks for, or brings."""
        if isinstance(message, WantPiece | WantProject | Wrote):
            try:
                answer = self._carriage.answer(message)
            except OSError as error:
                self.failed = self.failed or f"the project could not travel: {error}"
                self._command("fail", reason=self.failed)
                self._changed()
            else:
                if answer is not None:
                    vm.send(answer)

    def _name(self, number: int) -> str:
        vm = self._named.get(number)
        place = "" if vm is None else vm.machine.place
        return f"data VM {number} ({place})" if place else f"data VM {number}"

    def maker_ended(self, message: MakerEnded) -> None:
        """A maker is gone. A keeper is started anew; a planner's end is the run's, as the coordinator sees, too."""
        vm = self._started.pop(message.number, None)
        if vm is not None and not (self.closed or self._finishing or self.failed):
            if message.number == _PLANNER:
                said = f"the planner {message.how}; what it printed is in {self._log}"
                self.failed = "" if self.ready else said
            else:
                self.vms.pop(message.number, None)
                self._tell_lost(message.number, message.how)
                self._replace(message.how, lambda: vm)
        self._changed()

    def _tell_lost(self, number: int, how: str) -> None:
        """Tell the coordinator what it does not see itself, of other hosts."""
        cause = how.removeprefix("lost: ")
        self._last_lost = self._lost(number, cause)
        if self.elsewhere:
            self._command("lost", vm=number, cause=cause)

    def _lost(self, number: int, cause: str) -> str:
        return f"{self._name(number)} was lost ({cause})"

    def lose(self, vm: Vm, how: str, another: Callable[[], Vm | None]) -> None:
        """A data VM is lost, ``how`` in words: one that ``another`` leases takes its place."""
        if vm is self._planner:  # the coordinator sees its planner's end
            self._started.pop(_PLANNER, None)
            self.failed = self.failed or f"the agent of the planner was {how}"
        for number in [number for number, mine in self.vms.items() if mine is vm]:
            del self.vms[number]
            self._started.pop(number, None)
            if self.closed or self._finishing or self.failed:
                continue
            if vm.up or vm.machine.error == RunLost.__name__:
                self._tell_lost(number, how)
                self._replace(how, another)
            else:
                self._do_without(number, how, vm.machine.error)
        self._changed()

    def _do_without(self, number: int, why: str, error: str) -> None:
        """A data VM cannot be had: a run that has not begun fails, another goes on with those that it has."""
        if not self.ready:
            self.failed, self.error = why, error
        elif self.vms:
            self._notes.append(f"{self._name(number)} could not be had: {why}")
        else:
            self._command("fail", reason=f"all data VMs were lost, and no other could be had: {why}")

    def _replace(self, how: str, another: Callable[[], Vm | None]) -> None:
        """Start a keeper in place of one that is gone, under a new number, as long as that makes sense."""
        vm = another() if self._to_replace > 0 else None
        self._to_replace -= 1
        if vm is not None:
            self.vms[self._numbers] = self._named[self._numbers] = vm
            self._numbers += 1
            self.start_makers()
        elif not self.vms:
            reason = f"all data VMs were lost, the last one {how}; what they printed is in {self._log}"
            self.failed = self.failed or ("" if self._configured else reason)
            self._command("fail", reason=reason)

    # ------------------------------------------------------------ its end

    def close(self) -> None:
        """End all its processes; agents say when theirs are gone."""
        self.closed = True
        for report in self._service.close():
            self._take(report)
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
