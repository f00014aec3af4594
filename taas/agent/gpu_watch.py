"""Monitor the GPUs of a run by nvidia-ml-py, if it is installed; this makes no CUDA context.

A call to NVIDIA's library takes as long as the driver likes: minutes, if a GPU has fallen off the
bus. Therefore a separate thread makes the calls, and the agent's loop reads the latest results. The
library is loaded at the first look at a run's GPUs, and is shut down with the run's last rank:
while it is open, it keeps device files open, and keeps an unused driver awake.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from taas.engines.gpus import physical
from taas.protocol import deadlines


class GpuUse(NamedTuple):
    """The utilisation of one rank's GPUs.

    Attributes:
        percent: how busy the GPUs are, on average; None if unknown.
        nbytes: the GPU memory of the rank, if the driver can attribute memory to processes;
            otherwise the GPU memory of all processes.
    """

    percent: float | None = None
    nbytes: int = 0


class GpuWatch:
    """The GPUs of the ranks of a run, queried every two seconds until :meth:`end`.

    Args:
        gpus: the GPUs of each rank, as named by CUDA_VISIBLE_DEVICES in ``environ``.
        pids: the ranks' process ids, in the same order.
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
        """Return the latest result for each rank."""
        return self._found

    def end(self) -> None:
        """Let the thread shut the library down, without waiting: its call may never return."""
        self._over.set()

    def _watch(self) -> None:
        try:
            import pynvml as nvml
        except ImportError:
            return
        try:
            nvml.nvmlInit()
        except nvml.NVMLError:  # there is no driver, or its version does not fit the library
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
    """Return the library's handle of a GPU, by bus address or complete UUID; None if unknown."""
    with contextlib.suppress(nvml.NVMLError):
        if device != name:
            return nvml.nvmlDeviceGetHandleByPciBusId(device)
        if not name.isdigit():
            return nvml.nvmlDeviceGetHandleByUUID(name)
    return None


def _use(nvml: Any, handles: Sequence[Any], pid: int) -> GpuUse:
    shares, held = [], 0
    for handle in handles:
        with contextlib.suppress(nvml.NVMLError):  # a part of a GPU (MIG) has no utilisation
            held += _held(nvml, handle, pid)
            shares.append(nvml.nvmlDeviceGetUtilizationRates(handle).gpu)
    return GpuUse(sum(shares) / len(shares) if shares else None, held)


def _held(nvml: Any, handle: Any, pid: int) -> int:
    """Return the bytes that a process holds, if the driver knows the process by this id.

    In a container the driver may know it by another id; then the memory of all processes is
    returned.
    """
    with contextlib.suppress(nvml.NVMLError):
        for process in nvml.nvmlDeviceGetComputeRunningProcesses(handle):
            if process.pid == pid and process.usedGpuMemory is not None:
                return int(process.usedGpuMemory)
    return int(nvml.nvmlDeviceGetMemoryInfo(handle).used)
