"""How long a run takes to start, side by side with other launchers, in one run of this file.

From the moment a cell is executed (or a launcher's command started) to the end of the first
all-reduce in all ranks, and to the next prompt (or the launcher's exit). gloo, CPU ranks. Also:
many ranks on several agents, a 1 GB tensor to 8 ranks and back. What ranks print:
benchmarks/output.py.

    python benchmarks/launch.py [--ranks 8] [--rounds 7] [--skip-peers] [--json FILE]
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import multiprocessing
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
from notebook_harness import Notebook

from taas.base import linux
from taas.rank import lifeline

WORK = """
import time, torch, torch.distributed as dist
dist.init_process_group("gloo")
dist.all_reduce(torch.ones(1))
reached = torch.tensor([time.time()], dtype=torch.float64)
dist.all_reduce(reached, dist.ReduceOp.MAX)
if dist.get_rank() == 0:
    print("reached", repr(reached.item()), flush=True)
dist.destroy_process_group()
"""
SETUP = """
import taas, torch
from torch import nn
scale = 3
def helper(x):
    return x * scale
net = nn.Sequential(nn.Linear(10, 10), nn.ReLU(), nn.Linear(10, 2))
optimizer = torch.optim.Adam(net.parameters())
losses = []
"""
USES = "helper(1); losses.append(0.0); net.train(); optimizer.zero_grad()\n"


def reached(text: str) -> float:
    """When the all-reduce had ended in all ranks, as rank 0 printed it."""
    found = re.search(r"reached ([\d.]+)", text)
    assert found, text
    return float(found[1])


def cell(
    book: Notebook, ranks: int, instance: str = "", body: str = USES + WORK
) -> tuple[float, float]:
    """Seconds to the all-reduce and to the prompt, for one cell."""
    began = time.time()
    ran = book.good(f"{instance}#pragma taas --gpus {ranks}\n{body}", seconds=600)
    return reached(ran.stdout) - began, time.time() - began


def warm_cell(book: Notebook, ranks: int, instance: str = "") -> tuple[float, float]:
    """A cell after a pause, as a person makes it: the agents' spare processes wait for it."""
    deadline = time.monotonic() + 60
    while len([p for p in book.processes().spares if p.name() == lifeline.SPARE_NAME]) < ranks:
        if time.monotonic() > deadline:
            raise TimeoutError("the agents made no spares")
        time.sleep(0.2)
    time.sleep(1.0)  # the last one's preparation, and whatever else the cell before has left to do
    return cell(book, ranks, instance)


def first_cell(folder: Path, ranks: int, loaded: float | None = None) -> tuple[float, float]:
    """The first cell of a new kernel.

    Supervisor, agent and forkserver are started for it, or so long before.
    """
    book = Notebook(folder)
    try:
        if loaded is not None:
            book.good("%load_ext taas")
            time.sleep(loaded)
        book.good(SETUP)
        return cell(book, ranks)
    finally:
        book.close()


def command(arguments: list[str]) -> tuple[float, float]:
    """Seconds to the all-reduce and to the exit, for one command."""
    began = time.time()
    done = subprocess.run(arguments, check=True, capture_output=True, text=True)
    return reached(done.stdout) - began, time.time() - began


def bare_rank(rank: int, ranks: int, port: int, report: Any) -> None:
    """One process of the floor: nothing but a fork of a process that has imported torch."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", store=dist.TCPStore("127.0.0.1", port, is_master=False), rank=rank, world_size=ranks
    )
    dist.all_reduce(torch.ones(1))
    report.put(time.time())
    dist.destroy_process_group()


def bare_forkserver(ranks: int) -> Callable[[], tuple[float, float]]:
    """The floor: multiprocessing's forkserver with torch imported."""
    import torch.distributed as dist

    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed", "__main__"])

    def once() -> tuple[float, float]:
        began = time.time()
        store = dist.TCPStore("127.0.0.1", 0, ranks, is_master=True, wait_for_workers=False)
        report = context.SimpleQueue()
        processes = [
            context.Process(target=bare_rank, args=(r, ranks, store.port, report))
            for r in range(ranks)
        ]
        for process in processes:
            process.start()
        ends = [report.get() for _ in processes]
        for process in processes:
            process.join()
        return max(ends) - began, time.time() - began

    return once


