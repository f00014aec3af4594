"""What the supervisor does with many VMs.

A thousand agents and 8,000 ranks by the real wire, which do nothing but say so.

Supervisor, kernel and messages are the real ones. The agents stand in for VMs: they connect from
other processes by TCP with keys of their own, report eight ranks each, send a line for each, and
end as they are told.

    python benchmarks/scale.py [--vms 1000] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
sys.path.insert(0, str(Path(__file__).resolve().parent))
from notebook_harness import Notebook
from turns import TURNS

from taas.runs.records import read_records

RANKS = 8
SITE = f"""
import sys
if "taas.supervisor" in sys.orig_argv:
    sys.path.append({str(Path(__file__).parent)!r})
    import scale_vms
    from taas.engines import choice
    choice.start_engine = scale_vms.Engine
"""
TYPES = '[instances."s1.8"]\nvcpus = 8\ngpus = 8\nvms = [{vms}]\n'


def run(
    book: Notebook, supervisor: Callable[[], psutil.Process], turns: Path, cell: str, vms: int
) -> dict[str, object]:
    """Run a cell on all VMs; returns what it took."""
    turns.unlink(missing_ok=True)
    before, began = sum(supervisor().cpu_times()[:2]), time.perf_counter()
    ran = book.run(f"#!s1.8\n#pragma taas --gpus {vms * RANKS} --return none\n{cell}", seconds=600)
    took = time.perf_counter() - began
    process = supervisor()
    if not turns.exists():
        raise SystemExit(f"the run did not begin: {ran.stderr or ran.evalue}")
    return {
        "seconds": took,
        "processor_s": sum(process.cpu_times()[:2]) - before,
        "rss_mb": process.memory_info().rss / 2**20,
        "longest_turn_ms": 1000 * float(turns.read_text().splitlines()[-1].split()[0]),
        "said": " / ".join((ran.stdout + ran.evalue).split("\n"))[-160:],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--vms", type=int, default=1000)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = measure(Path(folder), arguments.vms)
    if arguments.json:
        arguments.json.write_text(json.dumps({"load": os.getloadavg(), "scale": found}, indent=1))


def stop_last(supervisor: psutil.Process, stopped: list[float]) -> None:
    """Stop the process of the last VM's agent, once the cell runs everywhere."""
    while not any(
        record.live and "'wait'" in record.cell.text and record.state == "running"
        for record in read_records()
    ):
        time.sleep(0.05)
    processes = [
        child for child in supervisor.children() if "scale_vms" in " ".join(child.cmdline())
    ]
    os.kill(max(process.pid for process in processes), signal.SIGSTOP)
    stopped.append(time.perf_counter())


def measure(folder: Path, vms: int) -> dict[str, dict[str, object]]:
    """Start, print, fail and lose a VM; returns what each took."""
    site, project, turns = folder / "site", folder / "project", folder / "turns"
    site.mkdir()
    project.mkdir()
    (site / "sitecustomize.py").write_text(SITE + TURNS)
    (site / "ray.py").touch()  # it is asked for
    (project / "taas.toml").write_text(TYPES.format(vms=vms))
    os.environ["JUPYTER_RUNTIME_DIR"] = str(folder / "runtime")
    environ = {"PYTHONPATH": str(site), "TAAS_ENGINE": "ray 127.0.0.1:1", "TAAS_TURNS": str(turns)}
    book = Notebook(project, environ=environ)

    def supervisor() -> psutil.Process:
        return psutil.Process(read_records()[0].supervisor.pid)

    found = {}
    try:
        book.good("%load_ext taas")
        book.good("#pragma taas --gpus 1 --return none\n'print'", seconds=300)
        for name, cell in {"first": "'print'", "next": "'print'", "a rank fails": "'fail'"}.items():
            found[name] = run(book, supervisor, turns, cell, vms)
            print(name, found[name], flush=True)
        stopper = threading.Thread(target=stop_last, args=(supervisor(), stopped := []))
        stopper.start()
        found["a VM is silent"] = run(book, supervisor, turns, "'wait'", vms)
        found["a VM is silent"]["named_s"] = time.perf_counter() - stopped[0]
        print("a VM is silent", found["a VM is silent"])
    finally:
        book.close()
    return found


if __name__ == "__main__":
    main()
