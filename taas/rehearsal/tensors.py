"""Tensors, storages and modules stay where they are, on the CPU, when they are sent to a CUDA device.

A tensor tells the truth (``x.device`` is ``cpu``, ``x.is_cuda`` is False), so branches to custom kernels are not
taken. ``x.cuda()`` is ``x``; but ``x.cpu()`` and ``x.to("cpu")`` copy, as they do from a GPU: a program that keeps
``{name: p.cpu() for …}`` as its best model must not find the last one there.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from taas.rehearsal.devices import CPU, as_cpu, existing, is_device_like
from taas.rehearsal.patches import replace, replace_all

_to = torch.Tensor.to
_type = torch.Tensor.type
_parse_to = torch._C._nn._parse_to
_to_empty = nn.Module.to_empty
_set_default_tensor_type = torch.set_default_tensor_type
_storage_to = torch.UntypedStorage.to

_TO_COPY = 4  # Tensor.to(device, dtype, non_blocking, copy)

LEGACY_TYPES = ("Float", "Double", "Half", "BFloat16", "Int", "Long", "Short", "Byte", "Char", "Bool")


def _tensor_to(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    if args:
        device = args[0]
        if is_device_like(device):
            if device == "cpu":
                if len(args) < _TO_COPY:
                    kwargs.setdefault("copy", True)
            else:
                args = (as_cpu(device), *args[1:])
    elif kwargs:
        device = kwargs.get("device")
        if isinstance(device, str) and device == "cpu":
            kwargs.setdefault("copy", True)
        elif device is not None:
            kwargs["device"] = as_cpu(device)
    return _to(self, *args, **kwargs)


def _tensor_cuda(
    self: torch.Tensor,
    device: Any = None,
    non_blocking: bool = False,
    memory_format: torch.memory_format = torch.preserve_format,
) -> torch.Tensor:
    existing(device)
    return _to(self, CPU, memory_format=memory_format)


def _tensor_cpu(
    self: torch.Tensor, memory_format: torch.memory_format = torch.preserve_format
) -> torch.Tensor:
    return _to(self, CPU, copy=True, memory_format=memory_format)


def _tensor_type(self: torch.Tensor, dtype: Any = None, non_blocking: bool = False, **kwargs: Any) -> Any:
    if dtype is None:
        return _type(self)
    return _type(self, _cpu_type(dtype), non_blocking, **kwargs)


def _itself(self: Any, device: Any = None) -> Any:
    return self


def _never(self: Any, device: Any = None) -> bool:
    return False


def _nothing(self: Any, stream: Any) -> None:
    """Streams of a rehearsal have no work under way that could outlive a tensor."""


TENSOR = {
    "to": _tensor_to,
    "cuda": _tensor_cuda,
    "cpu": _tensor_cpu,
    "type": _tensor_type,
    "pin_memory": _itself,
    "is_pinned": _never,
    "record_stream": _nothing,
}


def _parse_to_on_the_cpu(*args: Any, **kwargs: Any) -> Any:
    """What ``nn.Module.to`` and ``PackedSequence.to`` make of their arguments."""
    if args and is_device_like(args[0]):
        args = (as_cpu(args[0]), *args[1:])
    if kwargs.get("device") is not None:
        kwargs["device"] = as_cpu(kwargs["device"])
    return _parse_to(*args, **kwargs)


def _module_cuda(self: nn.Module, device: Any = None) -> nn.Module:
    existing(device)
    moved: nn.Module = self._apply(lambda tensor: _to(tensor, CPU))
    return moved


def _module_to_empty(self: nn.Module, *, device: Any, recurse: bool = True) -> nn.Module:
    return _to_empty(self, device=as_cpu(device), recurse=recurse)


def _storage_new(cls: type, *args: Any, device: Any = None, **kwargs: Any) -> Any:
    make: Any = torch._C.StorageBase.__new__
    return make(cls, *args, device=None if device is None else as_cpu(device), **kwargs)


def _storage_cuda(self: Any, device: Any = None, non_blocking: bool = False) -> Any:
    existing(device)
    return self


def _storage_to_on_the_cpu(self: Any, *, device: Any, non_blocking: bool = False) -> Any:
    return _storage_to(self, device=as_cpu(device), non_blocking=non_blocking)


class _LegacyType(type):
    """``torch.cuda.FloatTensor`` and the like: makes CPU tensors, recognises none (none is a CUDA tensor)."""

    cpu: Any

    def __call__(cls, *args: Any, **kwargs: Any) -> torch.Tensor:
        kwargs.pop("device", None)
        return cls.cpu(*args, **kwargs)  # type: ignore[no-any-return]

    def __instancecheck__(cls, instance: object) -> bool:
        return False


def _cpu_type(dtype: Any) -> Any:
    if isinstance(dtype, str):
        return dtype.replace("torch.cuda.", "torch.")
    return dtype.cpu if isinstance(dtype, _LegacyType) else dtype


def _set_cpu_tensor_type(t: Any) -> None:
    _set_default_tensor_type(_cpu_type(t))


def install() -> None:
    """Replace what moves tensors, storages and modules."""
    replace_all(torch.Tensor, TENSOR)
    replace(torch._C._nn, "_parse_to", _parse_to_on_the_cpu)
    replace_all(nn.Module, {"cuda": _module_cuda, "to_empty": _module_to_empty})
    for storage in (torch.UntypedStorage, torch.TypedStorage):
        replace_all(storage, {"cuda": _storage_cuda, "pin_memory": _itself, "is_pinned": _never})
    replace(torch.UntypedStorage, "to", _storage_to_on_the_cpu)
    torch.UntypedStorage.__new__ = staticmethod(_storage_new)  # type: ignore[method-assign]
    for name in LEGACY_TYPES:
        legacy = _LegacyType(
            f"{name}Tensor", (), {"cpu": getattr(torch, f"{name}Tensor"), "__module__": "torch.cuda"}
        )
        setattr(torch.cuda, f"{name}Tensor", legacy)
        setattr(torch.cuda, f"{name}Storage", getattr(torch, f"{name}Storage"))
    replace(torch, "set_default_tensor_type", _set_cpu_tensor_type)
