"""Steps a second of a small network under DDP.

A taas cell beside torchrun, in pairs of changing order.

gloo, two CPU ranks with one thread each. The pairs' ratios say what a cell costs, or gives; pages
faulted in and processor time of a step say why.

    python benchmarks/steps.py [--pairs 7] [--steps 400] [--ranks 2]
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
from notebook_harness import Notebook

WORK = """
import resource, time, torch, torch.distributed as dist
from torch import nn
dist.init_process_group("gloo")
torch.manual_seed(0)
net = nn.Sequential(
    nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
    nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
    nn.Flatten(), nn.Linear(32 * 49, 10))
model = nn.parallel.DistributedDataParallel(net)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
images, labels = torch.randn(64, 1, 28, 28), torch.randint(0, 10, (64,))
def train(steps):
    for _ in range(steps):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
    return loss.item()
train(20)
dist.barrier()
used, began = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
loss = train(STEPS)
seconds, now = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_SELF)
if dist.get_rank() == 0:
    user = 1e3 * (now.ru_utime - used.ru_utime) / STEPS
    system = 1e3 * (now.ru_stime - used.ru_stime) / STEPS
    faults = (now.ru_minflt - used.ru_minflt) / STEPS
    print("measured", STEPS / seconds, user, system, faults, loss, flush=True)
dist.destroy_process_group()
"""


def measured(text: str) -> tuple[float, ...]:
    """Return steps a second, and milliseconds, page faults and loss of a step.

    The milliseconds are those of user and of system time; the loss is the last one.
    """
    found = re.search(r"measured (.+)", text)
    assert found, text
    return tuple(float(figure) for figure in found[1].split())


def main() -> None:
    """Print a line a run, and the ratio of the pairs."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, default in (("--pairs", 7), ("--steps", 400), ("--ranks", 2)):
        parser.add_argument(name, type=int, default=default)
    args = parser.parse_args()
    work, header = WORK.replace("STEPS", str(args.steps)), f"#pragma taas --gpus {args.ranks}\n"
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "work.py"
        script.write_text(work)
        book = Notebook(Path(folder))
        launcher = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node",
            str(args.ranks),
        ]

        def torchrun() -> str:
            environ = {**os.environ, "OMP_NUM_THREADS": "1"}
            return subprocess.run(
                [*launcher, script], check=True, capture_output=True, text=True, env=environ
            ).stdout

        runs = {"taas": lambda: book.good(header + work, seconds=600).stdout, "torchrun": torchrun}
        ratios = []
        try:
            book.good("import taas")
            for pair in range(args.pairs):
                figures = {}
                for name in sorted(runs, reverse=bool(pair % 2)):
                    figures[name] = measured(runs[name]())
                    print(
                        "{:9} {:6.1f} steps/s  user {:5.2f} ms  system {:5.2f} ms  {:6.0f} pages a"
                        " step  loss {:.9f}".format(name, *figures[name]),
                        flush=True,
                    )
                ratios.append(figures["taas"][0] / figures["torchrun"][0])
        finally:
            book.close()
    print(
        f"taas / torchrun: median {statistics.median(ratios):.3f}, {min(ratios):.3f} to"
        f" {max(ratios):.3f}"
    )


if __name__ == "__main__":
    main()
