"""The cluster that the tests of the Ray engine run on is what it claims to be."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from ray_cluster import RayCluster

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(600)]
NODES = [{"CPU": 1}, {"GPU": 2, "g2.2": 1}, {"c1.4": 1}]

_LOOK = """
import json, sys
import ray
ray.init(address=sys.argv[1], log_to_driver=False)

@ray.remote(num_cpus=0)
def look(path):
    import os
    return {"address": ray.util.get_node_ip_address(), "sees": os.path.exists(path), "pid": os.getpid()}

for node in ray.nodes():
    there = {"node:" + node["NodeManagerAddress"]: 0.01}
    print(json.dumps(ray.get(look.options(resources=there).remote(sys.argv[2])) | node["Resources"]))
"""
_WAIT_FOR = """
import sys, time
import ray
ray.init(address=sys.argv[1], log_to_driver=False)
deadline = time.monotonic() + 150
while (alive := sorted(node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"])) != sys.argv[2:]:
    assert time.monotonic() < deadline, alive
    time.sleep(0.2)
"""

_KNOCK = """
import socket, sys
try:
    socket.create_connection((sys.argv[1], 1), timeout=3)
except ConnectionRefusedError:
    print("refused")
except OSError:
    print("nothing")
"""


def _wait_for(cluster: RayCluster, *numbers: int) -> None:
    """Wait until Ray's head knows these nodes as alive, and no other."""
    addresses = [cluster.nodes[number].address for number in numbers]
    cluster.head.python(_WAIT_FOR, cluster.address, *addresses, seconds=180)


def test_each_node_has_its_own_address_resources_and_files(cluster: RayCluster, tmp_path: Path) -> None:
    """A task runs on each node; what it sees of the notebook's project depends on the node."""
    seen = cluster.head.python(_LOOK, cluster.address, str(tmp_path), seconds=120)
    rows = {row["address"]: row for row in map(json.loads, seen.splitlines())}
    head, trainer, maker = (rows[node.address] for node in cluster.nodes)
    assert len(rows) == 3
    assert (trainer["GPU"], trainer["g2.2"], maker["c1.4"]) == (2, 1, 1)
    assert "GPU" not in head
    assert [row["sees"] for row in (head, trainer, maker)] == [True, False, False]


def test_a_notebook_runs_beside_the_head(cluster: RayCluster, tmp_path: Path) -> None:
    """Its kernel reaches the cluster, is interrupted, and sees its project."""
    notebook = cluster.notebook(tmp_path)
    try:
        notebook.good(f"import ray, time; _ = ray.init(address={cluster.address!r}, log_to_driver=False)")
        assert notebook.value("sum(node['Alive'] for node in ray.nodes())") == "3"
        assert notebook.value("__import__('os').getcwd()") == str(tmp_path)
        notebook.start("print('asleep', flush=True); time.sleep(600)")
        notebook.wait_for("asleep")
        notebook.interrupt()
        assert notebook.end().ename == "KeyboardInterrupt"
    finally:
        notebook.close()


def test_a_killed_node_is_gone_and_may_come_back(cluster: RayCluster) -> None:
    """Ray's head hears of it at once; the other nodes stay."""
    cluster.nodes[1].kill()
    _wait_for(cluster, 0, 2)
    cluster.nodes[1].restart()
    _wait_for(cluster, 0, 1, 2)


def test_nothing_reaches_a_node_that_is_cut_off(cluster: RayCluster) -> None:
    """No refusal comes either, as one would from a machine that is there. (Ray itself takes a minute to notice.)"""
    cluster.nodes[2].cut_off()
    assert cluster.head.python(_KNOCK, cluster.nodes[2].address) == "nothing\n"
    cluster.nodes[2].reconnect()
    assert cluster.head.python(_KNOCK, cluster.nodes[2].address) == "refused\n"


def test_the_head_restarts_and_all_nodes_join_it(cluster: RayCluster) -> None:
    """What the head knew is forgotten: each node has to start anew."""
    cluster.restart_head()
    for node in cluster.nodes[1:]:
        node.restart()
    _wait_for(cluster, 0, 1, 2)
