"""One run's delivery as the supervisor sees it: the coordinator's process, and what the others are told.

The order is always: coordinator, planner and data workers, and once ``Prebuffered`` came, the ranks with their
RankConfig.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from taas.delivery.config import DeliveryConfig, Keys, Place, RankConfig, WorkerConfig
from taas.delivery.reports import Report

__all__ = ["ChildProcess", "Service", "default_slab"]


_AT_ONCE = 1 << 16
"""Bytes that are read at once: as many as a pipe holds."""


class ChildProcess:
    """A child of this process, fed JSON lines, ended by closing its stdin."""

    def __init__(self, module: str, config: Any = None, *, reports: bool = False) -> None:
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE if reports else None,
            env=environment,
        )
        self.unread = b""
        """What it wrote that nobody has read: while it lives, the part of a line that is there."""
        if config is not None:
            self.send(msgspec.json.encode(config))

    @property
    def pid(self) -> int:
        """Its process id."""
        return self.process.pid

    def send(self, line: bytes) -> None:
        """Write one line to its stdin; a child that is gone reads nothing."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(line + b"\n")
            self.process.stdin.flush()

    def read_lines(self) -> list[bytes] | None:
        """Return all whole lines that are there, None at its end. Waits where it has written nothing."""
        assert self.process.stdout is not None
        data = os.read(self.process.stdout.fileno(), _AT_ONCE)
        *lines, self.unread = (self.unread + data).split(b"\n")
        return lines if data else None

    def end(self, patience: float = 5.0) -> int:
        """Close its stdin, wait, kill what does not end; return its exit code."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        try:
            self.process.wait(patience)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(patience)
        if self.process.stdout is not None:
            self.unread += self.process.stdout.read()
            self.process.stdout.close()
        return self.process.returncode


def default_slab(ranks: int) -> int:
    """Return the bytes of elements that may be under way per rank: 256 MiB, less where memory is short.

    The limit is an eighth of what this cgroup (or machine) has available, over all ranks.
    """
    available = int(os.sysconf("SC_AVPHYS_PAGES")) * int(os.sysconf("SC_PAGE_SIZE"))
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            available = int(line.split()[1]) * 1024
    for limit, used in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ):
        with contextlib.suppress(OSError, ValueError):
            available = min(available, int(Path(limit).read_text()) - int(Path(used).read_text()))
    share = max(available, 0) // 8 // ranks
    return max(4 << 20, min(256 << 20, share) // (1 << 20) * (1 << 20))


@dataclass
class Service:
    """One run's delivery: its coordinator, and what planner, data workers and ranks are told."""

    config: DeliveryConfig
    coordinator: ChildProcess
    endpoint: str
    slabs: str

    def worker_config(
        self, payload: str, vm: int, processes: int, encrypt: bool, sys_path: list[str], cwd: str
    ) -> WorkerConfig:
        """Return what the data VM number ``vm`` is told; a lost one may be replaced under a new number."""
        keys = self.config.keys.for_peers()
        hosts, ranks = max(self.config.hosts, vm + 1), self.config.ranks
        return WorkerConfig(
            keys, self.endpoint, payload, vm, hosts, processes, ranks, self.slabs, encrypt, sys_path, cwd
        )

    def rank_config(
        self,
        rank: int,
        host: str = "127.0.0.1",
        *,
        encrypt: bool = True,
        places: dict[str, Place] | None = None,
    ) -> RankConfig:
        """Return what a rank is told; ``places`` are where an earlier start of the run was."""
        config = self.config
        keys: Keys = config.keys.for_peers()
        return RankConfig(
            keys,
            self.endpoint,
            rank,
            config.ranks,
            self.slabs,
            host,
            encrypt,
            config.units,
            config.uneven,
            places or {},
        )

    def read(self) -> list[Report] | None:
        """Return all reports that are there, None when the coordinator has ended. Waits where it has said nothing."""
        lines = self.coordinator.read_lines()
        return None if lines is None else [_decode_report(line) for line in lines]

    def close(self) -> list[Report]:
        """End the coordinator; safe to call at any time. Returns what it said last, ``Places`` among it."""
        self.coordinator.end()
        *lines, _ = self.coordinator.unread.split(b"\n")
        return [_decode_report(line) for line in lines]


_decode_report: Callable[[bytes], Report] = msgspec.json.Decoder(Report).decode
