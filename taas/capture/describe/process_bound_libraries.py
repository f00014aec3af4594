"""Libraries whose objects store facts about their process, and determine them at the receiver.

* An ``Accelerator`` wraps again what it has wrapped, before a cell that does not do so itself.
* accelerate's states contain settings (mixed precision) and facts about the process (its number,
  its device). At the receiver, the library's own constructors determine these facts again; in a
  rank, with the rank's process group.
* accelerate's prepared loaders claim, through ``__reduce__``, to be made from their class and its
  base. They are read as their attributes, and send batches to the device of this process.
* transformers' ``TrainingArguments`` store what they have determined about devices.
* Lightning's ``Fabric`` gets its number from the environment, and needs the process group.
* Lightning's ``Trainer`` chooses in its constructor how many processes it works in.
* skorch pickles the objects of a net into bytes in the net's state, where objects cannot be found.
"""

from __future__ import annotations

import contextlib
import datetime
import inspect
import os
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

from taas.base.import_hooks import attribute_of, loaded
from taas.capture.describe.reading import (
    Reading,
    keeps_state_of_object,
    make_plain,
    read_plain,
    turn_into,
)

_ReaderOf = Callable[[Any], Reading | None]
_OF_PROCESS = frozenset({
    "backend", "debug", "device", "device_mesh", "distributed_type", "fork_launched",
    "local_process_index", "num_processes", "process_index",
})  # fmt: skip
_FOUND_OUT = {
    "PartialState": _OF_PROCESS,
    "AcceleratorState": _OF_PROCESS,
    "GradientState": frozenset({"_dataloader_references_ref"}),
}
"""Facts that accelerate's states determine in each process; everything else in them is a setting.
"""
_NOTHING = frozenset[str]()
_PREPARED = "_is_accelerate_prepared"

settings_waiting: dict[type, dict[str, Any]] = {}
"""By class, settings that arrived before the process had determined the facts about itself."""


def found_out_by(cls: type) -> frozenset[str]:
    """Return the attributes of a class's shared dict that each process determines itself."""
    for base in cls.__mro__:
        if base.__module__ == "accelerate.state":
            return _FOUND_OUT.get(base.__qualname__, _NOTHING)
    return _NOTHING


_state_of_process: list[Any] = []
"""This process's instance of accelerate's AcceleratorState, once it was requested."""


def needed_beside(value: Any) -> Any:
    """Return an object that objects like this one need without referring to it.

    Prepared loaders query accelerate's state.
    """
    state = loaded("accelerate.state")
    if (
        state is None
        or type(value) is not state.GradientState
        or not state.AcceleratorState._shared_state
    ):
        return None
    if not _state_of_process:
        made = object.__new__(state.AcceleratorState)
        object.__setattr__(made, "__dict__", state.AcceleratorState._shared_state)
        _state_of_process.append(made)
    return _state_of_process[0]


def _classes(*names: str) -> tuple[type, ...]:
    """Return the imported classes with these full names; Fabric is in two packages."""
    full: list[str] = []
    for name in names:
        is_fabric = name.startswith("fabric.")
        full += ("lightning." + name, "lightning_" + name) if is_fabric else (name,)
    found = (attribute_of(*one.rsplit(".", 1)) for one in full)
    return tuple(cls for cls in found if cls is not None)


def of_kind(name: str, values: Collection[Any]) -> list[Any]:
    """Return the objects of a class, given by its full name."""
    classes = _classes(name)
    if not classes:
        return []
    kinds = {cls for cls in {*map(type, values)} if issubclass(cls, classes)}
    return [value for value in values if type(value) in kinds] if kinds else []


def bound_reader(cls: Any) -> _ReaderOf | None:
    """Return the reader for objects that depend on their process; None for other classes."""
    if issubclass(cls, _classes("accelerate.data_loader.DataLoaderAdapter")):
        return lambda loader: _read_without(loader, ("device",))
    if issubclass(
        cls, _classes("transformers.training_args.TrainingArguments")
    ) and keeps_state_of_object(cls):
        return lambda value: _read_without(value, _OF_ARGUMENTS)
    if issubclass(cls, _classes("fabric.wrappers._FabricDataLoader")):
        return _read_fabrics_loader
    if issubclass(cls, _classes("accelerate.utils.operations.ConvertOutputsToFp32")):
        return read_plain  # a part of a prepared model; its own protocol refuses
    nets = _classes("skorch.net.NeuralNet")
    if nets and issubclass(cls, nets) and cls.__getstate__ is nets[0].__getstate__:
        return read_plain
    return None


