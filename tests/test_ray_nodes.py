"""A project on VMs that do not see its disk: the cell runs there as it does here, and what it saves is here."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from notebook_harness import Notebook
from ray_cluster import RayCluster

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))
import offline_mnist

sys.path.pop(0)

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(900)]
NODES = [{"CPU": 1}, {"g2.2": 1, "CPU": 1}, {"g2.2": 1, "CPU": 1}]

_MODEL = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(1, 8, 5, stride=2), nn.ReLU(), nn.Conv2d(8, 16, 5, stride=2), nn.ReLU(),
            nn.Flatten(), nn.Linear(256, 10))
    def forward(self, images):
        return self.layers(images)
"""
_SETUP = """
import os, torch
PROJECT = os.getcwd()
"""
_TRAIN = """#!g2.2
#pragma taas --gpus 4
import model, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler
from torchvision import datasets, transforms
dist.init_process_group("nccl")
rank, local_rank = dist.get_rank(), int(os.environ["LOCAL_RANK"])
torch.manual_seed(1)
net = DistributedDataParallel(model.Net().to(local_rank), device_ids=[local_rank])
digits = datasets.MNIST(f"{PROJECT}/data", train=True, download=True, transform=transforms.ToTensor())
loader = DataLoader(digits, batch_size=60, sampler=DistributedSampler(digits, seed=3))
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for epoch in range(2):
    loader.sampler.set_epoch(epoch)
    for images, labels in loader:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(net(images.to(local_rank)), labels.to(local_rank))
        loss.backward()
        optimizer.step()
    print(f"epoch {epoch}: {loss.item():.4f}")
    if rank == 0:
        os.makedirs("checkpoints", exist_ok=True)
        torch.save(net.module.state_dict(), f"checkpoints/{epoch}.pt")
        os.replace(f"checkpoints/{epoch}.pt", "checkpoints/last.pt")
        os.path.exists("old.txt") and os.remove("old.txt")
    open(f"rank-{rank}.txt", "w").write(f"rank {rank} was here")
print(os.getcwd() == PROJECT, model.__file__ == f"{PROJECT}/model.py")
"""
_SLEEP = """#!g2.2
#pragma taas --gpus 4
import time, torch.distributed as dist
dist.init_process_group("nccl")
if dist.get_rank() == 0:
    open("begun.txt", "w").write("complete")
    half = open("half.txt", "w")
    half.write("half"), half.flush()
numbers = torch.ones(1)
print("training", flush=True)
while True:
    dist.all_reduce(numbers)
    time.sleep(0.1)
"""

_AGAIN = """#!g2.2
#pragma taas --gpus 4 --max-restarts 1
import time, torch.distributed as dist
dist.init_process_group("nccl")
saved = os.path.exists("checkpoint.pt")
dist.barrier()  # before rank 0 saves it
if saved:
    print("goes on from", len(torch.load("checkpoint.pt")), "numbers")
else:
    if dist.get_rank() == 0:
        torch.save(torch.zeros(9 << 18), "checkpoint.pt")
    time.sleep(600)
"""


@pytest.fixture
def book(cluster: RayCluster, tmp_path: Path) -> Iterator[Notebook]:
    """A notebook beside the cluster's head, in a project that no other node sees."""
    (tmp_path / "model.py").write_text(_MODEL)
    book = cluster.notebook(tmp_path)
    try:
        book.good(f"import taas\n%taas engine ray {cluster.address}")
        book.good(_SETUP)
        book.good("from torch import nn")
        yield book
    finally:
        book.close()


def _weights(book: Notebook) -> str:
    return book.value("{name: value.tolist() for name, value in net.state_dict().items()}")


