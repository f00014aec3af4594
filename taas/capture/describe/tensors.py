"""Tensors, storages and arrays: views of memory that is sent separately from the states.

torch's own reduction copies a storage into bytes several times, and pickle's protocol 5 sends each
array's memory separately, so that views no longer share it. This module imports torch and NumPy
only to rebuild objects: if they are not loaded, no object can be a tensor or array.

A value that is sharded over the ranks is sent as a whole if this rank has all of it, otherwise not
at all: a pickle of a DTensor would contain this rank's shard with the shape of the whole tensor.

An array of Python objects is read by its own protocol; a view of such an array becomes an
independent array of the same objects. The data of a memory-mapped file (``np.memmap``) stays in the
file.
"""

from __future__ import annotations

import ctypes
import mmap
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from taas.base.import_hooks import attribute_of, loaded
from taas.capture.describe.memory import MemoryRange, memory_of_storage
from taas.capture.describe.reading import Reading, read_insides, read_reduced, set_insides
from taas.rank_storage import is_closed

if TYPE_CHECKING:
    import torch

ONLY_A_SHARD = (
    "rank 0 has only a shard of it. Gather it in the cell, in all ranks: tensor.full_tensor(), or"
    " for a model get_model_state_dict(model, options=StateDictOptions(full_state_dict=True)) of"
    " torch.distributed.checkpoint.state_dict"
)
_SHARDED = {
    "torch.distributed.tensor.DTensor",
    "torch.distributed._shard.sharded_tensor.api.ShardedTensor",
}


def is_tensor(value: Any) -> bool:
    """Tell whether a value is a tensor, without importing torch."""
    torch = loaded("torch")
    return torch is not None and hasattr(torch, "Tensor") and isinstance(value, torch.Tensor)


def storage_of(tensor: torch.Tensor) -> Any:
    """Return the storage of which a tensor is a dense view, in host or CUDA memory.

    Return None for any other tensor.
    """
    torch = sys.modules["torch"]
    dense = (
        tensor.layout is torch.strided
        and tensor.device.type in ("cpu", "cuda")
        and not (tensor.is_quantized or tensor.is_nested)
        and not torch._C._functorch.is_functorch_wrapped_tensor(tensor)
    )
    return tensor.untyped_storage() if dense else None


