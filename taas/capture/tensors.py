"""Tensors and storages in a pickle: views of memory that travels beside it.

torch's own reduction copies a storage into bytes several times. Here the stream holds only a storage's
place, and a tensor is (storage, dtype, offset, shape, stride). This module imports torch only to rebuild:
where torch isn't loaded there are no tensors.
"""

from __future__ import annotations

import copyreg
import sys
import weakref
from typing import TYPE_CHECKING, Any

from taas.capture.memory import Block

if TYPE_CHECKING:
    import torch

    from taas.capture.pickling import Pickler

__all__ = [
    "block_of",
    "is_plain_optimizer",
    "is_plain_scheduler",
    "join_devices",
    "join_devices_at_first_step",
    "keeps_pickling_of_object",
    "keeps_state_of_object",
    "moved",
    "new_memory",
    "reduce_optimizer",
    "reduce_scheduler",
    "reduce_storage",
    "reduce_tensor",
    "reduce_typed_storage",
    "storage_over",
    "travels_as_view",
    "wait_for_devices",
]

_rebuilt: weakref.WeakSet[Any] = weakref.WeakSet()
"""Optimizers that were unpickled in this process and not stepped since."""


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the first and the end byte that a tensor uses of its storage."""
    if not tensor.numel():
        return 0, 0
    size = tensor.element_size()
    start = tensor.storage_offset()
    reach = sum((length - 1) * step for length, step in zip(tensor.shape, tensor.stride(), strict=True))
    return int(start * size), int((start + reach + 1) * size)


def block_of(storage: Any) -> Block:
    """Return the block of a storage; a CUDA storage is copied into host memory first."""
    device, staged = str(storage.device), None
    if device != "cpu":
        staged = storage.cpu()
    address = (storage if staged is None else staged).data_ptr()
    return Block(address, storage.nbytes(), device, storage, storage.data_ptr, staged=staged)


def travels_as_view(tensor: torch.Tensor) -> bool:
    """Tell whether a tensor is a dense view of a storage in host or CUDA memory."""
    torch = sys.modules["torch"]
    return (
        tensor.layout is torch.strided
        and tensor.device.type in ("cpu", "cuda")
        and not tensor.is_quantized
        and not torch._C._functorch.is_functorch_wrapped_tensor(tensor)
    )


def reduce_tensor(pickler: Pickler, tensor: torch.Tensor) -> Any:
    """Reduce a dense tensor or parameter; one that has a graph is sent without it.

    The gradient of a leaf and attributes that somebody set on it travel along.
    """
    if not travels_as_view(tensor):
        return NotImplemented
    torch = sys.modules["torch"]
    handle = pickler.storage_handle(tensor.untyped_storage())
    pickler.use(handle, *_span(tensor), tensor)
    leaf = tensor.is_leaf
    pickler.detached += not leaf
    arguments = (
        handle,
        tensor.dtype,
        tensor.storage_offset(),
        tuple(tensor.shape),
        tensor.stride(),
        type(tensor) is torch.nn.Parameter,
        leaf and tensor.requires_grad,
        tensor.is_conj(),
        tensor.is_neg(),
    )
    grad, attributes = tensor.grad if leaf else None, tensor.__dict__
    if grad is None and not attributes:
        return _make_tensor, arguments
    return _make_tensor, arguments, (grad, dict(attributes)), None, None, _set_tensor


def _make_tensor(
    storage: Any,
    dtype: torch.dtype,
    offset: int,
    shape: tuple[int, ...],
    stride: tuple[int, ...],
    parameter: bool,
    requires_grad: bool,
    conjugate: bool,
    negative: bool,
) -> torch.Tensor:
    import torch

    tensor = torch.empty(0, dtype=dtype, device=storage.device).set_(storage, offset, shape, stride)
    if conjugate:
        tensor = torch._conj(tensor)
    if negative:
        tensor = torch._neg_view(tensor)
    if parameter:
        return torch.nn.Parameter(tensor, requires_grad=requires_grad)
    return tensor.requires_grad_() if requires_grad else tensor


def _set_tensor(tensor: torch.Tensor, state: tuple[torch.Tensor | None, dict[str, Any]]) -> None:
    grad, attributes = state
    tensor.__dict__.update(attributes)
    if grad is not None:
        tensor.grad = grad


def reduce_storage(pickler: Pickler, storage: Any) -> Any:
    """Reduce an untyped storage that an object of its own refers to."""
    if storage.device.type not in ("cpu", "cuda"):
        return NotImplemented
    handle = pickler.storage_handle(storage)
    pickler.use(handle, 0, storage.nbytes())
    return _same, (handle,)


def _same(storage: Any) -> Any:
    return storage


def reduce_typed_storage(storage: Any) -> Any:
    """Reduce a typed storage, as torch's own reduction of sparse and quantized tensors holds it."""
    return _make_typed_storage, (storage._untyped_storage, storage.dtype)


def _make_typed_storage(untyped: Any, dtype: torch.dtype) -> Any:
    import torch

    return torch.TypedStorage(wrap_storage=untyped, dtype=dtype, _internal=True)


def storage_over(memory: memoryview) -> Any:
    """Return a torch storage that lies in writable memory and keeps it alive."""
    import torch

    if not memory.nbytes:
        return torch.UntypedStorage(0)
    return torch.frombuffer(memory, dtype=torch.uint8).untyped_storage()


