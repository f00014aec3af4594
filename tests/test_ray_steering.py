"""Runs on a Ray cluster are seen and steered as runs on this machine are, and end with who started them."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from notebook_harness import Notebook, gone
from ray_cluster import RayCluster

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(600)]
NODES = [{"CPU": 1}, {"g2.2": 1, "CPU": 1}, {"g2.2": 1, "CPU": 1}]

_SLEEP = """
import os, time, torch.distributed as dist
dist.init_process_group("nccl")
print("rank", dist.get_rank(), "is there")
dist.barrier()
print("all there", flush=True)
time.sleep(600)
"""
_FINE = "#!g2.2\n#pragma taas --gpus 4\nimport os\nworld = os.environ['WORLD_SIZE']\nprint('world', world)"
_GATED = """#!g2.2
#pragma taas --gpus 4 --background --name night
import os, time
there = os.stat(".")
seen.append((there.st_dev, there.st_ino))
print("ready", flush=True)
while not os.path.exists("go"):
    time.sleep(0.05)
if os.environ["RANK"] == "0":
    open("made.txt", "w").write("by rank 0")
print("last words")
"""


def open_notebook(cluster: RayCluster, folder: Path) -> Notebook:
    """A notebook beside the cluster's head, whose cells run on the cluster."""
    book = cluster.notebook(folder)
    book.good(f"import taas\n%taas engine ray {cluster.address}")
    return book


@pytest.fixture(scope="module")
def book(cluster: RayCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Notebook]:
    """The notebook of all these tests but one."""
    notebook = open_notebook(cluster, tmp_path_factory.mktemp("project"))
    yield notebook
    notebook.close()


@pytest.fixture
def shared_project(cluster: RayCluster) -> Iterator[Path]:
    """A project on a disk that the nodes see, too."""
    folder = Path(tempfile.mkdtemp(prefix="project-", dir="/var/tmp"))
    yield folder
    shutil.rmtree(folder)


def test_an_interrupt_ends_a_run_there(cluster: RayCluster, book: Notebook) -> None:
    """KeyboardInterrupt in the cell, no process left on the nodes, and the next cell runs."""
    book.start(f"#!g2.2\n#pragma taas --gpus 4{_SLEEP}")
    book.wait_for("all there", 240)
    book.interrupt()
    assert book.end().ename == "KeyboardInterrupt"
    assert cluster.rid_of_taas(30)
    assert book.good(_FINE, 240).own == "world 4\n"


def test_status_logs_stacks_and_stop(cluster: RayCluster, book: Notebook) -> None:
    """The verbs know a background run on the cluster: its ranks, where they stand, what they print, how to end it."""
    book.good(f"#!g2.2\n#pragma taas --gpus 4 --background --name watched{_SLEEP}")
    book.start("%taas logs watched --rank 3 --follow")
    assert "rank 3 is there" in book.wait_for("all there", 240).stdout
    book.interrupt()
    book.end()
    shown = book.good("%taas status").displays[-1]["data"]["text/plain"]
    assert "watched" in shown
    assert "running" in shown
    stacks = book.good("%taas stacks watched")
    said = stacks.stdout + "".join(shown["data"]["text/plain"] for shown in stacks.displays)
    assert all(f"rank {rank}" in said for rank in (0, 3)) or "ranks 0–3" in said, said
    assert "line 6" in said or "line 8" in said, said
    stopped = book.good("%taas stop watched")
    assert "watched" in stopped.stdout
    assert cluster.rid_of_taas(30)
    assert "interrupted" in book.good("%taas history").displays[-1]["data"]["text/plain"]


def test_sigkill_of_the_supervisor(cluster: RayCluster, book: Notebook) -> None:
    """The cell says so, nothing is left on any node, nor of its driver; the next cell has a new supervisor."""
    book.start(f"#!g2.2\n#pragma taas --gpus 4{_SLEEP}")
    book.wait_for("all there", 240)
    found = book.processes()
    [supervisor] = found.supervisor
    drivers = [process for process in found.others if "taas.engines.ray_driver" in process.cmdline()]
    assert drivers
    os.kill(supervisor.pid, signal.SIGKILL)
    ran = book.end()
    assert ran.ename == "RunLost"
    assert "the supervisor was killed" in ran.evalue
    assert cluster.rid_of_taas(30)
    assert gone(drivers)
    assert book.good(_FINE, 240).own == "world 4\n"


def test_a_background_run_outlives_its_kernel_and_a_disk_that_all_see_is_found_out(
    cluster: RayCluster, shared_project: Path
) -> None:
    """The kernel is killed, the run goes on; another has its output and names. All stand in the project itself."""
    first = open_notebook(cluster, shared_project)
    second = None
    try:
        first.good("seen = []")
        first.good(_GATED)
        first.start("%taas logs night --follow")
        first.wait_for("ready", 240)
        first.kill()
        second = open_notebook(cluster, shared_project)
        second.good("seen = []")
        (shared_project / "go").touch()
        attached = second.good("%taas attach night", 240)
        assert attached.own == "ready\nlast words\n"
        here = shared_project.stat()
        assert second.value("seen") == str([(here.st_dev, here.st_ino)])
        assert (shared_project / "made.txt").read_text() == "by rank 0"
        assert cluster.rid_of_taas(30)
    finally:
        first.close()
        if second is not None:
            second.close()
