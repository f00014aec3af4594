"""A cell for GPUs runs where there are none: its ranks are CPU processes that say they have GPUs.

Covered: process groups (``nccl`` → ``gloo``), devices in every form (``"cuda"``, ``torch.device``, a number,
``with torch.device``, the default device), ``torch.cuda`` and ``torch.accelerator``, streams and events, seeds and
generators, autocast and GradScaler, ``torch.load`` with any ``map_location``, pinned memory, DDP, FSDP1, FSDP2,
DTensor and meshes, ZeRO, SyncBatchNorm, ``torch.cuda.comm``, ``torch.compile`` (eagerly), TorchScript; children
forked or spawned by ``multiprocessing``.

Not covered, and refused by name where it is called: CUDA graphs, CUDA and Triton kernels, cupy, NVML, GPU memory
snapshots. Memory figures are 0, with one warning. Tensors tell the truth: ``x.device`` is ``cpu`` and ``x.is_cuda``
False, so ``assert x.is_cuda`` and ``x.device == device`` fail here. Programs started with ``subprocess`` see the
machine as it is. The time and memory a rehearsal takes say nothing about GPUs.

``docs/rehearsal.md`` lists the calls, each of which a test makes. How: Python's entry points to torch are patched,
process-wide (a TorchFunctionMode costs 1.3 µs a call and is thread-local; a tensor that lies about its device
breaks FSDP and DTensor), over two dispatcher kernels that catch what the patches don't see.
"""

from __future__ import annotations

import sys

__all__ = ["RehearsalWarning", "install"]

_installed = False


class RehearsalWarning(UserWarning):
    """What was asked for has no meaning in a rehearsal; the answer is neutral."""


def install(local_rank: int, device_count: int) -> None:
    """Make this process a rehearsed rank, for good.

    Call it once, in a freshly forked rank, with torch and torch.distributed imported and no library that builds on
    torch. A forkserver whose ranks are all rehearsed may import ``taas.rehearsal.ahead``, which leaves nothing but
    naming the device; another may import ``taas.rehearsal.stages``, which leaves about 10 ms. With real GPUs in the
    machine set ``CUDA_VISIBLE_DEVICES=""`` first.

    Args:
        local_rank: the device that is current at the start.
        device_count: what ``torch.cuda.device_count()`` says.

    Raises:
        ValueError: the local rank has no device.
    """
    global _installed
    if _installed:
        return
    from taas.rehearsal.stages import install_all, place

    if "taas.rehearsal.ahead" in sys.modules:
        place(local_rank, device_count)
    else:
        install_all(local_rank, device_count)
    _installed = True
