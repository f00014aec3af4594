"""What the ranks of this VM use of it, looked at from outside every two seconds: processor, memory, and GPUs.

GPUs are asked by way of nvidia-ml-py, where that is installed: a look makes no CUDA context, in no process.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import psutil

from taas.agent.rank_endings import Rank
from taas.wire import deadlines
from taas.wire.ranks import RankUse

_PAGE = os.sysconf("SC_PAGE_SIZE")
_STEP_PERCENT = 5
"""What changes by less is no news."""


class RankUsage:
    """Looks at ranks.

    Args:
        gpus: those of each rank, as CUDA_VISIBLE_DEVICES names them, by its place on this VM.
    """

    def __init__(self, gpus: Sequence[Sequence[str]]) -> None:
        self._next = time.monotonic() + deadlines.USAGE_FIRST
        self._used: dict[int, tuple[float, float]] = {}
        self._told: tuple[RankUse, ...] = ()
        self._gpus = gpus

    def wait(self) -> float:
        """Return the seconds until the next look."""
        return max(0.0, self._next - time.monotonic())

    def look(self, ranks: Iterable[Rank]) -> tuple[RankUse, ...]:
        """Return what is to be told of them; nothing where that was told before."""
        self._next = time.monotonic() + deadlines.USAGE_LOOK
        seen = tuple(self._seen(rank, place) for place, rank in enumerate(ranks))
        if seen == self._told:
            return ()
        self._told = seen
        return seen

    def _seen(self, rank: Rank, place: int) -> RankUse:
        if rank.ended is not None:
            return RankUse(rank.number, rank.ended.outcome)
        state, share, nbytes = "running" if rank.started else "starting", 0.0, 0
        with contextlib.suppress(psutil.NoSuchProcess, FileNotFoundError, ProcessLookupError):
            process = psutil.Process(rank.process.pid)
            if process.status() == psutil.STATUS_STOPPED:
                state = "stopped"
            share = self._share(rank.number, sum(process.cpu_times()[:2]))
            _, resident, shared = map(int, Path(f"/proc/{process.pid}/statm").read_bytes().split()[:3])
            nbytes = (resident - shared) * _PAGE >> 20 << 20
        busy, held = self._of_gpus(place)
        return RankUse(rank.number, state, _rounded(share), nbytes, busy, held)

    def _share(self, rank: int, used: float) -> float:
        now = time.monotonic()
        before, then = self._used.get(rank, (used, now - 1))
        self._used[rank] = used, now
        return 100 * (used - before) / max(now - then, deadlines.CLOCK_GRAIN)

    def _of_gpus(self, place: int) -> tuple[int | None, int]:
        """Return how busy the GPUs of a rank are, in percent, and the memory that is used of them, by whomever."""
        shares, held = [], 0
        nvml: Any = _nvml() if self._gpus[place] else None
        for gpu in self._gpus[place] if nvml is not None else ():
            with contextlib.suppress(nvml.NVMLError):  # a part of one (MIG) has no utilisation
                by = nvml.nvmlDeviceGetHandleByIndex if gpu.isdigit() else nvml.nvmlDeviceGetHandleByUUID
                handle = by(int(gpu) if gpu.isdigit() else gpu)
                held += nvml.nvmlDeviceGetMemoryInfo(handle).used >> 20 << 20
                shares.append(nvml.nvmlDeviceGetUtilizationRates(handle).gpu)
        return (_rounded(sum(shares) / len(shares)) if shares else None), held


def _rounded(percent: float) -> int:
    return round(percent / _STEP_PERCENT) * _STEP_PERCENT


@lru_cache(1)
def _nvml() -> Any:
    """Return NVIDIA's library, ready to be asked; None where it cannot be had."""
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    return pynvml
