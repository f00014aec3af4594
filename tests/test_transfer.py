"""What crosses hosts in a run: both ends of it, with a wire between them that the test holds."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from taas.agent.staging import Staging, log_of, output_of
from taas.delivery.config import DataOrder
from taas.engines import AgentConfig, Demand
from taas.engines.driven import DrivenMachine
from taas.header.options import RunSpec
from taas.runs.events import EVENTS, STDERR, STDOUT
from taas.supervisor.transfer import ProjectSync, Transfer
from taas.supervisor.vms import Vm
from taas.wire.agents import JobRequest, OfJob, StartJob
from taas.wire.framing import Memory, Message
from taas.wire.poll_loop import PollLoop, WorkThread
from taas.wire.ranks import Workspace
from taas.wire.transfer import CHUNK, WINDOW, Chunk, Sender, Taken, chunks_of

RUN = "golden-fox"


class Hosts:
    """A run of two VMs elsewhere with two ranks each, as the notebook's machine has it, and what it told them."""

    def __init__(self, folder: Path) -> None:
        self.project, self.output = folder / "project", folder / "output"
        for place in (self.project, folder / "scratch"):
            place.mkdir()
        (self.project / "model.py").write_text("x = 1\n")
        self.told: deque[Message] = deque()
        self._machine = DrivenMachine(0, SimpleNamespace(give_back=print), "")
        self.vm = Vm(self._machine, "vm0", Demand(), self._tell, remote=True)
        spec = RunSpec(name=RUN, vms=2, ranks_per_vm=2)
        self.project_sync = ProjectSync(RUN, str(self.project), folder / "scratch", spec)
        self.failed: list[str] = []
        self._loop = PollLoop()
        self.worker = WorkThread(self._loop.soon)
        self.transfer = Transfer(
            RUN, spec, self.output, self.project_sync, self.worker, lambda job, why: self.failed.append(why)
        )
        self._payloads: list[int] = []

    def _tell(self, _: str, message: Message) -> None:
        self.told.append(message.said if isinstance(message, OfJob) else message)

    def start(self, job: int, payload: bytes = b"names", transfer: Transfer | None = None) -> StartJob:
        """Start a job with a payload, whose work does not matter; returns what its agent is told."""
        fd = os.memfd_create("payload")
        os.write(fd, payload)
        self._payloads.append(fd)
        order = StartJob(
            run=RUN,
            job=job,
            name="VM g2.2-0",
            payload=Memory(os.getpid(), fd, len(payload)),
            workspace=Workspace(str(self.project), {}),
            output=str(self.output),
            work=DataOrder(common=None),  # type: ignore[arg-type]
        )
        (transfer or self.transfer).start(self.vm, order)
        return self.told.popleft()

    def hear(self, job: int, said: Chunk | Taken | JobRequest) -> None:
        """Let the run hear something of a job, and do what that asks for."""
        self.transfer.hear(job, said)
        self.work()

    def work(self) -> None:
        """Wait for the worker."""
        while self.worker.pending:
            self._loop.step(None)

    def close(self) -> None:
        self.worker.close()
        self.transfer.close()
        self.project_sync.close()
        self._machine.end()
        for fd in self._payloads:
            os.close(fd)


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Hosts]:
    made = Hosts(tmp_path)
    yield made
    made.close()


def agent(folder: Path) -> AgentConfig:
    return AgentConfig("", "", "", "", str(folder), remote=True)


def ahead(messages: deque[Message]) -> int:
    """Bytes that are on their way."""
    return sum(len(message.data) for message in messages if isinstance(message, Chunk))


def test_a_job_elsewhere_gets_its_payload_and_the_project_in_turn(hosts: Hosts, tmp_path: Path) -> None:
    """No more than the window, and the chunk that fills it, is on its way, and each of the two gets on while the other one does."""
    payload = os.urandom(WINDOW + 5 * CHUNK + 7)
    (hosts.project / "weights.py").write_bytes(os.urandom(3 * CHUNK))
    order = hosts.start(0, payload)
    Path(order.token_path).unlink()  # as on a host that does not see this disk
    assert WINDOW <= ahead(hosts.told) < WINDOW + CHUNK
    asked: list[Message] = []
    staging = Staging(order, agent(tmp_path), asked.append)
    try:
        assert asked == [JobRequest(what="project")]
        hosts.hear(0, JobRequest(what="project"))
        came = []
        while hosts.told:
            assert ahead(hosts.told) < WINDOW + CHUNK
            chunk = hosts.told.popleft()
            came.append(chunk.of)
            staging.take(chunk)
            hosts.hear(0, Taken(len(chunk.data)))
        assert staging.complete
        assert came.index("project") < len(came) - 1 - came[::-1].index("payload")
        assert os.pread(staging.staged.payload.fd, len(payload) + 1, 0) == payload
        copy = Path(staging.staged.replica or staging.staged.project)
        assert (copy / "weights.py").read_bytes() == (hosts.project / "weights.py").read_bytes()
    finally:
        staging.close()
    assert [*tmp_path.glob("job-*/**/*")] == [copy], "nothing is left of it but where spares stand"


