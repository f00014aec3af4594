"""Figures of the delivery, side by side with torch's DataLoader (and a raw socket) in one run.

    python benchmarks/delivery.py [CASE …] [--rounds N] [--json FILE]

Each throughput row is the median of paired rounds: DataLoader, then taas, the same batches, every
byte read, sums compared. CPU seconds count every process that works for a side. Rounds begin with
warm-up batches. The figures of a busy machine say little: the load before and after stands below
the table.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import json
import math
import os
import platform
import random
import socket
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from torch.utils.data import DataLoader, Dataset

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
from delivery_peers import HOW, in_child, ray_first_batches, spdl_loader, version
from delivery_run import DeliveryRun

from taas.delivery.transport import DataReceiver, connect_data, new_context
from taas.protocol.delivery_messages import ProgressReport
from taas.protocol.delivery_orders import DeliveryConfig, new_keys

WORKERS = 2
WARM = 2 * WORKERS + 4
Row = dict[str, Any]


class Slices(Dataset):
    """Cheap samples: views of one tensor; ``heavy`` adds passes over each sample."""

    def __init__(self, floats: int, heavy: int = 0, numpy: bool = False) -> None:
        self.floats, self.heavy, self.numpy = floats, heavy, numpy
        self.data = torch.arange(4 << 20, dtype=torch.float32) % 977
        self.range = len(self.data) - floats

    def __len__(self) -> int:
        return 10**9

    def __getitem__(self, index: int) -> Any:
        at = index * 2654435761 % self.range
        sample = self.data[at : at + self.floats]
        for _ in range(self.heavy):
            sample = (sample * 1.01 + 0.5).sqrt()
        return sample.numpy() if self.numpy else sample


class Work(Dataset):
    """Elements of so many busy (or sleeping) seconds each; ``seconds`` maps an index to them."""

    def __init__(self, seconds: Callable[[int], float], *, busy: bool) -> None:
        self.seconds, self.busy = seconds, busy

    def __len__(self) -> int:
        return 10**9

    def __getitem__(self, index: int) -> Any:
        until = time.thread_time() + self.seconds(index)
        if self.busy:
            while time.thread_time() < until:
                pass
        else:
            time.sleep(self.seconds(index))
        return torch.full((256,), float(index))


class Many(Dataset):
    """114 small tensors a sample, made beforehand."""

    def __init__(self) -> None:
        self.sample = [torch.full((16,), float(i)) for i in range(114)]

    def __len__(self) -> int:
        return 10**9

    def __getitem__(self, index: int) -> Any:
        return self.sample


class Ranges:
    """A batch sampler of consecutive indices."""

    def __init__(self, size: int, batches: int) -> None:
        self.size, self.batches = size, batches

    def __iter__(self) -> Iterator[list[int]]:
        for at in range(self.batches):
            yield list(range(at * self.size, (at + 1) * self.size))

    def __len__(self) -> int:
        return self.batches


def total(element: Any) -> float:
    if isinstance(element, torch.Tensor):
        return element.sum().item()
    if isinstance(element, np.ndarray):
        return torch.from_numpy(element).sum().item()
    return sum(map(total, element)) if isinstance(element, list | tuple) else 0.0


def cpu_seconds(pids: list[int]) -> float:
    seconds = 0.0
    for pid in pids:
        try:
            times = psutil.Process(pid).cpu_times()
        except psutil.NoSuchProcess:
            continue
        seconds += times.user + times.system
    return seconds


def timed(loader: Any, pids: Callable[[], list[int]]) -> tuple[float, float, float]:
    """Return wall seconds and CPU seconds after the warm-up, and the sum of all that was read."""
    checksum, start, used = 0.0, 0.0, 0.0
    for number, element in enumerate(loader, 1):
        checksum += total(element)
        if number == WARM:
            used, start = cpu_seconds(pids()), time.perf_counter()
    return time.perf_counter() - start, cpu_seconds(pids()) - used, checksum


def processes_of(run: DeliveryRun) -> list[int]:
    pids = [run.coordinator.process.pid, *(child.pid for child in run.children)]
    for child in run.children[1:]:
        pids += [worker.pid for worker in psutil.Process(child.pid).children()]
    return pids


def torch_loader(arguments: dict[str, Any], workers: int) -> tuple[Any, Callable[[], list[int]]]:
    """Return a DataLoader, and what tells the processes that work for it."""
    loader: Any = DataLoader(**arguments, num_workers=workers, persistent_workers=True)
    return loader, lambda: [os.getpid(), *(worker.pid for worker in loader._iterator._workers)]


def paired(
    make: Callable[[], dict[str, Any]],
    rounds: int,
    peer: Callable[..., Any] = torch_loader,
    **config: Any,
) -> list[tuple[Any, Any]]:
    """Return (the peer's, ours) for each round. ``make`` gives a DataLoader's arguments."""
    with DeliveryRun(
        {"d": DataLoader(**make())}, processes=WORKERS, slab=256 << 20, **config
    ) as run:
        pids = processes_of(run)

        def body(_rank: int, loaders: dict[str, Any]) -> Any:
            torch.set_num_threads(1)
            other, workers = peer(make(), WORKERS)
            outcomes = []
            for _ in range(rounds):
                theirs = timed(other, workers)
                ours = timed(loaders["d"], lambda: [os.getpid(), *pids])
                assert theirs[2] == ours[2], "the two sides read different numbers"
                outcomes.append((theirs, ours))
            return outcomes

        return run.ranks(body, timeout=900)[0]


def throughput(
    name: str,
    goal: float,
    make: Callable[[], dict[str, Any]],
    nbytes: int,
    rounds: int,
    **config: Any,
) -> Row:
    outcomes = paired(make, rounds, **config)
    batches = make()["batch_sampler" if "batch_sampler" in make() else "sampler"].batches - WARM
    gigabytes = batches * nbytes / 1e9
    middle = statistics.median
    return {
        "case": name,
        "taas": (
            f"{middle(gigabytes / o[0] for _, o in outcomes):.2f} GB/s,"
            f" {middle(o[0] / batches for _, o in outcomes) * 1e3:.3f} ms"
        ),
        "peer": (
            f"{middle(gigabytes / t[0] for t, _ in outcomes):.2f} GB/s,"
            f" {middle(t[0] / batches for t, _ in outcomes) * 1e3:.3f} ms"
        ),
        "ratio": middle(t[0] / o[0] for t, o in outcomes),
        "cpu ratio": middle(o[1] / t[1] if t[1] else 0.0 for t, o in outcomes),
        "goal": goal,
    }


def batches(floats: int, size: int, count: int, heavy: int = 0) -> Callable[[], dict[str, Any]]:
    dataset = Slices(floats, heavy)
    return lambda: {"dataset": dataset, "batch_sampler": Ranges(size, count + WARM)}


def same_host(rounds: int) -> list[Row]:
    shapes = {
        "1 KiB": (256, 1, 2000),
        "64 KiB": (1024, 16, 2000),
        "1 MiB": (16384, 16, 600),
        "8 MiB": (65536, 32, 120),
    }
    return [
        throughput(
            f"same host, {name}", 4.0, batches(floats, size, count), 4 * floats * size, rounds
        )
        for name, (floats, size, count) in shapes.items()
    ]


def heavier(rounds: int) -> list[Row]:
    return [
        throughput(
            "same host, 1 MiB, heavier samples", 1.2, batches(16384, 16, 150, 24), 1 << 20, rounds
        )
    ]


def own_collate(samples: list[Any]) -> Any:
    return torch.stack(samples)


def spdl(rounds: int) -> list[Row]:
    """Same host and arrays beside SPDL's processes.

    CPU seconds are not compared, for it has processes a round.
    """
    if not version("spdl-core"):
        return [absent("SPDL")]
    rows = [
        throughput(
            "same host, 8 MiB, beside SPDL",
            1.0,
            batches(65536, 32, 120),
            8 << 20,
            rounds,
            peer=spdl_loader,
        )
    ]
    rows += [
        throughput(f"{name}, beside SPDL", 1.0, make, nbytes, rounds, peer=spdl_loader)
        for name, _, make, nbytes in array_cases()
    ]
    for row in rows:
        del row["cpu ratio"]
    return rows


def absent(peer: str) -> Row:
    return {
        "case": f"beside {peer}",
        "taas": "",
        "peer": f"not installed: {HOW}",
        "ratio": float("nan"),
        "goal": "",
        "met": None,
    }


def collate(rounds: int) -> list[Row]:
    make = batches(65536, 16, 120)
    return [
        throughput(
            "own collate, 4 MiB",
            3.0,
            lambda: {**make(), "collate_fn": own_collate},
            4 << 20,
            rounds,
        )
    ]


def keep(sample: Any) -> Any:
    return sample


class Counting(Ranges):
    """The same without batches."""

    def __iter__(self) -> Iterator[Any]:
        yield from range(self.batches)


def array_cases() -> list[tuple[str, float, Callable[[], dict[str, Any]], int]]:
    """Name, goal, a DataLoader's arguments, and bytes of an element."""
    cases: list[tuple[str, float, Callable[[], dict[str, Any]], int]] = []
    for name, floats, count, goal in (("8 MiB", 2 << 20, 100, 6.0), ("1 MiB", 1 << 18, 500, 2.5)):
        dataset = Slices(floats, numpy=True)

        def make(d=dataset, c=count):
            return {
                "dataset": d,
                "sampler": Counting(1, c + WARM),
                "batch_size": None,
                "collate_fn": keep,
            }

        cases.append((f"numpy without collate, {name}", goal, make, 4 * floats))
    return cases


def arrays(rounds: int) -> list[Row]:
    return [
        throughput(name, goal, make, nbytes, rounds) for name, goal, make, nbytes in array_cases()
    ]


def first_sample(samples: list[Any]) -> Any:
    return samples[0]


def many_tensors(rounds: int) -> list[Row]:
    def make():
        return {
            "dataset": Many(),
            "batch_sampler": Ranges(1, 150 + WARM),
            "collate_fn": first_sample,
        }

    outcomes = paired(make, rounds)
    ours = statistics.median(o[0] for _, o in outcomes) / 150 / 114 * 1e3
    theirs = statistics.median(t[0] for t, _ in outcomes) / 150 / 114 * 1e3
    return [
        {
            "case": "114 small tensors",
            "taas": f"{ours:.4f} ms a tensor",
            "peer": f"{theirs:.4f} ms",
            "ratio": theirs / ours,
            "goal": "≤ 0.02 ms",
            "met": ours <= 0.02,
        }
    ]


def tail(index: int) -> float:
    return 0.1 if random.Random(index).random() < 0.05 else 0.003


def lognormal(index: int) -> float:
    return 0.02 * random.Random(index).lognormvariate(0, 0.5)


def decode_work(rounds: int) -> list[Row]:
    rows = []
    for name, seconds, goal, count in (
        ("uniform", lambda i: 0.005, 0.97, 150),
        ("heavy-tailed", tail, 1.3, 200),
    ):

        def make(s=seconds, c=count):
            return {
                "dataset": Work(s, busy=True),
                "batch_sampler": Ranges(1, c + WARM),
            }

        rows.append(throughput(f"{name} decode work", goal, make, 1024, rounds))
    return rows


def slow_storage(_rounds: int) -> list[Row]:
    """Return the seconds of reading in a second, whichever reads fall into the window."""
    first, last = 20, 170

    def rate(vms: int) -> float:
        read = sum(lognormal(index) for index in range(first * vms, last * vms))
        loader = DataLoader(Work(lognormal, busy=False), batch_sampler=Ranges(1, (last + 10) * vms))
        with DeliveryRun({"d": loader}, vms=vms, processes=1, prebuffer=2) as run:

            def body(_rank: int, loaders: dict[str, Any]) -> float:
                start = 0.0
                for number, _ in enumerate(loaders["d"], 1):
                    if number == first * vms:
                        start = time.perf_counter()
                    if number == last * vms:
                        return read / (time.perf_counter() - start)
                raise AssertionError("fewer elements than planned")

            return run.ranks(body, timeout=300)[0]

    one, eight = rate(1), rate(8)
    return [
        {
            "case": "slow storage, M = 1 → 8",
            "taas": f"{one:.2f} → {eight:.2f} s of reading/s",
            "peer": "linear",
            "ratio": eight / one / 8,
            "goal": 0.95,
        }
    ]


def raw_rate(gigabytes: float) -> float:
    """GB/s of one plain loopback socket, 8 MiB writes."""
    server = socket.create_server(("127.0.0.1", 0))
    block = bytes(8 << 20)
    count = int(gigabytes * 1e9 / len(block))

    def send() -> None:
        with socket.create_connection(server.getsockname()) as client:
            for _ in range(count):
                client.sendall(block)

    sender = os.fork()
    if sender == 0:
        send()
        os._exit(0)
    accepted, _ = server.accept()
    buffer = memoryview(bytearray(8 << 20))
    start, got = time.perf_counter(), 0
    while n := accepted.recv_into(buffer):
        got += n
    seconds = time.perf_counter() - start
    os.waitpid(sender, 0)
    accepted.close()
    server.close()
    return got / seconds / 1e9


def data_path_rate(gigabytes: float, *, encrypt: bool) -> float:
    """GB/s of the data path's own sockets over loopback TCP, one worker process, 8 MiB elements."""
    config = DeliveryConfig(new_keys(), 1, 0, encrypt=encrypt)
    count = int(gigabytes * 1e9 / (8 << 20))
    context = new_context()
    receiver = DataReceiver(context, config, 0, "127.0.0.1")
    sender = os.fork()
    if sender == 0:
        own = new_context()
        data = connect_data(own, receiver.address, receiver.key, config.keys)
        data.setsockopt(17, -1)  # ZMQ_LINGER: everything leaves
        block = np.ones(8 << 20, np.uint8)
        for _ in range(count):
            data.send_multipart([b"header", b"stream", block.data], copy=False)
        data.close()
        own.term()
        os._exit(0)
    if receiver.gate is not None:
        receiver.gate.socket.poll()
        receiver.gate.answer()
    receiver.socket.recv_multipart(copy=False)
    start = time.perf_counter()
    for _ in range(count - 1):
        receiver.socket.recv_multipart(copy=False)
    seconds = time.perf_counter() - start
    os.waitpid(sender, 0)
    context.destroy()
    return (count - 1) * (8 << 20) / seconds / 1e9


def tcp(rounds: int) -> list[Row]:
    shares, raws, plains, curves = [], [], [], []
    for _ in range(rounds):
        raws.append(raw_rate(1.0))
        plains.append(data_path_rate(1.0, encrypt=False))
        curves.append(data_path_rate(0.5, encrypt=True))
        shares.append(plains[-1] / raws[-1])
    middle = statistics.median
    return [
        {
            "case": "TCP loopback, plain",
            "taas": f"{middle(plains):.2f} GB/s",
            "peer": f"raw socket {middle(raws):.2f} GB/s",
            "ratio": middle(shares),
            "goal": 0.75,
        },
        {
            "case": "TCP loopback, CURVE",
            "taas": f"{middle(curves):.2f} GB/s",
            "peer": "",
            "ratio": middle(curves),
            "goal": 0.5,
        },
    ]


def first_element(rounds: int) -> list[Row]:
    seconds = []
    for _ in range(rounds):
        loader = DataLoader(Slices(16384), batch_sampler=Ranges(16, 50))
        with DeliveryRun({"d": loader}, processes=WORKERS) as run:

            def body(_rank: int, loaders: dict[str, Any]) -> float:
                start = time.perf_counter()
                next(iter(loaders["d"]))
                return time.perf_counter() - start

            seconds += run.ranks(body)
    value = statistics.median(seconds) * 1e3
    theirs = statistics.median(in_child(first_of_torch) for _ in range(rounds)) * 1e3
    return [
        {
            "case": "first element after pre-buffering",
            "taas": f"{value:.1f} ms",
            "peer": f"DataLoader {theirs:.0f} ms",
            "ratio": 50 / value,
            "goal": "< 50 ms",
            "met": value < 50,
        }
    ]


def first_of_torch() -> float:
    loader = DataLoader(Slices(16384), batch_sampler=Ranges(16, 50), num_workers=WORKERS)
    start = time.perf_counter()
    next(iter(loader))
    return time.perf_counter() - start


def ray(rounds: int) -> list[Row]:
    if not version("ray"):
        return [absent("Ray Data")]
    cold, *warm = in_child(lambda: ray_first_batches(rounds + 1, 16384, 16, WORKERS))
    theirs = f"{cold:.2f} s, then {statistics.median(warm):.2f} s"
    return [
        {
            "case": "first element of Ray Data",
            "taas": "",
            "peer": theirs,
            "ratio": float("nan"),
            "goal": "",
            "met": None,
        }
    ]


def killed(_rounds: int) -> list[Row]:
    work = 0.02
    length = 400

    def body(_rank: int, loaders: dict[str, Any]) -> Any:
        digest, gaps, last = hashlib.sha256(), [], time.perf_counter()
        for element in loaders["d"]:
            digest.update(element.numpy().tobytes())
            now = time.perf_counter()
            gaps.append(now - last)
            last = now
        return digest.hexdigest(), len(gaps), max(gaps[10:])

    def once(kill: bool) -> Any:
        loader = DataLoader(Work(lambda i: work, busy=False), batch_sampler=Ranges(1, length))
        with DeliveryRun({"d": loader}, processes=3) as run:
            ranks = run.start_ranks(body)
            if kill:
                while True:
                    report = run.wait_for(ProgressReport)
                    if report.delivered.delivered > length // 2:
                        break
                psutil.Process(run.children[1].pid).children()[0].kill()
            return run.results(ranks)[0]

    calm, disturbed = once(False), once(True)
    same = calm[:2] == disturbed[:2] == (calm[0], length)
    stall = disturbed[2] - work
    gaps = f"longest gap {disturbed[2] * 1e3:.0f} ms (calm {calm[2] * 1e3:.0f})"
    return [
        {
            "case": "a worker SIGKILLed half-way",
            "taas": f"{'bit-identical' if same else 'DIFFERENT'}, {gaps}",
            "peer": "DataLoader raises",
            "ratio": 0.3 / max(stall, 1e-9),
            "goal": "≤ 0.3 s",
            "met": same and stall <= 0.3,
        }
    ]


def planner(_rounds: int) -> list[Row]:
    """An endless loader with 20,480,000 units.

    CPU time of an element, and of the longest step of the loop.
    """
    from taas.delivery.ledger import Ledger
    from taas.delivery.plan import plan_number
    from taas.protocol.delivery_messages import (
        Begin,
        Draw,
        Hello,
        LoaderFacts,
        Peer,
        Planned,
        Result,
    )

    ledger = Ledger(DeliveryConfig(new_keys(), 2, 1 << 28, "here", units={"*": 20_480_000}))
    ledger.open_plans(Hello(loaders=(LoaderFacts("d", None),)))
    for rank in (0, 1):
        ledger.add_rank(rank, Hello())
        ledger.plans.begin(rank, Begin(0, 0, None))
    for worker in range(8):
        ledger.add_worker(Peer("worker", 0, worker), True)
    plan, made, consumed, longest = plan_number(0, 0, None), 0, [0, 0], 0.0
    gc.collect()
    gc.freeze()  # torch's objects are here, and not in the coordinator
    start, now = time.process_time(), 0.0
    while made < 400_000:
        before = time.process_time()
        now += 0.001
        ledger.pump()
        outbox = list(ledger.outbox)
        ledger.outbox.clear()
        for peer, message in outbox:
            if isinstance(message, Draw):
                ledger.plans.take_planned(Planned(plan, 7, [b"x" * 8] * message.count, False))
            elif isinstance(message, list):
                ledger.take_results(peer, [Result(t.number, 4096, 0.0002) for t in message])
                for ticket in message:
                    consumed[ticket.rank] += 1
                    made += 1
                for rank in (0, 1):
                    below = max(0, consumed[rank] - 40)
                    ledger.plans.consume(rank, plan, below, below)
                ledger.release([ledger.works[t.number] for t in message])
        longest = max(longest, time.process_time() - before)
    cost = (time.process_time() - start) / made * 1e6
    return [
        {
            "case": "planner and ledger, 400,000 of 20,480,000 units",
            "taas": f"{cost:.1f} µs an element, longest step {longest * 1e3:.1f} ms",
            "peer": "",
            "ratio": 20 / cost,
            "goal": "≤ 20 µs, ≤ 50 ms",
            "met": cost <= 20 and longest <= 0.05,
        }
    ]


def stall(_rounds: int) -> list[Row]:
    """Stalled is waiting for an element that is not there.

    ``next()`` as a whole, after a sleep, is another figure.
    """
    steps, step = 100, 0.02
    loader = DataLoader(Slices(16384), batch_sampler=Ranges(16, 2 * steps))

    def in_next(iterator: Iterator[Any]) -> float:
        seconds = 0.0
        for _ in range(steps):
            before = time.perf_counter()
            next(iterator)
            seconds += time.perf_counter() - before
            time.sleep(step)
        return seconds / (seconds + steps * step)

    def body(_rank: int, loaders: dict[str, Any]) -> tuple[float, float, float]:
        from taas.delivery import loader as side

        ours = in_next(iter(loaders["d"]))
        assert side._connection is not None
        waited = side._connection.waited
        peer = DataLoader(Slices(16384), batch_sampler=Ranges(16, steps + WARM), num_workers=1)
        return waited / (waited + steps * step), ours, in_next(iter(peer))

    with DeliveryRun({"d": loader}, ranks=2, processes=WORKERS) as run:
        share, ours, theirs = map(max, zip(*run.ranks(body), strict=True))
    return [
        {
            "case": "2 ranks with a sleeping step",
            "taas": f"{share * 100:.2f} % stalled, {ours * 100:.1f} % in next()",
            "peer": f"{theirs * 100:.1f} % in next()",
            "ratio": 0.02 / share if share else math.inf,
            "goal": "< 2 %",
            "met": share < 0.02,
        }
    ]


CASES = {
    "same_host": same_host,
    "heavier": heavier,
    "collate": collate,
    "arrays": arrays,
    "many": many_tensors,
    "tcp": tcp,
    "decode": decode_work,
    "storage": slow_storage,
    "first": first_element,
    "killed": killed,
    "planner": planner,
    "stall": stall,
    "spdl": spdl,
    "ray": ray,
}


MET = {True: "yes", False: "no", None: ""}


def table(rows: list[Row]) -> str:
    lines = [
        "| case | taas | DataLoader or peer | ratio | CPU ratio | goal | met |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        met = row.get("met", isinstance(row["goal"], float) and row["ratio"] >= row["goal"])
        cpu = f"{row['cpu ratio']:.2f}" if "cpu ratio" in row else ""
        ratio = "" if math.isnan(row["ratio"]) else f"{row['ratio']:.2f}"
        goal = f"≥ {row['goal']}" if isinstance(row["goal"], float) else row["goal"]
        lines.append(
            f"| {row['case']} | {row['taas']} | {row['peer']} | {ratio} | {cpu} | {goal} |"
            f" {MET[met]} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "cases", nargs="*", default=list(CASES), metavar="CASE", help=", ".join(CASES)
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    before, rows = os.getloadavg(), []
    for name in options.cases:
        new = CASES[name](options.rounds)
        rows += new
        print("\n".join(table(new).splitlines()[2:]), flush=True)
    facts = {
        "torch": torch.__version__,
        "spdl": version("spdl-core"),
        "ray": version("ray"),
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "workers": WORKERS,
        "rounds": options.rounds,
        "load before": before,
        "load after": os.getloadavg(),
    }
    print("\n" + table(rows) + "\n\n" + json.dumps(facts))
    if options.json:
        options.json.write_text(json.dumps({"facts": facts, "rows": rows}, indent=1, default=str))


if __name__ == "__main__":
    assert threading.active_count() == 1, "processes are forked from here"
    main()
