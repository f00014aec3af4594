"""Keeps tensors, storages and modules on the CPU when a program moves them to a CUDA device.

A tensor reports its real device (``x.device`` is ``cpu``, ``x.is_cuda`` is False), so branches to
custom kernels are not taken. A tensor that is moved to a device is copied, except for parameters
and tensors that require a gradient: a leaf has to remain the leaf that an optimizer references,
and on a GPU a tensor that is there already stays the same object, frozen or not. ``x.cpu()`` and
``x.to("cpu")`` copy, as they do from a GPU: a program that stores ``{name: p.cpu() for …}`` as its
best model must not find the last model's values there.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from taas.rehearsal.devices import (
    CPU,
    as_cpu,
    cuda_index,
    existing,
    is_device_like,
    machine,
)
from taas.rehearsal.patches import always, overridable, replace, replace_all, stand_in

_to = torch.Tensor.to
_type = torch.Tensor.type
_parse_to = torch._C._nn._parse_to
_to_empty = nn.Module.to_empty
_set_default_tensor_type = torch.set_default_tensor_type

_TO_COPY = 4  # Tensor.to(device, dtype, non_blocking, copy)

LEGACY_TYPES = (
    "Float",
    "Double",
    "Half",
    "BFloat16",
    "Int",
    "Long",
    "Short",
    "Byte",
    "Char",
    "Bool",
)


def _tensor_to(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    device = args[0] if args else kwargs.get("device")
    if not is_device_like(device):
        return _to(self, *args, **kwargs)
    index = cuda_index(device)
    if index is not None:
        if args:
            args = (CPU, *args[1:])
        else:
            kwargs["device"] = CPU
    if len(args) < _TO_COPY and (device == "cpu" if index is None else not stays_itself(self)):
        kwargs["copy"] = True
    return _to(self, *args, **kwargs)


def _tensor_cuda(
    self: torch.Tensor, device: Any = None, non_blocking: bool = False, **kwargs: Any
) -> torch.Tensor:
    existing(device)
    return _to(self, CPU, copy=not stays_itself(self), **kwargs)


def stays_itself(tensor: torch.Tensor) -> bool:
    """Return whether a tensor that is moved to a device stays the same object."""
    return tensor.requires_grad or isinstance(tensor, nn.Parameter)


def _tensor_cpu(self: torch.Tensor, **kwargs: Any) -> torch.Tensor:
    return _to(self, CPU, copy=True, **kwargs)


def _tensor_type(
    self: torch.Tensor, dtype: Any = None, non_blocking: bool = False, **kwargs: Any
) -> Any:
    if dtype is None:
        return _type(self)
    cpu = _cpu_type(dtype)
    cast = _type(self, cpu, non_blocking, **kwargs)
    return cast if cpu == dtype else _tensor_cuda(cast)


def _itself(self: Any, device: Any = None) -> Any:
    return self


TENSOR: dict[str, Any] = {
    "to": _tensor_to,
    "cuda": _tensor_cuda,
    "cpu": _tensor_cpu,
    "type": _tensor_type,
    "pin_memory": _itself,
    "is_pinned": always(False),
    "record_stream": always(None),  # no work is ever in progress that could outlive a tensor
}


def _parse_to_on_the_cpu(*args: Any, **kwargs: Any) -> Any:
    """Parse the arguments of ``nn.Module.to`` and ``PackedSequence.to``."""
    if args and is_device_like(args[0]):
        args = (as_cpu(args[0]), *args[1:])
    if kwargs.get("device") is not None:
        kwargs["device"] = as_cpu(kwargs["device"])
    return _parse_to(*args, **kwargs)


def _module_cuda(self: nn.Module, device: Any = None) -> nn.Module:
    return self.to(torch.device("cuda", existing(device)))


def _module_to_empty(self: nn.Module, *, device: Any, recurse: bool = True) -> nn.Module:
    return _to_empty(self, device=as_cpu(device), recurse=recurse)


def _storage_cuda(self: Any, device: Any = None, non_blocking: bool = False) -> Any:
    existing(device)
    return self


_legacy: dict[Any, Any] = {}
"""The CPU's types for ``torch.cuda.FloatTensor`` and the like.

They create CPU tensors, and no tensor is an instance of them.
"""


class _CudaTensor:
    """The class of their instances, of which there are none."""


def _legacy_type(cpu: Any) -> type:
    legacy = stand_in(
        cpu.__name__,
        _CudaTensor,
        lambda *args, device=None, **kwargs: cpu(*args, **kwargs),
        "torch.cuda",
    )
    _legacy[legacy] = cpu
    return legacy


def _cpu_type(dtype: Any) -> Any:
    return (
        dtype.replace("torch.cuda.", "torch.")
        if isinstance(dtype, str)
        else _legacy.get(dtype, dtype)
    )


def _deserialize(storage: Any, location: str) -> Any:
    """Load a checkpoint that was saved on GPUs, or is to be loaded to a GPU, onto the CPU.

    ``map_location`` may request a GPU in any form.
    """
    if not location.startswith("cuda"):
        return None
    index = torch.device(location).index
    if index is not None and index >= machine.device_count:
        raise RuntimeError(
            f"Attempting to deserialize object on CUDA device {index} but torch.cuda.device_count()"
            f" is {machine.device_count}. Please use torch.load with map_location to map your"
            " storages to an existing device."
        )
    return storage


_BEFORE_TORCHS_OWN = 5  # torch's deserializer for the CPU has priority 10, for CUDA 20


def _whole_forward(self: nn.DataParallel[Any], *inputs: Any, **kwargs: Any) -> Any:
    """Compute in one process what ``nn.DataParallel`` computes.

    In a run with several ranks, ``adopt`` replaces this.
    """
    return self.module(*inputs, **kwargs)


def install() -> None:
    """Replace the functions that move tensors, storages and modules, and that load them."""
    torch.serialization.register_package(_BEFORE_TORCHS_OWN, lambda storage: None, _deserialize)
    replace_all(torch.Tensor, {name: overridable(new) for name, new in TENSOR.items()})
    # This is the only table of such methods that torch builds at import: the methods of a
    # parameter without a shape.
    tables: Any = nn.UninitializedParameter
    tables._allowed_methods += [torch.Tensor.to, torch.Tensor.cuda, torch.Tensor.cpu]
    replace(torch._C._nn, "_parse_to", _parse_to_on_the_cpu)
    replace_all(nn.Module, {"cuda": _module_cuda, "to_empty": _module_to_empty})
    for storage in (torch.UntypedStorage, torch.TypedStorage):
        replace_all(
            storage, {"cuda": _storage_cuda, "pin_memory": _itself, "is_pinned": always(False)}
        )
    for name in LEGACY_TYPES:
        setattr(torch.cuda, f"{name}Tensor", _legacy_type(getattr(torch, f"{name}Tensor")))
        setattr(torch.cuda, f"{name}Storage", getattr(torch, f"{name}Storage"))
    replace(torch, "set_default_tensor_type", lambda t: _set_default_tensor_type(_cpu_type(t)))
    replace(nn.DataParallel, "forward", _whole_forward)
