"""One run, from its submission to its end: what is told to whom, and who was to blame."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from taas.delivery.config import Place
from taas.errors import NotEnoughDevices, RunLost
from taas.messages.agents import (
    AgentTrouble,
    EndRanks,
    RankReport,
    RanksSeen,
    RunOver,
    StartRanks,
    StoreUp,
    Unwatch,
    VmDone,
)
from taas.messages.clients import Progressed, RunEnded, StateChanged, Submit
from taas.messages.hosts import FileChange, Piece, WantPiece, WantProject, Wrote
from taas.messages.ranks import CellStarted, RankEnded, RankOrder
from taas.messages.wire import Endpoint, Memory, Message
from taas.pieces import piece_of
from taas.records import output_folder
from taas.stacks import ranks_in_words
from taas.supervisor.books import shown_ranks
from taas.supervisor.carriage import Carriage
from taas.supervisor.data_side import DataSide, DataVms
from taas.supervisor.given_gpus import check_gpus, device_in_words, gpus_of
from taas.supervisor.hangs import HangWatch
from taas.supervisor.homecoming import Homecoming
from taas.supervisor.rank_writes import make_scratch, settle_scratch
from taas.supervisor.vms import Vm

_DEATH_IS_THE_CAUSE_SECONDS = 2.0
"""A rank that was killed is to blame for errors others had up to this long before its agent saw it."""
_LOOPBACK = "127.0.0.1"
FAILED = ("raised", "exited", "died")


def watched_ranks(submit: Submit) -> tuple[int, ...] | None:
    """The ranks whose output goes to the client; None for all. A background run's is read from its folder."""
    return shown_ranks(submit.spec) if submit.waiting else ()


