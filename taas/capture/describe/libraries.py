"""Read library objects whose own protocols omit parts; move optimizer state to its device.

* Optimizers and schedulers wrap each other's ``step`` in functions of this process; their protocols
  drop hooks.
* pandas copies a block before it writes to it if another frame or series shares the memory. It
  counts these users in an object that the blocks share. Pickle omits this object, so that a column
  taken from a frame would change with the frame. A series' pickle omits the block itself; an index
  made from a column shares its memory, too.
* DataLoaders with persistent workers refer to their worker processes.
* tqdm bars and gradient scalers refer to their process (``progress``).
* Objects with traits (widgets) notify observers when they change; their pickles omit the observers.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from typing import Any

from taas.base.import_hooks import attribute_of, loaded
from taas.capture.describe.process_own import keep_own
from taas.capture.describe.progress import read_bar, read_scaler
from taas.capture.describe.reading import (
    Reading,
    keeps_pickling_of_object,
    make_plain,
    read_reduced,
    turn_into,
)

_rebuilt: weakref.WeakSet[Any] = weakref.WeakSet()
"""Optimizers that were rebuilt in this process and have not stepped since."""

_ReaderOf = Callable[[Any], Reading | None]


def library_reader(cls: Any, *, answers: bool = False) -> _ReaderOf | None:
    """Return the reader for objects of a library's class, or None.

    ``answers``: the objects are sent to the notebook, which has all users of a pandas block.
    """
    traits = attribute_of("traitlets", "HasTraits")
    if traits is not None and issubclass(cls, traits) and cls.__setstate__ is traits.__setstate__:
        return _read_traits
    data = attribute_of("torch.utils.data", "DataLoader")
    if data is not None and issubclass(cls, data) and keeps_pickling_of_object(cls):
        return lambda value: _read(value, _set_loader, "_iterator")
    bar = attribute_of("tqdm.std", "tqdm")
    if bar is not None and issubclass(cls, bar):
        return read_bar
    scaler = attribute_of("torch.amp.grad_scaler", "GradScaler")
    if scaler is not None and issubclass(cls, scaler) and cls.__getstate__ is scaler.__getstate__:
        return read_scaler
    return _reader_of_optimizers(cls) or _reader_of_blocks(cls, answers=answers)


def _read(value: Any, setter: Callable[[Any, Any], None], without: str) -> Reading:
    attributes = {key: item for key, item in value.__dict__.items() if key != without}
    return Reading(make_plain, (type(value),), setter, (attributes,), turn_into)


def _set_loader(loader: Any, state: tuple[dict[str, Any]]) -> None:
    """Set a DataLoader's state; its persistent workers belong to its process."""
    iterator, own = vars(loader).get("_iterator"), keep_own(loader, state[0])
    vars(loader).clear()
    vars(loader).update(*state, **own | {"_iterator": iterator})


# ---------------------------------------------------------------- optimizers and schedulers


def _reader_of_optimizers(cls: Any) -> _ReaderOf | None:
    optim, schedulers = loaded("torch.optim"), loaded("torch.optim.lr_scheduler")
    if optim is None or schedulers is None or not keeps_pickling_of_object(cls):
        return None
    if issubclass(cls, optim.Optimizer) and cls.__getstate__ is optim.Optimizer.__getstate__:
        return lambda value: _read(value, _set_optimizer, "step")
    if issubclass(cls, schedulers.LRScheduler) and cls.__getstate__ is object.__getstate__:
        return lambda value: _read(value, _set_scheduler, "")
    return None


def _set_optimizer(optimizer: Any, state: tuple[dict[str, Any]]) -> None:
    step, own = optimizer.__dict__.get("step"), keep_own(optimizer, state[0])
    optimizer.__dict__.clear()
    optimizer.__dict__.update(*state, **own)
    if step is not None:
        optimizer.step = step
    # ``_patch_step_function`` sets it; some wrappers never call that function
    if "_zero_grad_profile_name" in optimizer.__dict__:
        optimizer._patch_step_function()
    _rebuilt.add(optimizer)


def _set_scheduler(scheduler: Any, state: tuple[dict[str, Any]]) -> None:
    own = keep_own(scheduler, state[0])
    scheduler.__dict__.clear()
    scheduler.__dict__.update(*state, **own)
    if "_step_count" in state[0]:  # ``ReduceLROnPlateau`` does not wrap ``step``
        _mark_step(state[0]["optimizer"])


def _mark_step(optimizer: Any) -> None:
    """Mark ``step`` as wrapped, as a scheduler's constructor does; otherwise torch warns."""
    step = optimizer.step
    if hasattr(step, "_wrapped_by_lr_sched"):
        return

    def marked(*args: Any, **kwargs: Any) -> Any:
        optimizer._opt_called = True
        return step(*args, **kwargs)

    marked._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    optimizer.step = marked


# ---------------------------------------------------------------- pandas blocks


