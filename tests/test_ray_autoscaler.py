"""Nodes that Ray's own autoscaler makes when a cell asks for them, and takes back."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster_cells import NEXT, SETUP, TRAIN, WEIGHTS
from conftest import leaves_nothing
from notebook_harness import Notebook, until
from ray_autoscaling import AutoscaledCluster
from ray_cluster import RayCluster, why_not

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(600)]
NODES = [{"CPU": 1}, {"g2.8": 1, "c1.4": 1}, {"g2.8": 1, "c1.4": 1}]
_WAITS = f"{NEXT}\nimport time\nprint('there', flush=True)\ntime.sleep(600)"


@pytest.fixture(scope="module")
def autoscaled() -> Iterator[AutoscaledCluster]:
    if missing := why_not():
        pytest.skip(f"no Ray nodes on this machine: {missing}")
    with AutoscaledCluster() as nodes:
        yield nodes


def _open(cluster: AutoscaledCluster, folder: Path) -> Notebook:
    book = Notebook(folder, environ=cluster.environ)
    book.good(f"import taas\n%taas engine ray {cluster.address}")
    return book


@pytest.fixture
def book(autoscaled: AutoscaledCluster, tmp_path: Path) -> Iterator[Notebook]:
    """A notebook whose cells run there; no node is up before and after."""
    with leaves_nothing("the notebook"):
        book = _open(autoscaled, tmp_path)
        yield book
        book.close()
        autoscaled.wait_until_none_is_left()


def _trains_as_here(book: Notebook) -> list[str]:
    """Train there and here; returns what the cell there said in its line."""
    book.good(SETUP)
    there = book.good(TRAIN, 400)
    assert re.fullmatch(r"epoch 0: [\d.]+\nepoch 1: [\d.]+\n", there.own)
    weights = book.value(WEIGHTS)
    assert book.good(NEXT, 240).own == "world 16\n"
    book.good("%taas engine local")
    book.good(SETUP)
    assert book.good(TRAIN, 400).own == there.own
    assert book.value(WEIGHTS) == weights
    return [update["data"]["text/plain"] for update in there.updates]


def test_nodes_come_for_a_cell_and_go(autoscaled: AutoscaledCluster, book: Notebook) -> None:
    """Two VMs train as this machine does.

    First come data VMs, and those of ranks when enough elements are ready.

    The cell's line says what is awaited. They are given back by `%taas release`, and the autoscaler
    takes them back.
    """
    lines = _trains_as_here(book)
    said = (
        r"waiting for 1 node with c1\.4 1; the cluster has 1 node",
        r"Ray's autoscaler starts \d c1\.4",
        r"waiting for 2 nodes with .*g2\.8 1.*Ray's autoscaler starts \d g2\.8",
    )
    when = [
        next((at for at, line in enumerate(lines) if re.search(what, line)), -1) for what in said
    ]
    assert -1 not in when and when == sorted(when), (when, lines)
    assert " given back" in book.good("%taas release").stdout
    autoscaled.wait_until_none_is_left()


def test_three_nodes_that_are_up_train_as_this_machine_does(
    cluster: RayCluster, tmp_path: Path
) -> None:
    """The same on nodes of a cluster that nobody scales, and that share no disk."""
    book = cluster.notebook(tmp_path)
    try:
        book.good(f"import taas\n%taas engine ray {cluster.address}")
        _trains_as_here(book)
    finally:
        book.close()


def test_what_can_never_come_fails_at_once(book: Notebook) -> None:
    """With what the autoscaler says, and what the cluster has."""
    for header, asked in (
        ("#!g2.4\n#pragma taas --gpus 4", "g2.4 1"),
        ("#!g2.8\n#pragma taas --gpus 32", "4 nodes"),
    ):
        ran = book.run(f"{header}\nprint('never')")
        assert ran.ename == "EngineError", ran
        assert "no available node types of Ray's autoscaler, within its limits" in ran.evalue
        assert asked in ran.evalue


def test_an_interrupt_withdraws_the_demand(autoscaled: AutoscaledCluster, book: Notebook) -> None:
    """Nodes that were on their way go again, with nobody's cell on them."""
    book.start(NEXT)
    book.wait_for_line("Ray's autoscaler starts 2 g2.8")
    book.interrupt()
    assert book.end().ename == "KeyboardInterrupt"
    autoscaled.wait_until_none_is_left()


def test_a_node_that_is_killed_is_replaced(autoscaled: AutoscaledCluster, book: Notebook) -> None:
    """The cell names it; the next one has another."""
    book.start(_WAITS)
    book.wait_for("there", 240)
    lost = autoscaled.nodes("g2.8")[0]
    lost.kill()
    ended = book.end(240)
    assert ended.ename == "RunLost"
    assert re.search(r"the agent of g2\.8-[01] \(node .*\) was lost", ended.evalue)
    assert book.good(NEXT, 240).own == "world 16\n"


def test_a_killed_kernel_holds_no_node(autoscaled: AutoscaledCluster, tmp_path: Path) -> None:
    """They go as after a release."""
    book = _open(autoscaled, tmp_path)
    try:
        book.start(_WAITS)
        book.wait_for("there", 240)
        os.kill(book.pid, signal.SIGKILL)
        until(lambda: not any(autoscaled.nodes(kind) for kind in ("g2.8", "c1.4")))
        autoscaled.wait_until_none_is_left()
    finally:
        book.close()