def _read_without(value: Any, left: tuple[str, ...]) -> Reading:
    """Read an object as its attributes, without those in ``left`` that are not None."""
    told = {key: item for key, item in value.__dict__.items() if key not in left or item is None}
    return Reading(make_plain, (type(value),), _set_beside, (told, left), turn_into)


def _set_beside(value: Any, state: tuple[dict[str, Any], tuple[str, ...]]) -> None:
    """Set all attributes except those that this process has determined."""
    told, left = state
    own = {key: value.__dict__[key] for key in left if key in value.__dict__}
    value.__dict__.clear()
    value.__dict__.update({**own, **told})


def _read_fabrics_loader(loader: Any) -> Reading:
    """Read a loader that a Fabric has set up; it sends batches to its process's current device."""
    told = {**vars(loader)}
    if told.get("_device") is not None:
        told["_device"] = loaded("torch").device(told["_device"].type)
    return Reading(make_plain, (type(loader),), _set_beside, (told, ()), turn_into)


# ---------------------------------------------------------------- at the receiver


def settle(
    values: Collection[Any], size: int | None, *, without_gpu: bool = False, wrapped: bool = False
) -> None:
    """Settle objects in a process: let them determine which process it is.

    In ranks, this creates a process group, as the libraries do when such objects are created.

    Args:
        values: the objects.
        size: how many ranks the process's run has; None: the process is not a rank.
        without_gpu: whether the process must not look for a GPU.
        wrapped: whether models will be wrapped again.
    """
    settings = {**settings_waiting}
    settings_waiting.clear()
    state = loaded("accelerate.state")
    if state is not None:
        _settle_states(state, settings, values, size, without_gpu=without_gpu)
    if without_gpu:
        return
    if wrapped and size and size > 1:
        for module in of_kind("torch.nn.Module", values):
            _forget_prepared(module)
    for name, settle_one in _SETTLED:
        for value in of_kind(name, values):
            settle_one(value, size)


def _settle_states(
    state: Any,
    settings: dict[type, dict[str, Any]],
    values: Collection[Any],
    size: int | None,
    *,
    without_gpu: bool,
) -> None:
    """Let accelerate's states determine the facts about the process when they first reach it."""
    if not settings:
        return
    own = settings.get(state.AcceleratorState, {})
    on_cpu = own.get("_cpu", settings.get(state.PartialState, {}).get("_cpu", False))
    if not state.PartialState._shared_state:
        state.PartialState(cpu=on_cpu or without_gpu, **(_group_arguments(values) if size else {}))
    if state.AcceleratorState in settings:
        known = inspect.signature(state.AcceleratorState).parameters
        said = {name: item for name, item in own.items() if name in known}
        said |= {
            "mixed_precision": own.get("_mixed_precision"),
            "cpu": on_cpu,
            "_from_accelerator": True,
        }
        state.AcceleratorState(**said)
        state.AcceleratorState._shared_state.update(own)
    if state.GradientState in settings:
        state.GradientState()
        state.GradientState._shared_state.update(settings[state.GradientState])


def _group_arguments(values: Collection[Any]) -> dict[str, Any]:
    """Return the arguments for the process group, from an Accelerator or TrainingArguments."""
    found: dict[str, Any] = {}
    for arguments in of_kind("transformers.training_args.TrainingArguments", values):
        found |= {
            "backend": arguments.ddp_backend,
            "timeout": datetime.timedelta(seconds=arguments.ddp_timeout),
        }
    for accelerator in of_kind("accelerate.accelerator.Accelerator", values):
        if accelerator.init_handler is not None:
            found |= accelerator.init_handler.to_kwargs()
    return {name: item for name, item in found.items() if item is not None}


def _settle_loader(loader: Any, size: int | None) -> None:
    """Let a loader that accelerate has prepared send its batches to this process's device.

    A loader that was prepared in one process may be prepared again in ranks.
    """
    if "device" not in vars(loader):
        vars(loader)["device"] = loaded("accelerate.state").PartialState().device
    if size and size > 1 and not _is_divided(loader):
        vars(loader).pop(_PREPARED, None)


def _forget_prepared(module: Any) -> None:
    """Remove accelerate's mark and its ``forward`` from a model that will be prepared again."""
    attributes = vars(module)
    attributes.pop(_PREPARED, None)
    original = attributes.pop("_original_forward", None)
    if original is None:
        return
    attributes.pop("forward", None)
    if getattr(original, "__func__", None) is not type(module).forward:
        module.forward = original