def peers(ranks: int, folder: Path) -> dict[str, Callable[[], tuple[float, float]]]:
    """The launchers that are installed, each with the same work."""
    script = folder / "work.py"
    script.write_text(WORK)
    torchrun = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc-per-node={ranks}",
        str(script),
    ]
    found: dict[str, Callable[[], tuple[float, float]]] = {"torchrun": lambda: command(torchrun)}
    if importlib.util.find_spec("accelerate"):
        # --cpu starts one process only, unless there is MPI; --multi_gpu is its torchrun, GPUs or
        # not
        launch = [
            sys.executable,
            "-m",
            "accelerate.commands.launch",
            "--multi_gpu",
            "--num_processes",
            str(ranks),
        ]
        found["accelerate launch"] = lambda: command(
            [
                *launch,
                "--num_machines",
                "1",
                "--mixed_precision",
                "no",
                "--main_process_port",
                "0",
                "--dynamo_backend",
                "no",
                str(script),
            ]
        )
    if importlib.util.find_spec("torchrunx"):
        runner = folder / "runx.py"
        runner.write_text(
            f"""\
import torchrunx, runpy
def work():
    return runpy.run_path({str(script)!r})['reached'].item()
if __name__ == '__main__':
    launcher = torchrunx.Launcher(
        hostnames=['localhost'], workers_per_host={ranks}, backend=None)
    print('reached', launcher.run(work).rank(0))  # its workers' output goes to log files
"""
        )
        found["torchrunx"] = lambda: command([sys.executable, str(runner)])
    return found


def measure(once: Callable[[], tuple[float, float]], rounds: int) -> dict[str, float]:
    """Medians over rounds."""
    pairs = [once() for _ in range(rounds)]
    return {
        "all_reduce_s": statistics.median(a for a, _ in pairs),
        "prompt_s": statistics.median(b for _, b in pairs),
    }


LIBRARIES = ("transformers", "trl", "peft")
USES_LIBRARIES = {
    "transformers": "from transformers import LlamaConfig, LlamaForCausalLM\nLlamaConfig()\n",
    "trl": "from trl import SFTTrainer\n",
    "peft": "from peft import LoraConfig, get_peft_model\nLoraConfig()\n",
}


def cpu_of(process: psutil.Process) -> float:
    """Seconds of processor time that a process has used; a day, if it is gone."""
    try:
        return sum(process.cpu_times()[:2])
    except psutil.NoSuchProcess:
        return 86400.0


def wait_for_rest(book: Notebook, ranks: int) -> None:
    """Wait until the spares are there and idle: they have imported all that there was."""
    deadline, quiet, before = time.monotonic() + 300, 0, 0.0
    while quiet < 8:
        if time.monotonic() > deadline:
            raise TimeoutError("the spares do not come to rest")
        spares = [p for p in book.processes().spares if p.name() == lifeline.SPARE_NAME]
        used = sum(map(cpu_of, spares))
        quiet = quiet + 1 if used == before and len(spares) >= ranks else 0
        before = used
        time.sleep(0.25)


def with_libraries(folder: Path, ranks: int, rounds: int) -> tuple[str, dict[str, float]]:
    """Time cells that use libraries which take seconds to import, as far as they are installed.

    The notebook has imported them, too. The first cell; later ones a while after the one before,
    when its spares have imported them too; and later ones right after the one before.
    """
    there = [name for name in LIBRARIES if importlib.util.find_spec(name)]
    body = "".join(USES_LIBRARIES[name] for name in there) + WORK
    book = Notebook(folder)
    try:
        book.good(f"import taas, torch, {', '.join(there)}")

        def after_a_pause() -> tuple[float, float]:
            wait_for_rest(book, ranks)
            return cell(book, ranks, body=body)

        first = cell(book, ranks, body=body)
        later = measure(after_a_pause, rounds)
        at_once = measure(lambda: cell(book, ranks, body=body), min(3, rounds))
        figures = {"first_all_reduce_s": first[0], **later}
        figures["at_once_all_reduce_s"] = at_once["all_reduce_s"]
        return f"taas, with {', '.join(there)}", figures
    finally:
        book.close()


