"""Processes that a cell starts itself: they know the notebook's names, and end with their rank."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from blocks import block
from notebook_harness import Notebook, gone, until

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
    context = mp.get_context(how)
    processes = [context.Process(target=function, args=(rank, *args)) for rank in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
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
    book.good(
        block("""
            #!g2.2
            #pragma taas --gpus 2
            mp.spawn(train, args=(2, free_port(), 'ranks.pt'), nprocs=2)
        """)
    )
    compared = (
        f"all(torch.equal(a, b) for a, b in zip(torch.load('{path}').values(),"
        " torch.load('ranks.pt').values()))"
    )
    return book.value(compared) == "True"


def test_mp_spawn_in_a_process_that_sees_all_gpus(book: Notebook) -> None:
    """The tutorial's DDP program starts real children, on a rehearsed GPU each, by a type alone.

    An error in one is raised in the cell, with the lines of the cell where it was.
    """
    ran = book.run(
        block("""
            #!g2.2
            def train_and_fail(rank, *args):
                train(rank, *args)
                if rank == 0:
                    raise ValueError('no more')
            gpus = torch.cuda.device_count()
            mp.spawn(train_and_fail, args=(gpus, free_port(), 'spawned.pt'), nprocs=gpus)
        """)
    )
    assert {"child 0 of 2 on 0", "child 1 of 2 on 1"} <= {*ran.own.splitlines()}
    assert ran.ename == "CellFailed"
    assert "ValueError: no more" in ran.traceback
    assert "raise ValueError('no more')" in ran.traceback
    assert same_model(book, "spawned.pt")


def test_processes_of_multiprocessing_train_together(book: Notebook) -> None:
    """The same program over ``mp.Process``, forked, however OpenMP was used before."""
    ran = book.good(block("""
        #!g2.2
        (torch.ones(600, 600) @ torch.ones(600, 600)).sum()
        print(start('fork', train, 2, free_port(), 'forked.pt'))
    """))  # fmt: skip
    assert "[0, 0]" in ran.own
    assert same_model(book, "forked.pt")


def test_children_end_with_the_rank(book: Notebook) -> None:
    """An interrupt ends the cell and what it spawned."""
    book.start(
        block("""
            #!g2.2
            def wait(rank):
                print('here', rank)
                threading.Event().wait()
            import threading
            mp.start_processes(wait, nprocs=2, start_method='fork')
        """)
    )
    book.wait_for("here 0")
    book.wait_for("here 1")
    book.interrupt()
    assert book.end().ename == "KeyboardInterrupt"


SHARING = """
import json, os, psutil, signal, torch, torch.multiprocessing as mp
from pathlib import Path
from torch.utils.data import DataLoader

class Numbers:
    def __len__(self): return 8
    def __getitem__(self, i): return torch.full((3,), i)

def share(place):
    mp.set_sharing_strategy("file_system")
    mine = [torch.zeros(1000).share_memory_() for _ in range(20)]
    loader = iter(DataLoader(Numbers(), num_workers=1))
    mine.append(next(loader))
    below = psutil.Process().children(recursive=True)
    managers = [one.pid for one in below if one.cmdline()[:1] == ["torch_shm_manager"]]
    files = [path.name for path in Path("/dev/shm").glob(f"torch_{os.getpid()}_*")]
    Path(place, os.environ["RANK"]).write_text(json.dumps([managers, files]))
    return mine, loader
"""
ENDS = {
    "ends": ("", ""),
    "raises": ("if rank == 1: raise LookupError('here')", "CellFailed"),
    "is killed": ("if rank == 1: os.kill(os.getpid(), signal.SIGKILL)", "CellFailed"),
    # multiprocessing's number for what it was not told
    "leaves": ("if rank == 1: os._exit(255)", "CellFailed"),
}


@pytest.mark.parametrize("how", ENDS)
def test_shared_memory_of_torchs_file_system_strategy_goes_with_its_rank(
    book: Notebook, tmp_path: Path, how: str
) -> None:
    """However the rank ends; and so does its manager, which removes the files."""
    body, error = ENDS[how]
    book.good(SHARING)
    ran = book.run(
        "#pragma taas --gpus 2\n"
        "rank = int(os.environ['RANK'])\n"
        f"kept = share({str(tmp_path)!r})\n"
        f"managers = json.loads(Path({str(tmp_path)!r}, str(rank)).read_text())[0]\n"
        f"{body}\n"
        "del kept"
    )
    assert ran.ename == error, ran
    assert how != "leaves" or "rank 1 left with status 255 before the cell ended" in ran.evalue, ran
    found = [json.loads((tmp_path / rank).read_text()) for rank in "01"]
    assert all(managers and len(files) >= 20 for managers, files in found)
    ranks = {int(name.split("_")[1]) for _, files in found for name in files}
    assert len(ranks) == 2
    managers = [
        psutil.Process(pid) for managers, _ in found for pid in managers if psutil.pid_exists(pid)
    ]
    until(lambda: not any(map(_at_work, managers)))
    left = [Path("/dev/shm", name) for _, files in found for name in files]
    assert not any(path.exists() for path in left)


def _at_work(process: psutil.Process) -> bool:
    """Whether it is there; one that has ended is buried when its agent looks next."""
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
