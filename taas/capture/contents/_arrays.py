"""Tensors, arrays and optimizers: what looks into memory, whose values are compared there."""

from __future__ import annotations

import sys
from typing import Any

from taas.capture.contents._python_objects import DICT, AttributesKind
from taas.capture.contents.kind import CannotChangeError, Kind
from taas.capture.tensors import travels_as_view


class TensorKind(Kind):
    """Where a tensor looks, its gradient, its attributes. Its values are memory, and compared there."""

    def take(self, value: Any) -> Any:
        leaf = value.is_leaf
        if travels_as_view(value):
            storage = value.untyped_storage()
            looks: Any = (storage.data_ptr(), storage.nbytes(), value.storage_offset(), value.stride())
        else:  # sparse, quantized: what changes them in place counts
            looks = value._version
        looks = (looks, value.shape, value.dtype, value.device)
        return looks, leaf and value.requires_grad, value.grad if leaf else None, dict(value.__dict__)

    def same(self, before: Any, after: Any) -> bool:
        return (
            before[0] == after[0]
            and before[1] == after[1]
            and before[2] is after[2]
            and DICT.same(before[3], after[3])
        )

    def message(self, value: Any, before: Any, after: Any) -> Any:
        data = value.detach() if before[0] != after[0] else None
        return data, before[0][-1] != after[0][-1], *after[1:]

    def put(self, value: Any, contents: Any) -> None:
        import torch

        data, moved, requires_grad, grad, attributes = contents
        if data is not None and moved and data.shape == value.shape and data.dtype == value.dtype:
            with torch.no_grad():
                value.copy_(data)
        elif data is not None:
            value.data = data.to(value.device)
        if value.is_leaf:
            value.requires_grad_(requires_grad)
            value.grad = grad if grad is None or grad.device == value.device else grad.to(value.device)
        value.__dict__.clear()
        value.__dict__.update(attributes)


class ArrayKind(Kind):
    """An array's values are memory, and compared there; here, only whether it still looks at that memory."""

    def take(self, value: Any) -> Any:
        interface = value.__array_interface__
        return (
            interface["data"][0],
            interface["shape"],
            value.strides,
            interface["typestr"],
            value.flags.writeable,
        )

    def same(self, before: Any, after: Any) -> bool:
        return bool(before == after)

    def message(self, value: Any, before: Any, after: Any) -> Any:
        if before[:4] != after[:4]:
            raise CannotChangeError("its shape or memory changed")
        return after[4]

    def put(self, value: Any, contents: Any) -> None:
        value.flags.writeable = contents


class OptimizerKind(AttributesKind):
    """An optimizer without its ``step``, which a scheduler replaces by one that refers to this process."""

    def take(self, value: Any) -> Any:
        attributes, slots = super().take(value)
        attributes.pop("step", None)
        return attributes, slots

    def put(self, value: Any, contents: Any) -> None:
        step = value.__dict__.get("step")
        super().put(value, contents)
        if step is not None:
            value.step = step


def memory_of(value: Any) -> tuple[int, int]:
    """Return the address and length of the memory that a tensor or array looks into; (0, 0) for anything else."""
    torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
    if torch is not None and isinstance(value, torch.Tensor) and travels_as_view(value):
        storage = value.untyped_storage()
        return storage.data_ptr(), storage.nbytes()
    if numpy is not None and isinstance(value, numpy.ndarray):
        low, high = numpy.lib.array_utils.byte_bounds(value)
        return low, high - low
    return 0, 0
