"""Tensors and storages in a pickle: views of memory that travels beside it.

torch's own reduction copies a storage into bytes several times. Here the stream holds only a storage's
place, and a tensor is (storage, dtype, offset, shape, stride). This module imports torch only to rebuild:
where torch isn't loaded there are no tensors.

A value that is sharded over ranks is whole where this rank has all of it, else nothing of it travels: a pickle of a
DTensor holds this rank's shard under the whole's shape, and nobody who unpickles it elsewhere can ask the other ranks.
"""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

from taas.capture.memory import MemoryRange, memory_of_storage
from taas.capture.reading import Reading, read_reduced

if TYPE_CHECKING:
    import torch

ONLY_A_SHARD = (
    "rank 0 has only a shard of it. Gather it in the cell, in all ranks: tensor.full_tensor(), or for a model "
    "get_model_state_dict(model, options=StateDictOptions(full_state_dict=True)) of torch.distributed.checkpoint.state_dict"
)
_SHARDED = {"torch.distributed.tensor.DTensor", "torch.distributed._shard.sharded_tensor.api.ShardedTensor"}


def is_tensor(value: Any) -> bool:
    """Tell whether a value is a tensor, without importing torch."""
    torch = sys.modules.get("torch")
    return torch is not None and hasattr(torch, "Tensor") and isinstance(value, torch.Tensor)


def storage_of(tensor: torch.Tensor) -> Any:
    """Return the storage that a tensor is a dense view of, in host or CUDA memory; None for any other tensor."""
    torch = sys.modules["torch"]
    dense = (
        tensor.layout is torch.strided
        and tensor.device.type in ("cpu", "cuda")
        and not (tensor.is_quantized or tensor.is_nested)
        and not torch._C._functorch.is_functorch_wrapped_tensor(tensor)
    )
    return tensor.untyped_storage() if dense else None


