"""The same cell on nodes of a real Slurm: jobs that come and go, and whoever ends them."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import psutil
import pytest
from cluster_cells import NEXT, SETUP, TRAIN, WEIGHTS
from conftest import leaves_nothing
from notebook_harness import Notebook, until
from slurm_cluster import SlurmCluster, why_not
from test_docs_cells import BLOCK, ROOT, door

pytestmark = [pytest.mark.slurm, pytest.mark.slow, pytest.mark.timeout(600)]

_FINE = "#!g2.2\n#pragma taas --gpus 4\nimport os\nprint('world', os.environ['WORLD_SIZE'])"
_LIVES = """#!g2.2
#pragma taas --gpus 4 --max-restarts 1
import os, time, torch.distributed as dist
dist.init_process_group("nccl")
dist.barrier()
life = int(os.environ["TORCHELASTIC_RESTART_COUNT"]) + 1
print("life", life, flush=True)
while life == 1:
    time.sleep(0.1)
"""
_ONCE = _LIVES.replace(" --max-restarts 1", "")

_SAVING = """#!g2.2
#pragma taas --gpus 4
import time
trained = 3
try:
    while True:
        time.sleep(0.1)
finally:
    open("saved.txt", "w").write("saved")
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[SlurmCluster]:
    """A login node, two nodes that claim 8 GPUs each, and one without any."""
    if missing := why_not():
        pytest.skip(f"no Slurm on this machine: {missing}")
    with leaves_nothing("the cluster"), SlurmCluster([8, 8, 0]) as nodes:
        yield nodes
    assert not nodes.folder.exists(), "the cluster left its folder"


@pytest.fixture(scope="module")
def shared(cluster: SlurmCluster) -> Iterator[Notebook]:
    """The notebook of all tests that leave it alive, in a project on a disk that the nodes see."""
    folder = Path(tempfile.mkdtemp(prefix="project-", dir="/var/tmp"))
    book = cluster.notebook(folder)
    book.good("import taas")
    yield book
    book.close()
    shutil.rmtree(folder)


@pytest.fixture
def book(cluster: SlurmCluster, shared: Notebook) -> Iterator[Notebook]:
    """That notebook, whose cells run on Slurm; nothing is in the queue before and after."""
    shared.good("%taas engine slurm --cpu-partition cpu")
    yield shared
    shared.good("%taas release")
    cluster.wait_until_idle()
    assert not cluster.of_taas()


def _states(cluster: SlurmCluster) -> list[str]:
    return [line.split()[1] for line in cluster.jobs()]


def test_two_nodes_train_as_this_machine_does(cluster: SlurmCluster, book: Notebook) -> None:
    """The output and the model are the same.

    The loader's elements come from data VMs of the CPU partition.

    The next cell has the same nodes. They are given back by `%taas release`.
    """
    book.good(SETUP)
    there = book.good(TRAIN, 300)
    assert "epoch 1" in there.own
    weights = book.value(WEIGHTS)
    assert [line.split()[1:] for line in cluster.jobs()] == [["RUNNING", "node3"]] * 2 + [
        ["RUNNING", "node[1-2]"]
    ]
    before = cluster.jobs()
    assert book.good(NEXT, 240).own == "world 16\n"
    assert set(cluster.jobs()) <= set(before)
    book.good("%taas engine local")
    book.good(SETUP)
    assert book.good(TRAIN, 300).own == there.own
    assert book.value(WEIGHTS) == weights


def test_the_document(cluster: SlurmCluster, book: Notebook) -> None:
    """Each command and cell of docs/clusters.md runs, its `taas.toml` included."""
    found = [*BLOCK.finditer((ROOT / "docs" / "clusters.md").read_text())]
    text = {
        kind: [block["text"] for block in found if block["info"] == kind]
        for kind in ("bash", "python", "toml")
    }
    for command in "".join(text["bash"]).splitlines():
        program, *words = command.split()
        assert cluster.run(
            str(Path(sys.executable).with_name(program)) if program == "taas" else program, *words
        )
    for cell in text["python"]:
        ran = book.good(cell, 240)
    assert ran.own == "16 ranks\n"
    (book.folder / "taas.toml").write_text(text["toml"][0])
    book.good("%taas release")
    book.good("%taas engine slurm")
    assert book.good(text["python"][-1], 240).own == "16 ranks\n"
    (book.folder / "taas.toml").unlink()


def test_first_steps(cluster: SlurmCluster, book: Notebook) -> None:
    """The page for people with a Slurm account ends with a trained model.

    The training runs in one job, and the page's last cell gives its node back.
    """
    for cell in door("start-slurm"):
        book.good(cell, 240)
        if cell.startswith("#pragma"):
            assert _states(cluster) == ["RUNNING"]
    assert (book.folder / "digits.pt").exists()
    cluster.wait_until_idle()


def test_the_check(cluster: SlurmCluster) -> None:
    """A terminal shows partitions, a node's versions, and whether it reaches this machine."""
    check = [sys.executable, "-m", "taas.cli", "engine", "slurm", "--check", "--partition"]
    said = cluster.run(*check, "gpu")
    for what in (
        "gpu:a100:8",
        "time limit infinite",
        f"torch {version('torch')}",
        "node1 reaches this machine",
    ):
        assert what in said
    assert "nvalid partition" in cluster.run(*check, "nowhere")