class Run:
    """A run's state machine: ``acquiring`` → ``starting`` → ``running`` → ``ending`` → ``over``.

    It starts when all its VMs are up, and is over when all of them are done or lost. A run that is started again
    after a loss is a new one of the same name.
    """

    def __init__(
        self,
        name: str,
        submit: Submit,
        vms: list[Vm],
        data: DataVms | None,
        folder: Path,
        tell_client: Callable[[Message], None],
        *,
        restarts: int = 0,
        places: dict[str, Place] | None = None,
    ) -> None:
        self.name, self.submit, self.vms, self.restarts = name, submit, vms, restarts
        self.state = "acquiring"
        self.answer: Memory | None = None
        self.interrupted = False
        self._folder, self.tell = folder, tell_client
        self._scratch = make_scratch(name, submit.project)
        self._ended: dict[int, RankEnded] = {}
        self._started = 0
        self._told: set[int] = set()
        self._done: set[int] = set()
        self._lost: str | None = None
        self._trouble: str | None = None
        self._notices: list[str] = []
        self._error = RunLost.__name__
        self._waiting = ""
        spec, output = submit.spec, str(output_folder(folder, restarts))
        self._carriage = Carriage(name, spec.world_size, submit.payload, output, self._tell_vm)
        self._homecoming = Homecoming(name, submit.project, self._scratch, spec.ranks_per_vm, self._tell_vm)
        self.hangs = HangWatch(self, tell_client)
        self.data = None if data is None else self._start_data(data, places or {})

    def _tell_vm(self, number: int, said: Message) -> None:
        self.vms[number].send(said)

    def _start_data(self, data: DataVms, places: dict[str, Place]) -> DataSide:
        return DataSide(
            self.name,
            self.submit,
            data,
            self._homecoming,
            f"{output_folder(self._folder, self.restarts)}/data.log",
            self.data_changed,
            lambda delivered: self.tell(Progressed(run=self.name, delivered=delivered)),
            places,
        )

    # ------------------------------------------------------------ going on

    def look_at_machines(self) -> None:
        """Start as soon as all VMs are up, and enough elements are prepared; until then say what is waited for."""
        if self.data is not None:
            self.data.start_makers()
        prepared = self.data is None or self.data.ready
        if self.state == "acquiring" and prepared and all(vm.up for vm in self.vms):
            self._start()
        elif self.state == "acquiring":
            vms = [*self.vms, *(() if self.data is None else self.data.vms.values())]
            self._say_waiting(next((vm.machine.waiting for vm in vms if not vm.up), ""))
        elif self.state == "running" and self.data is not None:
            self._say_waiting(self.data.waiting)

    def _start(self) -> None:
        spec = self.submit.spec
        try:
            check_gpus(spec, {self.vm_name(number): vm for number, vm in enumerate(self.vms)})
        except NotEnoughDevices as error:
            self._error, self._trouble = type(error).__name__, str(error)
            self.end()
        else:
            self._enter("starting", device=device_in_words(spec, self.vms))
            self._start_ranks(0, None)

    def _say_waiting(self, waiting: str) -> None:
        if waiting != self._waiting:
            self._waiting = waiting
            self.tell(StateChanged(run=self.name, state=self.state, detail=waiting))

    def data_changed(self) -> None:
        """The data side said something."""
        assert self.data is not None
        if self.data.failed and self.state == "acquiring":
            self._error = self.data.error
            had = self._error == RunLost.__name__
            self._trouble = f"nothing can be delivered: {self.data.failed}" if had else self.data.failed
            self.end()
        self.look_at_machines()

    def _enter(self, state: str, device: str = "") -> None:
        self.state = state
        self.tell(StateChanged(run=self.name, state=state, device=device))

    def _start_ranks(self, number: int, store: Endpoint | None) -> None:
        vm = self.vms[number]
        alone = len(self.vms) == 1  # its store need not be reached from anywhere else
        order = self._order(number, store or Endpoint(_LOOPBACK if alone else vm.machine.host, 0))
        self._told.add(number)
        vm.send(
            StartRanks(run=self.name, vm=number, order=order, store=store, watched=watched_ranks(self.submit))
        )

    def _order(self, number: int, store: Endpoint) -> RankOrder:
        submit, spec, vm = self.submit, self.submit.spec, self.vms[number]
        width = spec.ranks_per_vm
        gpus = gpus_of(vm)
        return RankOrder(
            run=self.name,
            vm=self.vm_name(number),
            cell=submit.cell,
            execution_count=submit.execution_count,
            project=submit.project,
            environ=submit.environ,
            payload=self._carriage.payload_for(remote=vm.remote),
            first_rank=number * width,
            world_size=spec.world_size,
            local_world_size=width,
            group_rank=number,
            group_world_size=spec.vms,
            store=store,
            gpus=gpus,
            rehearsed=0 if gpus else width * spec.gpus_per_rank,
            control="",
            log_dir=str(output_folder(self._folder, self.restarts)),
            scratch=str(self._scratch),
            spec=spec,
            colors=submit.colors,
            delivery=None if self.data is None else self.data.rank_config(vm.machine.host),
            restart_count=self.restarts,
            host=vm.machine.host,
            changed=submit.changed,
            files=self._homecoming.files() if vm.remote else None,
        )

    # ------------------------------------------------------------ what agents say

    def hear(self, message: Any) -> None:
        """Take in what an agent of this run says."""
        match message:
            case WantPiece() | Piece() | Wrote() | WantProject() | FileChange():
                self._carry(message)
            case RanksSeen():
                self.hangs.take(message)
            case StoreUp() if self.state == "starting":
                for number in range(1, len(self.vms)):
                    self._start_ranks(number, message.store)
            case RankReport(said=CellStarted()):
                self._started += 1
                if self._started == self.submit.spec.world_size and self.state == "starting":
                    if self.data is None or not self.data.elsewhere:  # another data VM may join at any time
                        self._homecoming.all_started()
                    self._enter("running")
            case RankReport(said=RankEnded() as ended):
                self._rank_ended(ended)
            case VmDone():
                self._done.add(message.vm)
                self.hangs.lose_vm(message.vm)
                self._notices += message.notices
                if self.data is not None and len(self._done) == len(self.vms):
                    self.data.ask_for_final()
            case AgentTrouble():
                self._trouble = message.message
                self._done.add(message.vm)
                self.end()

    def _carry(self, message: WantPiece | Piece | Wrote | WantProject | FileChange) -> None:
        files = isinstance(message, WantProject | FileChange)
        try:
            if isinstance(message, WantPiece) and message.fd == self._homecoming.parcel_fd:
                self.vms[message.vm].send(piece_of(message, message.fd))
            elif isinstance(message, WantProject | FileChange):
                self._homecoming.hear(message)
            else:
                self._carriage.hear(message)
        except (OSError, msgspec.DecodeError) as error:
            what = "project could not travel" if files else "names that the run made could not be taken"
            self._trouble = f"the {what}: {error}"
            self.end()

    def _rank_ended(self, ended: RankEnded) -> None:
        self._ended[ended.rank] = ended
        if ended.answer is not None and ended.answer.elsewhere:
            self._carriage.fetch(ended.rank // self.submit.spec.ranks_per_vm, ended.answer)
        else:
            self.answer = ended.answer or self.answer
        self._notices += ended.notices
        if ended.outcome != "done":
            self.end()

    def vm_lost(self, vm: Vm, how: str) -> None:
        """An agent of this run is gone."""
        number = self.vms.index(vm)
        if number not in self._done or number == self._carriage.fetching_from:
            if self._lost is None:
                self._error = vm.machine.error
                agent = f"the agent of {self.vm_name(number)} was {how}"
                if number in self._told:
                    self._lost = f"{agent}; it took its ranks with it"
                else:
                    self._lost = (
                        how.removeprefix("lost: ") if vm.remote else f"{agent} before its ranks began"
                    )
            self._done.add(number)
            self._homecoming.lose(number)
            self.hangs.lose_vm(number)
            self.end()

    def busy_vms(self) -> list[tuple[int, Vm]]:
        """Return the VMs that have ranks, with their numbers."""
        return [(n, vm) for n, vm in enumerate(self.vms) if n in self._told and n not in self._done]

    def ended_ranks(self) -> set[int]:
        """Return the ranks that have ended the cell."""
        return set(self._ended)

    # ------------------------------------------------------------ ending

    def end(self, *, at_once: bool = False) -> None:
        """End all ranks: they get SIGINT, SIGTERM, SIGKILL. VMs that were not told to start are done.

        A run that is over stays as it ended: its client has been told, and may be taking its names.
        """
        if self.state == "over" or (self.state == "ending" and not at_once):
            return
        self._enter("ending")
        for number, vm in enumerate(self.vms):
            if number not in self._told:
                self._done.add(number)
            elif number not in self._done:
                vm.send(EndRanks(run=self.name, at_once=at_once))

    def interrupt(self) -> None:
        """Stop as a person at the keyboard does; a second time is final."""
        self.end(at_once=self.interrupted)
        self.interrupted = True

    def abandon(self) -> None:
        """Stop as its client is gone: what it has printed is in its files, and nobody acknowledges the rest."""
        for _, vm in self.busy_vms():
            vm.send(Unwatch(run=self.name))
        self.interrupt()

    @property
    def settled(self) -> bool:
        """Whether every VM is done or lost, and the data side has said its last."""
        said = self.data is None or self.data.over or self.state == "ending"
        fetching = self._carriage.fetching_from >= 0 and self.state != "ending"
        return said and not fetching and len(self._done) == len(self.vms)

    @property
    def finished(self) -> bool:
        """Whether it is settled, and no process of its data side is left."""
        return self.settled and (self.data is None or self.data.gone)

    @property
    def loss(self) -> str:
        """What was lost, of a finished run that may be started again; else empty."""
        verdict = self._verdict()
        never_began = self._error != RunLost.__name__
        if self._trouble or never_began or self.restarts >= self.submit.spec.max_restarts:
            return ""
        if verdict.outcome == "lost":
            return verdict.message
        first = verdict.first
        died = verdict.outcome == "failed" and first is not None and first.outcome == "died"
        return f"rank {first.rank} on {verdict.vm} {first.message}" if died and first is not None else ""

    def again(self, vms: list[Vm], data: DataVms | None) -> Run:
        """Give this name to a new start on these VMs; what ranks other than 0 wrote until now is kept.

        The ranks hear where the loaders were, for ``taas.resume``.

        Raises:
            OSError: there is no room for it; then this start is what it was.
        """
        new = Run(
            self.name,
            self.submit,
            vms,
            data,
            self._folder,
            self.tell,
            restarts=self.restarts + 1,
            places=None if self.data is None else self.data.places,
        )
        self.forget()
        new._notices = self._settle(well=True)
        new._homecoming.take_along(self._homecoming.written)
        return new

    def conclude(self) -> bool:
        """Tell the client how it ended; returns whether it has an answer to take, which its agent holds."""
        self.state = "over"
        self.answer = self._carriage.answer or self.answer
        verdict = self._verdict()
        if self.data is not None:
            verdict = msgspec.structs.replace(verdict, loaders=self.data.final)
        notices = tuple(self._settle(well=verdict.outcome != "failed"))
        self.tell(msgspec.structs.replace(verdict, notices=notices))
        return verdict.answer is not None

    def _settle(self, *, well: bool) -> list[str]:
        """Bring what was written to where it belongs, now that no rank is left; returns the lines for the user."""
        data = [] if self.data is None else self.data.notes
        files = self._homecoming.notices(well=well)
        self._homecoming.close()
        return [*self._notices, *data, *files, *self._carriage.notices, *settle_scratch(self._scratch)]

    def say(self, line: str) -> None:
        """Add a line to what the cell says when the run is over."""
        self._notices.append(line)

    def forget(self) -> None:
        """Tell the agents that nobody needs what they hold for this run."""
        for vm in self.vms:
            vm.send(RunOver(run=self.name))
        self._carriage.close()

    def _verdict(self) -> RunEnded:
        undone = [ended for ended in self._ended.values() if ended.outcome != "done"]
        failed = [ended for ended in undone if ended.outcome in FAILED]
        orphaned = [ended for ended in self._ended.values() if ended.outcome == "orphaned"]
        if self.interrupted:
            return RunEnded(run=self.name, outcome="interrupted")
        if self._lost or self._trouble or orphaned:
            message = self._lost or self._trouble or self._forkserver_lost(orphaned[0])
            return RunEnded(run=self.name, outcome="lost", message=message, error=self._error)
        if undone:
            first = blame(failed or undone)
            others = max(0, len(failed) - 1)
            return RunEnded(
                run=self.name,
                outcome="failed",
                first=first,
                vm=self._vm_of(first.rank),
                others=others,
                message=self._left_before(first),
            )
        return RunEnded(run=self.name, outcome="done", answer=self.answer)

    def _left_before(self, first: RankEnded) -> str:
        """Name the ranks that had ended well when the first one failed: its collective may have missed them."""
        left = [
            ended.rank for ended in self._ended.values() if ended.outcome == "done" and ended.at < first.at
        ]
        return f"{ranks_in_words(left)} had ended the cell before." if left else ""

    def _forkserver_lost(self, orphan: RankEnded) -> str:
        return f"the forkserver of {self._vm_of(orphan.rank)} was killed; its ranks went with it"

    def vm_name(self, number: int) -> str:
        """What messages call a VM of this run, such as ``g2.8-0``."""
        name = f"{self.submit.spec.instance or 'vm'}-{number}"
        place = self.vms[number].machine.place
        return f"{name} ({place})" if place else name

    def _vm_of(self, rank: int) -> str:
        return self.vm_name(rank // self.submit.spec.ranks_per_vm)


def blame(failed: list[RankEnded]) -> RankEnded:
    """Return what failed first, among ranks that may have failed because of each other.

    The earliest wins, but for a rank that died: its peers' collectives fail at once, while its own death is
    stamped when its agent sees it.
    """
    earliest = min(failed, key=lambda ended: ended.at)
    deaths = [ended for ended in failed if ended.outcome == "died"]
    causes = [ended for ended in deaths if ended.at <= earliest.at + _DEATH_IS_THE_CAUSE_SECONDS]
    return min(causes, key=lambda ended: ended.at) if causes else earliest