def memory_of(book: Notebook) -> int:
    """Bytes of all processes of a notebook together, shared pages once."""
    processes = [psutil.Process(book.pid), *psutil.Process().children(recursive=True)]
    return sum(process.memory_full_info().pss for process in {p.pid: p for p in processes}.values())


def big_tensor(book: Notebook, ranks: int) -> dict[str, float]:
    """1 GB to all ranks of a VM: seconds, against one memcpy.

    Also how much memory grew before a rank wrote to it.
    """
    book.good("big = torch.ones(250_000_000)")
    copy = book.good(
        "import time; t = time.time(); again = big.clone(); print(time.time() - t); del again"
    ).own
    before = memory_of(book)
    body = (
        "import os, time\nfrom pathlib import Path\nshown = big[::1_000_000].sum().item()\n"
        "print('reached', time.time(), flush=True)\n"
        "while not Path('go').exists(): time.sleep(0.005)\n"
    )
    began = time.time()
    book.start(f"#pragma taas --gpus {ranks}\n{body}")
    ran = book.wait_for("reached", 120)
    there = reached(ran.stdout) - began
    growth = memory_of(book) - before
    (book.folder / "go").touch()
    book.end()
    (book.folder / "go").unlink()
    back = time.time()
    book.good("#pragma taas --gpus 1\nbig += 1", seconds=300)
    changed = time.time() - back
    book.good("assert big[-1] == 2")
    return {
        "memcpy_s": float(copy),
        "to_ranks_s": there,
        "growth_gb": growth / 1e9,
        "there_changed_and_back_s": changed,
    }


def main() -> None:
    """Measure, print a table, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--skip-peers", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    linux.prctl(36, 1)  # PR_SET_CHILD_SUBREAPER: supervisors are found below this process
    folder = Path(tempfile.mkdtemp(prefix="launch-"))
    os.chdir(folder)
    rows = _Rows()
    floor = bare_forkserver(options.ranks)
    floor()
    rows["bare forkserver (floor)"] = measure(floor, options.rounds)
    rows["taas, first cell of a kernel"] = measure(lambda: first_cell(folder, options.ranks), 3)
    rows["taas, first cell, 10 s after %load_ext"] = measure(
        lambda: first_cell(folder, options.ranks, 10.0), 3
    )
    book = Notebook(folder)
    book.good(SETUP)
    cell(book, options.ranks)
    rows["taas, warm"] = measure(lambda: warm_cell(book, options.ranks), options.rounds)
    rows["taas, warm, no pause before"] = measure(lambda: cell(book, options.ranks), options.rounds)
    if any(map(importlib.util.find_spec, LIBRARIES)):
        name, figures = with_libraries(folder, options.ranks, options.rounds)
        rows[name] = figures
    rows["1 GB tensor"] = big_tensor(book, options.ranks)
    cell(book, 32, "#!g2.8\n")
    rows["taas, 32 ranks on 4 agents, warm"] = measure(lambda: warm_cell(book, 32, "#!g2.8\n"), 3)
    book.close()
    if not options.skip_peers:
        for name, once in peers(options.ranks, folder).items():
            try:
                rows[name] = measure(once, min(3, options.rounds))
            except subprocess.CalledProcessError as error:
                print(
                    f"{name:36} does not run here:"
                    f" {(error.stderr.strip().splitlines() or ['?'])[-1]}"
                )
    if "torchrun" in rows:
        ratio = rows["torchrun"]["all_reduce_s"] / rows["taas, warm"]["all_reduce_s"]
        print(f"torchrun takes {ratio:.0f} times as long as taas, warm")
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))


class _Rows(dict[str, dict[str, float]]):
    """The table, printed as it grows."""

    def __setitem__(self, name: str, figures: dict[str, float]) -> None:
        super().__setitem__(name, figures)
        print(
            f"{name:36}",
            "  ".join(f"{key} {value:.3f}" for key, value in figures.items()),
            flush=True,
        )


if __name__ == "__main__":
    main()
