"""Processes that a cell starts itself: they know the notebook's names, and end with their rank."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from notebook_harness import Notebook, gone

pytestmark = pytest.mark.slow

TRAINING = """
import os, socket
import taas, torch, torch.distributed as dist, torch.multiprocessing as mp
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

SCALE = 3.0

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def forward(self, x):
        return self.layer(x) * SCALE

def free_port():
    with socket.socket() as found:
        found.bind(("localhost", 0))
        return str(found.getsockname()[1])

def setup(rank, world, port):
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "localhost", port
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", rank=rank, world_size=world)

def train(rank, world, port, path):
    setup(rank, world, port)
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(Net().to(rank), device_ids=[rank])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(3):
        loss = model(torch.full((2, 4), float(rank + step)).to(rank)).square().mean()
        optimizer.zero_grad(); loss.backward(); optimizer.step()
    print("child", rank, "of", torch.cuda.device_count(), "on", torch.cuda.current_device())
    if rank == 0:
        torch.save(model.module.state_dict(), path)
    dist.destroy_process_group()

def start(how, function, *args):
    processes = [mp.get_context(how).Process(target=function, args=(rank, *args)) for rank in range(2)]
    for process in processes: process.start()
    for process in processes: process.join()
    return [process.exitcode for process in processes]
"""


@pytest.fixture(scope="module")
def book(notebook: Notebook) -> Notebook:
    notebook.good(TRAINING)
    return notebook


@pytest.fixture(autouse=True)
def nothing_is_left(book: Notebook) -> Iterator[None]:
    """After each program neither a rank nor a child of one is there."""
    yield
    found = book.processes()
    assert not found.ranks
    assert gone(found.others)


def same_model(book: Notebook, path: str) -> bool:
    """Whether a saved model is the one that two ranks train, in which ``mp.spawn`` is adopted."""
    book.good("#!g2.2\n#pragma taas --gpus 2\nmp.spawn(train, args=(2, free_port(), 'ranks.pt'), nprocs=2)")
    compared = f"all(torch.equal(a, b) for a, b in zip(torch.load('{path}').values(), torch.load('ranks.pt').values()))"
    return book.value(compared) == "True"


def test_mp_spawn_in_a_process_that_sees_all_gpus(book: Notebook) -> None:
    """A type alone: the tutorial's DDP program starts real children, a rehearsed GPU each, which meet where it says.

    An error in one is raised in the cell, with the lines of the cell where it was.
    """
    ran = book.run(
        "#!g2.2\ndef train_and_fail(rank, *args):\n    train(rank, *args)\n"
        "    if rank == 0:\n        raise ValueError('no more')\n"
        "mp.spawn(train_and_fail, args=(torch.cuda.device_count(), free_port(), 'spawned.pt'), "
        "nprocs=torch.cuda.device_count())"
    )
    assert {"child 0 of 2 on 0", "child 1 of 2 on 1"} <= {*ran.own.splitlines()}
    assert ran.ename == "CellFailed"
    assert "ValueError: no more" in ran.traceback
    assert "raise ValueError('no more')" in ran.traceback
    assert same_model(book, "spawned.pt")


def test_processes_of_multiprocessing_train_together(book: Notebook) -> None:
    """The same program over ``mp.Process``, forked, however OpenMP was used before."""
    ran = book.good("#!g2.2\n(torch.ones(600, 600) @ torch.ones(600, 600)).sum()\n"
                    "print(start('fork', train, 2, free_port(), 'forked.pt'))")  # fmt: skip
    assert "[0, 0]" in ran.own
    assert same_model(book, "forked.pt")


def test_children_end_with_the_rank(book: Notebook) -> None:
    """An interrupt ends the cell and what it spawned."""
    book.start("#!g2.2\ndef wait(rank):\n    print('here', rank)\n    threading.Event().wait()\n"
               "import threading\nmp.start_processes(wait, nprocs=2, start_method='fork')")  # fmt: skip
    book.wait_for("here 0")
    book.wait_for("here 1")
    book.interrupt()
    assert book.end().ename == "KeyboardInterrupt"
