"""Rehearses process groups, meshes and the wrappers for many GPUs: gloo replaces NCCL.

If possible, a patch rewrites the arguments and calls torch's own function, so that semantics and
errors stay torch's.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from types import FrameType
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.cpu
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import device_mesh
from torch.distributed.nn.functional import _AllReduce
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves

from taas.base.import_hooks import after_import
from taas.rehearsal.devices import CPU, as_cpu, existing
from taas.rehearsal.patches import (
    Arguments,
    always,
    replace,
    replace_all,
    replace_everywhere,
    rewrite_calls,
)


def gloo_for(backend: Any) -> Any:
    """Return the backend that replaces the requested one.

    ``nccl`` becomes ``gloo``, ``cpu:gloo,cuda:nccl`` becomes ``cpu:gloo``; others stay unchanged.
    """
    if not isinstance(backend, str):
        return backend
    if ":" in backend:
        return (
            ",".join(pair for pair in backend.lower().split(",") if not pair.startswith("cuda:"))
            or "gloo"
        )
    return "gloo" if backend.lower().startswith("nccl") else backend


def _rewrite_group(arguments: Arguments) -> None:
    if (device := arguments.pop("device_id", None)) is not None:
        existing(device)
    if type(arguments.get("pg_options")).__qualname__.startswith("ProcessGroupNCCL"):
        del arguments["pg_options"]
    if arguments.get("backend") is not None:
        arguments["backend"] = gloo_for(arguments["backend"])


def _rewrite_init(arguments: Arguments) -> None:
    _rewrite_group(arguments)
    # without a backend, torch would choose its default for CUDA
    arguments["backend"] = arguments.get("backend") or "gloo"


# ----------------------------------------------------------------------- backends of groups
#
# A program gets the name of the backend that it requested, because libraries compare it with the
# name that they would have requested. torch's own code, which works differently for each backend,
# gets the real one.

_asked: WeakKeyDictionary[Any, str] = WeakKeyDictionary()
"""The backend that the program requested, as torch spells it, by process group."""
_real_backend, _real_config = dist.get_backend, dist.distributed_c10d.get_backend_config


def _make_of_gloo(name: str, rewrite: Callable[[Arguments], None]) -> None:
    """Let a function create its groups with gloo, and record the requested backend.

    Other groups inherit the backend of the default group.
    """
    original = getattr(dist, name)
    signature = inspect.signature(original)

    @functools.wraps(original)
    def make(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        backend = bound.arguments.get("backend")
        rewrite(bound.arguments)
        made = original(*bound.args, **bound.kwargs)
        asked = str(dist.Backend(backend)) if backend else _asked.get(dist.group.WORLD)
        groups = tree_leaves(made if made is not None else dist.group.WORLD)
        if asked is not None:
            # torch returns a number instead of the group to a rank outside it
            _asked.update(
                {group: asked for group in groups if isinstance(group, dist.ProcessGroup)}
            )
        return made

    replace_everywhere(dist, name, make)


def _asks_itself(caller: FrameType | None) -> bool:
    """Return whether the caller is torch's own code."""
    return caller is not None and str(caller.f_globals.get("__name__")).startswith("torch.")


def _get_backend(group: Any = None) -> str:
    real = _real_backend(group)
    return (
        real
        if _asks_itself(sys._getframe().f_back)
        else _asked.get(group or dist.group.WORLD, real)
    )


def _get_backend_config(group: Any = None) -> str:
    real = _real_config(group)
    asked = None if _asks_itself(sys._getframe().f_back) else _asked.get(group or dist.group.WORLD)
    return real if asked is None else str(dist.distributed_c10d.BackendConfig(dist.Backend(asked)))


# ---------------------------------------------------------------- devices, meshes, wrappers


def _without_devices(arguments: Arguments) -> None:
    for device in arguments.pop("device_ids", None) or ():
        existing(device)


def _rewrite_ddp(arguments: Arguments) -> None:
    devices: Sequence[Any] = arguments.get("device_ids") or ()
    if len(devices) > 1:
        return  # torch rejects it with its own message
    for device in [*devices, arguments.get("output_device")]:
        if device is not None:
            existing(device)
    arguments["device_ids"] = arguments["output_device"] = None


def _rewrite_fsdp(arguments: Arguments) -> None:
    as_cpu(arguments.get("device_id"))
    arguments["device_id"] = CPU


def _rewrite_mesh(arguments: Arguments) -> None:
    if arguments.get("device_type") == "cuda":
        arguments["device_type"] = "cpu"


def _split_unnoticed(*args: Any, out: Sequence[Tensor], **kwargs: Any) -> None:
    """Copy from tensors that FSDP2 has gathered; preserve the version counters of ``out``.

    torch 2.6 relies on CUDA's kernel, which autograd does not count as a change.
    """
    with ExitStack() as uncounted:
        for tensor in out:
            uncounted.enter_context(torch.autograd._unsafe_preserve_version_counter(tensor))
        _split_with_sizes_copy(*args, out=list(out), **kwargs)


_split_with_sizes_copy = torch.split_with_sizes_copy


# -------------------------------------------------------- SyncBatchNorm: the sums go over all ranks
#
# In fp32 for half-precision inputs, as CUDA's kernels keep them
# (aten/src/ATen/native/cuda/Normalization.cuh).


