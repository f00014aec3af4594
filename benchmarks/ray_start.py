"""How long a run takes to start on a Ray cluster that is up, beside Ray Train's TorchTrainer.

The cluster is that of the tests: a head and two nodes in network namespaces of this machine, which
see neither the notebook's project nor its memory. From the moment a cell is executed (or ``fit`` is
called, in a driver that has connected and imported all it needs) to the end of the first all-reduce
in all ranks, and to the next prompt (or the return of ``fit``). gloo, CPU ranks, half of them on
each node. Then: how long it takes until the cell names a node that was killed, one that was cut
off, and a head that was.

    python benchmarks/ray_start.py [--ranks 8] [--rounds 5] [--skip-peer] [--skip-losses] [--json
    FILE]

Needs root, and benchmarks/requirements-ray.txt for the peer.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
from launch import SETUP, USES, WORK, cell
from notebook_harness import Notebook
from ray_cluster import RayCluster, why_not

from taas.base import linux

TRAINER = """
import sys, time
from pathlib import Path
import ray, torch
import torch.distributed as dist
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer

ray.init(address=sys.argv[1], log_to_driver=False)
ranks, folder = int(sys.argv[2]), Path(sys.argv[3])

def work():
    dist.all_reduce(torch.ones(1))
    reached = torch.tensor([time.time()], dtype=torch.float64)
    dist.all_reduce(reached, dist.ReduceOp.MAX)
    if dist.get_rank() == 0:
        (folder / "reached").write_text(repr(reached.item()))

print("ready", flush=True)
for line in sys.stdin:
    began = time.time()
    TorchTrainer(
        work,
        torch_config=TorchConfig(backend="gloo"),
        scaling_config=ScalingConfig(num_workers=ranks, placement_strategy="SPREAD"),
        run_config=RunConfig(name=f"run-{began}", storage_path=str(folder)),
    ).fit()
    ended = time.time()
    print("took", float((folder / "reached").read_text()) - began, ended - began, flush=True)
"""
SLEEP = """
import time, torch.distributed as dist
dist.init_process_group("gloo")
dist.barrier()
print("all there", flush=True)
time.sleep(600)
"""
_PAUSE_SECONDS = 10.0
FIRST, NEXT = "taas, first cell of a kernel", "taas, next cell"
CHOSEN = f"taas, first cell, {_PAUSE_SECONDS:.0f} s after %taas engine"
Figures = dict[str, float]


class Bench:
    """A cluster, and what is measured on it."""

    def __init__(self, cluster: RayCluster, ranks: int, folder: Path) -> None:
        self.cluster, self.ranks, self.folder = cluster, ranks, folder
        self.instance = f"#!g2.{ranks // 2}\n"

    def notebook(self) -> Notebook:
        """A kernel whose cells run on the cluster."""
        book = self.cluster.notebook(self.folder)
        book.good(SETUP)
        book.good(f"%taas engine ray {self.cluster.address}")
        return book

    def cell(self, book: Notebook) -> tuple[float, float]:
        """Seconds to the all-reduce and to the prompt."""
        return cell(book, self.ranks, self.instance, USES + WORK)

    def first_cell(self, pause: float = 0.0) -> tuple[float, float]:
        """Run the first cell so many seconds after ``%taas engine ray`` started the driver."""
        book = self.notebook()
        try:
            time.sleep(pause)
            return self.cell(book)
        finally:
            book.close()

    @contextmanager
    def trainer(self) -> Iterator[Callable[[], tuple[float, float]]]:
        """Ray Train, in a driver on the head's node; its storage is a folder that all nodes see."""
        storage = Path(tempfile.mkdtemp(prefix="ray-train-", dir="/var/tmp"))
        command = self.cluster.head.command(
            sys.executable,
            "-W",
            "ignore",
            "-c",
            TRAINER,
            self.cluster.address,
            str(self.ranks),
            str(storage),
        )
        log = (self.folder / "trainer.log").open("w")
        driver = subprocess.Popen(
            command,
            env=self.cluster.head.environ,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )
        assert driver.stdin is not None and driver.stdout is not None

        def answer(word: str) -> list[str]:
            assert driver.stdout is not None
            for line in driver.stdout:
                if line.startswith(word):
                    return line.split()[1:]
            raise RuntimeError(Path(log.name).read_text()[-2000:])

        def fit() -> tuple[float, float]:
            assert driver.stdin is not None
            driver.stdin.write("go\n")
            driver.stdin.flush()
            reached, ended = map(float, answer("took"))
            return reached, ended

        try:
            answer("ready")
            yield fit
        finally:
            driver.stdin.close()
            driver.wait(60)
            driver.stdout.close()
            log.close()
            shutil.rmtree(storage)

    # ------------------------------------------------------------ losses

    def named_after(self, book: Notebook, lose: Callable[[], None]) -> float:
        """Seconds from a loss to the cell's error."""
        book.start(f"{self.instance}#pragma taas --gpus {self.ranks}\n{SLEEP}")
        book.wait_for("all there", 240)
        began = time.monotonic()
        lose()
        took = 0.0
        while not book._next(time.monotonic() + 120):
            took = time.monotonic() - began if book._ran.ename and not took else took
        book._client.get_shell_msg(timeout=30)
        assert book._ran.ename == "RunLost", book._ran
        print("   ", book._ran.evalue.splitlines()[0])
        return took

    def losses(self, rounds: int) -> Iterator[tuple[str, list[float]]]:
        """What is lost, and after how many seconds the cell named it."""
        head, _, node = self.cluster.nodes
        deeds = {
            "a node killed": (node.kill, [node]),
            "a node cut off": (node.cut_off, [node]),
            "the head killed": (head.kill, self.cluster.nodes),
        }
        book = self.notebook()
        try:
            for name, (lose, gone) in deeds.items():
                took = []
                for _ in range(rounds):
                    took.append(self.named_after(book, lose))
                    node.reconnect()
                    for lost in gone:
                        lost.restart()
                yield name, took
        finally:
            book.close()


