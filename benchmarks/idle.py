"""What an idle notebook keeps: the memory of all of taas's processes, shared pages once (Pss).

After a cell in two ranks, when the spare processes for the next one are there; and of a
run with `--cpus 8` whose elements are small. The kernel, which belongs to the user, has a row of
its own.

    python benchmarks/idle.py [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
from notebook_harness import Notebook

from taas.base import linux
from taas.rank import lifeline

CELL = """#pragma taas --gpus 2
import torch, torch.distributed as dist
dist.init_process_group("gloo")
dist.all_reduce(torch.ones(1))
"""
LOADER = """
import taas, torch
from torch.utils.data import DataLoader
loader = DataLoader(torch.arange(10_000), batch_size=1)
taas.register(loader)
"""
DELIVERY = """#pragma taas --gpus 1 --cpus 8
import time
batches = iter(loader)
next(batches)
print("there", flush=True)
while not Path("go").exists():
    time.sleep(0.05)
"""


def memory(book: Notebook) -> dict[str, float]:
    """MB of each kind of process."""
    found = book.processes()
    kinds = {
        "supervisor": found.supervisor,
        "agents": found.agents,
        "forkservers": found.forkservers,
        "spares": found.spares,
        "ranks": found.ranks,
        "data processes": found.data_processes,
        "others": found.others,
    }
    of = {process.pid: kind for kind, processes in kinds.items() for process in processes}
    sums: Counter[str] = Counter()
    for process in psutil.Process().children(recursive=True):
        try:
            kind = "the kernel" if process.pid == book.pid else of.get(process.pid, "others")
            sums[kind] += process.memory_full_info().pss
        except psutil.NoSuchProcess:  # it was about to end
            continue
    own = {kind: nbytes / 1e6 for kind, nbytes in sums.items() if kind != "the kernel"}
    return {"all of taas": sum(own.values()), **own, "the kernel": sums["the kernel"] / 1e6}


def wait_for_spares(book: Notebook, count: int) -> None:
    """Wait until the agents have made what they keep for the next cell."""
    deadline = time.monotonic() + 120
    while len([p for p in book.processes().spares if p.name() == lifeline.SPARE_NAME]) < count:
        if time.monotonic() > deadline:
            raise TimeoutError("the agents made no spares")
        time.sleep(0.2)
    time.sleep(1.0)


def main() -> None:
    """Measure, print a table, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    linux.prctl(36, 1)  # PR_SET_CHILD_SUBREAPER: supervisors are found below this process
    folder = Path(tempfile.mkdtemp(prefix="idle-"))
    os.chdir(folder)
    book = Notebook(folder)
    rows = {}
    try:
        book.good(f"from pathlib import Path\n{LOADER}")
        book.good(CELL, seconds=600)
        wait_for_spares(book, 2)
        rows["idle after a cell in 2 ranks"] = memory(book)
        book.start(DELIVERY)
        book.wait_for("there", 300)
        rows["1 rank, --cpus 8"] = memory(book)
        Path("go").touch()
        book.end()
    finally:
        book.close()
    for name, row in rows.items():
        print(
            f"{name}:", ", ".join(f"{kind} {megabytes:.0f} MB" for kind, megabytes in row.items())
        )
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
