"""How long the supervisor's loop hears nobody while large names arrive.

A run's answer comes from an agent elsewhere (in chunks, which are written down here), for the
notebook's cell or for a background run that keeps it on disk; and from an agent here, kept on disk.
A turn is from the return of poll(2) to its next call, less the time in which threads of the
supervisor were ready to run and another process had the processor (schedstat).

    python benchmarks/turns.py [--gigabytes 2] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
from elsewhere import install
from notebook_harness import Notebook

TURNS = """
import contextlib, os, sys
if "taas.supervisor" in sys.orig_argv:
    import threading, time
    import zmq
    wait, main, since = zmq.Poller.poll, threading.main_thread(), []
    longest = [0.0]

    def now():
        ready = {}
        # the others may have to give the interpreter's lock back first
        for thread in threading.enumerate():
            number = thread.native_id
            with contextlib.suppress(OSError), open(f"/proc/self/task/{number}/schedstat") as file:
                ready[number] = int(file.read().split()[1]) / 1e9
        return time.monotonic(), time.thread_time(), ready

    def passed():
        began, used, ready = since
        now_, used_, ready_ = now()
        waited = sum(ready_[one] - ready[one] for one in ready_.keys() & ready.keys())
        return now_ - began, used_ - used, waited

    def poll(self, timeout=None):
        if threading.current_thread() is not main or len(self.sockets) < 4:
            return wait(self, timeout)
        wall, processor, ready = passed() if since else (0.0, 0.0, 0.0)
        if not os.path.exists(os.environ["TAAS_TURNS"]):  # begin anew
            longest[0] = 0.0
        if wall - ready > longest[0]:
            longest[0] = wall - ready
            with open(os.environ["TAAS_TURNS"], "a") as file:
                print(wall - ready, processor, file=file)
        try:
            return wait(self, timeout)
        finally:
            since[:] = now()

    zmq.Poller.poll = poll
"""
CELL = """#pragma taas --gpus 1{options}
import torch
made = torch.ones({count} << 28)
"""
CASES = {
    "elsewhere, for the cell": (True, ""),
    "elsewhere, kept on disk": (True, " --background --name large"),
    "here, kept on disk": (False, " --background --name large"),
}


def longest(folder: Path, gigabytes: int, *, remote: bool, options: str) -> tuple[float, float]:
    """Run a cell with a large answer, and return the longest turn until its end.

    Also the turn's processor time; both in seconds.
    """
    environ = install(folder / "site") if remote else {"PYTHONPATH": str(folder / "site")}
    (folder / "site").mkdir(exist_ok=True)
    with (folder / "site" / "sitecustomize.py").open("a") as file:
        file.write(TURNS)
    turns = folder / "turns"
    (folder / "project").mkdir()
    book = Notebook(
        folder / "project",
        environ={
            **environ,
            "TAAS_TURNS": str(turns),
            "JUPYTER_RUNTIME_DIR": str(folder / "runtime"),
        },
    )
    try:
        book.good("%load_ext taas")
        book.good("#pragma taas --gpus 1\npass", seconds=300)
        turns.unlink(missing_ok=True)  # agents and engines start once
        book.good(CELL.format(options=options, count=gigabytes), seconds=900)
        if options:
            book.good("%taas attach large", seconds=900)
        assert book.value("made.numel()") == str(gigabytes << 28)
        wall, processor = map(float, turns.read_text().splitlines()[-1].split())
    finally:
        book.close()
    return wall, processor


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gigabytes", type=int, default=2)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    found = {}
    for name, (remote, options) in CASES.items():
        with tempfile.TemporaryDirectory() as folder:
            wall, processor = longest(
                Path(folder), arguments.gigabytes, remote=remote, options=options
            )
        found[name] = {"turn_ms": 1000 * wall, "processor_ms": 1000 * processor}
        print(
            f"{name:26} {1000 * wall:7.1f} ms, of which {1000 * processor:.1f} ms processor",
            flush=True,
        )
    if arguments.json:
        arguments.json.write_text(json.dumps({"load": os.getloadavg(), "turns": found}, indent=1))


if __name__ == "__main__":
    main()