def figures(pairs: list[tuple[float, float]]) -> Figures:
    """Medians over rounds."""
    return {
        "all_reduce_s": statistics.median(a for a, _ in pairs),
        "prompt_s": statistics.median(b for _, b in pairs),
    }


def show(name: str, row: Figures) -> None:
    """Print a row of the table."""
    print(f"{name:44}", "  ".join(f"{key} {value:.2f}" for key, value in row.items()), flush=True)


def start_up(bench: Bench, rounds: int, *, peer: bool) -> dict[str, Figures]:
    """Rounds in which all are measured, one after the other."""
    pairs: dict[str, list[tuple[float, float]]] = {}

    def note(name: str, pair: tuple[float, float]) -> None:
        pairs.setdefault(name, []).append(pair)
        print(f"    {name}: {pair[0]:.2f} {pair[1]:.2f}", flush=True)

    def around(fit: Callable[[], tuple[float, float]] | None) -> None:
        book = bench.notebook()
        try:
            bench.cell(book)
            for _ in range(rounds):
                note(FIRST, bench.first_cell())
                note(CHOSEN, bench.first_cell(_PAUSE_SECONDS))
                note(NEXT, bench.cell(book))
                if fit is not None:
                    note("TorchTrainer", fit())
        finally:
            book.close()

    if peer:
        with bench.trainer() as fit:
            around(fit)
    else:
        around(None)
    return {name: figures(measured) for name, measured in pairs.items()}


def main() -> None:
    """Measure, print a table, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--skip-peer", action="store_true")
    parser.add_argument("--skip-start", action="store_true")
    parser.add_argument("--skip-losses", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if missing := why_not():
        raise SystemExit(f"no Ray nodes on this machine: {missing}")
    peer = not options.skip_peer
    if peer and importlib.util.find_spec("tensorboardX") is None:
        raise SystemExit(
            "Ray Train is not installed: pip install -r benchmarks/requirements-ray.txt, or"
            " --skip-peer"
        )
    linux.prctl(36, 1)  # PR_SET_CHILD_SUBREAPER: what a kernel leaves is found below this process
    half = options.ranks // 2
    node = {"CPU": float(half), f"g2.{half}": 1.0}
    rows: dict[str, Figures] = {}
    folder = Path(tempfile.mkdtemp(prefix="ray-start-", dir="/tmp"))
    nodes = RayCluster([{"CPU": 2.0}, node, node])
    nodes.environ["GLOO_SOCKET_IFNAME"] = "eth0"  # Ray Train leaves it to the nodes; taas finds it
    with nodes as cluster:
        bench = Bench(cluster, options.ranks, folder)
        if not options.skip_start:
            rows |= start_up(bench, options.rounds, peer=peer)
        if not options.skip_losses:
            for name, took in bench.losses(max(1, options.rounds // 2)):
                rows[name] = {"named_after_s": statistics.median(took), "at_most_s": max(took)}
    shutil.rmtree(folder, ignore_errors=True)
    for name, row in rows.items():
        show(name, row)
    if "TorchTrainer" in rows:
        for name in (FIRST, CHOSEN, NEXT):
            ratio = {key: rows["TorchTrainer"][key] / rows[name][key] for key in rows[name]}
            print(
                f"TorchTrainer takes {ratio['all_reduce_s']:.1f} times as long as {name}, to the"
                f" prompt {ratio['prompt_s']:.1f}"
            )
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
