"""The jobs of a run's ranks, one on each VM, and the verdict on how the run ended."""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Callable
from enum import Enum, auto
from functools import partial
from pathlib import Path
from typing import Protocol

import msgspec

from taas.base.wording import counted, named, ranks_in_words
from taas.engines.gpus import refused_as_mig
from taas.errors import RanksGone, RunLost
from taas.header.options import RunSpec
from taas.protocol import deadlines
from taas.protocol.agents import EndJob, How, JobHears, JobRequest, JobSays, OfJob, StartJob
from taas.protocol.clients import Submit
from taas.protocol.delivery_orders import DeliveryConfig
from taas.protocol.framing import LOOPBACK, Memory, StoreAddress
from taas.protocol.ranks import Answer, RankEnded, RankKept, RankOrder
from taas.protocol.records import Verdict
from taas.supervisor.transfer import Transfer
from taas.supervisor.vms import Vm


class StartedRun(Protocol):
    """The attributes of a start of a run that the jobs of its ranks need (supervisor/runs.py)."""

    name: str
    submit: Submit
    vms: list[Vm]
    restarts: int
    output: Path
    scratch: Path
    since_ns: int
    transfer: Transfer


class JobStage(Enum):
    """How far the job of a VM's ranks has got; it never goes back."""

    DUE = auto()
    STARTED = auto()
    OVER = auto()
    """The job has ended, was lost with its VM, or will not be started any more."""


