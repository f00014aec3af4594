"""Process groups, meshes and the wrappers for many GPUs: gloo in the place of NCCL, CPUs in the place of GPUs.

Each patch rewrites arguments and calls torch's own function, so meaning and errors stay torch's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.cpu
import torch.distributed as dist
from torch.distributed import device_mesh
from torch.nn.parallel import DistributedDataParallel

from taas.rehearsal.after_import import patch_module
from taas.rehearsal.devices import CPU, as_cpu, existing
from taas.rehearsal.patches import Arguments, replace_everywhere, rewrite_calls


def gloo_for(backend: Any) -> Any:
    """The backend that stands in: ``nccl`` → ``gloo``, ``cpu:gloo,cuda:nccl`` → ``cpu:gloo``; others stay."""
    if not isinstance(backend, str):
        return backend
    if ":" in backend:
        pairs = [pair.split(":") for pair in backend.lower().split(",")]
        on_cpu = [":".join(pair) for pair in pairs if pair[0] != "cuda"]
        return ",".join(on_cpu) or "gloo"
    return "gloo" if backend.lower().startswith("nccl") else backend


def _rewrite_group(arguments: Arguments) -> None:
    device = arguments.pop("device_id", None)
    if device is not None:
        existing(device)
    if type(arguments.get("pg_options")).__qualname__.startswith("ProcessGroupNCCL"):
        del arguments["pg_options"]
    if arguments.get("backend") is not None:
        arguments["backend"] = gloo_for(arguments["backend"])


def _rewrite_init(arguments: Arguments) -> None:
    _rewrite_group(arguments)
    arguments.setdefault("backend", "gloo")
    arguments["backend"] = arguments["backend"] or "gloo"  # torch would ask its default for CUDA


def _flatten(arguments: Arguments, whole: str, part: str) -> None:
    """NCCL counts elements, and takes any shapes of the whole and a rank's part; gloo wants them to agree."""
    tensors = arguments[whole], arguments[part]
    sizes = [tensor.numel() for tensor in tensors]
    if sizes[0] == sizes[1] * dist.get_world_size(arguments.get("group")) and all(
        tensor.is_contiguous() for tensor in tensors
    ):
        arguments[whole], arguments[part] = (tensor.detach().view(-1) for tensor in tensors)


def _flatten_gathered(arguments: Arguments) -> None:
    _flatten(arguments, whole="output_tensor", part="input_tensor")


def _flatten_scattered(arguments: Arguments) -> None:
    _flatten(arguments, whole="input", part="output")


def _without_devices(arguments: Arguments) -> None:
    for device in arguments.pop("device_ids", None) or ():
        existing(device)


def _rewrite_ddp(arguments: Arguments) -> None:
    devices: Sequence[Any] = arguments.get("device_ids") or ()
    if len(devices) > 1:
        return  # torch refuses, with its own words
    for device in [*devices, arguments.get("output_device")]:
        if device is not None:
            existing(device)
    arguments["device_ids"] = arguments["output_device"] = None


def _rewrite_fsdp(arguments: Arguments) -> None:
    if arguments.get("device_id") is not None:
        as_cpu(arguments["device_id"])
    arguments["device_id"] = CPU


def _rewrite_mesh(arguments: Arguments) -> None:
    if arguments.get("device_type") == "cuda":
        arguments["device_type"] = "cpu"


def _split_group(
    parent_pg: Any = None, split_ranks: Sequence[Sequence[int]] | None = None, timeout: Any = None, **_: Any
) -> Any:
    """``dist.split_group``: new gloo groups of the parent's ranks; gloo cannot split."""
    if not split_ranks:
        raise ValueError("split_ranks cannot be None or empty")
    members = dist.get_process_group_ranks(parent_pg or dist.group.WORLD)
    mine = None
    for ranks in split_ranks:
        chosen = [members[rank] for rank in ranks]
        if dist.get_rank() in chosen:
            mine = dist.new_group(chosen, timeout=timeout, use_local_synchronization=True)
    return mine


def _patch_fsdp(module: Any) -> None:
    rewrite_calls(module.FullyShardedDataParallel, "__init__", _rewrite_fsdp)


def _accept_cpu_modules(module: Any) -> None:
    """FSDP1 broadcasts modules that are on their GPU only (``sync_module_states``); here that is the CPU."""
    module._check_module_states_for_sync_module_states = lambda module_states: None


def _let_streams_wait() -> None:
    """FSDP1 waits for the current stream where parameters are offloaded; the CPU's stand-in cannot."""
    if not hasattr(torch.cpu.Stream, "synchronize"):
        torch.cpu.Stream.synchronize = lambda self: None  # type: ignore[attr-defined]


def install() -> None:
    """Rewrite the calls that name NCCL or a CUDA device."""
    rewrite_calls(dist, "init_process_group", _rewrite_init)
    for name in ("new_group", "new_subgroups", "new_subgroups_by_enumeration"):
        rewrite_calls(dist, name, _rewrite_group)
    rewrite_calls(dist, "barrier", _without_devices)
    for rewrite, names in (
        (_flatten_gathered, ("all_gather_into_tensor", "all_gather_single")),
        (_flatten_scattered, ("reduce_scatter_tensor", "reduce_scatter_single")),
    ):
        for name in names:
            if hasattr(dist, name):  # the second came with torch 2.13
                rewrite_calls(dist, name, rewrite)
    replace_everywhere(dist, "is_nccl_available", lambda: True)
    replace_everywhere(dist, "split_group", _split_group)
    rewrite_calls(DistributedDataParallel, "__init__", _rewrite_ddp)
    rewrite_calls(device_mesh.DeviceMesh, "__init__", _rewrite_mesh)
    patch_module("torch.distributed.fsdp._init_utils", _accept_cpu_modules)
    patch_module("torch.distributed.fsdp.fully_sharded_data_parallel", _patch_fsdp)
    _let_streams_wait()