def _wait_for_file(path: Path, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not path.exists():
        assert time.monotonic() < deadline, f"{path.name} does not come: {list(path.parent.iterdir())}"
        time.sleep(0.1)


def test_mnist_on_two_vms_as_here(cluster: RayCluster, book: Notebook) -> None:
    """The same output, the same model; modules, data and saved files where the notebook has them."""
    offline_mnist.write(book.folder / "data")
    (book.folder / "old.txt").write_text("for rank 0 to remove")
    (book.folder / "large.bin").write_bytes(bytes(9 << 20))
    there = book.good(_TRAIN, 400)
    assert "epoch 1" in there.own
    assert there.own.endswith("True True\n")
    assert "%taas recover" in there.stdout, "what only other ranks wrote is kept"
    weights = _weights(book)
    names = {path.name for path in book.folder.iterdir()}
    assert names == {"checkpoints", "data", "large.bin", "model.py", "rank-0.txt"} | ({"__pycache__"} & names)
    assert [path.name for path in (book.folder / "checkpoints").iterdir()] == ["last.pt"]
    saved = "torch.load('checkpoints/last.pt')"
    assert (
        book.value(f"all(torch.equal({saved}[name], value) for name, value in net.state_dict().items())")
        == "True"
    )
    book.good("%taas engine local")
    here = book.good(_TRAIN, 400)
    assert here.own == there.own
    assert _weights(book) == weights


def test_todays_module_travels_and_a_missing_file_is_explained(book: Notebook) -> None:
    """An edit of model.py holds in the next run. What was too large to travel is named when the run fails.

    It is also named, and kept, when the cell adds to it and so makes a new one.
    """
    for name in ("large.bin", "log.csv"):
        (book.folder / name).write_bytes(bytes(9 << 20))
    cell = "#!g2.2\n#pragma taas --gpus 2\nimport model\nprint(model.VALUE)\n"
    (book.folder / "model.py").write_text("VALUE = 'first'\n")
    first = book.good(cell + "with open('log.csv', 'a') as log: log.write('a line')", 300)
    assert first.own == "first\n"
    assert "log.csv (9.4 MB) had not travelled" in first.stdout
    assert (book.folder / "log.csv").read_text() == "a line"
    [kept] = book.folder.glob("log.before-*.csv")
    assert kept.stat().st_size == 9 << 20
    (book.folder / "model.py").write_text("VALUE = 'second'\n")
    failed = book.run(cell + "open('large.bin')", 300)
    assert failed.own == "second\n"
    assert failed.ename == "CellFailed"
    assert "large.bin (9.4 MB)" in failed.stdout + failed.stderr


@pytest.mark.parametrize("number", [1, 2])
def test_a_vm_lost_in_training_is_named_and_what_was_saved_is_here(
    cluster: RayCluster, book: Notebook, number: int
) -> None:
    """Killed, or cut off: RunLost within 15 s; files saved before are whole; the next run works."""
    book.start(_SLEEP)
    book.wait_for("training", 240)
    _wait_for_file(book.folder / "begun.txt")
    node = cluster.nodes[number]
    began = time.monotonic()
    node.kill() if number == 1 else node.cut_off()
    try:
        ran = book.end()
        took = time.monotonic() - began
        assert ran.ename == "RunLost", ran
        assert f"(node {node.address})" in ran.evalue
        assert took < 30, "15 where the machine is not busy with other things"
        assert (book.folder / "begun.txt").read_text() == "complete"
    finally:
        node.reconnect()
        node.restart()
    names = {path.name for path in book.folder.iterdir()}
    assert names <= {"begun.txt", "half.txt", "model.py", "__pycache__"}, "nothing of taas is left"
    assert book.good("#!g2.2\n#pragma taas --gpus 4\nprint('fine')", 300).own == "fine\n"


def test_a_run_that_starts_again_has_its_checkpoint(cluster: RayCluster, book: Notebook) -> None:
    """Larger than what else travels, and saved on a VM that may be gone."""
    book.start(_AGAIN)
    _wait_for_file(book.folder / "checkpoint.pt", 300)
    cluster.nodes[1].restart()  # Ray is killed there first
    assert "goes on from 2359296 numbers" in book.end(300).own
