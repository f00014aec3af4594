"""When the ranks of a run are started, and on what.

A run and VMs of a cluster, without their processes.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from taas.base.places import ProcessMark
from taas.base.poll_loop import PollLoop, WorkThread
from taas.engines.driven import DrivenMachine
from taas.header.options import RunSpec
from taas.protocol.agents import AgentUp, JobOver, JobSays, StartJob
from taas.protocol.chunks import Chunk
from taas.protocol.clients import DeliveryOrder, Submit
from taas.protocol.engines import Demand, EngineChoice
from taas.protocol.framing import Memory, Message, StoreAddress
from taas.protocol.ranks import Asking, Cell, RankEnded, RankStage, Workspace
from taas.protocol.records import RunRecord
from taas.runs.records import read_record
from taas.supervisor.data_side import Phase
from taas.supervisor.rank_jobs import JobStage
from taas.supervisor.recorder import Recorder
from taas.supervisor.runs import Run
from taas.supervisor.stages import Stage
from taas.supervisor.vms import DataVms, Vm


def _submit(
    spec: RunSpec, payload: Memory, loaders: DeliveryOrder | None, project: str = "/"
) -> Submit:
    return Submit(
        cell=Cell("", 1, spec, "nocolor"),
        workspace=Workspace(project, {}),
        payload=payload,
        gpus=(),
        device="by Ray",
        delivery=loaders,
        engine=EngineChoice("ray"),
    )


class Beginning:
    """A run of two VMs with two ranks each, and what is written down of it.

    ``told`` is what VMs were told, with their keys.
    """

    def __init__(
        self,
        project: Path,
        data_vms: int = 0,
        here: str = "",
        *,
        remote: bool = True,
        **options: Any,
    ) -> None:
        self._here, self._remote = here, remote
        self.told: list[tuple[str, Message]] = []
        self.machines: list[DrivenMachine] = []
        self.vms = self._vms(2)
        self._payload = os.memfd_create("nothing")
        payload = Memory(os.getpid(), self._payload, 0)
        loaders = DeliveryOrder(payload, processes=1, encrypt=True) if data_vms else None
        spec = RunSpec(
            name="starts", instance="g2.2", vms=2, ranks_per_vm=2, data_vms=data_vms, **options
        )
        recorder = Recorder(
            _submit(spec, payload, loaders, str(project)), ProcessMark.of(os.getpid())
        )
        recorder.begin(())
        recorder.move(Stage.ACQUIRING)
        self._loop = PollLoop()
        self._worker = WorkThread(self._loop.soon)
        self.run = Run(recorder, self.vms, self.data(data_vms), project, self._worker)

    def _vms(self, count: int) -> list[Vm]:
        engine: Any = SimpleNamespace(want=print, give_back=print)
        machines = [DrivenMachine(number, engine, "the Ray cluster") for number in range(count)]
        self.machines += machines
        return [
            Vm(
                machine,
                f"vm{number}",
                Demand(),
                lambda *told: self.told.append(told),
                remote=self._remote,
            )
            for number, machine in enumerate(machines)
        ]

    def data(self, count: int) -> DataVms | None:
        """So many data VMs that have yet to come, and one for the planner."""
        if not count:
            return None
        planner, *vms = self._vms(count + 1)
        return DataVms(vms, planner, lambda: self._here, lambda: None)

    def started(self) -> list[StartJob]:
        """The orders to start ranks."""
        return [told for _, told in self.told if isinstance(told, StartJob)]

    def hear(self, job: int, said: JobSays) -> None:
        """Let the agent of a job say something of it."""
        self.run.hear(self.vms[job], job, said)

    @property
    def record(self) -> RunRecord:
        """What everybody may read of it now."""
        record = read_record(self.run.recorder.record.folder)
        assert record is not None
        return record

    def ended(self) -> RunRecord:
        """End it, and return what is known of it then."""
        run = self.run
        run.end()
        if run.recorder.record.live:
            if run.data is not None and not run.data.closed:
                run.data.close()
            for number, job in enumerate(run.ranks.jobs):
                if job is JobStage.STARTED:
                    self.hear(number, JobOver())
            self.work()
            run.step(swept=True, hear_no_more=self._loop.off, then=lambda settled: None)
            self.work()
            run.conclude()
        return self.record

    def work(self) -> None:
        """Wait for the worker."""
        while self._worker.pending:
            self._loop.step(None)

    def close(self) -> None:
        """End what never ran."""
        self.ended()
        self._worker.close()
        for machine in self.machines:
            machine.end()
        self.run.recorder.discard()
        os.close(self._payload)


@pytest.fixture
def begin(tmp_path: Path) -> Iterator[Callable[..., Beginning]]:
    """Makes a run that waits for its VMs."""
    begun: list[Beginning] = []

    def make(**options: Any) -> Beginning:
        begun.append(Beginning(tmp_path, **options))
        return begun[-1]

    yield make
    for beginning in begun:
        beginning.close()


def _all_come(begun: Beginning, *gpus: tuple[str, ...]) -> None:
    for number, (vm, given) in enumerate(zip(begun.vms, gpus, strict=True), 1):
        vm.take(AgentUp(host=f"10.0.0.{number}", node=f"10.0.0.{number}", gpus=given))
        begun.run.look_at_machines()


@pytest.mark.parametrize(("short", "count"), [((), 0), (("0",), 1)])
def test_a_vm_without_the_gpus_it_was_said_to_have(
    begin: Callable[..., Beginning], short: tuple[str, ...], count: int
) -> None:
    """Half of a run is never rehearsed: it ends before any rank starts, and the node is named."""
    begun = begin()
    _all_come(begun, ("0", "1"), short)
    assert begun.started() == []
    assert begun.run.ranks.over
    ended = begun.ended()
    assert not begun.run.loss
    assert (ended.outcome, ended.error) == ("lost", "NotEnoughDevices")
    assert f"g2.2-1 (node 10.0.0.2) has {count} of the 2 GPUs that its ranks need" in ended.message


@pytest.mark.parametrize("ahead", [-60.0, 60.0])
@pytest.mark.parametrize("first", [0, 2])
@pytest.mark.parametrize("outcome", ["raised", "died"])
def test_the_first_to_fail_is_found_whatever_clocks_say(
    begin: Callable[..., Beginning], ahead: float, first: int, outcome: str
) -> None:
    """The second VM's clock is wrong by a minute.

    Who died is to blame for what others raise just before that is seen.
    """
    begun = begin()
    _all_come(begun, (), ())

    def clock(rank: int) -> float:
        return time.time() + (ahead if rank >= 2 else 0.0)

    for rank in range(4):
        begun.hear(rank // 2, RankStage(stage="begun", rank=rank))
    second = 2 - first
    order = (second, first) if outcome == "died" else (first, second)
    for rank in order:
        how = outcome if rank == first else "raised"
        begun.hear(
            rank // 2, RankEnded(rank=rank, outcome=how, at=clock(rank), message=f"of {rank}")
        )
    verdict = begun.ended()
    assert verdict.first is not None and verdict.first.rank == first
    assert verdict.vm.startswith(f"g2.2-{first // 2} ")


ANSWER = Memory(0, 0, 4)
FOREIGN: list[tuple[int, JobSays]] = [
    (0, RankEnded(rank=0, outcome="done", at=0.0, answer=ANSWER)),
    (1, RankEnded(rank=0, outcome="done", at=0.0, answer=ANSWER)),
    (-1, RankEnded(rank=0, outcome="done", at=0.0, answer=ANSWER)),
    (0, Chunk(of="answer", data=b"evil", size=4)),
    (0, Chunk(of="changes", data=b"")),
    (0, Chunk(of="output", data=b"evil", file="events")),
    (1, Chunk(of="output", data=b"evil", file="events")),
    (1, RankStage(stage="begun", rank=0)),
    (1, Asking(rank=0, number=1, prompt="password?")),
    (1, StoreAddress("10.0.0.66", b"evil", port=6)),
    (0, JobOver()),
    (3, JobOver()),
]


def test_an_agent_speaks_of_its_own_job_and_ranks_only(begin: Callable[..., Beginning]) -> None:
    """What the second VM says of the first one's ranks, or of data processes, changes nothing.

    Names are rank 0's.

    Another rank of its VM may name a memory: nobody opens it.
    """
    begun = begin(data_vms=1)
    assert begun.run.data is not None
    begun.run.data.phase = Phase.DELIVERING
    _all_come(begun, (), ())
    before = begun.record, list(begun.told), list(begun.run.output.rglob("*"))
    for job, said in FOREIGN:
        begun.run.hear(begun.vms[1], job, said)
    assert (begun.record, begun.told, list(begun.run.output.rglob("*"))) == before
    assert not (begun.run.found.ended or begun.run.found.started)
    assert JobStage.OVER not in begun.run.ranks.jobs
    assert (begun.run.found.answer, begun.run.transfer.answer, begun.run.ranks.store) == (
        None,
        None,
        None,
    )
    begun.hear(0, RankEnded(rank=1, outcome="done", at=0.0, answer=Memory(os.getpid(), 9, 100)))
    assert begun.run.found.answer is None
