"""Nodes of a Ray cluster that stay, are seen, and are lost.

VMs that share nothing with the notebook.

That cells train there as here is in test_ray_autoscaler.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from notebook_harness import Notebook, gone, until
from ray_cluster import Node, RayCluster
from test_docs_cells import door

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(600)]
_NAMED_SECONDS = 60.0  # 15 where the machine is not busy with other things
NODES = [{"CPU": 1}, {"g2.2": 1, "CPU": 1}, {"g2.2": 1, "CPU": 1}]

_FREE = """
import sys, time
import ray
ray.init(address=sys.argv[1], log_to_driver=False)
until = time.monotonic() + 60
while (free := ray.available_resources().get("g2.2", 0)) != float(sys.argv[2]):
    assert time.monotonic() < until, free
    time.sleep(0.1)
"""
_SLEEP = """
import os, time, torch.distributed as dist
dist.init_process_group("nccl")
rank = dist.get_rank()
print("rank", rank, "is there")
if rank == 0:
    open("begun.txt", "w").write("complete")
    half = open("half.txt", "w")
    half.write("half"), half.flush()
dist.barrier()
print("all there", flush=True)
time.sleep(600)
"""
_SLEEPING = f"#!g2.2\n#pragma taas --gpus 4{_SLEEP}"
_TWO_LIVES = """#!g2.2
#pragma taas --gpus 4 --max-restarts 1
import os, time, torch, torch.distributed as dist
dist.init_process_group("nccl")
saved = os.path.exists("checkpoint.pt")
dist.barrier()  # before rank 0 saves it
lives = int(os.environ["TORCHELASTIC_RESTART_COUNT"]) + 1
print("life", lives, flush=True)
if saved:
    print("goes on from", len(torch.load("checkpoint.pt")), "numbers")
else:
    if dist.get_rank() == 0:
        torch.save(torch.zeros(9 << 18), "checkpoint.pt")
    time.sleep(600)
"""
_AT_THE_GATE = """#!g2.2
#pragma taas --gpus 4
import os, time, torch.distributed as dist
dist.init_process_group("nccl")
dist.barrier()
print("all there", flush=True)
while not os.path.exists("/tmp/go"):
    time.sleep(0.05)
"""
_FINE = "#!g2.2\n#pragma taas --gpus 4\nimport os\nprint('world', os.environ['WORLD_SIZE'])"
_KEPT = _FINE.replace("4", "4 --keep", 1)
_NIGHT = """#!g2.2
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


def _open(cluster: RayCluster, folder: Path) -> Notebook:
    """A notebook beside the cluster's head, whose cells run on the cluster."""
    book = cluster.notebook(folder)
    book.good(f"import taas\n%taas engine ray {cluster.address}")
    return book


@pytest.fixture(scope="module")
def shared(cluster: RayCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Notebook]:
    """The notebook of all tests that leave it alive, in a project that no other node sees."""
    book = _open(cluster, tmp_path_factory.mktemp("project"))
    yield book
    book.close()


@pytest.fixture
def book(cluster: RayCluster, shared: Notebook) -> Notebook:
    """That notebook, with an empty project; its cells run on the cluster."""
    for path in shared.folder.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    shared.good(f"%taas engine ray {cluster.address}")
    return shared


@pytest.fixture
def seen_by_all() -> Iterator[Path]:
    """A project on a disk that the nodes see, too."""
    folder = Path(tempfile.mkdtemp(prefix="project-", dir="/var/tmp"))
    yield folder
    shutil.rmtree(folder)


def _release(cluster: RayCluster, book: Notebook) -> None:
    """Give the VMs back that stayed after the last cell."""
    assert " given back" in book.good("%taas release").stdout
    assert cluster.rid_of_taas(30)


def _agents(cluster: RayCluster) -> list[int]:
    """Return the process ids of the agents on the nodes."""
    return sorted(one.pid for node in cluster.nodes[1:] for one in _find(node, "taas.agent"))


def _wait_for_resources(cluster: RayCluster, free: int) -> None:
    """Wait until so many units of ``g2.2`` are free, as Ray's autoscaler sees it."""
    cluster.head.python(_FREE, cluster.address, str(free), seconds=120)


def _status(book: Notebook) -> str:
    return str(book.good("%taas status").displays[-1]["data"]["text/plain"])