def new_memory(nbytes: int) -> tuple[memoryview, Any]:
    """Return new memory and the torch storage it is; without torch loaded, a bytearray's and None."""
    torch = sys.modules.get("torch")
    if torch is None or not hasattr(torch, "UntypedStorage") or not nbytes:
        return memoryview(bytearray(nbytes)), None
    whole = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
    return memoryview(whole.numpy()), whole.untyped_storage()


def moved(storage: Any, device: str) -> Any:
    """Return a copy of a storage on a device."""
    import torch

    return torch.UntypedStorage(storage.nbytes(), device=device).copy_(storage)


def keeps_pickling_of_object(cls: Any) -> bool:
    """Tell whether a class leaves ``__reduce_ex__`` and ``__reduce__`` as they are."""
    return cls.__reduce_ex__ is object.__reduce_ex__ and cls.__reduce__ is object.__reduce__


def keeps_state_of_object(cls: Any) -> bool:
    """Tell whether a class leaves ``__getstate__`` as it is."""
    return cls.__getstate__ is object.__getstate__


def is_plain_optimizer(cls: type) -> bool:
    """Tell whether a class is an optimizer that pickles as torch's own do."""
    optim = sys.modules.get("torch.optim")
    return (
        optim is not None
        and issubclass(cls, optim.Optimizer)
        and cls.__getstate__ is optim.Optimizer.__getstate__
        and keeps_pickling_of_object(cls)
    )


def reduce_optimizer(optimizer: Any) -> Any:
    """Reduce an optimizer with all its attributes; its own way drops hooks, and what a scheduler noted in it."""
    attributes = {key: value for key, value in optimizer.__dict__.items() if key != "step"}
    return copyreg.__newobj__, (type(optimizer),), attributes, None, None, _set_optimizer  # type: ignore[attr-defined]


def _set_optimizer(optimizer: Any, attributes: dict[str, Any]) -> None:
    optimizer.__dict__.update(attributes)
    optimizer._patch_step_function()
    _rebuilt.add(optimizer)


def wait_for_devices() -> None:
    """Wait until CUDA devices have done all that this process asked of them: copies into pinned memory, too.

    Raises:
        RuntimeError: something failed on a device after the call that asked for it had returned.
    """
    torch = sys.modules.get("torch")
    if torch is None or not hasattr(torch, "cuda") or not torch.cuda.is_initialized():
        return
    has_context = getattr(torch._C, "_cuda_hasPrimaryContext", None)
    for number in range(torch.cuda.device_count()):
        if has_context is None or has_context(number):  # asking the others would give them one
            torch.cuda.synchronize(number)


def join_devices_at_first_step() -> None:
    """In a rank: join the state of an optimizer that travelled when the cell first steps it.

    Parameters that an earlier run trained on a GPU came back to host memory, and the state with them. The cell
    moves the parameters again, but nobody moves the state.
    """
    if not _rebuilt:
        return
    from torch.optim.optimizer import register_optimizer_step_pre_hook

    def join(optimizer: Any, arguments: Any, keywords: Any) -> None:
        del arguments, keywords
        if optimizer in _rebuilt:
            _rebuilt.discard(optimizer)
            join_devices([optimizer])

    register_optimizer_step_pre_hook(join)


def join_devices(objects: list[Any]) -> None:
    """Bring new state of optimizers and new buffers of modules to the device of their parameters.

    Parameters that a cell moved to a GPU come back to the device they had in the notebook; what the cell made
    beside them on the GPU has to follow, or the next step in the notebook fails.

    Args:
        objects: what travelled; tensors among them stay where they are.
    """
    if "torch.optim" not in sys.modules:
        return
    import torch

    known = {id(value) for value in objects}

    def follow(holder: dict[str, Any], device: Any) -> None:
        for key, value in holder.items():
            if key == "step":  # of an optimizer: in host memory on purpose
                continue
            if isinstance(value, torch.Tensor) and id(value) not in known and value.device != device:
                holder[key] = value.to(device)

    for value in objects:
        if isinstance(value, torch.optim.Optimizer):
            for parameter, state in value.state.items():
                follow(state, parameter.device)
        elif isinstance(value, torch.nn.Module):
            devices = {parameter.device for parameter in value.parameters()}
            for module in value.modules() if len(devices) == 1 else ():
                follow(module._buffers, *devices)


def is_plain_scheduler(cls: type) -> bool:
    """Tell whether a class is a learning rate scheduler that pickles as any object."""
    module = sys.modules.get("torch.optim.lr_scheduler")
    return (
        module is not None
        and issubclass(cls, module.LRScheduler)
        and keeps_pickling_of_object(cls)
        and keeps_state_of_object(cls)
    )


def reduce_scheduler(scheduler: Any) -> Any:
    """Reduce a scheduler; where it arrives it marks its optimizer again."""
    state = dict(scheduler.__dict__)
    return copyreg.__newobj__, (type(scheduler),), state, None, None, _set_scheduler  # type: ignore[attr-defined]


def _set_scheduler(scheduler: Any, attributes: dict[str, Any]) -> None:
    scheduler.__dict__.update(attributes)
    if (optimizer := attributes.get("optimizer")) is not None:
        _mark_step(optimizer)


def _mark_step(optimizer: Any) -> None:
    """Mark an optimizer's ``step`` as followed by a scheduler, as the scheduler's constructor does.

    Optimizers pickle without this mark, and a scheduler then warns that ``step`` was overridden.
    """
    step = optimizer.step
    if hasattr(step, "_wrapped_by_lr_sched"):
        return

    def marked(*args: Any, **kwargs: Any) -> Any:
        optimizer._opt_called = True
        return step(*args, **kwargs)

    marked._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    optimizer.step = marked
