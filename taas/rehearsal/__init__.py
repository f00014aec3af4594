"""A simulated GPU environment on the CPU (a *rehearsal*): CPU processes that report GPUs.

A cell written for GPUs runs on a machine without any. ``docs/rehearsal.md`` lists the calls that
are covered and those that are rejected with an error; a test makes these calls. Tensors report
their real device: ``x.device`` is ``cpu`` and ``x.is_cuda`` is False. The time and memory of a
rehearsal do not predict those on GPUs.

Python's entry points to torch are patched in the whole process. (A TorchFunctionMode costs 1.3 µs
per call and is thread-local; a tensor that reports a false device breaks FSDP and DTensor.)
"""

from __future__ import annotations

_installed = False


def install(local_rank: int, device_count: int) -> None:
    """Make this process a rehearsed rank for good; a second call only sets another device.

    Call it in a freshly forked rank that has imported torch and torch.distributed, and no library
    that builds on torch. If the machine has GPUs, set ``CUDA_VISIBLE_DEVICES=""`` first.

    A forkserver whose ranks are all rehearsed may import ``taas.rehearsal.ahead``; then this call
    only sets the device. Another forkserver may import the submodules; then the call takes about
    10 ms. Forked processes inherit the rehearsal; for others see ``rank.children``.

    Raises:
        ValueError: there is no device for the local rank.
    """
    global _installed
    # These import torch: a child that does not need torch must not pay for it.
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
        # The last one inspects torch as the others have left it.
        for part in (devices, cuda_module, operators, tensors, distributed, commands, refused):
            part.install()
    _installed = True