def test_a_full_queue(cluster: SlurmCluster, book: Notebook) -> None:
    """The cell's line says what the job waits for, and since when.

    An interrupt takes it out of the queue.
    """
    cluster.run("sbatch", "--nodes=2", "--exclusive", "--output=/dev/null", "--wrap", "sleep 900")
    until(lambda: _states(cluster) == ["RUNNING"])
    book.start(_FINE)
    book.wait_for_line(": PENDING (Resources), ")
    book.interrupt()
    assert book.end().ename == "KeyboardInterrupt"
    until(lambda: _states(cluster) == ["RUNNING"])
    (book.folder / "taas.toml").write_text("[engine]\nwait = 1\n")
    book.good("%taas engine slurm")
    ran = book.run(_FINE)
    (book.folder / "taas.toml").unlink()
    assert ran.ename == "EngineError"
    assert "Slurm did not give 2 nodes within 1 s" in ran.evalue
    assert "PENDING (Resources)" in ran.evalue
    cluster.run("scancel", "--user=root")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ("--partition nowhere", "Invalid partition name specified. .* --partition=nowhere"),
        ("--python /no/python", "its nodes said: .*/no/python"),
        ("--sbatch=--no-such-option", "unrecognized option '--no-such-option'"),
    ],
)
def test_what_cannot_be_had_is_said(book: Notebook, options: str, says: str) -> None:
    """What Slurm, or a node, says of it stands in the cell."""
    book.good(f"%taas engine slurm {options}")
    ran = book.run(_FINE)
    assert ran.ename == "EngineError"
    assert re.search(says, ran.evalue), ran.evalue


def _lose(cluster: SlurmCluster, name: str) -> None:
    """Take the power from a node, and wait until Slurm knows."""
    node = next(node for node in cluster.nodes if node.name == name)
    node.kill()
    until(lambda: "down" in cluster.run("sinfo", "--noheader", f"--nodes={name}", "--format=%T"))
    node.boot()


def test_the_node_of_the_jobs_script_dies(cluster: SlurmCluster, book: Notebook) -> None:
    """The cell names it; nothing of the job stays, also on the other node."""
    book.start(_ONCE)
    book.wait_for("life 1", 240)
    _lose(cluster, "node1")
    ended = book.end(240)
    assert ended.ename == "RunLost"
    assert "(node node1) was lost" in ended.evalue
    cluster.wait_until_idle()


def test_another_node_is_asked_for(cluster: SlurmCluster, book: Notebook) -> None:
    """With `--max-restarts` the run waits for a node in place of the lost one, and starts again."""
    book.start(_LIVES)
    book.wait_for("life 1", 240)
    _lose(cluster, "node2")
    ended = book.end(240)
    assert "life 2" in ended.own
    assert "(node node2) was lost" in ended.stdout


def test_an_agent_that_is_killed(cluster: SlurmCluster, book: Notebook) -> None:
    """The job ends with it, so that its node is free; a cell that starts again gets another job."""
    book.start(_LIVES)
    book.wait_for("life 1", 240)
    below = psutil.Process(cluster.nodes[2].pid).children(recursive=True)
    [agent] = [process for process in below if "taas.agent" in process.cmdline()]
    agent.kill()
    ended = book.end(240)
    assert "life 2" in ended.own
    assert re.search(r"was lost: its Slurm job .* node2: its agent killed by SIGKILL", ended.stdout)


@pytest.mark.parametrize(
    "command",
    [
        "scancel --user=root",
        "sbatch --partition=urgent --nodes=3 --exclusive --output=/dev/null --wrap true",
    ],
)
def test_a_job_that_is_taken_away(cluster: SlurmCluster, book: Notebook, command: str) -> None:
    """The cell names its node, and the next one runs in a new job."""
    book.start(_ONCE)
    book.wait_for("life 1", 240)
    cluster.run(*shlex.split(command))
    ended = book.end(240)
    assert ended.ename == "RunLost"
    assert re.search(r"\(node node\d\) was lost", ended.evalue)
    assert book.good(_FINE, 240).own == "world 4\n"


def test_the_time_limit(book: Notebook) -> None:
    """Before it a cell is interrupted, so that it saves what it has, and its names come back.

    Nobody stops at it who may start again.

    The cell says in both cases what it was, and how more is asked for.
    """
    book.good("%taas engine slurm --time 1")
    ended = book.run(_SAVING, 240)
    assert ended.ename == "KeyboardInterrupt"
    assert "reaches the time limit (1:00) in " in ended.evalue + ended.stdout
    assert (book.folder / "saved.txt").read_text() == "saved"
    assert book.value("trained") == "3"
    ended = book.run(_LIVES, 240)
    assert "life 2" in ended.own
    assert "the time limit (1:00)" in ended.stdout and "started again" in ended.stdout


def test_after_the_idle_time_and_the_kernels_death_nothing_is_left(
    cluster: SlurmCluster, tmp_path: Path
) -> None:
    """The time is `[engine] idle`; a kernel killed while its cell runs leaves no process."""
    (tmp_path / "taas.toml").write_text('[engine]\ndefault = "slurm"\nidle = 0\n')
    book = cluster.notebook(tmp_path)
    try:
        book.good("import taas")
        assert book.good(_FINE, 240).own == "world 4\n"
        cluster.wait_until_idle()
        book.start(_ONCE)
        book.wait_for("life 1", 240)
        os.kill(book.pid, signal.SIGKILL)
        cluster.wait_until_idle()
        assert not cluster.of_taas()
    finally:
        book.close()
