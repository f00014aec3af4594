"""What the GPUs of a run do, by nvidia-ml-py, if installed: asking makes no CUDA context.

A call of NVIDIA's library takes as long as its driver likes, minutes where a GPU has fallen off the
bus. So a thread asks, and the agent's loop takes what that has found last. The library is loaded
with a run's first look, and shut down with its last rank: held open, it keeps device files open,
and a driver that nobody uses awake.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from taas.engines.gpus import physical
from taas.protocol import deadlines


class GpuUse(NamedTuple):
    """What is known of the GPUs of one rank.

    Attributes:
        percent: how busy they are, on average; None: not known.
        nbytes: the memory that the rank holds of them, where the driver tells processes apart; else
            what all hold.
    """

    percent: float | None = None
    nbytes: int = 0


class GpuWatch:
    """The GPUs of the ranks of a run, looked at every two seconds until :meth:`end`.

    Args:
        gpus: those of each rank, as CUDA_VISIBLE_DEVICES names them in ``environ``.
        pids: the ranks' processes, in the same order.
    """

    def __init__(
        self, gpus: Sequence[Sequence[str]], pids: Sequence[int], environ: Mapping[str, str]
    ) -> None:
        self._gpus, self._pids, self._environ = gpus, pids, environ
        self._found: tuple[GpuUse, ...] = (GpuUse(),) * len(gpus)
        self._over = threading.Event()
        self.thread = threading.Thread(target=self._watch, name="taas-asks-gpus", daemon=True)
        self.thread.start()

    def now(self) -> tuple[GpuUse, ...]:
        """Return what was found last, for each rank."""
        return self._found

    def end(self) -> None:
        """Let the thread shut the library down, without a wait: its call may never return."""
        self._over.set()

    def _watch(self) -> None:
        try:
            import pynvml as nvml
        except ImportError:
            return
        try:
            nvml.nvmlInit()
        except nvml.NVMLError:  # no driver, or another one than the library is for
            return
        try:
            handles = [
                [_handle(nvml, gpu.name, gpu.device) for gpu in self._of(names)]
                for names in self._gpus
            ]
            while not self._over.is_set():
                self._found = tuple(
                    _use(nvml, [handle for handle in of_rank if handle is not None], pid)
                    for of_rank, pid in zip(handles, self._pids, strict=False)
                )
                self._over.wait(deadlines.USAGE_LOOK)
        finally:
            with contextlib.suppress(nvml.NVMLError):
                nvml.nvmlShutdown()

    def _of(self, names: Sequence[str]) -> Sequence[Any]:
        return physical(names, self._environ)


def _handle(nvml: Any, name: str, device: str) -> Any:
    """Return the library's handle of a GPU by bus address or whole UUID; None if unknown."""
    with contextlib.suppress(nvml.NVMLError):
        if device != name:
            return nvml.nvmlDeviceGetHandleByPciBusId(device)
        if not name.isdigit():
            return nvml.nvmlDeviceGetHandleByUUID(name)
    return None


def _use(nvml: Any, handles: Sequence[Any], pid: int) -> GpuUse:
    shares, held = [], 0
    for handle in handles:
        with contextlib.suppress(nvml.NVMLError):  # a part of one (MIG) has no utilisation
            held += _held(nvml, handle, pid)
            shares.append(nvml.nvmlDeviceGetUtilizationRates(handle).gpu)
    return GpuUse(sum(shares) / len(shares) if shares else None, held)


def _held(nvml: Any, handle: Any, pid: int) -> int:
    """Return the bytes that a process holds, if the driver knows it by this process id.

    In a container it may know it by another one; then what all processes hold is returned.
    """
    with contextlib.suppress(nvml.NVMLError):
        for process in nvml.nvmlDeviceGetComputeRunningProcesses(handle):
            if process.pid == pid and process.usedGpuMemory is not None:
                return int(process.usedGpuMemory)
    return int(nvml.nvmlDeviceGetMemoryInfo(handle).used)