def test_an_empty_project_arrives_and_the_next_one_where_it_was(hosts: Hosts, tmp_path: Path) -> None:
    """A spare that was forked between two runs stands in the folder that the second one fills."""
    copies = []
    for text in ("", "x = 2\n"):
        for path in hosts.project.iterdir():
            path.unlink()
        if text:
            (hosts.project / "model.py").write_text(text)
        spec = RunSpec(name=RUN)
        project_sync = ProjectSync(RUN, str(hosts.project), tmp_path, spec)
        transfer = Transfer(RUN, spec, hosts.output, project_sync, hosts.worker, pytest.fail)
        order = hosts.start(0, transfer=transfer)
        project_sync.all_started()  # the token is gone, as on a host that does not see this disk
        staging = Staging(order, agent(tmp_path), lambda _: None)
        transfer.hear(0, JobRequest(what="project"))
        hosts.work()
        while hosts.told:
            chunk = hosts.told.popleft()
            staging.take(chunk)
        assert staging.complete
        copies.append(Path(staging.staged.replica or staging.staged.project))
        assert [path.read_text() for path in copies[-1].iterdir()] == ([text] if text else [])
        staging.close()
        transfer.close()
        project_sync.close()
    assert copies[0] == copies[1]


def test_a_payload_that_breaks_off_is_said(hosts: Hosts, tmp_path: Path) -> None:
    """Bytes that are not the next ones are not taken for them."""
    staging = Staging(hosts.start(0, b"0" * 100), agent(tmp_path), lambda _: None)
    with pytest.raises(OSError, match=r"the registered loaders could not be taken: .* broke off at byte 0"):
        staging.take(Chunk(of="payload", data=b"0", offset=50, size=100))
    assert not staging.complete
    staging.close()


def test_what_a_rank_writes_is_the_same_file_here_and_raw_bytes_come_first(
    hosts: Hosts, tmp_path: Path
) -> None:
    """A record in the events counts on the raw files; what is written while it is sent comes with the next look."""
    hosts.start(0)
    there = tmp_path / "there"
    there.mkdir()
    ended: list[bool] = []
    sent: list[Message] = []
    sender = Sender(sent.append)
    sender.add(output_of(1, there, lambda: bool(ended)))
    wrote = {STDOUT: os.urandom(WINDOW + 3), STDERR: b"oh", EVENTS: b"record"}
    for name, data in wrote.items():
        (there / name).write_bytes(data)
    sender.step()
    for look in range(2):
        for message in sent:
            hosts.hear(0, message)
        names = [message.file for message in sent if isinstance(message, Chunk)]
        assert names == ([STDOUT] * 16 if look == 0 else [STDOUT, STDERR, EVENTS])
        sender.taken(ahead(deque(sent)))
        sent.clear()
        sender.step()
    ended.append(True)
    with (there / EVENTS).open("ab") as file:
        file.write(b" and the last one")
    sender.step()
    sender.step()
    assert sender.done
    for message in sent:
        hosts.hear(0, message)
    wrote[EVENTS] = b"record and the last one"
    assert {path.name: path.read_bytes() for path in (hosts.output / "1").iterdir()} == wrote
    assert hosts.transfer.notices == []


def test_data_processes_of_several_vms_print_into_one_file_line_by_line(hosts: Hosts, tmp_path: Path) -> None:
    """Half a line is sent when nobody writes any more, and not before."""
    ended: list[bool] = []
    senders, sent = [], deque[tuple[int, Message]]()
    for job in (3, 4):
        hosts.start(job)
        log = tmp_path / f"data-{job}.log"
        log.write_text(f"{job} begins\n{job} ha")
        sender = Sender(lambda chunk, job=job: sent.append((job, chunk)))
        sender.add(log_of(log, lambda: bool(ended)))
        senders.append((sender, log))
    for last in (False, True):
        if last:
            for _, log in senders:
                with log.open("a") as file:
                    file.write("s ended\n")
            ended.append(True)
        for sender, _ in senders:
            sender.step()
            sender.step()
        while sent:
            hosts.hear(*sent.popleft())
    assert (hosts.output / "data.log").read_text() == "3 begins\n4 begins\n3 has ended\n4 has ended\n"
    assert all(sender.done for sender, _ in senders)


def test_the_answer_comes_from_the_vm_that_said_so(hosts: Hosts) -> None:
    """Another VM's bytes are not taken for rank 0's; each is acknowledged."""
    answer = os.urandom(2 * CHUNK + 1)
    for job in (0, 1):
        hosts.start(job)
    hosts.told.clear()
    hosts.transfer.expect(0, Memory(0, 0, len(answer)))
    fd = os.memfd_create("answer")
    try:
        os.write(fd, answer)
        memory = Memory(os.getpid(), fd, len(answer))
        for chunk in chunks_of("answer", memory):
            assert hosts.transfer.answer is None
            for job in (1, 0):
                hosts.hear(job, chunk)
    finally:
        os.close(fd)
    here = hosts.transfer.answer
    assert here is not None
    assert os.pread(here.fd, len(answer) + 1, 0) == answer
    assert sum(said.nbytes for said in hosts.told if isinstance(said, Taken)) == 2 * len(answer)


def test_what_cannot_be_written_is_acknowledged_all_the_same(hosts: Hosts, tmp_path: Path) -> None:
    """An agent waits for that, and the run's end for the agent. It is no loss of the run: here the project was just renamed."""
    hosts.start(0)
    hosts.hear(0, JobRequest(what="project"))
    hosts.told.clear()
    hosts.project.rename(tmp_path / "renamed")
    for _ in range(2):
        hosts.hear(0, Chunk(of="changes", data=b"new", size=3))
    assert list(hosts.told) == [Taken(3)] * 2
    assert hosts.failed == []
    [said] = hosts.project_sync.notices(well=True)
    assert said.endswith(f"No such file or directory ({hosts.project}). See to that, and run the cell again")
