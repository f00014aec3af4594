"""The same cell on nodes of a Ray cluster: VMs that share no memory, no process ids and no folder with the notebook."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from notebook_harness import Notebook, Ran
from ray_cluster import Node, RayCluster

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(900)]
_NAMED_SECONDS = 30.0  # 15 where the machine is not busy with other things
NODES = [{"CPU": 1}, {"g2.2": 1, "CPU": 1}, {"g2.2": 1, "CPU": 1}]

_SETUP = """
import torch
from torch import nn
torch.manual_seed(7)
inputs = torch.randn(512, 20)
wanted = inputs @ torch.randn(20, 3)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 3))
    def forward(self, x):
        return self.layers(x)

def fresh():
    torch.manual_seed(1)
    return Net()
"""
_TRAIN = """#!g2.2
#pragma taas --gpus 4
import os, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group("nccl")
rank, size = dist.get_rank(), dist.get_world_size()
model = DistributedDataParallel(fresh().to("cuda"), device_ids=[int(os.environ["LOCAL_RANK"])])
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(10):
    rows = slice(rank * 128, (rank + 1) * 128)
    loss = nn.functional.mse_loss(model(inputs[rows].to("cuda")), wanted[rows].to("cuda"))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"step {step}: {loss.item():.5f}")
print("rank", rank, "says farewell") if rank else None
"""
_SLEEP = """#!g2.2
#pragma taas --gpus 4
import os, time, torch.distributed as dist
dist.init_process_group("nccl")
dist.barrier()
print("all there", flush=True)
time.sleep(600)
"""

_TWO_LIVES = """#!g2.2
#pragma taas --gpus 4 --max-restarts 1
import os, time, torch.distributed as dist
dist.init_process_group("nccl")
dist.barrier()
lives = int(os.environ["TORCHELASTIC_RESTART_COUNT"]) + 1
print("life", lives, flush=True)
time.sleep(600) if lives == 1 else None
"""


def _open(cluster: RayCluster, folder: Path) -> Notebook:
    book = cluster.notebook(folder)
    book.good("import taas")
    return book


@pytest.fixture(scope="module")
def shared(cluster: RayCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Notebook]:
    """A notebook beside the cluster's head, for all tests that leave it alive."""
    book = _open(cluster, tmp_path_factory.mktemp("project"))
    yield book
    book.close()


@pytest.fixture
def book(cluster: RayCluster, shared: Notebook) -> Notebook:
    """That notebook; its cells run on the cluster."""
    shared.good(f"%taas engine ray {cluster.address}")
    return shared


def test_two_vms_train_as_this_machine_does(cluster: RayCluster, book: Notebook) -> None:
    """Output, model, logs of a rank elsewhere and a variable of the environment: all as with the local engine."""
    book.good(_SETUP)
    there = book.good(_TRAIN, 300)
    assert "step 9" in there.own
    book.good("away = {name: value.clone() for name, value in model.state_dict().items()}")
    said = book.good("%taas logs --rank 3").stdout
    assert "rank 3 says farewell" in said
    assert cluster.rid_of_taas(30), "VMs were not given back"
    book.good("%taas engine local")
    assert book.good(_TRAIN, 300).own == there.own
    assert (
        book.value("all(torch.equal(away[name], value) for name, value in model.state_dict().items())")
        == "True"
    )


def test_what_travels(cluster: RayCluster, book: Notebook) -> None:
    """Large names, both ways; what the notebook set in its environment; the interface that reaches the other VM."""
    book.good("import os, torch\nos.environ['TOLD'] = 'by the notebook'\nlarge = torch.arange(12_000_000)")
    book.good(
        "#!g2.2\n#pragma taas --gpus 4\n"
        "import os, socket\n"
        "larger = large + 1\n"
        "seen = os.environ['TOLD'], os.environ['GLOO_SOCKET_IFNAME'], os.environ['MASTER_ADDR'], os.getcwd()\n",
        300,
    )
    assert book.value("torch.equal(larger, large + 1)") == "True"
    assert book.value("seen[:3]") == str(("by the notebook", "eth0", cluster.nodes[1].address)) or book.value(
        "seen[:3]"
    ) == str(("by the notebook", "eth0", cluster.nodes[2].address))