def _reader_of_blocks(cls: Any, *, answers: bool) -> _ReaderOf | None:
    internals = loaded("pandas._libs.internals")
    references = getattr(internals, "BlockValuesRefs", None)
    if references is None:  # pandas is not imported, or does not copy on write
        return None
    if cls is references:  # blocks register with it at the receiver
        return (lambda _: Reading(cls, ())) if answers else _read_references
    if cls is sys.modules["pandas.core.internals.managers"].SingleBlockManager:
        return lambda manager: Reading(cls, (manager.blocks[0], manager.axes[0]))
    if issubclass(cls, sys.modules["pandas.core.indexes.base"].Index):
        return _read_index
    return _read_block if issubclass(cls, internals.Block) else None


def _read_index(index: Any) -> Reading:
    constructor, arguments = index.__reduce__()[:2]
    references = vars(index).get("_references")  # a RangeIndex creates its own on access
    shared = references if references is not None and references.has_reference() else None
    return Reading(constructor, arguments, _set_index, (shared,))


def _set_index(index: Any, state: tuple[Any] | None) -> None:
    (references,) = state or (None,)
    if references is not None:
        index._references = references
        references.add_index_reference(index)


def _read_block(block: Any) -> Reading:
    constructor, arguments = block.__reduce__()[:2]
    return Reading(constructor, arguments, _set_references, (block.refs,))


def _set_references(block: Any, state: tuple[Any]) -> None:
    (block.refs,) = state
    if all(known() is not block for known in block.refs.referenced_blocks):
        block.refs.add_reference(block)


def _read_references(references: Any) -> Reading:
    return Reading(type(references), (), _set_shared, (references.has_reference(),))


def _set_shared(references: Any, state: tuple[bool]) -> None:
    if state[0]:
        # stands for frames of the notebook
        references.referenced_blocks.append(weakref.ref(_set_shared))


# ---------------------------------------------------------------- traits: widgets


def _read_traits(value: Any) -> Reading | None:
    constructor, arguments, state = value.__reduce_ex__(4)[:3]
    told = {**state, "_trait_notifiers": _added_observers(value)}
    return read_reduced(value, (constructor, arguments, told, None, None, _set_traits))


def _added_observers(value: Any) -> dict[Any, Any]:
    """Return the observers of traits, except the methods that the object's class registers."""
    handler = sys.modules["traitlets"].EventHandler
    found = {
        name: {
            kind: [one for one in ones if not isinstance(one, handler)]
            for kind, ones in kinds.items()
        }
        for name, kinds in value._trait_notifiers.items()
    }
    left = {
        name: {kind: ones for kind, ones in kinds.items() if ones} for name, kinds in found.items()
    }
    return {name: kinds for name, kinds in left.items() if kinds}


def _set_traits(value: Any, state: dict[str, Any]) -> None:
    value.__setstate__({**state, "_trait_notifiers": {}})
    for name, kinds in state["_trait_notifiers"].items():
        for kind, observers in kinds.items():
            for observer in observers:
                value._add_notifiers(observer, name, kind)


# ---------------------------------------------------------------- devices


def wait_for_devices() -> None:
    """Wait until all CUDA devices are idle; raise :class:`RuntimeError` for work that failed."""
    torch = loaded("torch")
    if torch is None or not hasattr(torch, "cuda") or not torch.cuda.is_initialized():
        return
    has_context = getattr(torch._C, "_cuda_hasPrimaryContext", None)
    for number in range(torch.cuda.device_count()):
        if has_context is None or has_context(number):  # synchronize() would create a context
            torch.cuda.synchronize(number)


def join_devices_at_first_step() -> None:
    """In a rank: move the state of a received optimizer when the cell first steps the optimizer.

    Parameters that were trained on a GPU came back to host memory, together with the optimizer's
    state. The cell moves the parameters to the GPU again, but nothing moves the state.
    """
    if not _rebuilt:
        return
    from torch.optim.optimizer import register_optimizer_step_pre_hook

    def join(optimizer: Any, *_: Any) -> None:
        if optimizer in _rebuilt:
            _rebuilt.discard(optimizer)
            join_devices([optimizer])

    register_optimizer_step_pre_hook(join)


def join_devices(objects: list[Any]) -> None:
    """Move new state of optimizers and new buffers of modules to the device of their parameters.

    Parameters that a cell moved to a GPU return to the device that they had. Other tensors that the
    cell created on the GPU for them have to follow, or the next step in the notebook fails. Tensors
    that are in ``objects`` stay where they are.
    """
    if loaded("torch.optim") is None:
        return
    import torch

    known = {id(value) for value in objects}

    def follow(holder: dict[str, Any], device: Any) -> None:
        for key, value in holder.items():
            if key == "step":  # an optimizer keeps it in host memory on purpose
                continue
            if (
                isinstance(value, torch.Tensor)
                and id(value) not in known
                and value.device != device
            ):
                holder[key] = value.to(device)

    for value in objects:
        if isinstance(value, torch.optim.Optimizer):
            for parameter, state in value.state.items():
                follow(state, parameter.device)
        elif isinstance(value, torch.nn.Module):
            devices = {parameter.device for parameter in value.parameters()}
            for module in value.modules() if len(devices) == 1 else ():
                follow(module._buffers, *devices)
