"""A cell for GPUs runs where there are none: its ranks are CPU processes that say they have GPUs.

What is covered and what is refused by name is in ``docs/rehearsal.md``, whose calls a test makes.
Tensors tell the truth: ``x.device`` is ``cpu`` and ``x.is_cuda`` False. The time and memory a
rehearsal takes say nothing about GPUs.

How: Python's entry points to torch are patched, process-wide (a TorchFunctionMode costs 1.3 µs a
call and is thread-local; a tensor that lies about its device breaks FSDP and DTensor).
"""

from __future__ import annotations

_installed = False


def install(local_rank: int, device_count: int) -> None:
    """Make this process a rehearsed rank, for good; a second call only names another device.

    Call it in a freshly forked rank, with torch and torch.distributed imported and no library that
    builds on torch. A forkserver whose ranks are all rehearsed may import ``taas.rehearsal.ahead``,
    which leaves nothing but naming the device; another may import the parts, which leaves about 10
    ms. With real GPUs in the machine set ``CUDA_VISIBLE_DEVICES=""`` first. Processes that it forks
    inherit it, for others see ``rank.children``. ValueError: the local rank, whose device is
    current, has none.
    """
    global _installed
    # these import torch: a child that never does shall not pay for it
    from taas.rehearsal import (
        commands,
        cuda_module,
        devices,
        distributed,
        operators,
        refused,
        tensors,
    )

    devices.place(local_rank, device_count)
    if not _installed:
        # the last one looks at what the others left of torch
        for part in (devices, cuda_module, operators, tensors, distributed, commands, refused):
            part.install()
    _installed = True