class RankJobs:
    """The jobs of the ranks in one start of a run, indexed by the number of their VM.

    Attributes:
        continues: whether the ranks are those that an earlier run has kept; its jobs were
            ``before``.
        jobs: the stage of each job.
        kept: the ranks that stay on each VM.
        lost: how kept ranks died after the run; empty while they are alive.
        store: the address of the store at which the ranks rendezvous, once it is open; None after a
            failure, which breaks process groups.
    """

    def __init__(self, run: StartedRun, before: RankJobs | None) -> None:
        self._run, self._submit, self.vms = run, run.submit, run.vms
        self.store: StoreAddress | None = before.store if before else None
        self.continues = before is not None
        self.kept: dict[int, tuple[RankKept, ...]] = {}
        self.lost = ""
        self.jobs = [JobStage.DUE] * len(self.vms)
        self._end_by = self._patient_by = float("inf")

    def name(self, number: int) -> str:
        """Return a VM's name for messages, such as ``g2.8-0``; empty for this machine alone."""
        if len(self.vms) == 1 and not self.vms[0].remote:
            return ""
        name = f"{self._submit.cell.spec.instance or 'vm'}-{number}"
        place = self.vms[number].place
        return f"{name} ({place})" if place else name

    def loss(self, number: int, how: str) -> str:
        """Describe what was lost with a VM, and how."""
        agent = f"the agent{named('of', self.name(number))} was {how}"
        match self.jobs[number]:
            case JobStage.DUE if self.vms[number].remote:
                return how.removeprefix("lost: ")
            case JobStage.DUE:
                return f"{agent} before its ranks began"
            case JobStage.STARTED:
                return f"{agent}; it took its ranks with it"
            case JobStage.OVER:
                return f"{agent}; it took rank 0's names with it"

    def lack_of_gpus(self) -> str:
        """Return why ranks cannot have the GPUs that they need, now that the VMs are up; else ''.

        Either some VM has fewer GPUs than needed (if no VM has any, the run is rehearsed instead),
        or ranks need several GPUs on each VM, and some of the assigned ones are MIG instances.
        """
        needed = self._submit.cell.spec.gpus_per_vm
        # MIG devices of this machine were refused before; those of a remote VM are known only now
        parts = [gpu for vm in self.vms if vm.remote for gpu in vm.given if gpu.startswith("MIG-")]
        if refused := refused_as_mig(parts, needed):
            return refused
        given = {number: len(vm.given) for number, vm in enumerate(self.vms)}
        short = [number for number, count in given.items() if count < needed]
        if not short or not any(given.values()):
            return ""
        return (
            f"{self.name(short[0])} has {given[short[0]]} of the {needed} GPUs that its ranks need,"
            " and that it was said to have. `nvidia-smi` there tells whether its driver is loaded."
            " Take it out of the cluster until then, or rehearse the run on CPU ranks"
            " (--rehearse)."
        )

    def device_in_words(self) -> str:
        """Return the device that the ranks use, if only the engine knew it before; else ''."""
        spec = self._submit.cell.spec
        if not self.vms[0].remote or not spec.gpus_per_rank:
            return ""
        count = sum(len(vm.given) for vm in self.vms)
        if not count:
            return f"rehearsed on CPU ({'as --rehearse asks' if spec.rehearse else 'no GPU there'})"
        return counted(count, "GPU")

    def begin(self, delivery: Callable[[int], DeliveryConfig] | None) -> None:
        """Start the ranks: all at once if the store is open, otherwise those of the first VM first.

        The agent of the first VM opens the store.
        """
        self._delivery = delivery
        if self.store is not None:
            self.take_store(self.store, start=0)
            return
        alone = len(self.vms) == 1  # then no other machine has to reach the store
        host = LOOPBACK if alone else self.vms[0].host
        self._start(0, StoreAddress(host, secrets.token_bytes(32)))

    def take_store(self, store: StoreAddress, start: int = 1) -> None:
        """Start the ranks of the VMs that wait for the store, which is open now."""
        self.store = store
        for number in range(start, len(self.vms)):
            if self.jobs[number] is JobStage.DUE:
                self._start(number, store)

    def _start(self, number: int, store: StoreAddress) -> None:
        submit, name, vm = self._submit, self.name(number), self.vms[number]
        work = RankOrder(
            run=self._run.name,
            vm=name,
            cell=submit.cell,
            group_rank=number,
            store=store,
            gpus=vm.given,
            delivery=None if self._delivery is None else self._delivery(number),
            restart_count=self._run.restarts,
            host=vm.host,
            continues=self.continues,
        )
        order = StartJob(
            run=self._run.name,
            job=number,
            name=f"VM {name}" if name else "this machine",
            payload=submit.payload,
            workspace=submit.workspace,
            output=str(self._run.output),
            scratch=str(self._run.scratch),
            since_ns=self._run.since_ns,
            work=work,
        )
        self.jobs[number] = JobStage.STARTED
        self._run.transfer.start(vm, order)

    @property
    def busy(self) -> dict[int, Vm]:
        """The VMs that have ranks."""
        started = [number for number, job in enumerate(self.jobs) if job is JobStage.STARTED]
        return {number: self.vms[number] for number in started}

    def may_say(self, vm: Vm, job: int, said: JobSays) -> bool:
        """Return whether a message is about a job, and a rank, of the VM that sent it."""
        rank = getattr(said, "rank", None)
        own = rank is None or rank // self._submit.cell.spec.ranks_per_vm == job
        return own and 0 <= job < len(self.vms) and self.vms[job] is vm

    def tell(self, number: int, said: JobHears) -> None:
        """Send a message about a job to the agent of its VM."""
        self.vms[number].send(OfJob(run=self._run.name, job=number, said=said))

    def answer(self, answer: Answer) -> None:
        """Forward a person's reply to a rank's question."""
        number = answer.rank // self._submit.cell.spec.ranks_per_vm
        if number in self.busy:
            self.tell(number, answer)

    @property
    def notice(self) -> str:
        """Why VMs will be taken away soon, so that the cell can still save its state.

        It is empty for a run that may start again: such a run continues until its VMs are gone.
        """
        spec = self._submit.cell.spec
        again = not spec.keep and self._run.restarts < spec.max_restarts
        return (
            "" if again else next((vm.machine.ending for vm in self.vms if vm.machine.ending), "")
        )

    @property
    def stay(self) -> tuple[RankKept, ...]:
        """The kept ranks: all ranks of the run, or none."""
        everywhere = all(self.kept.get(number) for number in range(len(self.vms)))
        return tuple(rank for ranks in self.kept.values() for rank in ranks) if everywhere else ()

    @property
    def over(self) -> bool:
        """Whether no rank is left, and none will be started."""
        return all(job is JobStage.OVER for job in self.jobs)

    def end(self, how: How, *, names: bool, begun: bool) -> None:
        """End all ranks, as described in :class:`taas.protocol.agents.EndJob`.

        If no rank has ``begun`` the cell, nothing has to be finished.
        """
        by = time.monotonic() + deadlines.END_RANKS
        if how == "now":
            self._end_by = min(self._end_by, by)
        elif not names or (how == "interrupt" and not begun):
            self._patient_by = min(self._patient_by, by)
        for number, job in enumerate(self.jobs):
            if job is JobStage.DUE:
                self.jobs[number] = JobStage.OVER
        for number in self.busy:
            self.tell(number, EndJob(how=how, names=names))

    def postpone_end(self) -> None:
        """Restart the agents' deadlines, since data of the run still arrive."""
        by, never = time.monotonic() + deadlines.END_RANKS, float("inf")
        self._end_by = by if self._end_by < never else never
        self._patient_by = by if self._patient_by < never else never

    @property
    def overdue(self) -> list[Vm]:
        """The VMs that have not ended their ranks in time.

        Unless the ranks have to end now, a VM on another host is not limited in time, since the
        files that the cell wrote there have to be transferred.
        """
        now, here = time.monotonic(), min(self._end_by, self._patient_by)
        return [vm for vm in self.busy.values() if now > (self._end_by if vm.remote else here)]

    def forget(self) -> None:
        """Tell the agents to forget the jobs: the memory that they hold is not needed any more."""
        for number in range(len(self.vms)):
            self.tell(number, JobRequest(what="forget"))


