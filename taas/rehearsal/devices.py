"""The devices of a rehearsal, all of which are the CPU.

A *device-like* is anything that torch accepts as a device: ``"cuda"``, ``"cuda:1"``,
``torch.device("cuda", 1)`` or ``1``.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import torch

from taas.rehearsal.patches import stand_in

CPU = torch.device("cpu")

# torch before 2.8 has no class for these errors.
_CudaError: type[RuntimeError] = getattr(torch, "AcceleratorError", RuntimeError)


@dataclass
class RehearsedMachine:
    """The simulated GPUs of a rank, and the current one.

    All ranks of the run on this VM have the same GPUs.
    """

    device_count: int = 1
    current: int = 0
    used: bool = False  # whether this process, or the one it was forked from, has used a device
    forked: bool = False  # from a process that had used one: CUDA does not work here


machine = RehearsedMachine()


def place(local_rank: int, device_count: int) -> None:
    """Set the machine's devices, and make the local rank's the current one.

    Raises:
        ValueError: the local rank's device does not exist.
    """
    if not 0 <= local_rank < device_count:
        raise ValueError(
            f"local rank {local_rank} has no GPU among {device_count}: a rehearsed rank needs 0 <="
            " rank < GPUs"
        )
    machine.device_count, machine.current = device_count, local_rank


def use() -> None:
    """Raise CUDA's error in a child that was forked after its parent had used a device."""
    if machine.forked:
        raise RuntimeError(
            "Cannot re-initialize CUDA in forked subprocess. To use CUDA with multiprocessing, you"
            " must use the 'spawn' start method"
        )
    machine.used = True


def cuda_index(device: Any) -> int | None:
    """Return the index of a CUDA device-like, which must exist; None for anything else."""
    if not is_device_like(device) or not (
        isinstance(device, int) or torch.device(device).type == "cuda"
    ):
        return None
    return existing(device)


def as_cpu(device: Any) -> Any:
    """Return the CPU for a CUDA device-like, which must exist; return anything else unchanged."""
    return device if cuda_index(device) is None else CPU


def is_device_like(value: Any) -> bool:
    """Return whether a positional argument is a device and not a dtype or a tensor."""
    return isinstance(value, (str, torch.device, int)) and not isinstance(value, bool)


def ordinal(device: Any = None) -> int:
    """Return the index of a CUDA device-like; for ``None`` and ``"cuda"``, the current device's.

    Programs pass ``x.device``, which is the CPU, as it really is. Therefore the CPU's device,
    unless it is a string, means the current device. Any other device raises a ValueError, as in
    torch.
    """
    if device is None or device == CPU:
        return machine.current
    if isinstance(device, int):
        return device
    parsed = torch.device(device)
    if parsed.type != "cuda":
        raise ValueError(f"Expected a cuda device, but got: {device}")
    return machine.current if parsed.index is None else parsed.index


def existing(device: Any = None) -> int:
    """Use a device and return its index; for one that does not exist, raise CUDA's error.

    The error lists the devices that exist.
    """
    index, last = ordinal(device), machine.device_count - 1
    use()
    if not 0 <= index <= last:
        raise _CudaError(
            f"CUDA error: invalid device ordinal\ncuda:{index} was asked for; this run has cuda:0"
            + (f" to cuda:{last}" if last else "")
            + " on this VM (rehearsed on the CPU)."
        )
    return index


def install() -> None:
    """Detect forks, and let ``torch.device(0)`` mean ``cuda:0``.

    torch without CUDA, and torch 2.6 without GPUs, reject a number there.
    """
    os.register_at_fork(after_in_child=lambda: setattr(machine, "forked", machine.used))
    try:
        torch.device(0)
    except RuntimeError:
        torch.device = stand_in("device", _Device, _device)  # type: ignore[assignment, misc]
        torch.jit._builtins._register_builtin(torch.device, "aten::device")  # for TorchScript


_Device = torch.device


def _device(*args: Any, **kwargs: Any) -> torch.device:
    if len(args) == 1 and not kwargs and isinstance(args[0], int):
        return _Device("cuda", args[0])
    return _Device(*args, **kwargs)
