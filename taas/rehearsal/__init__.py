"""A cell for GPUs runs where there are none: its ranks are CPU processes that say they have GPUs.

Covered: process groups (``nccl`` → ``gloo``), devices in every form (``"cuda"``, ``torch.device``, a number,
``with torch.device``, the default device), ``torch.cuda`` and ``torch.accelerator``, streams and events, seeds and
generators, autocast and GradScaler, ``torch.load`` with any ``map_location``, pinned memory, DDP, FSDP1, FSDP2,
DTensor and meshes, ZeRO, SyncBatchNorm, ``torch.compile`` (eagerly), TorchScript; children
forked or spawned by ``multiprocessing``.

Not covered, and refused by name where it is called: CUDA graphs, CUDA and Triton kernels, cupy, NVML, GPU memory
snapshots, ``torch.cuda.comm``. Memory figures are 0, with one warning. Tensors tell the truth: ``x.device`` is ``cpu`` and ``x.is_cuda``
False, so ``assert x.is_cuda`` and ``x.device == device`` fail here. Programs started with ``subprocess`` see the
machine as it is. The time and memory a rehearsal takes say nothing about GPUs.

``docs/rehearsal.md`` lists the calls, each of which a test makes. How: Python's entry points to torch are patched,
process-wide (a TorchFunctionMode costs 1.3 µs a call and is thread-local; a tensor that lies about its device
breaks FSDP and DTensor), over two dispatcher kernels that catch what the patches don't see.
"""

from __future__ import annotations

from multiprocessing.process import BaseProcess
from typing import Any

from taas.import_hooks import after_import

_installed = False


def install(local_rank: int, device_count: int) -> None:
    """Make this process a rehearsed rank, for good; a second call only names another device.

    Call it in a freshly forked rank, with torch and torch.distributed imported and no library that builds on
    torch. A forkserver whose ranks are all rehearsed may import ``taas.rehearsal.ahead``, which leaves nothing but
    naming the device; another may import the parts, which leaves about 10 ms. With real GPUs in the
    machine set ``CUDA_VISIBLE_DEVICES=""`` first.

    Args:
        local_rank: the device that is current at the start.
        device_count: what ``torch.cuda.device_count()`` says.

    Raises:
        ValueError: the local rank has no device.
    """
    global _installed
    # these import torch: a child that never does shall not pay for it
    from taas.rehearsal import (
        cuda_module,
        devices,
        distributed,
        operators,
        patches,
        refused,
        streams,
        tensors,
    )

    devices.place(local_rank, device_count)
    if not _installed:
        # the last one looks at what the others left of torch
        for part in (patches, devices, cuda_module, streams, operators, tensors, distributed, refused):
            part.install()
            vars(part)["__warningregistry__"] = None  # what it shows for the program is noted there
    _installed = True
    _rehearse_children(local_rank, device_count)


# ---------------------------------------------------------------- processes that a rank starts afresh
#
# Forked ones inherit the rehearsal. ``spawn`` and ``forkserver`` pickle the ``multiprocessing.Process``, its target
# and arguments in it: a first entry of its state installs the rehearsal as it is unpickled, so before the dataset of
# a DataLoader worker is.


class _Carried:
    def __init__(self, *place: int) -> None:
        self.place = place

    def __reduce__(self) -> tuple[Any, ...]:
        return _install_in_child, self.place


def _install_in_child(local_rank: int, device_count: int) -> None:
    after_import("torch", lambda torch: install(local_rank, device_count))


def _rehearse_children(local_rank: int, device_count: int) -> None:
    carried = _Carried(local_rank, device_count)

    def state(self: BaseProcess) -> dict[str, Any]:
        return {"_rehearsal": carried, **self.__dict__}

    BaseProcess.__getstate__ = state  # type: ignore[assignment, method-assign]