def _settle_accelerator(accelerator: Any, size: int | None) -> None:
    """Adapt an Accelerator's settings to this process; forget models that arrived unwrapped."""
    if not size:
        return
    if size > 1:
        wrapper = loaded("torch.nn.parallel").DistributedDataParallel
        accelerator._models[:] = [
            model for model in accelerator._models if isinstance(model, wrapper)
        ]
    if accelerator.scaler is not None or accelerator.native_amp:
        return
    with _unchanged_states():
        handlers = [accelerator.scaler_handler] if accelerator.scaler_handler is not None else None
        twin = type(accelerator)(
            mixed_precision=accelerator.mixed_precision, kwargs_handlers=handlers
        )
    accelerator.scaler, accelerator.native_amp = twin.scaler, twin.native_amp


@contextlib.contextmanager
def _unchanged_states() -> Iterator[None]:
    """Restore accelerate's states at the end, whatever its constructors do to them."""
    state = loaded("accelerate.state")
    shared = [getattr(state, name)._shared_state for name in _FOUND_OUT]
    before = [{**one} for one in shared]
    try:
        yield
    finally:
        for one, was in zip(shared, before, strict=True):
            if was:
                one.clear()
                one.update(was)


_OF_ARGUMENTS = ("_n_gpu", "_setup_devices")


def _settle_arguments(arguments: Any, _: int | None) -> None:
    """Let TrainingArguments determine devices: the access does it, and resets the states."""
    if "_setup_devices" not in vars(arguments):
        with _unchanged_states():
            arguments._setup_devices  # noqa: B018  a cached property


def _settle_trainer(trainer: Any, _: int | None) -> None:
    """Tell a Trainer whether it is the main process; its constructor has recorded that."""
    trainer.state.is_local_process_zero = trainer.is_local_process_zero()
    trainer.state.is_world_process_zero = trainer.is_world_process_zero()


def _settle_fabric(fabric: Any, size: int | None) -> None:
    """Give a launched Fabric its process group here, and its device."""
    if size and fabric._launched:
        _enter_strategy(fabric._strategy)


def _settle_fabrics_module(module: Any, size: int | None) -> None:
    """Move a model to its Fabric's device, and wrap it again as the strategy does."""
    strategy, inner = module._strategy, module._forward_module
    if size and _processes_of(strategy) == size and inner is module._original_module:
        _enter_strategy(strategy)
        strategy.module_to_device(inner)
        module._forward_module = strategy.setup_module(inner)


def _enter_strategy(strategy: Any) -> None:
    if not loaded("torch.distributed").is_initialized():
        strategy.setup_environment()


def _settle_skorch(net: Any, size: int | None) -> None:
    """Let a net's accelerator wrap its modules again if they were wrapped in the ranks."""
    if not size or size == 1 or not net._wrapped_with_accelerator:
        return
    for name in net._modules + net._criteria:
        _forget_prepared(getattr(net, name + "_"))
    net._wrapped_with_accelerator = False
    net._initialize_accelerator()


_SETTLED = (
    ("transformers.training_args.TrainingArguments", _settle_arguments),
    ("accelerate.data_loader.DataLoaderAdapter", _settle_loader),
    ("accelerate.accelerator.Accelerator", _settle_accelerator),
    ("transformers.trainer.Trainer", _settle_trainer),
    ("fabric.fabric.Fabric", _settle_fabric),
    ("fabric.wrappers._FabricModule", _settle_fabrics_module),
    ("skorch.hf.AccelerateMixin", _settle_skorch),
)
"""For each class: the function that settles its objects."""


# ---------------------------------------------------------------- at the sender


def wraps(words: Collection[str]) -> bool:
    """Tell whether code with these words lets a library wrap modules again."""
    if "Trainer" in words or "Learner" in words:
        return True
    return not {"setup", "setup_module"}.isdisjoint(words) and bool(
        _classes("fabric.fabric.Fabric")
    )


_TRAINERS = (
    "lightning.pytorch.trainer.trainer.Trainer",
    "pytorch_lightning.trainer.trainer.Trainer",
)
_RENEW = (
    "transformers.trainer.Trainer",
    "accelerate.accelerator.Accelerator",
    *_TRAINERS,
    "fabric.wrappers._FabricModule",
    "skorch.hf.AccelerateMixin",
)
"""Classes whose objects :func:`renews` handles."""
_REFUSED = (
    "accelerate.data_loader.DataLoaderShard",
    "fabric.fabric.Fabric",
    "torch.distributed.optim.ZeroRedundancyOptimizer",
)
"""Further classes whose objects :func:`misfit` handles."""


