"""An agent and its ranks: what it does when one says half of something, or when their names cannot be taken."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from vm_harness import Vm

from taas.agent.forkserver import Forkserver
from taas.agent.rank_job import RankJob
from taas.header.options import RunSpec
from taas.wire.agents import JobOver, StartJob
from taas.wire.framing import LOOPBACK, Memory, StoreAddress
from taas.wire.ranks import Cell, RankEnded, RankOrder, Workspace, receive, socket_pair, tell

Ends = tuple[socket.socket, socket.socket]


@pytest.fixture
def ends() -> Iterator[Ends]:
    """The two ends, the agent's and a rank's."""
    agent, rank = socket_pair()
    with agent, rank:
        yield agent, rank


def tell_all(agent: socket.socket, *told: tuple[bytes, *tuple[int, ...]]) -> None:
    """Tell a rank that does not hear, in a time that says that nobody waits for it."""
    telling = threading.Thread(target=lambda: [tell(agent, *message) for message in told], daemon=True)
    telling.start()
    telling.join(30)
    assert not telling.is_alive()


def test_an_agent_waits_for_no_rank_that_does_not_hear(ends: Ends) -> None:
    """A rank that is stuck reads nothing: an order of any length is there for it, with its descriptors, when it goes on."""
    agent, rank = ends
    payload = os.memfd_create("payload")
    os.write(payload, b"names")
    try:
        order = os.urandom(8 << 20)
        tell_all(agent, (order, payload), (b"short",))
        heard, [descriptor] = receive(rank)
        assert heard == order
        assert os.pread(descriptor, 9, 0) == b"names"
        os.close(descriptor)
        assert receive(rank) == (b"short", [])
    finally:
        os.close(payload)


def test_names_that_cannot_be_opened_end_the_run_and_not_the_agent(
    tmp_path: Path, forkserver: Forkserver
) -> None:
    """The supervisor is told why, and every rank ends; nobody looks ten times a second when all are gone."""
    payload = os.memfd_create("payload")
    vm = Vm(tmp_path, forkserver)
    cell = Cell("", 1, RunSpec(name="golden-fox", ranks_per_vm=2), "nocolor")
    order = StartJob(
        run="golden-fox", job=0, name="VM vm-0", payload=Memory(os.getpid(), payload, 0),
        workspace=Workspace(str(tmp_path), dict(os.environ)),
        output=str(tmp_path / "output"), scratch=str(tmp_path / "writes"),
        work=RankOrder("golden-fox", "vm-0", cell, 0, StoreAddress(LOOPBACK, b"0" * 32), ()),
    )  # fmt: skip
    job = RankJob(order, vm.services)
    try:
        job.begin()
        wrong = Memory(os.getpid(), payload, 1)
        job._rank_ended(job.ranks[0], RankEnded(rank=0, outcome="done", at=0.0, answer=wrong))
        heard = [message.said for message in vm.run(job)]
        assert RankEnded(rank=0, outcome="done", at=0.0) in heard
        [over] = [said for said in heard if isinstance(said, JobOver)]
        assert over.how.startswith("the names that the run made could not be taken: /proc/")
    finally:
        job.close()
        os.close(payload)


IN_ITS_EXCEPT = """
import ctypes, threading
from taas.rank.agent_link import AgentLink
from taas.wire.framing import pack
from taas.wire.ranks import hear, socket_pair, tell
from taas.wire.ranks import RankRequest
from multiprocessing.connection import wait

agent, its = socket_pair()
link = AgentLink(its)
link.begin_cell(lambda **_: None, lambda _: None)
libc, lock = ctypes.CDLL(None), ctypes.create_string_buffer(64)

def be_agent():
    tell(agent, pack(RankRequest(what="notice")))
    wait([agent], 20)
    print([said.stage for said in hear(agent)[0]], link.broken_off, flush=True)
    libc.pthread_mutex_unlock(lock)

try:
    raise KeyboardInterrupt
except KeyboardInterrupt:
    libc.pthread_mutex_lock(lock)
    threading.Thread(target=be_agent).start()
    libc.pthread_mutex_lock(lock)  # no signal ends this call
"""


def test_a_rank_in_the_except_of_its_interrupt_is_not_broken_off() -> None:
    """It has noticed, though C code lets it run no handler: it may wait there for a rank that saves."""
    ran = subprocess.run(
        [sys.executable, "-c", IN_ITS_EXCEPT], capture_output=True, text=True, timeout=60, check=False
    )
    assert (ran.stdout, ran.stderr) == ("['at work'] False\n", "")