def test_waiting_says_what_is_missing_and_can_be_interrupted(book: Notebook) -> None:
    """A run that asks for more than there is waits, says for what, and is given up by an interrupt."""
    book.start("#!g2.4\n#pragma taas --gpus 4\nprint('never')")
    _wait_for_line(book, "waiting for 1 node with GPU 4, g2.4 1; the cluster has 3 nodes")
    book.interrupt()
    assert book.end().ename == "KeyboardInterrupt"


def test_no_patience_no_wait(cluster: RayCluster, book: Notebook) -> None:
    """[engine] wait = 0: the run fails and says what is missing."""
    settings = book.folder / "taas.toml"
    settings.write_text("[engine]\nwait = 0\n")
    book.good(f"%taas engine ray {cluster.address}")
    ran = book.run("#!g2.4\n#pragma taas --gpus 4\nprint('never')")
    settings.unlink()
    assert ran.ename == "EngineError"
    assert "1 node with GPU 4, g2.4 1" in ran.evalue
    assert "0 like that" in ran.evalue


def test_kernel_killed_nothing_left(cluster: RayCluster, tmp_path: Path) -> None:
    """SIGKILL of the kernel leaves no process of the run on any node."""
    book = _open(cluster, tmp_path)
    try:
        book.good(f"%taas engine ray {cluster.address}")
        book.start(_SLEEP)
        book.wait_for("all there", 240)
        assert sum(len(node.of_taas(actors=True)) for node in cluster.nodes[1:]) > 4
        book.kill()
        assert cluster.rid_of_taas(30)
    finally:
        book.close()


def _lost(ran: Ran, node: Node, since: float) -> None:
    took = time.monotonic() - since
    assert ran.ename == "RunLost", ran
    assert f"(node {node.address})" in ran.evalue
    assert took < _NAMED_SECONDS


def test_node_cut_off(cluster: RayCluster, book: Notebook) -> None:
    """A partition ends the run within 15 s, the message names the VM; the lost agent ends its ranks by itself."""
    book.start(_SLEEP)
    book.wait_for("all there", 240)
    node = cluster.nodes[2]
    began = time.monotonic()
    node.cut_off()
    try:
        _lost(book.end(), node, began)
        assert cluster.rid_of_taas(60, actors=False), "ranks outlive the way to their notebook"
    finally:
        node.reconnect()


def test_node_killed(cluster: RayCluster, book: Notebook) -> None:
    """A node that dies is named within 15 s; with --max-restarts the run starts again once there is another."""
    node = cluster.nodes[2]
    node.restart()
    book.start(_TWO_LIVES)
    book.wait_for("life 1", 300)
    began = time.monotonic()
    node.kill()
    told = book.wait_for("started again", 60)
    assert time.monotonic() - began < _NAMED_SECONDS
    assert f"(node {node.address})" in told.stdout
    node.restart()
    assert "life 2" in book.end(400).stdout
    assert book.value("lives") == "2"
    assert cluster.rid_of_taas(30)


def test_head_lost_and_restarted(cluster: RayCluster, book: Notebook) -> None:
    """A head that is lost is named and no rank outlives it; the next cell waits for it, and outlives it with a restart."""
    where = f"the head of the Ray cluster at {cluster.address}"
    book.start(_SLEEP)
    book.wait_for("all there", 240)
    began = time.monotonic()
    cluster.head.kill()
    ran = book.end()
    assert ran.ename == "RunLost", ran
    assert where in ran.evalue
    assert time.monotonic() - began < _NAMED_SECONDS
    assert cluster.rid_of_taas(60, actors=False)
    book.start(_TWO_LIVES)
    _wait_for_line(book, f"waiting for the Ray cluster at {cluster.address} to be back")
    for node in cluster.nodes:
        node.restart()
    book.wait_for("life 1", 300)
    cluster.restart_head()
    assert where in book.wait_for("started again", 60).stdout
    for node in cluster.nodes[1:]:
        node.restart()
    assert "life 2" in book.end(400).stdout
    assert book.value("lives") == "2"
    assert cluster.rid_of_taas(30)


def _wait_for_line(book: Notebook, text: str, seconds: float = 120) -> None:
    """Wait until the running cell's live line says something."""
    deadline = time.monotonic() + seconds
    while not any(text in update["data"]["text/plain"] for update in book._ran.updates):
        assert not book._next(deadline), f"the cell ended without {text!r}: {book._ran}"