def kinds_asked(kinds: Iterable[type]) -> set[type]:
    """Return the classes whose objects :func:`renews` and :func:`misfit` handle.

    A notebook may have a million objects of other classes, and each call takes microseconds.
    """
    known = _classes(*_RENEW, *_REFUSED)
    return {cls for cls in kinds if issubclass(cls, known)}


def renews(value: Any) -> bool:
    """Tell whether an object recreates its loaders and wrapped models, or only lists them.

    A Trainer recreates them when it trains; for Fabric and skorch, :func:`settle` does.
    """
    return any(of_kind(name, [value]) for name in _RENEW)


def models_of(value: Any) -> list[Any]:
    """Return the models that an Accelerator has prepared and can wrap again.

    Return none for any other object, or for an Accelerator that also compiles models.
    """
    if not of_kind("accelerate.accelerator.Accelerator", [value]):
        return []
    plugin = getattr(value.state, "dynamo_plugin", None)
    compiles = plugin is not None and getattr(plugin.backend, "value", "NO") != "NO"
    return [] if compiles else value._models


def wrap_again(accelerator: Any, model: Any) -> Any:
    """Return a model with the wrapper that an Accelerator gives it in this process."""
    wrapped = accelerator.prepare_model(model)
    setattr(wrapped, _PREPARED, True)
    return wrapped


def prepared_models(values: Collection[Any]) -> list[Any]:
    """Return the models that accelerate has prepared in one process, and so did not wrap."""
    return [model for model in of_kind("torch.nn.Module", values) if _PREPARED in vars(model)]


def misfit(value: Any, size: int, words: Collection[str]) -> tuple[str, str] | None:
    """Return why a run of ``size`` ranks cannot use an object, and what to do; None if it can.

    ``words`` are those of the code that runs: an object that it prepares again can be used.
    """
    if of_kind("accelerate.data_loader.DataLoaderShard", [value]):
        if size > 1 and "prepare" not in words and not _is_divided(value):
            return "was prepared by accelerate for one process", "call prepare again"
        return None
    if of_kind("fabric.fabric.Fabric", [value]) and (of := _processes_of(value._strategy)) != size:
        processes = f"{of} processes" if of > 1 else "one process"
        return f"is a Fabric for {processes}", "make it"
    if size > 1 and not _TRAINS.isdisjoint(words) and is_lone_trainer(value):
        return "is a Trainer for one process", "make it"
    if of_kind("torch.distributed.optim.ZeroRedundancyOptimizer", [value]):
        return "has only what rank 0 had of an optimizer's state", "make it"
    if of_kind("accelerate.accelerator.Accelerator", [value]):
        engine = _engine_of(vars(value.state))
        return (f"has {engine}, which is its process's", "make it") if engine else None
    return None


_OF_ONE_DEVICE = (
    "lightning.pytorch.strategies.single_device.SingleDeviceStrategy",
    "pytorch_lightning.strategies.single_device.SingleDeviceStrategy",
)
_TRAINS = frozenset({"fit", "lr_find", "scale_batch_size"})
"""Methods of Lightning's Trainer that train a model."""


def is_lone_trainer(value: Any) -> bool:
    """Tell whether an object is a Lightning Trainer that has chosen to work in one process.

    It chooses in its constructor. With a Trainer made in a plain cell, each rank would train
    separately.
    """
    if not any(of_kind(name, [value]) for name in _TRAINERS):
        return False
    strategy = value.strategy
    if isinstance(strategy, _classes(*_OF_ONE_DEVICE)):
        return True
    return hasattr(strategy, "num_processes") and _processes_of(strategy) == 1


def _engine_of(state: dict[str, Any]) -> str:
    """Return the part of accelerate's state that only its process can use; '' if there is none."""
    if state.get("parallelism_config") is not None:
        return "a ParallelismConfig"
    if state.get("deepspeed_plugins") is not None:
        return "DeepSpeed"
    needs_plugin = os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true"
    return "an FSDP plugin" if needs_plugin and state.get("fsdp_plugin") is None else ""


def _processes_of(strategy: Any) -> int:
    """Return the number of processes for which a Lightning strategy was made.

    In ranks, only its environment determines this number.
    """
    return int(getattr(strategy, "num_processes", 1) * getattr(strategy, "num_nodes", 1))


def _is_divided(loader: Any) -> bool:
    """Tell whether a loader that accelerate has prepared yields one rank's share."""
    shards = _classes(
        "accelerate.data_loader.BatchSamplerShard", "accelerate.data_loader.IterableDatasetShard"
    )
    base = loader.base_dataloader
    parts = (base.batch_sampler, base.sampler, base.dataset)
    return any(isinstance(part, shards) for part in parts)
