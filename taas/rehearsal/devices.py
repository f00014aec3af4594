"""Which devices a rehearsal pretends to have, and where they really are: on the CPU.

A *device-like* is what torch takes for a device: ``"cuda"``, ``"cuda:1"``, ``torch.device("cuda", 1)`` or ``1``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

CPU = torch.device("cpu")

_CudaError: type[RuntimeError] = getattr(
    torch, "AcceleratorError", RuntimeError
)  # torch < 2.8 has no class of its own
_ACCEPTED_BY_CPU_BUILDS = torch.version.cuda is not None or torch.version.hip is not None


@dataclass
class Machine:
    """What the rank is told it has.

    Attributes:
        local_rank: the device that is current when the cell starts.
        device_count: GPUs of the run on this VM, the same for all its ranks there.
        current: what ``torch.cuda.current_device()`` says.
    """

    local_rank: int
    device_count: int
    current: int


machine = Machine(local_rank=0, device_count=1, current=0)


def install(local_rank: int, device_count: int) -> None:
    """Set what the machine has.

    Raises:
        ValueError: the local rank has no device.
    """
    if not 0 <= local_rank < device_count:
        raise ValueError(
            f"local rank {local_rank} has no GPU among {device_count}: a rehearsed rank needs 0 <= rank < GPUs"
        )
    machine.local_rank = machine.current = local_rank
    machine.device_count = device_count
    if not _ACCEPTED_BY_CPU_BUILDS:
        _accept_numbers()


def invalid_ordinal(index: int) -> RuntimeError:
    """What CUDA raises for a device that isn't there, with the devices that are."""
    last = machine.device_count - 1
    return _CudaError(
        f"CUDA error: invalid device ordinal\ncuda:{index} was asked for; this run has cuda:0"
        + (f" to cuda:{last}" if last else "")
        + " on this VM (rehearsed on the CPU)."
    )


def check(index: int | None) -> None:
    """Raise what CUDA raises when there is no device of this index."""
    if index is not None and not 0 <= index < machine.device_count:
        raise invalid_ordinal(index)


def as_cpu(device: Any) -> Any:
    """The CPU for a device-like that means CUDA; anything else as it is.

    Raises:
        RuntimeError: the device isn't there, as CUDA raises it.
    """
    if isinstance(device, str):
        if device.startswith("cuda"):
            check(torch.device(device).index)
            return CPU
    elif isinstance(device, torch.device):
        if device.type == "cuda":
            check(device.index)
            return CPU
    elif isinstance(device, int) and not isinstance(device, bool):
        check(device)
        return CPU
    return device


def is_device_like(value: Any) -> bool:
    """Whether a positional argument names a device rather than a dtype or a tensor."""
    return isinstance(value, (str, torch.device)) or (isinstance(value, int) and not isinstance(value, bool))


def ordinal(device: Any = None) -> int:
    """The index of a CUDA device-like; the current device for ``None`` and for a bare ``"cuda"``.

    Programs ask about ``x.device``, which is honest: so the CPU's device, where it is no text, is the current one.

    Raises:
        ValueError: the device isn't a CUDA device.
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
    """Like :func:`ordinal`, and the device must exist.

    Raises:
        RuntimeError: the device isn't there, as CUDA raises it.
    """
    index = ordinal(device)
    check(index)
    return index


def _accept_numbers() -> None:
    """Let ``torch.device(0)`` mean ``cuda:0`` where torch is a CPU build, which refuses numbers.

    ``torch.device`` cannot be patched in place, so a class stands in for it that makes and recognises the real
    ones.
    """
    real = torch.device

    class Meta(type):
        def __call__(cls, *args: Any, **kwargs: Any) -> torch.device:
            if len(args) == 1 and not kwargs and isinstance(args[0], int):
                return real("cuda", args[0])
            return real(*args, **kwargs)

        def __instancecheck__(cls, instance: object) -> bool:
            return isinstance(instance, real)

        def __subclasscheck__(cls, subclass: type) -> bool:
            return issubclass(subclass, real)

    torch.device = Meta("device", (), {"__module__": "torch"})  # type: ignore[assignment, misc]
