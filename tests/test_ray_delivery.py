"""Registered DataLoaders on nodes of a Ray cluster.

Data VMs that share nothing with the notebook or the ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from notebook_harness import Notebook
from ray_cluster import Node, RayCluster

from taas.runs.records import read_records

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(900)]
NODES = [{"CPU": 1}, {"g2.2": 1, "CPU": 1}, {"c1.4": 1, "CPU": 1}, {"c1.4": 1, "CPU": 1}]

_MODULE = """
import os, time, torch
from torch.utils.data import Dataset

class Numbers(Dataset):
    def __init__(self, folder, count, pause=0.0):
        self.folder, self.count, self.pause = folder, count, pause
    def __len__(self):
        return self.count
    def __getitem__(self, i):
        with open(f"{self.folder}/offset.txt") as file:
            offset = int(file.read())
        time.sleep(self.pause)
        os.write(1, f"made {i} told {os.environ['TOLD']}\\n".encode())
        return i, torch.full((16,), float(i % 7 + offset)) + torch.rand(16)
"""
_SETUP = """
import os, taas, torch, taas.dataloader_registry
from torch import nn
from torch.utils.data import DataLoader
import numbers_here
os.environ["TOLD"] = "by the notebook"
def fresh(count, pause=0.0):
    [taas.unregister(one.loader) for one in taas.dataloader_registry.list_registered()]
    data = numbers_here.Numbers(os.getcwd(), count, pause)
    made = DataLoader(data, batch_size=2, shuffle=True, generator=torch.Generator().manual_seed(3))
    taas.register(made)
    return made
"""
_TRAIN = """#!g2.2
#pragma taas --gpus 2 --cpus 2
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group("nccl")
torch.manual_seed(1)
net = nn.Linear(16, 1).to("cuda")
net = DistributedDataParallel(net, device_ids=[int(os.environ["LOCAL_RANK"])])
optimizer = torch.optim.SGD(net.parameters(), lr=0.001)
mine = []
for epoch in range(2):
    for indices, rows in loader:
        mine.append((epoch, indices.tolist()))
        loss = net(rows.to("cuda")).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"epoch {epoch}: {loss.item():.6f}")
seen = [None] * dist.get_world_size()
dist.all_gather_object(seen, mine)
weights = [value.tolist() for value in net.module.parameters()]
"""
_SLOW = """#!g2.2
#pragma taas --gpus 2 --cpus {vms} --name {name}
import time, torch.distributed as dist
dist.init_process_group("gloo")
mine = []
for indices, rows in loader:
    mine += indices.tolist()
    time.sleep(0.1)
    print("got", len(mine), flush=True)
seen = [None] * dist.get_world_size()
dist.all_gather_object(seen, mine)
"""
_SLOW_ROWS = 800
"""Two ranks take two rows each a step, and 0.1 s: 20 s."""
_EXPECTED = """
generator = torch.Generator().manual_seed(3)
here = DataLoader(range({count}), batch_size=2, shuffle=True, generator=generator)
reference = [rows.tolist() for rows in here]
"""


@pytest.fixture
def book(cluster: RayCluster, tmp_path: Path) -> Iterator[Notebook]:
    """A notebook beside the cluster's head, in a project that no other node sees."""
    (tmp_path / "numbers_here.py").write_text(_MODULE)
    (tmp_path / "offset.txt").write_text("1")
    (tmp_path / "taas.toml").write_text("[engine]\nidle = 0\n")
    book = cluster.notebook(tmp_path)
    try:
        book.good(f"import taas\n%taas engine ray {cluster.address}")
        book.good(_SETUP)
        yield book
    finally:
        book.close()


def _data_node(cluster: RayCluster) -> Node:
    """A node on which data workers are."""
    return next(
        node
        for node in cluster.nodes[2:]
        if any("taas-pool" in each.name() for each in node.of_taas())
    )


def _two_data_nodes_serve(book: Notebook) -> None:
    """The next run gets all that it asks for."""
    book.good("loader = fresh(40)")
    book.good(
        "#!g2.2\n#pragma taas --gpus 2 --cpus 2\ntotal = sum(len(rows) for rows, _ in loader)", 300
    )
    assert book.value("total") == "20"


def _exactly_once(book: Notebook) -> None:
    """Both ranks get what the notebook's own loader yields, in its order, each row once."""
    book.good(_EXPECTED.format(count=_SLOW_ROWS))
    assert book.value(f"sorted(seen[0] + seen[1]) == list(range({_SLOW_ROWS}))") == "True"
    shares = "[[row for batch in reference[rank::2] for row in batch] for rank in range(2)]"
    assert book.value(f"seen == {shares}") == "True"


def test_two_data_nodes_deliver_as_this_machine_does(cluster: RayCluster, book: Notebook) -> None:
    """The same rows in the same order with the same random numbers, and the same model.

    The data processes' log is there.
    """
    book.good("loader = fresh(240)")
    there = book.good(_TRAIN + "\nprint('from there')\n", 400)
    book.good("away = seen, weights, loader.generator.get_state()")
    assert cluster.rid_of_taas(60, actors=False)
    record = max(read_records(), key=lambda record: record.submitted)
    log = (record.folder / "data.log").read_text()
    assert all(f"made {i} told by the notebook" in log for i in range(240)), log[-2000:]
    book.good("%taas engine local\nloader = fresh(240)")
    here = book.good(_TRAIN + "\nprint('from there')\n", 400)
    assert there.own == here.own
    assert book.value("away[:2] == (seen, weights)") == "True"
    assert book.value("torch.equal(away[2], loader.generator.get_state())") == "True"
    assert book.value("sorted(i for share in seen for _, rows in share for i in rows)[::2]") == str(
        list(range(240))
    )


def test_a_data_node_killed_in_an_epoch(cluster: RayCluster, book: Notebook) -> None:
    """It is named, the other one goes on, nothing is lost or doubled.

    The next run has two again.
    """
    book.good(f"loader = fresh({_SLOW_ROWS})")
    book.start(_SLOW.format(vms=2, name="killed"))
    book.wait_for("got 8\n", 240)
    node = cluster.nodes[2]
    node.kill()
    try:
        ran = book.end(300)
        assert ran.status == "ok", ran.traceback
        assert f"(node {node.address}) was lost" in ran.stdout, ran.stdout[-2000:]
        _exactly_once(book)
        assert cluster.rid_of_taas(60, actors=False)
    finally:
        node.restart()
    _two_data_nodes_serve(book)


def test_another_data_node_joins_in_place_of_one_that_is_cut_off(
    cluster: RayCluster, book: Notebook
) -> None:
    """The only data VM is out of reach.

    It ends by itself, and Ray gives another node, for which the ranks wait.
    """
    book.good(f"loader = fresh({_SLOW_ROWS})")
    book.start(_SLOW.format(vms=1, name="alone"))
    book.wait_for("got 8\n", 240)
    node = _data_node(cluster)
    node.cut_off()
    try:
        named = f"waiting for another data VM, since data VM 0 (node {node.address}) was lost"
        book.wait_for_line(named)
        ran = book.end(300)
        assert ran.status == "ok", ran.traceback
        assert f"data VM 0 (node {node.address}) was lost" in ran.stdout, ran.stdout[-2000:]
        _exactly_once(book)
        assert cluster.rid_of_taas(60, actors=False)
    finally:
        node.reconnect()
