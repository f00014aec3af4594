"""Waits for ranks that never come to a group's first collective are broken off.

NCCL is torch's own, and no GPU is needed.

NCCL's sockets are real ones; what needs a GPU is in test_adopt_gpu.py.
"""

from __future__ import annotations

import ast

import pytest
from accounting_cuda import Call, accounts_of, needs_it

pytestmark = [needs_it, pytest.mark.slow]

BEGIN = """
import asyncio, os, socket, sys, threading, time, zmq
import torch, torch.distributed as dist
from pathlib import Path
from taas.adopt import own_gpu, waits
from taas.protocol.framing import LOOPBACK, StoreAddress
os.environ["NCCL_SOCKET_IFNAME"] = os.environ["GLOO_SOCKET_IFNAME"] = "lo"
main = threading.get_ident()
before = socket.create_server((LOOPBACK, 0))
waits.register_backends()
noted = waits.Waits()
noted.install()
folder = Path(os.environ["ACCOUNT"] + ".store")
store = StoreAddress(LOOPBACK, b"", 1, str(folder.parent))
def accepts(port):
    try:
        socket.create_connection((LOOPBACK, port), 10).close()
        return True
    except ConnectionRefusedError:
        return False
"""
PROGRAMS = {
    # what waits for the others: the root of a communicator listens, until all have come
    "a communicator's sockets": """
own_gpu.install()
dist.init_process_group("cpu:gloo,cuda:nccl", store=dist.HashStore(), rank=0, world_size=1)
nccl = int.from_bytes(torch.cuda.nccl.unique_id()[10:12])
python = socket.create_server((LOOPBACK, 0))
other = zmq.Context().socket(zmq.ROUTER)
async def serve():
    return await asyncio.start_server(lambda reader, writer: None, LOOPBACK, 0)
server = asyncio.new_event_loop().run_until_complete(serve())
ports = {
    "nccl": nccl, "python": python.getsockname()[1], "before": before.getsockname()[1],
    "asyncio": server.sockets[0].getsockname()[1],
    "zmq": other.bind_to_random_port("tcp://127.0.0.1"),
}
there = {name: accepts(port) for name, port in ports.items()}
gloo = dist.group.WORLD._get_backend(torch.device("cpu"))
noted.break_off(store, [])
print([there, {name: accepts(port) for name, port in ports.items()}, len(waits.nccl_backends())])
other.close(0)
""",
    # the other rank has joined the group, and never comes to the first collective: this one waits
    # for the communicator's name
    "the first collective": """
own_gpu.install()
def join(rank):
    dist.init_process_group("nccl", store=dist.FileStore(str(folder), 2), rank=rank, world_size=2)
here, its = os.pipe()
if os.fork() == 0:
    os.close(its)
    join(0)
    os.read(here, 1)  # until the other rank is gone
    os._exit(0)
join(1)
def break_off():
    while not waits.waits_at_full_speed(main):
        time.sleep(0.01)
    noted.break_off(store, [folder])
breaker = threading.Thread(target=break_off)
breaker.start()
try:
    dist.all_reduce(torch.empty(1, device="cuda"))
except RuntimeError as error:
    print(["broken off", isinstance(error, dist.DistError)])
breaker.join()
""",
    # who computes has the time it needs, also where there are groups of NCCL
    "what is no collective": """
own_gpu.install()
dist.init_process_group("cpu:gloo,cuda:nccl", store=dist.HashStore(), rank=0, world_size=1)
large = torch.ones(1 << 21)
seen = []
def look(known, going):
    while not going.is_set():
        known.append(waits.waits_at_full_speed(main))
for work in (
    lambda: large.sort(),
    lambda: torch.save(large, os.devnull),
    lambda: time.sleep(0.3),
    lambda: list(range(1 << 20)),
):
    known, over = [], threading.Event()
    looker = threading.Thread(target=look, args=(known, over))
    looker.start()
    while len(known) < 20:
        work()
    over.set()
    looker.join()
    seen.append(any(known))
print(seen)
""",
}


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[list[str], list[Call]]]:
    """What each program printed."""
    programs = {name: BEGIN + program for name, program in PROGRAMS.items()}
    return accounts_of(programs, tmp_path_factory.mktemp("waits"))


def test_sockets_of_a_communicator_in_the_making_are_shut_and_no_others(
    said: dict[str, tuple[list[str], list[Call]]],
) -> None:
    """NCCL's root listens until every rank has come.

    Python's servers, event loops and zmq go on listening.
    """
    [line] = said["a communicator's sockets"][0]
    before, after, backends = ast.literal_eval(line)
    assert before == dict.fromkeys(before, True)
    assert after == {**before, "nccl": False}
    assert backends == 1


def test_the_first_collective_is_broken_off(said: dict[str, tuple[list[str], list[Call]]]) -> None:
    """It is recognised though it uses the processor, and fails with torch's own error."""
    assert said["the first collective"][0] == ["['broken off', True]"]


def test_who_computes_is_not_taken_to_wait(said: dict[str, tuple[list[str], list[Call]]]) -> None:
    """Sorting, saving, sleeping and Python's own work are no collectives."""
    assert said["what is no collective"][0] == ["[False, False, False, False]"]