def test_first_steps(cluster: RayCluster, book: Notebook) -> None:
    """The page for people with a Ray cluster ends with a trained model.

    What rank 0 saved is beside the notebook, although the node does not see its disk. The page's
    last cell gives the node back.
    """
    for cell in door("start-ray"):
        book.good(cell.replace("ray auto", f"ray {cluster.address}"), 240)
        if cell.startswith("#pragma"):
            assert sum(len(_find(node, "taas.agent")) for node in cluster.nodes) == 1
    assert (book.folder / "digits.pt").exists()
    assert cluster.rid_of_taas(30)


def test_what_the_cluster_lacks_is_said(cluster: RayCluster, book: Notebook) -> None:
    """A run says what it waits for, and is given up by an interrupt, or does not wait."""
    never = "#!g2.4\n#pragma taas --gpus 4\nprint('never')"
    book.start(never)
    book.wait_for_line("waiting for 1 node with GPU 4, g2.4 1; the cluster has 3 nodes")
    book.interrupt()
    assert book.end().ename == "KeyboardInterrupt"
    (book.folder / "taas.toml").write_text("[engine]\nwait = 0\n")
    book.good(f"%taas engine ray {cluster.address}")
    ran = book.run(never)
    assert ran.ename == "EngineError"
    assert "1 node with GPU 4, g2.4 1" in ran.evalue
    assert "0 like that" in ran.evalue


