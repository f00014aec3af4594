"""What the write rule costs: ``python benchmarks/storage.py [--json FILE] [--quick]``.

* guard: from the first instruction of ``guard`` to its return, one freshly forked rank after
  another, with torch loaded and the forkserver's survey made, for each mechanism this machine
  gives;
* rank 0: small files and one large save, with and without the guard, in turns (paired), so that
  what else the machine does falls on both; the figure is the median of the pairs' ratios;
* other ranks: one call of each kind, plain and behind the wall.
"""

# The calls of os are what is measured.
# ruff: noqa: PTH116

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from taas import rank_storage
from taas.project.wall import diversion, walls


def in_fork(body: Callable[[], Any]) -> Any:
    """What ``body`` returns in a forked process."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.write(write, json.dumps(body()).encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        said = json.loads(pipe.read())
    os.waitpid(pid, 0)
    return said


def policy(base: Path, rank: int) -> dict[str, Any]:
    project, scratch = base / "project", rank_storage.scratch_of(base / "scratch", rank)
    project.mkdir(exist_ok=True)
    scratch.mkdir(parents=True, exist_ok=True)
    return {"project": str(project), "rank": rank, "scratch": scratch}


def guard_seconds(base: Path, mechanism: str, repeats: int) -> dict[str, float]:
    """Median and slowest of guarding one rank, in milliseconds; processor time beside it."""

    def body() -> tuple[float, float]:
        wall, processor = time.perf_counter(), time.process_time()
        rank_storage.guard(**policy(base, 1), mechanisms=(mechanism,))
        return (time.perf_counter() - wall) * 1e3, (time.process_time() - processor) * 1e3

    found = [in_fork(body) for _ in range(repeats)]
    return {
        "median_ms": statistics.median(wall for wall, _ in found),
        "p95_ms": sorted(wall for wall, _ in found)[int(0.95 * (repeats - 1))],
        "median_cpu_ms": statistics.median(processor for _, processor in found),
    }


def timed(call: Callable[[], None]) -> tuple[float, float]:
    """Seconds and processor seconds of a call."""
    wall, processor = time.perf_counter(), time.process_time()
    call()
    return time.perf_counter() - wall, time.process_time() - processor


def small_files(base: Path, count: int) -> tuple[float, float]:
    folder = base / "project" / "small"
    folder.mkdir()

    def write() -> None:
        for number in range(count):
            (folder / str(number)).write_text("x")

    found = timed(write)
    shutil.rmtree(folder)
    return found


def large_save(base: Path, tensor: torch.Tensor) -> tuple[float, float]:
    path = base / "project" / "large.pt"
    found = timed(lambda: torch.save(tensor, path))
    path.unlink()
    return found


def rank_0_ratio(
    base: Path, work: Callable[[], tuple[float, float]], pairs: int
) -> dict[str, float]:
    """Guarded over unguarded time of rank 0.

    Of the clock, and of the processor, which neighbours disturb less.
    """

    def guarded() -> tuple[float, float]:
        rank_storage.guard(**policy(base, 0))
        return work()

    policy(base, 0)
    found = []
    for number in range(pairs):
        order = (work, guarded) if number % 2 else (guarded, work)
        times = {one: in_fork(one) for one in order}
        found.append(
            [with_ / without for with_, without in zip(times[guarded], times[work], strict=True)]
        )
    return {
        "wall_ratio": statistics.median(wall for wall, _ in found),
        "cpu_ratio": statistics.median(processor for _, processor in found),
    }


def call_microseconds(base: Path, guarded: bool) -> dict[str, float]:
    """One call of each kind in a rank, in microseconds; the rank has diverted a file before."""
    project = base / "project"
    (project / "live").write_text("x")
    outside = base / "outside"
    outside.write_text("x")

    def each(call: Callable[[], Any], repeats: int = 2000) -> float:
        start = time.perf_counter()
        for _ in range(repeats):
            call()
        return (time.perf_counter() - start) / repeats * 1e6

    def body() -> dict[str, float]:
        if guarded:
            rank_storage.guard(**policy(base, 1))
        found = {"stat, nothing diverted yet": each(lambda: os.stat(project / "live"))}
        (project / "mine").write_text("x")
        found["stat in the project"] = each(lambda: os.stat(project / "live"))
        found["stat outside"] = each(lambda: os.stat(outside))
        found["open and read in the project"] = each(lambda: (project / "live").read_bytes())
        found["open and read outside"] = each(lambda: outside.read_bytes())
        found["write in the project"] = each(lambda: (project / "mine").write_bytes(b"x"))
        return found

    return in_fork(body)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path)
    parser.add_argument("--quick", action="store_true", help="fewer repeats, a 100 MB save")
    options = parser.parse_args()
    torch.set_num_threads(1)
    diversion.survey()
    pairs, repeats, floats = (5, 20, 25_000_000) if options.quick else (15, 100, 250_000_000)
    memory = Path("/dev/shm")  # no disk of a busy machine in the figures
    base = Path(tempfile.mkdtemp(prefix="taas-bench-", dir=memory if memory.is_dir() else None))
    try:
        result: dict[str, Any] = {"machine": {"cores": os.cpu_count(), "load": os.getloadavg()[0]}}
        result["doctor"] = walls.verdicts()
        result["guard"] = {}
        for mechanism in rank_storage.MECHANISMS:
            if walls.verdicts((mechanism,))[0].startswith(f"write rule: {mechanism}"):
                result["guard"][mechanism] = guard_seconds(base, mechanism, repeats)
        tensor = torch.zeros(floats)
        result["rank 0, 10,000 small files"] = rank_0_ratio(
            base, lambda: small_files(base, 10_000), pairs
        )
        result[f"rank 0, {floats * 4 / 1e9:g} GB save"] = rank_0_ratio(
            base, lambda: large_save(base, tensor), pairs
        )
        plain, behind = call_microseconds(base, False), call_microseconds(base, True)
        result["calls_us"] = {
            name: {"plain": plain[name], "behind the wall": behind[name]} for name in plain
        }
    finally:
        shutil.rmtree(base)
    for name, value in result.items():
        print(f"{name}:")
        rows = value.items() if isinstance(value, dict) else enumerate(value)
        for key, row in rows:
            shown = {k: round(v, 4) for k, v in row.items()} if isinstance(row, dict) else row
            print(f"  {key}: {shown}")
    if options.json:
        options.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
