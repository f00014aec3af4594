"""One run, from its submission to its end."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial, wraps
from pathlib import Path
from typing import Concatenate, ParamSpec

from taas.base.poll_loop import WorkThread
from taas.base.wording import named
from taas.errors import DeliveryError, NotEnoughDevices, RunLost
from taas.project.wall.rescued import make_writes, sort_writes
from taas.protocol.agents import (
    WITH_FORKSERVER,
    How,
    JobOver,
    JobRequest,
    JobSays,
    RanksSeen,
    RanksUse,
)
from taas.protocol.chunks import Chunk, Taken
from taas.protocol.clients import RunState
from taas.protocol.delivery_orders import ResumePoint
from taas.protocol.framing import StoreAddress
from taas.protocol.ranks import Asking, RankEnded, RankStage
from taas.protocol.records import output_folder
from taas.supervisor.curve_watch import CurveWatch
from taas.supervisor.data_side import DataSide
from taas.supervisor.hangs import HangWatch
from taas.supervisor.rank_jobs import Findings, JobStage, RankJobs
from taas.supervisor.recorder import Recorder
from taas.supervisor.stages import UNDER_WAY, UNDISTURBED, Stage, UnknownStep
from taas.supervisor.transfer import ProjectSync, Transfer
from taas.supervisor.vms import DataVms, Vm

logger = logging.getLogger(__name__)

_NOT_KEPT = (
    "its ranks are gone, and with them what only they had; the next --keep cell starts new ones, to"
    " which the notebook's names travel"
)

P = ParamSpec("P")


def handler(handle: Callable[Concatenate[Run, P], None]) -> Callable[Concatenate[Run, P], None]:
    """Let a transition that the table of stages rejects end this run, and no other run."""

    @wraps(handle)
    def handle_or_break_off(self: Run, /, *args: P.args, **kwargs: P.kwargs) -> None:
        try:
            handle(self, *args, **kwargs)
        except UnknownStep as refused:
            self.break_off(refused)

    return handle_or_break_off


class Run:
    """One start of a run.

    Events reach a run through its handlers. Each handler decides to which stage the run moves
    (:mod:`taas.supervisor.stages` has the table of transitions). A run that is started again after
    a loss is a new ``Run`` with the same recorder.

    Attributes:
        loss: what was lost, for a run that is ``RESTARTING``; another start follows unless a person
            interrupts the run, which empties this attribute.
    """

    def __init__(
        self,
        recorder: Recorder,
        vms: list[Vm],
        data: DataVms | None,
        sockets: Path,
        worker: WorkThread,
        *,
        restarts: int = 0,
        places: dict[str, ResumePoint] | None = None,
        kept: Run | None = None,
    ) -> None:
        self.recorder, self.vms, self.worker, self.restarts = recorder, vms, worker, restarts
        self.submit = submit = recorder.submit
        self.name = name = recorder.record.name
        self._spec, project = submit.cell.spec, submit.workspace.project
        self.background = self._spec.background
        self.loss = ""
        self.output, self._sockets = output_folder(recorder.record.folder, restarts), sockets
        self.scratch: Path = self.output / "writes"
        self.since_ns = make_writes(self.scratch, project)
        before, known = (kept.ranks, kept._project_sync.known) if kept else (None, None)
        self._project_sync: ProjectSync = ProjectSync(
            name, project, self.scratch, self._spec, known
        )
        self.transfer = Transfer(
            name, self._spec, self.output, self._project_sync, worker, self._failed
        )
        self.ranks: RankJobs = RankJobs(self, before)
        self.found = Findings(self._spec, self.ranks)
        self.hangs = HangWatch(self)
        self.curves: CurveWatch = CurveWatch(self)
        self.data: DataSide | None = None
        if data is not None:
            log = self.output / "data.log"
            self.data = DataSide(name, submit, data, self.transfer, log, sockets, places or {})

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return self._spec.world_size

    @property
    def stage(self) -> Stage:
        """The stage of the run."""
        return self.recorder.stage

    @handler
    def look_at_machines(self) -> None:
        """Start if all VMs are up and enough batches are ready; else record what is missing."""
        data = self.data
        if data is not None:
            data.start_data_processes()
        if self.stage is Stage.ACQUIRING:
            if data is not None and data.ready:
                for vm in self.vms:
                    vm.machine.want()
            vms = [*(() if data is None else data.vms.by_number.values()), *self.vms]
            if (data is None or data.ready) and all(vm.up for vm in self.vms):
                self._start()
            else:
                self.recorder.note(
                    waiting=next((vm.machine.waiting for vm in vms if not vm.up), "")
                )
        elif self.stage is Stage.RUNNING:
            if data is not None:
                self.recorder.note(waiting=data.waiting)
            if notice := self.ranks.notice:
                self.interrupt(notice)

    def _start(self) -> None:
        if lack := self.ranks.lack_of_gpus():
            self._trouble(lack, NotEnoughDevices.__name__)
        else:
            device = self.ranks.device_in_words() or self.recorder.record.device
            self.recorder.move(Stage.STARTING, waiting="", device=device)
            self.ranks.begin(None if self.data is None else self.data.rank_config)

    @handler
    def data_changed(self) -> None:
        """Process the progress and the failures of the data side."""
        data = self.data
        assert data is not None
        if data.delivered is not None:
            self.recorder.note(delivered=data.delivered)
        if data.deserted and self.stage in (Stage.STARTING, Stage.RUNNING):
            self._data_gone(f"nothing can be delivered any more: {data.failed}")
        elif data.failed and self.stage is Stage.ACQUIRING:
            had = data.error == RunLost.__name__
            self._data_gone(f"nothing can be delivered: {data.failed}" if had else data.failed)
        self.look_at_machines()

    def _data_gone(self, what: str) -> None:
        """End the run, since its data side is gone.

        After a loss another start may succeed; an error in the loader's code is final.
        """
        assert self.data is not None
        if self.data.lost:
            self.found.lost = self.found.lost or what
            self.end()
        else:
            self._trouble(what, self.data.error)

    @handler
    def hear(self, vm: Vm, job: int, said: JobSays) -> None:
        """Handle an agent's message about a job; ignore messages about jobs of other agents."""
        if self.data is not None and self.data.has(vm, job):
            if isinstance(said, JobOver):
                self.data.process_over(job, said)
                self.data_changed()
            elif isinstance(said, Chunk | Taken | JobRequest):
                self._carry(job, said)
        elif self.ranks.may_say(vm, job, said):
            self._hear_ranks(job, said)

    def _hear_ranks(self, job: int, said: JobSays) -> None:
        match said:
            case Chunk() | Taken() | JobRequest():
                self._carry(job, said)
            case RanksSeen():
                self.hangs.take(job, said)
            case StoreAddress() if self.stage is Stage.STARTING and job == 0:
                self.ranks.take_store(said)
            case RankStage():
                self._rank_began(said.rank)
            case Asking() | RanksUse():
                self.recorder.take(said)
            case RankEnded():
                self._rank_ended(said)
            case JobOver():
                self._vm_done(job, said)

    def _rank_began(self, rank: int) -> None:
        self.found.started.add(rank)
        all_began = len(self.found.started) == self._spec.world_size
        if all_began and self.stage is Stage.STARTING:
            # with data VMs on other hosts, another data VM may be added at any time
            if self.data is None or not self.data.vms.elsewhere:
                self._project_sync.all_started()
            self.recorder.move(Stage.RUNNING, waiting="")
            self.look_at_machines()

    def _vm_done(self, number: int, over: JobOver) -> None:
        self.ranks.jobs[number] = JobStage.OVER
        self.ranks.kept[number] = over.kept
        self.hangs.lose_vm(number)
        self.found.notices += over.notices
        if over.how:
            if over.how == WITH_FORKSERVER:
                of = named("of", self.ranks.name(number))
                self.found.lost = (
                    self.found.lost or f"the forkserver{of} was killed before its ranks began"
                )
                self.end()
            else:
                self.vms[number].unfit = True
                self._trouble(over.how)
        # even if ``how`` is set, the ranks may have ended well: only their variables were not
        # received
        if not over.how or self.found.all_done:
            self._ask_for_final()

    def _carry(self, job: int, said: Chunk | Taken | JobRequest) -> None:
        self.ranks.postpone_end()
        if self.data is not None:
            self.data.postpone_end()
        self.transfer.hear(job, said)

    @handler
    def _failed(self, job: int, why: str) -> None:
        if job < len(self.vms):
            self._trouble(why)
        elif self.data is not None:
            self.data.fail(why)
            self.data_changed()

    def _trouble(self, what: str, error: str = RunLost.__name__) -> None:
        """End the run, since it cannot continue."""
        logger.warning("%s cannot go on: %s", self.name, error)
        self.found.trouble, self.found.error = what, error
        self.end()

    def _rank_ended(self, ended: RankEnded) -> None:
        self.found.take(ended)
        self.recorder.take(Asking(rank=ended.rank))
        if ended.rank == 0 and ended.answer is not None and ended.answer.elsewhere:
            try:
                self.transfer.expect(0, ended.answer)
            except OSError as error:
                self._trouble(f"the names that the run made could not be taken: {error}")
        if ended.outcome != "done":
            self.end()

    @handler
    def vm_lost(self, vm: Vm, how: str) -> None:
        """Handle the loss of an agent of this run, with its ranks, its data processes, or both."""
        if vm in self.vms:
            self._rank_vm_lost(self.vms.index(vm), how)
        if self.data is not None:
            self.data.lose(vm, how, replace=self.stage in UNDISTURBED)
            self.data_changed()

    def _rank_vm_lost(self, number: int, how: str) -> None:
        vm, answer = self.vms[number], self.found.answer
        of_agent = answer is not None and answer.pid == vm.machine.pid
        # once the run has left these stages, the client may have received the variables
        held = of_agent and self.stage in UNDER_WAY
        if held:  # the variables were lost with the agent
            self.found.answer = None
        if self.ranks.jobs[number] is JobStage.OVER and not held:
            return
        if self.found.lost is None:
            self.found.lost = self.ranks.loss(number, how)
            self.found.error = RunLost.__name__ if vm.up else vm.machine.error
        self.ranks.jobs[number] = JobStage.OVER
        self.transfer.lose(number)
        self.hangs.lose_vm(number)
        self.end()
        if self.found.all_done:  # the agent was lost between its ranks' last messages and its own
            self._ask_for_final()

    def _ask_for_final(self) -> None:
        if self.data is not None and self.ranks.over:
            self.data.ask_for_final()

    def end(self) -> None:
        """End all ranks after a failure; a rank that was interrupted may finish."""
        if self.stage in UNDISTURBED:
            self._end_ranks(Stage.ENDING, "failure")

    @handler
    def interrupt(self, place: str = "") -> None:
        """Interrupt the run, as the interrupt button does; a second call ends it at once.

        ``place`` is where the person is, if not at the run's own cell.

        If no process of the run is left, its outcome stays as it is: its client may already be
        receiving its variables.
        """
        self.found.presses += 1
        logger.info("%s is interrupted, press %d", self.name, self.found.presses)
        self.loss = ""
        if self.stage not in UNDER_WAY:
            return
        self.recorder.note(interrupted=True)
        if self.found.presses > 1:
            self._end_ranks(Stage.ENDING, "now")
        elif self.stage is not Stage.ENDING:
            self.found.interrupted = True
            self.found.stopped = f"stopped from {place}" if place else ""
            self._end_ranks(Stage.FINISHING, "interrupt")
            self.hangs.watch_finish()

    @handler
    def abandon(self) -> None:
        """End the run, since its client is gone and no process will receive its variables."""
        self.found.interrupted = True
        self.recorder.note(interrupted=True)
        self.loss = ""
        if self.stage in UNDER_WAY:
            self._end_ranks(Stage.ENDING, "failure", names=False)

    def break_off(self, refused: UnknownStep) -> None:
        """End the run after a rejected transition, since the supervisor's view of the run is wrong.

        Raises:
            UnknownStep: the run is being ended already. Then only the end of the supervisor is
                certain to end it, and this ends all other runs of the supervisor, too.
        """
        if self.stage not in UNDER_WAY or self.stage is Stage.ENDING:
            raise refused
        logger.error("%s is broken off", self.name, exc_info=refused)
        self.found.trouble = (
            f"taas has lost track of it ({refused}). That is a mistake in taas: please report it,"
            f" with the file that `%taas doctor --report {self.name}` writes"
        )
        self.found.error = RunLost.__name__
        # otherwise the run would count as interrupted by a person, and would report nothing else
        self.found.interrupted = False
        self._end_ranks(Stage.ENDING, "failure")

    def _end_ranks(self, stage: Stage, how: How, *, names: bool = True) -> None:
        if self.stage is not stage:
            self.recorder.move(stage, waiting="")
        self.ranks.end(how, names=names, begun=bool(self.found.started))

    @property
    def overdue(self) -> list[Vm]:
        """The VMs that have not ended their ranks, or their data processes, in time."""
        return self.ranks.overdue + ([] if self.data is None else self.data.overdue)

    @handler
    def step(
        self, *, swept: bool, hear_no_more: Callable[[int], None], then: Callable[[Run], None]
    ) -> None:
        """Bring the run to its end once no rank is left: close the data side, then sort files.

        Args:
            swept: whether the processes that lost agents left behind have ended, too.
            hear_no_more: stops polling the file descriptor of the coordinator, its argument.
            then: concludes the run, or starts it again.
        """
        if self.stage not in UNDER_WAY or not self.ranks.over:
            return
        data = self.data
        if data is not None and not data.closed:
            # the coordinator's last report is the generators' states; after a failure it is not
            # needed
            if data.over or not self.found.all_done:
                hear_no_more(data.fileno())
                data.close()
        elif (data is None or data.gone) and swept and not self.worker.pending:
            self._settle(then)

    def _loss_that_restarts(self) -> str:
        """Return what was lost, if the run starts again because of it; otherwise empty.

        A run in kept ranks is not started again, since new ranks would lack the variables that only
        the kept ones had. Nor is a run that a person has interrupted meanwhile.
        """
        if self._spec.keep or self.restarts >= self._spec.max_restarts or self.found.presses:
            return ""
        return self.found.loss or self._loss_of_planner()

    def _loss_of_planner(self) -> str:
        """Return how the planner was lost, if ranks failed because of that; otherwise empty."""
        first = self.found.verdict.first
        failed_for_it = first is not None and first.etype == DeliveryError.__name__
        return self.data.planner_lost if self.data is not None and failed_for_it else ""

    def again(self, vms: list[Vm], data: DataVms | None) -> Run:
        """Return a new start of this run, on these VMs.

        The new ranks get the loaders' positions, for ``taas.resume``. Files that ranks other than 0
        have written so far are sorted again at the end of the new start.

        Raises:
            OSError: there is no space for the new start; this start is unchanged then.
        """
        number, places = self.restarts + 1, None if self.data is None else self.data.places
        new = Run(
            self.recorder, vms, data, self._sockets, self.worker, restarts=number, places=places
        )
        self.forget()
        self.recorder.begin_again(number, self.loss)
        new.found.notices = self.found.notices
        new._project_sync.follow(self._project_sync)
        new.curves = CurveWatch(new, self.curves)
        return new

    def _settle(self, then: Callable[[Run], None]) -> None:
        """Sort the files that the ranks wrote, now that none is left; call ``then`` afterwards."""
        self.found.answer = self.transfer.answer or self.found.answer
        self.loss = self._loss_that_restarts()
        well = bool(self.loss) or self.found.verdict.outcome != "failed"
        self.recorder.move(Stage.RESTARTING if self.loss else Stage.SORTING)
        self.worker.do(self.curves.finish)
        sorts = partial(self._sort_writes, well=well, over=not self.loss)
        self.worker.do(sorts, lambda done: then(done.result()))

    def _sort_writes(self, *, well: bool, over: bool) -> Run:
        notes, final = ([], b"") if self.data is None else (self.data.notes, self.data.final)
        notices = self.found.notices
        notices += [*notes, *self._project_sync.notices(well=well)]
        self._project_sync.close()
        notices += self.transfer.notices
        notices += self.recorder.keep(self.found.answer, final)
        record = self.recorder.record
        self.found.kept = sort_writes(record.writes, record.project, self.name, over=over)
        return self

    def conclude(self) -> RunState:
        """Record how the run ended; return the message to its client, with rank 0's variables."""
        logger.info("%s is over: %s", self.name, self.found.verdict.outcome)
        gone = [_NOT_KEPT] if self._spec.keep and not self.ranks.stay else []
        if not self.found.all_done:
            self.ranks.store = None  # process groups of its ranks may be broken
        notices = (*self.found.notices, *self.found.kept, *gone)
        self.recorder.end(self.found.verdict, notices, self.ranks.stay or None)
        loaders = b"" if self.data is None else self.data.final
        return RunState(record=self.recorder.record, answer=self.found.answer, loaders=loaders)

    def forget(self) -> None:
        """Tell the agents to forget this run: no process needs the memory that they hold for it."""
        self.ranks.forget()
        self.worker.do(self.transfer.close)  # it takes a while to release gigabytes of memory
