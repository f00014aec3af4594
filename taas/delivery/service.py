"""Starting and ending a delivery: with an agent's processes for the supervisor, with forked ones for tests.

The order is always: coordinator, planner and data workers, and once ``Prebuffered`` came, the ranks with their
RankConfig. ``finish`` asks for the final states when the ranks have ended.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from taas.delivery.config import DeliveryConfig, Keys, Place, PlannerConfig, RankConfig, WorkerConfig
from taas.delivery.reports import Final, Places, Report, Serving
from taas.errors import DeliveryError

__all__ = ["ChildProcess", "ForkedProcess", "Service", "default_slab", "spawn_forked"]


class ChildProcess:
    """A child of this process, fed JSON lines, ended by closing its stdin."""

    def __init__(self, module: str, config: Any = None, *, reports: bool = False) -> None:
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        self.process = subprocess.Popen(
            [sys.executable, "-m", module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE if reports else None,
            env=environment,
        )
        self.unread = b""
        """What it wrote last, once it was ended."""
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
            self.unread = self.process.stdout.read()
            self.process.stdout.close()
        return self.process.returncode


class ForkedProcess:
    """A child forked from this process, which has torch imported already; ends when its pipe closes."""

    def __init__(self, main: Callable[[Any, int], None], config: Any) -> None:
        lifeline, self._writer = os.pipe()
        with warnings.catch_warnings():
            warnings.simplefilter(
                "ignore", DeprecationWarning
            )  # threads of this process: the child uses none
            self.pid = os.fork()
        if self.pid == 0:
            status = 1
            try:
                os.closerange(3, lifeline)  # above all the other children's pipes: their ends must be seen
                os.closerange(lifeline + 1, os.sysconf("SC_OPEN_MAX"))
                main(config, lifeline)
                status = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(status)
        os.close(lifeline)

    def end(self, patience: float = 5.0) -> int:
        """Close its pipe, wait, kill what does not end; return its status."""
        os.close(self._writer)
        with contextlib.suppress(ProcessLookupError, ChildProcessError):
            pidfd = os.pidfd_open(self.pid)
            if not select.select([pidfd], [], [], patience)[0]:
                os.kill(self.pid, signal.SIGKILL)
            os.close(pidfd)
        try:
            return os.waitpid(self.pid, 0)[1]
        except ChildProcessError:
            return 0


def spawn_forked(role: str, config: PlannerConfig | WorkerConfig) -> ForkedProcess:
    """Start a planner or a keeper by forking this process; for one that has torch and no threads that matter."""
    from taas.delivery import keeper, planner

    return ForkedProcess(planner.main if role == "planner" else keeper.main, config)


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
    """One run's delivery. ``reports`` are read with ``read``; children end with ``close``."""

    config: DeliveryConfig
    coordinator: ChildProcess
    endpoint: str
    slabs: str
    children: list[Any] = field(default_factory=list)

    @classmethod
    def start(
        cls,
        config: DeliveryConfig,
        payload: str,
        *,
        processes: int,
        spawn: Callable[[str, Any], Any],
        encrypt: bool = True,
        sys_path: list[str] | None = None,
        cwd: str = "",
    ) -> Service:
        """Start coordinator, planner and ``config.hosts`` data VMs with ``processes`` workers each."""
        coordinator = ChildProcess("taas.delivery.coordinator", config, reports=True)
        first = _read_report(coordinator)
        if not isinstance(first, Serving):
            coordinator.end()
            raise DeliveryError("the delivery's coordinator did not start; its messages are in the run's log")
        service = cls(config, coordinator, first.endpoint, first.slabs)
        keys, path = config.keys.for_peers(), sys_path or []
        planner = PlannerConfig(keys, first.endpoint, payload, config.ranks, path, cwd)
        service.children.append(spawn("planner", planner))
        for vm in range(config.hosts):
            worker = service.worker_config(payload, vm, processes, encrypt, path, cwd)
            service.children.append(spawn("keeper", worker))
        return service

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

    def read(self) -> Report | None:
        """Return the next report, None when the coordinator has ended. Blocks."""
        return _read_report(self.coordinator)

    def finish(self) -> Iterator[Report]:
        """Ask for the final states; yield the remaining reports, Final last."""
        self.coordinator.send(b'{"type": "finish"}')
        while (report := self.read()) is not None:
            yield report
            if isinstance(report, Final):
                return

    def close(self) -> dict[str, Place]:
        """End everything; safe to call at any time. Returns where each loader that was begun would go on."""
        self.coordinator.end()
        for child in self.children:
            child.end()
        last = [_decode_report(line) for line in self.coordinator.unread.splitlines()]
        return {name: at for said in last if isinstance(said, Places) for name, at in said.places.items()}


def _read_report(coordinator: ChildProcess) -> Report | None:
    assert coordinator.process.stdout is not None
    line = coordinator.process.stdout.readline()
    return _decode_report(line) if line else None


_decode_report: Callable[[bytes], Report] = msgspec.json.Decoder(Report).decode