def span_of(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the offset of the first byte that a tensor uses in its storage, and the end offset."""
    if not (count := tensor.numel()):
        return 0, 0
    size, start = tensor.element_size(), tensor.storage_offset()
    if not tensor.is_contiguous():
        steps = zip(tensor.shape, tensor.stride(), strict=True)
        count = 1 + sum((length - 1) * step for length, step in steps)
    return int(start * size), int((start + count) * size)


def content_of(value: Any) -> Reading | None:
    """Read a plain array or tensor that a protocol made, with a copy of its memory; else None."""
    if is_array(value):
        return None if value.dtype.hasobject else Reading(pickle.loads, (pickle.dumps(value, 5),))
    return _copy_of_tensor(value) if is_tensor(value) else None


def _copy_of_tensor(tensor: torch.Tensor) -> Reading | None:
    torch = sys.modules["torch"]
    if (
        type(tensor) is not torch.Tensor
        or storage_of(tensor) is None
        or tensor.device.type != "cpu"
    ):
        return None
    data = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
    return Reading(_make_copy, (tensor.dtype, tuple(tensor.shape), data.numpy().tobytes()))


def _make_copy(dtype: torch.dtype, shape: tuple[int, ...], data: bytes) -> torch.Tensor:
    import torch

    if not data:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(bytearray(data), dtype=dtype).reshape(shape)


def tensor_reader(cls: Any) -> Callable[[Any], Reading | None] | None:
    """Return the reader for tensors and storages of a class; None for others.

    A class with its own ``__torch_dispatch__`` does not have its values in a storage.
    """
    torch = loaded("torch")
    if torch is None or not hasattr(torch, "UntypedStorage"):
        return None
    if cls is torch.UntypedStorage:
        return _read_storage
    if is_sharded(cls):
        return lambda tensor: Reading(_make_whole, _parts_of_whole(tensor))
    if (
        not issubclass(cls, torch.Tensor)
        or cls.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__
    ):
        return None
    keeps = cls.__reduce_ex__ in (torch.Tensor.__reduce_ex__, torch.nn.Parameter.__reduce_ex__)
    return _read_tensor if keeps else _read_other_tensor


def _read_tensor(tensor: torch.Tensor) -> Reading | None:
    """Read a dense tensor or parameter as a view of its storage, without its graph."""
    with sys.modules["torch"]._C.DisableTorchFunctionSubclass():
        if (storage := storage_of(tensor)) is None:
            return _read_other_tensor(tensor)
        if hasattr(tensor, "_fsdp_flattened") or hasattr(tensor._base, "_fsdp_flattened"):
            # FSDP1 has replaced a parameter by this shard, or by an empty one
            raise pickle.PicklingError(ONLY_A_SHARD)
        memory = memory_of_storage(storage)
        memory.spans.append(span_of(tensor))
        memory.tensors.append(tensor)
        view = (memory, tensor.dtype, tensor.storage_offset(), tuple(tensor.shape), tensor.stride())
        arguments = (type(tensor), *view, tensor.is_conj(), tensor.is_neg(), str(tensor.device))
        return Reading(_make_tensor, arguments, *_state(tensor), _change_tensor)


def _read_other_tensor(tensor: torch.Tensor) -> Reading | None:
    """Read a sparse, nested or uninitialized tensor by its own protocol; changes set new data."""
    with sys.modules["torch"]._C.DisableTorchFunctionSubclass():
        made: Any = tensor.__reduce_ex__(4)
        if len(made) > 2:
            return read_reduced(tensor, made)
        return Reading(
            _make_other, (type(tensor), made[0], made[1]), *_state(tensor), _change_other
        )


def _state(tensor: torch.Tensor) -> tuple[Callable[..., None], Any]:
    leaf = tensor.is_leaf
    state = (
        leaf and tensor.requires_grad,
        tensor.grad if leaf or tensor.retains_grad else None,
        dict(tensor.__dict__),
        tensor._backward_hooks if leaf else None,
        getattr(tensor, "_post_accumulate_grad_hooks", None) if leaf else None,
    )
    return _set_tensor, None if state == (False, None, {}, None, None) else state


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
    # otherwise torch keeps the tensor for a later torch.load to validate
    torch._utils._validate_loaded_sparse_tensors()
    return made


def _set_tensor(tensor: torch.Tensor, state: tuple[Any, ...] | None) -> None:
    requires_grad, grad, attributes, hooks, grad_hooks = state or (False, None, {}, None, None)
    with sys.modules["torch"]._C.DisableTorchFunctionSubclass():
        tensor.__dict__.clear()
        tensor.__dict__.update(attributes)
        if not tensor.is_leaf:
            return
        tensor.requires_grad_(requires_grad)
        if tensor.grad is not grad:  # the present gradient may have another dtype
            tensor.grad = (
                grad if grad is None or grad.device == tensor.device else grad.to(tensor.device)
            )
        if tensor._backward_hooks is not hooks:
            tensor._backward_hooks = hooks
        if getattr(tensor, "_post_accumulate_grad_hooks", None) is not grad_hooks:
            tensor._post_accumulate_grad_hooks = grad_hooks


def _change_tensor(tensor: Any, _: Any, cls: Any, *arguments: Any) -> None:
    """Change the view of a tensor; a tensor that the cell moved stays on its device here.

    It gets the new values on that device.
    """
    import torch

    data = _make_tensor(torch.Tensor, *arguments)
    with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
        if type(tensor) is not cls:
            tensor.requires_grad_(False)
            tensor.__class__ = cls  # lazy modules do the same
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
    """Tell whether a tensor of this class holds one rank's part of a value."""
    names = (
        f"{c.__module__.replace('tensor._api', 'tensor')}.{c.__qualname__}" for c in cls.__mro__
    )
    return not _SHARDED.isdisjoint(names)


def _parts_of_whole(tensor: Any) -> tuple[Any, ...]:
    import torch

    mesh: Any = getattr(tensor, "device_mesh", None)
    there = mesh is not None and mesh.get_coordinate() is not None
    if not there or any(
        mesh.size(n) > 1 and not p.is_replicate() for n, p in enumerate(tensor.placements)
    ):
        raise pickle.PicklingError(ONLY_A_SHARD)
    with torch.no_grad():
        whole = tensor.to_local()
    leaf = tensor.is_leaf
    parameter = isinstance(tensor, torch.nn.Parameter)
    return whole, parameter, leaf and tensor.requires_grad, tensor.grad if leaf else None


def _make_whole(whole: Any, parameter: bool, requires_grad: bool, grad: Any) -> Any:
    import torch

    made = torch.nn.Parameter(whole, False) if parameter else whole.detach()
    made.requires_grad_(requires_grad)
    made.grad = grad
    return made


# ---------------------------------------------------------------- arrays


def is_array(value: Any) -> bool:
    """Tell whether a value is an array, without importing NumPy."""
    numpy = loaded("numpy")
    return numpy is not None and hasattr(numpy, "ndarray") and isinstance(value, numpy.ndarray)


def array_reader(cls: Any) -> Callable[[Any], Reading | None] | None:
    """Return the reader for arrays of a class; None for others, and for classes with a protocol."""
    numpy = loaded("numpy")
    if numpy is None or not hasattr(numpy, "ndarray"):
        return None
    if issubclass(cls, numpy.dtype):
        return _read_dtype
    if not issubclass(cls, numpy.ndarray):
        return None
    masked = attribute_of("numpy.ma", "MaskedArray", numpy.ndarray)
    known = (numpy.ndarray, masked)
    keeps = any(
        cls.__reduce__ is k.__reduce__ and cls.__setstate__ is k.__setstate__ for k in known
    )
    return _read_array if keeps else None


def _address(array: Any) -> int:
    return int(array.__array_interface__["data"][0])


def _reach(array: Any) -> tuple[int, int]:
    if not array.size:
        return 0, 0
    steps = [
        (length - 1) * stride for length, stride in zip(array.shape, array.strides, strict=True)
    ]
    return sum(s for s in steps if s < 0), sum(s for s in steps if s > 0) + array.itemsize


def _root(array: Any) -> Any:
    """Return the root of array views, skipping the helper objects that ``as_strided`` makes."""
    while True:
        base = array.base
        if hasattr(base, "__array_interface__") and not is_array(base):
            base = getattr(base, "base", None)
        if not is_array(base):
            return array
        array = base


def _memory_of(array: Any, root: Any) -> MemoryRange | None:
    """Return the memory that an array uses; None if it has none.

    The memory belongs to a tensor, or to the root of the views.
    """
    low, end = _reach(array)
    if not root.nbytes:
        return None
    raw = root.base.obj if type(root.base) is memoryview else root.base
    if is_tensor(root.base) and root.base.device.type == "cpu":
        memory = memory_of_storage(root.base.untyped_storage())
    elif isinstance(raw, ctypes.Array) and hasattr(raw, "owner"):
        # the memory with which the array arrived; it may be larger than the array
        memory = MemoryRange(ctypes.addressof(raw), ctypes.sizeof(raw), raw)
    else:
        first, last = _reach(root)
        memory = MemoryRange(
            _address(root) + first, last - first, root, lambda: _address(root) + _reach(root)[0]
        )
    shift = _address(array) - memory.address
    memory.spans.append((shift + low, shift + end))
    return memory


def _read_array(array: Any) -> Reading | None:
    if array.dtype.hasobject:
        return None
    root = _root(array)
    of_file = _is_of_file(root)
    if root is array and of_file:
        return _read_file(array)
    memory = root if of_file else _memory_of(array, root)
    start = (
        _address(array) if memory is None else _address(root) if memory is root else memory.address
    )
    view = (type(array), memory, array.dtype, array.shape, array.strides, _address(array) - start)
    return Reading(_make_array, view, *_insides(array))


def _read_dtype(dtype: Any) -> Reading | None:
    """Read a dtype by name if the name is sufficient, so that it becomes NumPy's own object."""
    import numpy as np

    by_name = dtype.metadata is None and dtype.names is None and np.dtype(dtype.str) is dtype
    return Reading(np.dtype, (dtype.str,)) if by_name else None


def _insides(array: Any) -> tuple[Callable[[Any, Any], None] | None, Any]:
    if not type(array).__dictoffset__ and array.flags.writeable:
        return _set_array, None
    attributes, slots = read_insides(array)
    if attributes and "_mmap" in attributes:  # a memmap's, which belongs to its process
        attributes = {name: item for name, item in attributes.items() if name != "_mmap"}
    return _set_array, (attributes, slots, array.flags.writeable)


def _make_array(cls: Any, memory: Any, dtype: Any, shape: Any, strides: Any, offset: int) -> Any:
    import numpy as np

    if memory is None:
        return np.ndarray.__new__(cls, shape, dtype)
    if isinstance(memory, MemoryRange):
        return np.ndarray.__new__(cls, shape, dtype, memory.as_buffer(), offset, strides)
    whole = memory if memory.flags.c_contiguous else memory.T
    made = np.ndarray.__new__(cls, shape, dtype, whole, offset, strides)
    if isinstance(made, np.memmap):
        vars(made)["_mmap"] = memory._mmap
    return made


def _set_array(array: Any, state: tuple[Any, ...] | None) -> None:
    attributes, slots, writeable = state or (None, {}, True)
    if "_mmap" in getattr(array, "__dict__", ()):
        attributes = {**(attributes or {}), "_mmap": array.__dict__["_mmap"]}
    set_insides(array, (attributes, slots))
    if array.flags.writeable != writeable:
        array.flags.writeable = writeable


def _is_of_file(root: Any) -> bool:
    """Tell whether an array's memory belongs to a file.

    The memory of a private copy (mode ``c``) does not, nor does that of a file without a name.
    """
    mapped = isinstance(root, sys.modules["numpy"].memmap) and isinstance(root.base, mmap.mmap)
    return (
        mapped and root.mode != "c" and root.filename is not None and Path(root.filename).exists()
    )


def _read_file(root: Any) -> Reading:
    mode = root.mode.replace("w", "r")  # ``w+`` would truncate the file
    order = "C" if root.flags.c_contiguous else "F"
    where = (str(root.filename), root.dtype, mode, root.offset, root.shape, order)
    return Reading(_open_file, (type(root), *where), *_insides(root))


def _open_file(
    cls: Any, file: str, dtype: Any, mode: str, offset: int, shape: Any, order: str
) -> Any:
    """Map a file; a rank that must not write to the file writes to a private copy of its pages."""
    return cls(file, dtype, "c" if mode != "r" and is_closed(file) else mode, offset, shape, order)
