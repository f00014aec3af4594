"""A cell for GPUs runs where there are none: its ranks are CPU processes that say they have GPUs.

What is covered and what is refused by name is in ``docs/rehearsal.md``, whose calls a test makes. Tensors tell the truth:
``x.device`` is ``cpu`` and ``x.is_cuda`` False. The time and memory a rehearsal takes say nothing about GPUs.

How: Python's entry points to torch are patched, process-wide (a TorchFunctionMode costs 1.3 µs a call and is thread-local;
a tensor that lies about its device breaks FSDP and DTensor).
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
    machine set ``CUDA_VISIBLE_DEVICES=""`` first. ValueError: the local rank, whose device is current, has none.
    """
    global _installed
    # these import torch: a child that never does shall not pay for it
    from taas.rehearsal import cuda_module, devices, distributed, operators, refused, tensors

    devices.place(local_rank, device_count)
    if not _installed:
        # the last one looks at what the others left of torch
        for part in (devices, cuda_module, operators, tensors, distributed, refused):
            part.install()
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