def _norm_forward(self: nn.SyncBatchNorm, input: Tensor) -> Tensor:  # noqa: A002 - torch's name
    self._check_input_dim(input)
    self._check_non_zero_input_channels(input)
    group = (
        (self.process_group or dist.group.WORLD)
        if self.training and dist.is_initialized()
        else None
    )
    if group is None or dist.get_world_size(group) == 1:
        return _BatchNorm.forward(self, input)

    # The sum over all ranks; the gradient of a rank's value is the sum of all ranks' gradients.
    total = functools.partial(_AllReduce.apply, dist.ReduceOp.SUM, group)
    x = input.float() if input.dtype.itemsize < 4 else input
    others = [dim for dim in range(x.dim()) if dim != 1]
    shape = (1, -1, *[1] * (x.dim() - 2))
    count = float(total(x.new_tensor(float(x.numel() // x.shape[1]))))
    mean = total(x.sum(others)) / count
    centred = x - mean.view(shape)
    var = total(centred.square().sum(others)) / count
    _move_running_statistics(self, mean.detach(), var.detach() * count / max(count - 1, 1))
    out: Tensor = centred * torch.rsqrt(var + self.eps).view(shape)
    if self.affine:
        out = out * self.weight.view(shape) + self.bias.view(shape)
    return out.to(input.dtype)


def _move_running_statistics(norm: nn.SyncBatchNorm, mean: Tensor, var: Tensor) -> None:
    if norm.track_running_stats:
        norm.num_batches_tracked.add_(1)  # type: ignore[union-attr]
        momentum: Any = norm.momentum
        if momentum is None:  # a cumulative average
            momentum = 1.0 / float(norm.num_batches_tracked)  # type: ignore[arg-type]
        for running, value in ((norm.running_mean, mean), (norm.running_var, var)):
            running.lerp_(value.to(running.dtype), momentum)  # type: ignore[union-attr]


# -------------------------------------------------------- calls that NCCL accepts and gloo does not
#
# NCCL only counts elements; gloo requires that the shapes of the whole and of a rank's part agree.
# NCCL averages; gloo does so since torch 2.15, but not for integers.

AVERAGING = {  # the collective, and the argument that holds its result
    "all_reduce": "tensor",
    "reduce": "tensor",
    "reduce_scatter": "output",
    "reduce_scatter_tensor": "output",
}
FLATTENED = {  # the collective, and the arguments that hold the whole and a rank's part of it
    "all_gather_into_tensor": ("output_tensor", "input_tensor"),
    "all_gather_single": ("output_tensor", "input_tensor"),
    "reduce_scatter_tensor": ("input", "output"),
    "reduce_scatter_single": ("input", "output"),
}


def _flatten(arguments: Arguments, names: tuple[str, str]) -> None:
    whole, part = (arguments[name] for name in names)
    as_many = whole.numel() == part.numel() * dist.get_world_size(arguments.get("group"))
    if as_many and whole.is_contiguous() and part.is_contiguous():
        arguments |= {name: arguments[name].detach().view(-1) for name in names}


def _average(name: str, result: str) -> None:
    """Let a collective average by a sum and a division.

    Both have finished when the call returns.
    """
    original = getattr(dist, name)
    signature = inspect.signature(original)

    @functools.wraps(original)
    def collective(*args: Any, **kwargs: Any) -> Any:
        arguments = signature.bind(*args, **kwargs).arguments
        if arguments.get("op") != dist.ReduceOp.AVG:
            return original(*args, **kwargs)
        total, size = arguments[result].detach(), dist.get_world_size(arguments.get("group"))
        work = original(**arguments | {"op": dist.ReduceOp.SUM})
        if work is not None:
            work.wait()
        whole = not (total.is_floating_point() or total.is_complex())
        total.copy_(torch.div(total, max(size, 1), rounding_mode="trunc" if whole else None))
        return work

    replace_everywhere(dist, name, collective)


def _install_collectives() -> None:
    for name, result in AVERAGING.items():
        _average(name, result)
    for name, arguments in FLATTENED.items():
        if hasattr(dist, name):  # torch has had the names ending in "single" since 2.13
            rewrite_calls(dist, name, functools.partial(_flatten, names=arguments))


def install() -> None:
    """Rewrite calls with NCCL or a CUDA device; replace those that only NCCL or CUDA supports."""
    _make_of_gloo("init_process_group", _rewrite_init)
    for name in ("new_group", "new_subgroups", "new_subgroups_by_enumeration"):
        _make_of_gloo(name, _rewrite_group)
    replace_everywhere(dist, "get_backend", _get_backend)
    replace_everywhere(dist.distributed_c10d, "get_backend_config", _get_backend_config)
    rewrite_calls(dist, "barrier", _without_devices)
    replace_everywhere(dist, "is_nccl_available", always(True))
    rewrite_calls(DistributedDataParallel, "__init__", _rewrite_ddp)
    rewrite_calls(device_mesh.DeviceMesh, "__init__", _rewrite_mesh)
    # FSDP1 broadcasts only modules that are on their GPU (sync_module_states); here that is the
    # CPU.
    accept = {"_check_module_states_for_sync_module_states": always(None)}
    after_import("torch.distributed.fsdp._init_utils", lambda module: replace_all(module, accept))
    after_import(
        "torch.distributed.fsdp.fully_sharded_data_parallel",
        lambda module: rewrite_calls(module.FullyShardedDataParallel, "__init__", _rewrite_fsdp),
    )
    # FSDP waits for streams and events. The CPU's stand-in classes lack methods for that, and more
    # of them before torch 2.7.
    for name in {"synchronize", "record_event", "wait_event"} - vars(torch.cpu.Stream).keys():
        setattr(torch.cpu.Stream, name, always(None))
    if torch.__version__ < "2.7":
        replace(torch, "split_with_sizes_copy", _split_unnoticed)
    replace(nn.SyncBatchNorm, "forward", _norm_forward)
    # It would keep DDP from accepting SyncBatchNorm.
    replace(DistributedDataParallel, "_passing_sync_batchnorm_handle", always(None))
    _install_collectives()
