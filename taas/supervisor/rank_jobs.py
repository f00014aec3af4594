"""The jobs of a run's ranks, one on each of its VMs: what each is told, when they are over, and by when they have to be."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from taas.delivery.config import DeliveryConfig
from taas.supervisor.vms import Vm
from taas.wire import deadlines
from taas.wire.agents import EndJob, How, JobHears, JobRequest, JobSays, OfJob, StartJob
from taas.wire.framing import LOOPBACK, StoreAddress
from taas.wire.ranks import Answer, RankKept, RankOrder
from taas.wording import counted, named

if TYPE_CHECKING:
    from taas.supervisor.runs import Run


class RankJobs:
    """The jobs of the ranks of one start of a run, by the number of their VM.

    Args:
        run: whose they are.
        before: the jobs of the run whose ranks the VMs have kept for this one.

    Attributes:
        vms: those of the run.
        continues: these are ranks that were kept.
        told: those that were started.
        done: those that are over, or lost, or will not be started.
        kept: the ranks that stay on each VM.
        lost: how these ranks died since; empty while they are there.
        store: where the ranks find each other, once it is open; None after a failure, which breaks groups off.
    """

    def __init__(self, run: Run, before: RankJobs | None) -> None:
        self._run, self._submit, self.vms = run, run.submit, run.vms
        self.store: StoreAddress | None = before.store if before else None
        self.continues = before is not None
        self.kept: dict[int, tuple[RankKept, ...]] = {}
        self.lost = ""
        self.told: set[int] = set()
        self.done: set[int] = set()
        self._end_by = self._patient_by = float("inf")

    def name(self, number: int) -> str:
        """Return what messages call a VM of this run, such as ``g2.8-0``; empty where that is this machine, alone."""
        if len(self.vms) == 1 and not self.vms[0].remote:
            return ""
        name = f"{self._submit.cell.spec.instance or 'vm'}-{number}"
        place = self.vms[number].machine.place
        return f"{name} ({place})" if place else name

    def loss(self, number: int, how: str) -> str:
        """Say what was lost with a VM, ``how`` in words."""
        agent = f"the agent{named('of', self.name(number))} was {how}"
        if number in self.told:
            what = "its ranks" if number in self.busy else "rank 0's names"
            return f"{agent}; it took {what} with it"
        return how.removeprefix("lost: ") if self.vms[number].remote else f"{agent} before its ranks began"

    # ------------------------------------------------------------ GPUs

    def lack_of_gpus(self) -> str:
        """Say which VM has fewer GPUs than its ranks need, where not all have none, and are rehearsed; the VMs are up."""
        needed = self._submit.cell.spec.gpus_per_vm
        given = {number: len(vm.given) for number, vm in enumerate(self.vms)}
        short = [number for number, count in given.items() if count < needed]
        if not short or not any(given.values()):
            return ""
        return (
            f"{self.name(short[0])} has {given[short[0]]} of the {needed} GPUs that its ranks need, and that it was "
            "said to have. `nvidia-smi` there tells whether its driver is loaded. Take it out of the cluster until "
            "then, or rehearse the run on CPU ranks (--rehearse)."
        )

    def device_in_words(self) -> str:
        """Say what the ranks run on, where only the engine knew; else nothing."""
        spec = self._submit.cell.spec
        if self.vms[0].machine.gpus is None or not spec.gpus_per_rank:
            return ""
        count = sum(len(vm.given) for vm in self.vms)
        if not count:
            return f"rehearsed on CPU ({'as --rehearse asks' if spec.rehearse else 'no GPU there'})"
        return counted(count, "GPU")

    # ------------------------------------------------------------ from start to end

    def begin(self, delivery: Callable[[int], DeliveryConfig] | None) -> None:
        """Start the ranks: at once where there is a store, else those of the first VM, whose agent opens one.

        Args:
            delivery: tells how those of a VM reach the run's data workers.
        """
        self._delivery = delivery
        if self.store is not None:
            self.take_store(self.store, start=0)
            return
        alone = len(self.vms) == 1  # its store need not be reached from anywhere else
        host = LOOPBACK if alone else self.vms[0].machine.host
        self._start(0, StoreAddress(host, secrets.token_bytes(32)))

    def take_store(self, store: StoreAddress, start: int = 1) -> None:
        """The store is open: start the ranks of the VMs that wait for it."""
        self.store = store
        for number in range(start, len(self.vms)):
            if number not in self.done:
                self._start(number, store)

    def _start(self, number: int, store: StoreAddress) -> None:
        submit, name = self._submit, self.name(number)
        order = StartJob(
            run=self._run.name,
            job=number,
            name=f"VM {name}" if name else "this machine",
            payload=submit.payload,
            workspace=submit.workspace,
            output=str(self._run.output),
            scratch=str(self._run.scratch),
            since_ns=self._run.since_ns,
            work=self._order(number, store),
        )
        self.told.add(number)
        self._run.transfer.start(self.vms[number], order)

    def _order(self, number: int, store: StoreAddress) -> RankOrder:
        submit, vm = self._submit, self.vms[number]
        return RankOrder(
            run=self._run.name,
            vm=self.name(number),
            cell=submit.cell,
            group_rank=number,
            store=store,
            gpus=vm.given,
            delivery=None if self._delivery is None else self._delivery(number),
            restart_count=self._run.restarts,
            host=vm.machine.host,
            continues=self.continues,
        )

    @property
    def busy(self) -> dict[int, Vm]:
        """The VMs that have ranks."""
        return {number: self.vms[number] for number in sorted(self.told - self.done)}

    def may_say(self, vm: Vm, job: int, said: JobSays) -> bool:
        """Whether it is this VM's job that is spoken of, and a rank of it."""
        rank = getattr(said, "rank", None)
        own = rank is None or rank // self._submit.cell.spec.ranks_per_vm == job
        return own and 0 <= job < len(self.vms) and self.vms[job] is vm

    def tell(self, number: int, said: JobHears) -> None:
        """Say something of a job to its agent."""
        self.vms[number].send(OfJob(run=self._run.name, job=number, said=said))

    def answer(self, answer: Answer) -> None:
        """Hand on what somebody answers to a rank's question."""
        number = answer.rank // self._submit.cell.spec.ranks_per_vm
        if number in self.busy:
            self.tell(number, answer)

    @property
    def notice(self) -> str:
        """Why VMs will be taken away soon: the cell may still save what it has. Who may start again goes on until then."""
        spec = self._submit.cell.spec
        again = not spec.keep and self._run.restarts < spec.max_restarts
        return "" if again else next((vm.machine.ending for vm in self.vms if vm.machine.ending), "")

    @property
    def stay(self) -> tuple[RankKept, ...]:
        """The ranks that stay: all of them, wherever they are, or none."""
        everywhere = all(self.kept.get(number) for number in range(len(self.vms)))
        return tuple(rank for ranks in self.kept.values() for rank in ranks) if everywhere else ()

    @property
    def over(self) -> bool:
        """Whether every VM is done or lost."""
        return len(self.done) == len(self.vms)

    def end(self, how: How, *, names: bool, begun: bool) -> None:
        """Let all ranks end, as :class:`taas.wire.agents.EndJob` says; VMs that were not told to start are done.

        Where no rank has ``begun`` the cell, there is nothing that would have to be finished.
        """
        by = time.monotonic() + deadlines.END_RANKS
        if how == "now":
            self._end_by = min(self._end_by, by)
        elif not names or (how == "interrupt" and not begun):
            self._patient_by = min(self._patient_by, by)
        self.done |= set(range(len(self.vms))) - self.told
        for number in self.busy:
            self.tell(number, EndJob(how=how, names=names))

    def postpone_end(self) -> None:
        """Somebody of the run is at work: its agents have their time from now on."""
        by = time.monotonic() + deadlines.END_RANKS
        self._end_by, self._patient_by = (
            by if deadline < float("inf") else deadline for deadline in (self._end_by, self._patient_by)
        )

    @property
    def overdue(self) -> list[Vm]:
        """The VMs that have not ended in time what had to be ended.

        Until all has to end now, a VM elsewhere may take its time: what the cell wrote there has to come home.
        """
        now = time.monotonic()
        return [
            vm
            for vm in self.busy.values()
            if now > (self._end_by if vm.remote else min(self._end_by, self._patient_by))
        ]

    def forget(self) -> None:
        """Tell the agents that nobody needs what they hold."""
        for number in range(len(self.vms)):
            self.tell(number, JobRequest(what="forget"))
