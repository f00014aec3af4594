"""How soon a cell is done in ranks that stay, beside nbdistributed and ipyparallel.

Four ranks each, in a notebook of each one's own: a cell of one line; a cell that changes an array
of 1 MB, which is changed in the notebook afterwards with taas, and stays in the ranks with the
others; the memory of the ranks' own while they wait. The time is that from sending the cell to its
idle message at the front end.

    pip install -r benchmarks/requirements-keep.txt
    python benchmarks/keep.py [--rounds 20] [--gigabytes 2] [--json FILE]

With ``--gigabytes`` also: a model of that size made in the first cell, and ten cells that use it.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import re
import statistics
import sys
import tempfile
import time
from pathlib import Path

import psutil

from taas.base import linux

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
from notebook_harness import Notebook

RANKS = 4
KEEP = f"#pragma taas --gpus {RANKS} --keep\n"
ARRAY = "import numpy as np\na = np.zeros(125_000)"
MODEL = """import torch, torch.distributed as dist
dist.init_process_group("gloo")
model = torch.nn.ParameterList([torch.randn(1000, 1000) for _ in range({megabytes} // 4)])
"""
USE = """import time
here = torch.ones(1)
dist.all_reduce(here)
reached = time.time()
total = model[0].sum().item()
"""
PEERS = {
    "taas": (("%load_ext taas",), KEEP, "%taas release"),
    "nbdistributed": (
        ("%load_ext nbdistributed", f"%dist_init -n {RANKS}"),
        "%%distributed\n",
        "",  # its %dist_shutdown kills by name, whosever process it is
    ),
    "ipyparallel": (
        (
            f"""
import ipyparallel
cluster = ipyparallel.Cluster(n={RANKS})
client = cluster.start_and_connect_sync()
""",
            "%load_ext ipyparallel",
        ),
        "%%px\n",
        "client.close(); cluster.stop_cluster_sync()",
    ),
}


def median_ms(book: Notebook, cell: str, rounds: int) -> float:
    """Milliseconds from a cell's sending to its end, in the median of some."""
    found = []
    for _ in range(rounds):
        began = time.perf_counter()
        book.good(cell)
        found.append(time.perf_counter() - began)
    return 1000 * statistics.median(found)


def own_mb(pids: list[int]) -> float:
    """Memory of processes' own, in MB, in the mean."""
    return statistics.mean(psutil.Process(pid).memory_full_info().uss for pid in pids) / 1e6


def measure(begin: tuple[str, ...], header: str, end: str, rounds: int) -> dict[str, float]:
    """Measure one way to have ranks that stay; none is left."""
    book = Notebook(Path(tempfile.mkdtemp(prefix="keep-")))
    pids: list[int] = []
    try:
        for cell in begin:
            book.good(cell, seconds=300)
        first = (
            header.replace("--keep", "--keep --output all")
            + "import os\nprint('pid', os.getpid())\n"
            + ARRAY
        )
        # nbdistributed loses a cell whose workers do not listen yet, and says so after 30 s
        for _ in range(4):
            said = book.good(first)
            pids = pids or sorted(
                {int(pid) for pid in re.findall(r"pid\s+(\d+)", f"{said.stdout} {said.displays}")}
            )
        assert len(pids) == RANKS, said.stdout
        return {
            "one line, ms": median_ms(book, header + "n = 1", rounds),
            "changes 1 MB, ms": median_ms(book, header + "a += 1", rounds),
            "memory of a rank, MB": own_mb(pids),
        }
    finally:
        book.run(end)
        book.close()
        for pid in pids:
            with contextlib.suppress(psutil.NoSuchProcess):
                psutil.Process(pid).kill()


def large(gigabytes: float, cells: int = 10) -> dict[str, float]:
    """Measure cells that use a model of so many GB, which the first cell made.

    From sending to the first all-reduce.
    """
    book = Notebook(Path(tempfile.mkdtemp(prefix="keep-")))
    try:
        book.good("%load_ext taas")
        book.good(KEEP + MODEL.format(megabytes=int(1000 * gigabytes)), seconds=600)
        found = []
        for _ in range(cells):
            began = time.time()
            book.good(KEEP + USE, seconds=600)
            found.append(float(book.value("reached")) - began)
        return {"to the first all-reduce, s": statistics.median(found), "slowest, s": max(found)}
    finally:
        book.close()


def main() -> None:
    """Measure, print a table, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--gigabytes", type=float, default=0.0)
    parser.add_argument("--json", type=lambda path: Path(path).absolute())
    options = parser.parse_args()
    linux.prctl(36, 1)  # PR_SET_CHILD_SUBREAPER: supervisors are found below this process
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    os.environ["PATH"] = (
        f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # nbdistributed starts "python"
    )
    rows = {}
    for name, (begin, header, end) in PEERS.items():
        if importlib.util.find_spec(name) is None:
            print(f"{name} is not installed (benchmarks/requirements-keep.txt)")
            continue
        try:
            rows[name] = measure(begin, header, end, options.rounds)
        except AssertionError as error:  # what the peer says where it does not start
            print(f"{name} does not run here: {str(error)[:200]}")
            continue
        print(
            f"{name:14}",
            "  ".join(f"{what}: {value:.1f}" for what, value in rows[name].items()),
            flush=True,
        )
    if options.gigabytes:
        rows[f"{options.gigabytes} GB"] = large(options.gigabytes)
        print(f"{options.gigabytes} GB kept:", rows[f"{options.gigabytes} GB"])
    if options.json:
        options.json.write_text(json.dumps(rows, indent=2))


if __name__ == "__main__":
    main()
