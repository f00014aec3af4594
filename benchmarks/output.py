"""How fast a rank's output reaches the cell, beside the same cell in a plain kernel.

100,000 printed lines, from the cell's start to its end, and in how many messages of each second and
in all, which is what a front end pays for; the time from a print after a pause to its message at
the front end; what the rank keeps of what it has printed.

    python benchmarks/output.py [--rounds 5] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path

from taas.base import linux

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
from notebook_harness import Notebook

HEADER = "#pragma taas --gpus 1\n"
LINES = 100_000
PRINTED = f"for i in range({LINES}): print('line', i)"
STAMPS = """
import time
for i in range(60):
    print("stamp", time.time(), flush=True)
    time.sleep(0.211)  # text that comes sooner waits for more of it
"""
KEPT = f"""
import psutil
before = psutil.Process().memory_full_info().uss
{PRINTED}
kept = (psutil.Process().memory_full_info().uss - before) / {LINES}
"""


def lines(book: Notebook, header: str) -> tuple[float, int]:
    """Return a cell's seconds, with all lines at the front end, and the number of messages."""
    began = time.time()
    ran = book.good(header + PRINTED, seconds=600)
    seconds = time.time() - began
    assert ran.own.count("\n") == LINES
    return seconds, sum(kind == "stdout" for kind, _ in ran.shown)


def latencies(book: Notebook, header: str) -> list[float]:
    """Seconds from each print of a cell to its arrival at the front end, sorted."""
    book.start(header + STAMPS)
    found, line, idle = [], "", False
    while not idle:
        message = book._client.get_iopub_msg(timeout=120)
        now, content = time.time(), message["content"]
        idle = (
            message["msg_type"] == "status" and content["execution_state"] == "idle" and bool(found)
        )
        if message["msg_type"] != "stream" or content["name"] != "stdout":
            continue
        *whole, line = (line + content["text"]).split("\n")
        found += [now - float(stamp.split()[1]) for stamp in whole if stamp.startswith("stamp")]
    book._client.get_shell_msg(timeout=30)
    return sorted(found)


def main() -> None:
    """Measure, print a table, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=lambda path: Path(path).absolute())
    options = parser.parse_args()
    linux.prctl(36, 1)  # PR_SET_CHILD_SUBREAPER: supervisors are found below this process
    folder = Path(tempfile.mkdtemp(prefix="output-"))
    os.chdir(folder)
    book = Notebook(folder)
    book.good("%load_ext taas")
    book.good(HEADER + "1")
    rows: dict[str, dict[str, float]] = {"plain kernel": {}, "taas, one rank": {}}
    took: dict[str, list[tuple[float, int]]] = {name: [] for name in rows}
    for _ in range(options.rounds):
        for name, header in zip(rows, ("", HEADER), strict=True):
            took[name].append(lines(book, header))
    for name, header in zip(rows, ("", HEADER), strict=True):
        waits = latencies(book, header)
        rows[name] = {
            "lines_s": statistics.median(seconds for seconds, _ in took[name]),
            "messages": statistics.median(messages for _, messages in took[name]),
            "messages_a_second": statistics.median(
                messages / seconds for seconds, messages in took[name]
            ),
            "print_to_cell_ms": 1000 * statistics.median(waits),
            "print_to_cell_p95_ms": 1000 * waits[len(waits) * 95 // 100],
        }
        book.good(header + KEPT)
        rows[name]["kept_bytes_a_line"] = float(book.value("kept"))
        print(
            f"{name:20}",
            "  ".join(f"{key} {value:.2f}" for key, value in rows[name].items()),
            flush=True,
        )
    ratio = rows["taas, one rank"]["lines_s"] / rows["plain kernel"]["lines_s"]
    print(f"{LINES:,} lines take {ratio:.2f} times as long as in a plain kernel")
    book.close()
    os.chdir("/")
    shutil.rmtree(folder)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