@pytest.mark.parametrize(
    "environ",
    [
        {"RAY_AUTH_MODE": "disabled"},
        {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0" * 64},
    ],
    ids=["none", "another"],
)
def test_a_notebook_without_the_clusters_token_is_told_so(
    cluster: RayCluster, tmp_path: Path, environ: dict[str, str]
) -> None:
    """The message has Ray's cause, which Ray's own outermost error hides, and what to set."""
    book = cluster.notebook(tmp_path, environ)
    try:
        book.good(f"import taas\n%taas engine ray {cluster.address}")
        ran = book.run(_FINE, 240)
        assert ran.ename == "EngineError", ran
        assert "uthentication token" in ran.evalue, ran.evalue
        assert "Start Jupyter with RAY_AUTH_MODE=token" in ran.evalue, ran.evalue
    finally:
        book.close()


# ---------------------------------------------------------------- VMs that stay


def test_the_next_cell_has_the_same_vms_and_one_of_another_shape_others(
    cluster: RayCluster, book: Notebook
) -> None:
    """They are held until then, or until `%taas release`.

    All of them are given back for another shape.
    """
    book.good(_FINE, 240)
    first = _agents(cluster)
    assert len(first) == 2
    assert book.good(_FINE, 240).own == "world 4\n"
    assert _agents(cluster) == first
    _wait_for_resources(cluster, 0)
    assert book.good(_FINE.replace("--gpus 4", "--gpus 2"), 240).own == "world 2\n"
    _wait_for_resources(cluster, 1)
    assert not set(_agents(cluster)) & set(first)
    _release(cluster, book)
    _wait_for_resources(cluster, 2)


def test_vms_are_given_back_after_a_time_and_when_the_kernel_dies(
    cluster: RayCluster, tmp_path: Path
) -> None:
    """The time is `[engine] idle`; a kernel that is killed leaves nothing on any node."""
    (tmp_path / "taas.toml").write_text("[engine]\nidle = 1\n")
    book = _open(cluster, tmp_path)
    try:
        book.good(_FINE, 240)
        assert cluster.rid_of_taas(30)
        _wait_for_resources(cluster, 2)
        (tmp_path / "taas.toml").write_text("[engine]\nidle = 600\n")
        book.good(f"%taas engine ray {cluster.address}")
        book.good(_FINE, 240)
        assert len(_agents(cluster)) == 2
        book.kill()
        assert cluster.rid_of_taas(30)
        _wait_for_resources(cluster, 2)
    finally:
        book.close()


# ---------------------------------------------------------------- seen and steered from here


def test_a_background_run_outlives_its_kernel_and_a_disk_that_all_see_is_found_out(
    cluster: RayCluster, seen_by_all: Path
) -> None:
    """The kernel is killed, the run goes on.

    Another has its output and names. All stand in the project itself.

    When that kernel is killed in a run of its own, nothing is left of it on any node.
    """
    first, second = _open(cluster, seen_by_all), None
    try:
        first.good("seen = []")
        first.good(_NIGHT)
        first.start("%taas logs night --follow")
        first.wait_for("ready", 240)
        first.kill()
        second = _open(cluster, seen_by_all)
        second.good("seen = []")
        (seen_by_all / "go").touch()
        assert second.good("%taas attach night", 240).own == "ready\nlast words\n"
        here = seen_by_all.stat()
        assert second.value("seen") == str([(here.st_dev, here.st_ino)])
        assert (seen_by_all / "made.txt").read_text() == "by rank 0"
        second.start(_SLEEPING)
        second.wait_for("all there", 240)
        assert sum(len(node.of_taas()) for node in cluster.nodes[1:]) > 4
        second.kill()
        assert cluster.rid_of_taas(30)
    finally:
        first.close()
        if second is not None:
            second.close()


# ---------------------------------------------------------------- losses


def _find(node: Node, name: str) -> list[psutil.Process]:
    """Return what has this in its name or its command line on a node.

    ``rank``: what was forked and has no name of taas.
    """
    found = []
    for one in node.of_taas(actors=False):
        with contextlib.suppress(psutil.NoSuchProcess):
            own, words = one.name(), one.cmdline()
            forked = not own.startswith("taas-") and any("forkserver" in word for word in words)
            if one.status() != psutil.STATUS_ZOMBIE and (
                forked if name == "rank" else name in (own, *words)
            ):
                found.append(one)
    return found


def _strike(node: Node, name: str, how: signal.Signals = signal.SIGSTOP) -> list[psutil.Process]:
    """Signal what there is of a name on a node; of ranks, one."""
    found = _find(node, name)
    assert found, f"no {name} on {node.address}"
    for one in found[: 1 if name == "rank" else None]:
        one.send_signal(how)
    return found


def _lost(book: Notebook, node: Node) -> None:
    ran = book.end(_NAMED_SECONDS)
    assert ran.ename == "RunLost", ran
    assert f"(node {node.address})" in ran.evalue


def test_an_agent_that_is_stopped_there_holds_nobody(cluster: RayCluster, book: Notebook) -> None:
    """It is missed, named, and ends with its ranks."""
    book.start(_AT_THE_GATE)
    book.wait_for("all there", 240)
    _strike(cluster.nodes[2], "taas.agent")
    _lost(book, cluster.nodes[2])
    assert cluster.rid_of_taas(60)


def test_sigkill_of_the_supervisor(cluster: RayCluster, book: Notebook) -> None:
    """The cell says so, nothing is left on any node, nor of its driver.

    The next cell has a new supervisor.
    """
    book.start(_SLEEPING)
    book.wait_for("all there", 240)
    found = book.processes()
    [supervisor] = found.supervisor
    drivers = [
        process for process in found.others if "taas.engines.ray_driver" in process.cmdline()
    ]
    assert drivers
    os.kill(supervisor.pid, signal.SIGKILL)
    ran = book.end()
    assert ran.ename == "RunLost"
    assert "the supervisor was killed" in ran.evalue
    assert cluster.rid_of_taas(30)
    assert gone(drivers)
    assert book.good(_FINE, 240).own == "world 4\n"


@pytest.mark.parametrize("waits", [_FINE, _KEPT], ids=["warm", "kept"])
@pytest.mark.parametrize(
    ("who", "how"),
    [
        ("taas.agent", signal.SIGKILL),
        ("taas.agent", signal.SIGSTOP),
        ("taas-forkserver", signal.SIGKILL),
        ("rank", signal.SIGKILL),
    ],
    ids=lambda value: getattr(value, "name", value),
)
def test_a_fault_while_they_wait(
    cluster: RayCluster, book: Notebook, who: str, waits: str, how: signal.Signals
) -> None:
    """VMs that stay, and ranks in them: the next cell runs, or is lost and says so.

    Then one runs, and nothing is left.
    """
    who = "taas-spare" if who == "rank" and waits == _FINE else who
    book.good(waits, 240)
    until(lambda: _find(cluster.nodes[2], who))
    _strike(cluster.nodes[2], who, how)
    if who == "rank":
        until(lambda: "ranks kept" not in _status(book))  # a cell typed before would fail with it
    ran = book.run(waits, 240)
    assert ran.ename in ("", "RunLost"), ran
    assert not ran.ename or f"(node {cluster.nodes[2].address})" in ran.evalue, ran
    assert book.good(waits, 240).own == "world 4\n"
    said = book.good("%taas release").stdout
    assert ("4 kept ranks ended" if waits == _KEPT else " given back") in said
    assert cluster.rid_of_taas(30)


def test_node_cut_off(cluster: RayCluster, book: Notebook) -> None:
    """A partition ends the run, the message names the VM, files saved before are whole.

    Its agent ends by itself.
    """
    book.start(_SLEEPING)
    book.wait_for("all there", 240)
    until((book.folder / "begun.txt").exists)
    node = cluster.nodes[2]
    node.cut_off()
    try:
        _lost(book, node)
        assert (book.folder / "begun.txt").read_text() == "complete"
        assert {path.name for path in book.folder.iterdir()} <= {
            "begun.txt",
            "half.txt",
        }, "nothing of taas"
        assert cluster.rid_of_taas(60, actors=False), "ranks outlive the way to their notebook"
    finally:
        node.reconnect()
        node.restart()
    assert book.good(_FINE, 300).own == "world 4\n"


def test_node_killed(cluster: RayCluster, book: Notebook) -> None:
    """A node that dies is named; with --max-restarts the run goes on once there is another.

    Its checkpoint is larger than what else travels, and was saved on a VM that may be gone.
    """
    book.start(_TWO_LIVES)
    book.wait_for("life 1", 300)
    until((book.folder / "checkpoint.pt").exists)
    node = cluster.nodes[1]
    node.kill()
    assert f"(node {node.address})" in book.wait_for("started again", _NAMED_SECONDS).stdout
    node.restart()
    assert "life 2\ngoes on from 2359296 numbers" in book.end(400).own
    assert book.value("lives") == "2"
    _release(cluster, book)


def test_head_lost_and_restarted(cluster: RayCluster, book: Notebook) -> None:
    """A head that is lost is named, and no rank outlives it.

    The run waits for it, and starts again.
    """
    book.start(_TWO_LIVES)
    book.wait_for("life 1", 240)
    until((book.folder / "checkpoint.pt").exists)
    cluster.head.kill()
    told = book.wait_for("started again", _NAMED_SECONDS)
    assert f"the head of the Ray cluster at {cluster.address}" in told.stdout
    assert cluster.rid_of_taas(60, actors=False)
    book.wait_for_line(f"waiting for the Ray cluster at {cluster.address} to be back")
    for node in cluster.nodes:
        node.restart()
    assert "life 2" in book.end(400).own
    _release(cluster, book)


# --------------------------------------------------- a version of Ray that has other modules inside

_HIDDEN = """
import sys
import ray.core.generated.autoscaler_pb2  # Ray itself has it already when a driver asks for it
sys.modules["ray.core.generated.autoscaler_pb2"] = None
del ray.core.generated.autoscaler_pb2
"""
_ASKED = """
import sys
import ray
from taas.engines import ray_driver
from taas.errors import EngineError
try:
    found = ray_driver.inner(*sys.argv[1:])
except EngineError as error:
    asked = ".".join(sys.argv[1:])
    assert f"Ray {ray.__version__} has no {asked}, which taas asks" in str(error), error
    print("refused")
else:
    print("found", found)
"""


def test_a_driver_needs_rays_inner_modules_only_when_it_asks_them(tmp_path: Path) -> None:
    """One that Ray has no more does not keep the driver from saying what is wrong."""
    (tmp_path / "sitecustomize.py").write_text(_HIDDEN)
    paths = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    nobody_is_there = ["127.0.0.1:9", "0"]
    driver = subprocess.run(
        [sys.executable, "-m", "taas.engines.ray_driver", *nobody_is_there],
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        stdin=subprocess.DEVNULL,
        text=True,
        timeout=120,
    )
    assert '"why_not":"[Errno 111] Connection refused"' in driver.stdout, driver


@pytest.mark.parametrize(
    ("asked", "answer"),
    [
        (["ray._raylet", "GcsClient"], "found"),
        (["ray._raylet", "NoClient"], "refused"),
        (["ray._private.no_worker", "global_worker"], "refused"),
        (["ray._private.worker", "global_worker", "nobody"], "refused"),
    ],
)
def test_what_a_version_of_ray_has_no_more_is_refused_by_its_name(
    asked: list[str], answer: str
) -> None:
    """With that version of Ray: a module, one of its names, or what such a thing has."""
    done = subprocess.run(
        [sys.executable, "-c", _ASKED, *asked], capture_output=True, text=True, timeout=120
    )
    assert done.stdout.split()[:1] == [answer], done
