"""What capture costs: names into a payload, out of it in a rank, changes back into the notebook.

Each line is the median of several rounds in a process of its own, which plays all parts; the plain
pickle beside it is `pickle.dumps(..., protocol=5)` and `pickle.loads` of the same objects, or one
copy of the same memory. The last columns compare all of it with pickle: times, and the most memory
that Python had allocated (what lies in the shared file does not count, pickle's bytes do).

    python benchmarks/capture.py [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import pickle
import statistics
import sys
import time
import tracemalloc
import types
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch

from taas.capture import arrive, capture, pack_answer

SMALL = """
import torch, torch.nn as nn, math, random
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 32, 3, 1); self.conv2 = nn.Conv2d(32, 64, 3, 1)
        self.drop = nn.Dropout(0.25); self.fc1 = nn.Linear(9216, 128); self.fc2 = nn.Linear(128, 10)
    def forward(self, x):
        return self.fc2(torch.relu(self.fc1(self.drop(self.conv2(self.conv1(x))).flatten(1))))
net = Net(); opt = torch.optim.Adam(net.parameters(), lr=lr)
def train(epoch):
    for data in loader: step(data)
def step(data): losses.append(math.sqrt(lr)); net(data)
def test(): return sum(losses)
losses = []; loader = [1, 2]
"""
CASES: dict[str, tuple[str, str]] = {
    "helpers, a net, Adam": (
        f"lr = 0.1\n{SMALL}",
        "train(1); test(); net.train(); opt.step(); losses.append(lr)",
    ),
    "256 MB tensor": ("t = torch.ones(64 << 20)", "t.sum()"),
    "1M ints": ("numbers = list(range(1000, 1001000))", "numbers"),
    "100k small dicts": (
        "rows = [{'i': i, 'x': i / 3, 's': str(i)} for i in range(100000)]",
        "rows",
    ),
    "100k instances": (
        "class A: pass\nrows = []\nfor i in range(100000):\n    a = A(); a.i = i; rows.append(a)",
        "rows",
    ),
    "3M distinct strings": ("texts = [f'string number {i}' for i in range(3_000_000)]", "texts"),
    "300k small dicts": (
        "rows = [{'i': i, 'x': i / 3, 's': str(i)} for i in range(300_000)]",
        "rows",
    ),
    "1M-row object column": (
        """
import pandas as pd
texts = [f'row {i}' for i in range(1_000_000)]
df = pd.DataFrame({'a': pd.Series(texts, dtype=object)})
del texts
""",
        "df",
    ),
    "1000 small tensors": ("ts = [torch.ones(8) for _ in range(1000)]", "ts"),
}


def _namespace(setup: str) -> dict[str, Any]:
    main = types.ModuleType("__main__")
    sys.modules["__main__"] = main
    exec(
        compile(setup, "setup", "exec"), main.__dict__.setdefault("torch", torch) and main.__dict__
    )
    return main.__dict__


def _timed(work: Callable[[], Any]) -> tuple[float, Any]:
    start = time.perf_counter()
    result = work()
    return (time.perf_counter() - start) * 1e3, result


def _plain(namespace: dict[str, Any], cell: str) -> float:
    value = namespace.get(cell.split(".")[0])
    if isinstance(value, torch.Tensor):
        return _timed(value.clone)[0]
    if isinstance(value, (torch.nn.Module, type(None))) or callable(value):
        return 0.0
    return _timed(lambda: pickle.loads(pickle.dumps(value, protocol=5)))[0]


def _peak(work: Callable[[], Any]) -> int:
    """Return the most bytes that Python allocates meanwhile."""
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def _there_and_back(namespace: dict[str, Any], cell: str) -> None:
    captured = capture(cell, namespace, None, project=Path.cwd())
    rank = types.ModuleType("__main__").__dict__
    arrival = arrive(captured.fd, rank, device=None)
    arrival.mark()
    answer = pack_answer(arrival, rank)
    captured.apply(answer)
    os.close(answer)
    arrival.close()
    captured.close()


def measure(setup: str, cell: str, rounds: int) -> dict[str, float]:
    """Return medians in milliseconds of all steps.

    They are capture, arrive (any rank), mark and answer (rank 0), apply, and plain.
    """
    times: dict[str, list[float]] = {}

    def note(what: str, work: Callable[[], Any]) -> Any:
        taken, result = _timed(work)
        times.setdefault(what, []).append(taken)
        return result

    for _ in range(rounds):
        # the last round's classes are the rank's by now, which is this process
        namespace = _namespace(setup)
        captured = note("capture", lambda n=namespace: capture(cell, n, None, project=Path.cwd()))
        rank = types.ModuleType("__main__").__dict__
        arrival = note("arrive", lambda c=captured, r=rank: arrive(c.fd, r, device=None))
        note("mark", arrival.mark)
        answer = note("answer", lambda a=arrival, r=rank: pack_answer(a, r))
        note("apply", lambda c=captured, a=answer: c.apply(a))
        note("plain", lambda: None)
        times["plain"][-1] = _plain(namespace, cell)
        os.close(answer)
        arrival.close()
        captured.close()
        del captured, arrival
    found = {what: statistics.median(taken) for what, taken in times.items()}
    value = namespace.get(cell.split(".")[0])
    if found["plain"] and not isinstance(value, torch.Tensor):
        found["times"] = (sum(found.values()) - found["plain"]) / found["plain"]
        plain = _peak(lambda: pickle.loads(pickle.dumps(value, protocol=5)))
        found["memory"] = _peak(lambda: _there_and_back(namespace, cell)) / plain
    return found


def main() -> None:
    """Print a table, and JSON where asked."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    results = {}
    spawn = multiprocessing.get_context("spawn")
    for name, (setup, cell) in CASES.items():  # each in a heap of its own
        with ProcessPoolExecutor(1, spawn, torch.set_num_threads, (1,)) as process:
            results[name] = process.submit(measure, setup, cell, options.rounds).result()
    columns = ("capture", "arrive", "mark", "answer", "apply", "plain", "times", "memory")
    print(f"{'ms':<24}" + "".join(f"{column:>10}" for column in columns))
    for name, row in results.items():
        print(f"{name:<24}" + "".join(f"{row.get(column, 0):>10.1f}" for column in columns))
    if options.json:
        options.json.write_text(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