def span_of(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the first and the end byte that a tensor uses of its storage."""
    if not (count := tensor.numel()):
        return 0, 0
    size, start = tensor.element_size(), tensor.storage_offset()
    if not tensor.is_contiguous():
        count = 1 + sum(
            (length - 1) * step for length, step in zip(tensor.shape, tensor.stride(), strict=True)
        )
    return int(start * size), int((start + count) * size)


def copy_of_tensor(tensor: torch.Tensor) -> Reading | None:
    """Read a plain tensor in host memory by a copy of what is in it; any other not at all."""
    torch = sys.modules["torch"]
    if type(tensor) is not torch.Tensor or storage_of(tensor) is None or tensor.device.type != "cpu":
        return None
    data = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
    return Reading(_make_copy, (tensor.dtype, tuple(tensor.shape), data.numpy().tobytes()))


def _make_copy(dtype: torch.dtype, shape: tuple[int, ...], data: bytes) -> torch.Tensor:
    import torch

    if not data:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(bytearray(data), dtype=dtype).reshape(shape)


def tensor_reader(cls: Any) -> Callable[[Any], Reading | None] | None:
    """Return what reads tensors and storages of a class, or None: it is none, or has a protocol of its own.

    A class with a ``__torch_dispatch__`` of its own has its values elsewhere than in a storage.
    """
    torch = sys.modules.get("torch")
    if torch is None or not hasattr(torch, "UntypedStorage"):
        return None
    if cls is torch.UntypedStorage:
        return _read_storage
    if is_sharded(cls):
        return lambda tensor: Reading(_make_whole, _parts_of_whole(tensor))
    if not issubclass(cls, torch.Tensor) or cls.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        return None
    keeps = cls.__reduce_ex__ in (torch.Tensor.__reduce_ex__, torch.nn.Parameter.__reduce_ex__)
    return _read_tensor if keeps else _read_other_tensor


def _read_tensor(tensor: torch.Tensor) -> Reading | None:
    """Read a dense tensor or parameter as a view of its storage; one that has a graph, without it."""
    with sys.modules["torch"]._C.DisableTorchFunctionSubclass():
        if (storage := storage_of(tensor)) is None:
            return _read_other_tensor(tensor)
        refuse_flat_shard(tensor)
        memory = memory_of_storage(storage)
        memory.spans.append(span_of(tensor))
        memory.tensors.append(tensor)
        view = (memory, tensor.dtype, tensor.storage_offset(), tuple(tensor.shape), tensor.stride())
        arguments = (type(tensor), *view, tensor.is_conj(), tensor.is_neg(), str(tensor.device))
        return Reading(_make_tensor, arguments, *_state(tensor), _change_tensor)


def _read_other_tensor(tensor: torch.Tensor) -> Reading | None:
    """Read a sparse, nested or uninitialized tensor by its own protocol; it changes by new data."""
    with sys.modules["torch"]._C.DisableTorchFunctionSubclass():
        made: Any = tensor.__reduce_ex__(4)
        if len(made) > 2:
            return read_reduced(tensor, made)
        return Reading(_make_other, (type(tensor), made[0], made[1]), *_state(tensor), _change_other)


def _state(tensor: torch.Tensor) -> tuple[Callable[..., None], Any, tuple[str, ...]]:
    leaf = tensor.is_leaf
    state = (
        leaf and tensor.requires_grad,
        tensor.grad if leaf or tensor.retains_grad else None,
        dict(tensor.__dict__),
        tensor._backward_hooks if leaf else None,
        getattr(tensor, "_post_accumulate_grad_hooks", None) if leaf else None,
    )
    labels = (".requires_grad", ".grad", ".", "._backward_hooks", "._post_accumulate_grad_hooks")
    return _set_tensor, None if state == (False, None, {}, None, None) else state, labels


def _make_tensor(cls: Any, memory: MemoryRange, dtype: torch.dtype, *view: Any) -> torch.Tensor:
    import torch

    storage = memory.as_storage()
    *where, conjugate, negative, _ = view
    with torch._C.DisableTorchFunctionSubclass():
        tensor = torch.empty(0, dtype=dtype, device=storage.device).set_(storage, *where)
        if conjugate:
            tensor = torch._conj(tensor)
        if negative:
            tensor = torch._neg_view(tensor)
        return tensor if cls is torch.Tensor else torch.Tensor._make_subclass(cls, tensor)


def _make_other(cls: Any, constructor: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    made = _made_by(constructor, arguments)
    return made if type(made) is cls else made.as_subclass(cls)


def _made_by(constructor: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    made = constructor(*arguments)
    torch: Any = sys.modules["torch"]
    torch._utils._validate_loaded_sparse_tensors()  # else torch keeps it, for the torch.load to come
    return made


def _set_tensor(tensor: torch.Tensor, state: tuple[Any, ...] | None) -> None:
    requires_grad, grad, attributes, hooks, grad_hooks = state or (False, None, {}, None, None)
    with sys.modules["torch"]._C.DisableTorchFunctionSubclass():
        tensor.__dict__.clear()
        tensor.__dict__.update(attributes)
        if not tensor.is_leaf:
            return
        tensor.requires_grad_(requires_grad)
        if tensor.grad is not grad:  # one that it has may have another dtype by now
            tensor.grad = grad if grad is None or grad.device == tensor.device else grad.to(tensor.device)
        if tensor._backward_hooks is not hooks:
            tensor._backward_hooks = hooks
        if getattr(tensor, "_post_accumulate_grad_hooks", None) is not grad_hooks:
            tensor._post_accumulate_grad_hooks = grad_hooks


def _change_tensor(tensor: Any, _: Any, cls: Any, *arguments: Any) -> None:
    """Look elsewhere; a tensor that the cell moved to another device stays on its own, with the new values."""
    import torch

    data = _make_tensor(torch.Tensor, *arguments)
    with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
        if type(tensor) is not cls:
            tensor.requires_grad_(False)
            tensor.__class__ = cls  # as lazy modules do
        moved_away = str(tensor.device) != arguments[-1]
        if moved_away and data.shape == tensor.shape and data.dtype == tensor.dtype:
            tensor.copy_(data)
        else:
            tensor.data = data.to(tensor.device) if tensor.device.type != "meta" else data


def _change_other(
    tensor: Any, _: Any, cls: Any, constructor: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    if type(tensor) is not cls:
        raise TypeError(f"a {type(tensor).__name__} cannot become a {cls.__name__}")
    tensor.data = _made_by(constructor, arguments).to(tensor.device)


def _read_storage(storage: Any) -> Reading | None:
    if storage.device.type not in ("cpu", "cuda"):
        return None
    memory = memory_of_storage(storage)
    memory.spans.append((0, memory.nbytes))
    return Reading(MemoryRange.as_storage, (memory,))


# ---------------------------------------------------------------- sharded over ranks


def is_sharded(cls: type) -> bool:
    """Tell whether tensors of a class hold one rank's part of a value."""
    names = (f"{c.__module__.replace('tensor._api', 'tensor')}.{c.__qualname__}" for c in cls.__mro__)
    return not _SHARDED.isdisjoint(names)


def _parts_of_whole(tensor: Any) -> tuple[Any, ...]:
    import torch

    mesh: Any = getattr(tensor, "device_mesh", None)
    there = mesh is not None and mesh.get_coordinate() is not None
    if not there or any(mesh.size(n) > 1 and not p.is_replicate() for n, p in enumerate(tensor.placements)):
        _refuse_shard()
    with torch.no_grad():
        whole = tensor.to_local()
    leaf = tensor.is_leaf
    parameter = isinstance(tensor, torch.nn.Parameter)
    return whole, parameter, leaf and tensor.requires_grad, tensor.grad if leaf else None


def _make_whole(whole: Any, parameter: bool, requires_grad: bool, grad: Any) -> Any:
    import torch

    made = whole.detach().requires_grad_(requires_grad)
    if parameter:
        made = torch.nn.Parameter(whole, requires_grad)
    made.grad = grad
    return made


def refuse_flat_shard(tensor: Any) -> None:
    """Refuse what FSDP1 puts in a parameter's place: its shard, or nothing.

    Raises:
        pickle.PicklingError: it has.
    """
    if hasattr(tensor, "_fsdp_flattened") or hasattr(tensor._base, "_fsdp_flattened"):
        _refuse_shard()


def _refuse_shard() -> NoReturn:
    raise pickle.PicklingError(ONLY_A_SHARD)