# -------------------------------------------------- findings about the ranks, and the verdict

_FAILED = ("raised", "exited", "died")
_LOST = ("died", "orphaned", "ended")


class Findings:
    """The facts that the supervisor has gathered about one start of a run.

    Attributes:
        started: the ranks that have begun the cell.
        ended: how ranks have ended, as reported by them or by their agents.
        answer: rank 0's variables, once they have been received.
        notices: lines that the cell shows when the run is over.
        kept: lines that the cell shows then about files written by ranks other than 0.
        presses: how often a person has interrupted the run.
        interrupted: whether a person interrupted the run, or its client disappeared, before it
            failed.
        let_go: whether the client declines the run's variables.
        stopped: from where the run was interrupted, if not from its own cell.
        lost: which VM was lost, and how.
        trouble: any other reason why the run cannot continue.
        error: the name of the class in :mod:`taas.errors` for ``lost`` and ``trouble``.
    """

    def __init__(self, spec: RunSpec, ranks: RankJobs) -> None:
        self._spec, self._ranks = spec, ranks
        self.started: set[int] = set()
        self.ended: dict[int, RankEnded] = {}
        self.answer: Memory | None = None
        self.notices: list[str] = []
        self.kept: list[str] = []
        self.presses = 0
        self.interrupted = self.let_go = False
        self.stopped = ""
        self.lost: str | None = None
        self.trouble: str | None = None
        self.error = RunLost.__name__

    def take(self, ended: RankEnded) -> None:
        """Record how the cell ended in a rank; variables on another host are transferred later.

        Clocks of VMs on other hosts may be wrong, so for their ranks the time at which the message
        arrived is used.
        """
        if self._ranks.vms[ended.rank // self._spec.ranks_per_vm].remote:
            ended = msgspec.structs.replace(ended, at=time.time())
        self.ended[ended.rank] = ended
        if ended.rank == 0 and ended.answer is not None and not ended.answer.elsewhere:
            self.answer = ended.answer
        self.notices += [line for line in ended.notices if line not in self.notices]

    @property
    def all_done(self) -> bool:
        """Whether the cell has ended well in every rank."""
        return sum(rank.outcome == "done" for rank in self.ended.values()) == self._spec.world_size

    @property
    def loss(self) -> str:
        """Return what was lost, if another start may succeed; otherwise empty."""
        may = not self.trouble and self.error == RunLost.__name__
        return what_was_lost(self.verdict) if may else ""

    @property
    def verdict(self) -> Verdict:
        """How the run ended.

        If kept ranks were lost before any of them began the cell, the error is `RanksGone`, and the
        notebook runs the cell in new ranks.
        """
        verdict = self._verdict()
        lost = what_was_lost(verdict) if self._ranks.continues and not self.started else ""
        if not lost or self.error != RunLost.__name__:
            return verdict
        return Verdict(outcome="lost", message=RanksGone.in_words(lost), error=RanksGone.__name__)

    def _verdict(self) -> Verdict:
        undone = [ended for ended in self.ended.values() if ended.outcome != "done"]
        failed = [ended for ended in undone if ended.outcome in _FAILED]
        orphaned = [ended for ended in self.ended.values() if ended.outcome == "orphaned"]
        over = partial(Verdict, names=self._names_in_words())
        if self.interrupted and not (self.all_done and self.answer):
            return over(outcome="interrupted", message=self._after_interrupt(failed))
        if self.lost or self.trouble or orphaned:
            message = self.lost or self.trouble
            if not message:
                server = f"the forkserver{named('of', self._vm_of(orphaned[0].rank))}"
                message = f"{server} was killed; its ranks went with it"
            return over(outcome="lost", message=message, error=self.error)
        if not undone:
            return Verdict(outcome="done")
        first = self._blame(failed or undone)
        waited = self._waited_for(first, undone)
        others = [ended for ended in failed if ended is not first and ended not in waited]
        return over(
            outcome="failed",
            first=first,
            vm=self._vm_of(first.rank),
            others=len(others),
            waited=len(waited),
            message=self._left_before(first),
        )

    def _after_interrupt(self, failed: list[RankEnded]) -> str:
        """Describe the interrupt, and the error of a rank while its cell was finishing, if any.

        That error is reported because the code that failed may have been saving results.
        """
        own = [
            ended
            for ended in failed
            if ended.outcome == "raised" and not failed_in_collective(ended)
        ]
        if not own:
            return self.stopped
        first = self._blame(own)
        return (
            f"{self.stopped or 'interrupted'}, then rank {first.rank} raised {first.etype}:"
            f" {first.message}"
        )

    def _names_in_words(self) -> str:
        """Describe what became of rank 0's variables in a run that is not done."""
        if self._spec.returned == ():
            return "no names came back, as none were asked for"
        if self.answer is not None:
            return "rank 0's names came back as they stood"
        ended = self.ended.get(0)
        if ended is None or ended.outcome not in _LOST:
            return "no names came back"
        return f"no names came back: rank 0 {ended.message}"

    def _left_before(self, first: RankEnded) -> str:
        """List the ranks that had ended well before the collective of the first failed rank failed.

        The collective may have failed because those ranks were missing.
        """
        if not failed_in_collective(first):
            return ""
        done = [ended for ended in self.ended.values() if ended.outcome == "done"]
        left = [ended.rank for ended in done if ended.at < first.at]
        return f"{ranks_in_words(left)} had ended the cell" if left else ""

    def _waited_for(self, first: RankEnded, undone: list[RankEnded]) -> list[RankEnded]:
        """Return the ranks that failed only because ``first`` was missing in a collective."""
        # ``first`` was waiting in a collective itself, so no other rank failed by waiting for it
        if failed_in_collective(first):
            return []
        return [
            ended
            for ended in undone
            if ended is not first and (ended.asleep or failed_in_collective(ended))
        ]

    def _blame(self, failed: list[RankEnded]) -> RankEnded:
        """Return the rank that failed first; others may have failed because of it.

        The earliest failure wins, with one exception, a rank that died: the collectives of its
        peers fail at once, whereas its own death gets its time stamp only when its agent notices.
        """
        earliest = min(failed, key=lambda ended: ended.at)
        until = earliest.at + deadlines.DEATH_IS_THE_CAUSE
        causes = [ended for ended in failed if ended.outcome == "died" and ended.at <= until]
        return min(causes, key=lambda ended: ended.at) if causes else earliest

    def _vm_of(self, rank: int) -> str:
        return self._ranks.name(rank // self._spec.ranks_per_vm)


def what_was_lost(verdict: Verdict) -> str:
    """Return which part of a run was lost; empty if nothing was."""
    if verdict.outcome == "lost":
        return verdict.message
    first = verdict.first
    if verdict.outcome == "failed" and first is not None and first.outcome == "died":
        return f"rank {first.rank}{named('on', verdict.vm)} {first.message}"
    return ""


def failed_in_collective(ended: RankEnded) -> bool:
    """Return whether a rank failed in a collective, as far as its error shows."""
    in_torch = any("torch/distributed/" in line for line in ended.traceback)
    return in_torch or bool(re.search("gloo|nccl|ProcessGroup", ended.message, re.IGNORECASE))
