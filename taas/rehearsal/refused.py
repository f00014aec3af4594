"""What cannot be rehearsed says so by name, where it is called.

Nothing here stops an import but cupy's, as if it were not installed: libraries that import these modules and never use
them go on.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Mapping
from types import FunctionType, ModuleType
from typing import Any, NoReturn

import torch
from torch.nn.parallel import comm  # torch.cuda.comm takes its names from here

from taas.errors import CannotRehearse
from taas.import_hooks import after_import, around_import
from taas.rehearsal.patches import Arguments, always, replace, rewrite_calls
from taas.rehearsal.streams import Event, Stream
from taas.wording import shown

GRAPHS = "CUDA graphs record what a GPU executes"
NVML = "it reads the sensors of a GPU"
MEMORY = "it looks into GPU memory"
KERNELS = "it compiles or runs a CUDA kernel"
RAW = "it hands out the CUDA library itself"

TORCH_CUDA = {
    **dict.fromkeys(
        ("CUDAGraph", "export_dot", "export_graph_data", "graph", "graph_pool_handle", "make_graphed_callables"),
        GRAPHS,
    ),
    **dict.fromkeys(
        ("CUDAPluggableAllocator", "MemPool", "MemPoolContext", "caching_allocator_alloc", "caching_allocator_delete",
         "change_current_allocator", "memory_snapshot", "use_mem_pool"),
        MEMORY,
    ),
    **dict.fromkeys(
        ("clock_rate", "device_memory_used", "memory_usage", "power_draw", "temperature", "utilization"), NVML
    ),
    **dict.fromkeys(("GreenContext", "cudart", "current_blas_handle", "current_solver_handle"), RAW),
    "_compile_kernel": KERNELS,
}  # fmt: skip
TORCH_CUDA_MEMORY = dict.fromkeys(
    ("_record_memory_history", "_snapshot", "_dump_snapshot", "memory_snapshot"), MEMORY
)
TORCH_CUDA_JITERATOR = dict.fromkeys(("_create_jit_fn", "_create_multi_output_jit_fn"), KERNELS)
TORCH_CUDA_NCCL = dict.fromkeys(
    ("all_reduce", "reduce", "broadcast", "all_gather", "reduce_scatter"),
    "it calls NCCL; use torch.distributed",
)

TORCH_CUDA_COMM = dict.fromkeys(
    ("broadcast", "gather", "reduce_add", "reduce_add_coalesced", "scatter"),
    "it copies from GPU to GPU; use nn.DataParallel, or torch.distributed",
)


def _message(name: str, reason: str) -> str:
    return (
        f"{name} cannot be rehearsed: {reason}, and this run has CPU ranks in place of GPUs. "
        "Run the cell where there are GPUs, or guard the call with `if x.is_cuda:`, which is False here."
    )


def _refusing(
    name: str, reason: str, error: type[CannotRehearse] = CannotRehearse
) -> Callable[..., NoReturn]:
    def refused(*args: Any, **kwargs: Any) -> NoReturn:
        raise error(_message(name, reason))

    return refused


def _refuse_names(module: Any, table: dict[str, str], called: str | None = None) -> None:
    for name, reason in table.items():
        old = getattr(module, name, None)
        refused = _refusing(f"{called or module.__name__}.{name}", reason)
        if isinstance(old, type):
            old.__new__ = staticmethod(refused)  # type: ignore[method-assign]
        elif old is not None:
            replace(module, name, refused)


def _refuse_cuda_sources(module: Any) -> None:
    """``torch.utils.cpp_extension``: C++ extensions build, CUDA ones are refused."""
    for name in ("load", "load_inline"):
        rewrite_calls(module, name, functools.partial(_check_sources, name))


def _check_sources(function: str, given: Arguments) -> None:
    sources = given.get("sources", ())
    files = [sources] if isinstance(sources, str) else list(sources)
    kernels = given.get("cuda_sources") or any(str(file).endswith((".cu", ".cuh")) for file in files)
    if kernels or given.get("with_cuda"):
        called = f"torch.utils.cpp_extension.{function}({given['name']!r}) with CUDA sources"
        raise CannotRehearse(_message(called, KERNELS))


def _refuse_triton(module: Any) -> None:
    """``triton.runtime.jit``: kernels may be defined, launching one is refused under its name."""

    def run(self: Any, *args: Any, **kwargs: Any) -> NoReturn:
        raise CannotRehearse(_message(f"the Triton kernel {self.fn.__name__}", "Triton compiles for a GPU"))

    module.JITFunction.run = run


def _no_triton(module: Any) -> None:
    """``torch.utils._triton``: libraries that choose Triton kernels where there are GPUs keep to their others."""
    module.has_triton = always(False)


def _refuse_nvml(module: Any) -> None:
    """``pynvml`` does not initialise; those who can do without NVML catch its own error."""

    class NVMLCannotBeRehearsed(CannotRehearse, module.NVMLError_LibraryNotFound):
        __str__ = Exception.__str__

    module.nvmlInit = module.nvmlInitWithFlags = _refusing("pynvml", NVML, NVMLCannotBeRehearsed)


class _CupyCannotBeRehearsed(CannotRehearse, ImportError):
    """Those who can do without cupy catch an ImportError."""


def install() -> None:
    """Refuse by name, in torch and in libraries that may be imported later."""
    _refuse_names(torch.cuda, TORCH_CUDA)
    _refuse_names(
        torch.cuda.graphs, {name: GRAPHS for name in TORCH_CUDA if TORCH_CUDA[name] == GRAPHS}, "torch.cuda"
    )
    _refuse_names(torch.cuda.memory, TORCH_CUDA_MEMORY)
    _refuse_names(torch.cuda.jiterator, TORCH_CUDA_JITERATOR)
    _refuse_names(torch.cuda.nccl, TORCH_CUDA_NCCL)
    _refuse_names(comm, TORCH_CUDA_COMM, "torch.cuda.comm")
    _refuse_names(torch.accelerator, {"Graph": GRAPHS})
    after_import("torch.utils.cpp_extension", _refuse_cuda_sources)
    after_import("torch.utils._triton", _no_triton)
    after_import("triton.runtime.jit", _refuse_triton)
    after_import("pynvml", _refuse_nvml)
    around_import({"cupy"}, _refusing("cupy", "it computes on a GPU", _CupyCannotBeRehearsed))


# ---------------------------------------------------------------- what remembers a device afterwards
#
# What a rehearsed cell made for a device remembers it, where the notebook has none: a loader of accelerate's, a Trainer. In
# a plain cell such an object sends tensors there, which raises. So the cell that made it says what to do.

_CLOSED = (torch.Tensor, type, ModuleType, FunctionType, Stream, Event)
"""What is not looked into, as it belongs to all, or sends nothing anywhere."""
_MOST = 10_000
"""So many parts of an object are looked at, the nearest first."""


def remembered(names: Mapping[str, Any]) -> tuple[str, ...]:
    """Say which objects remember a CUDA device, and where they can be used; nothing if there are none."""
    found = [
        name for name, value in names.items() if not isinstance(value, torch.device) and _remembers(value)
    ]
    if not found:
        return ()
    said = (
        f"made for cuda devices, which this machine lacks: {shown(', '.join(found), 200)}. They work in cells with a header; in a "
        "plain cell, what they send to a device raises (no NVIDIA driver): make them anew there, and bring models and "
        "tensors with .cpu()."
    )
    if any(type(names[name]).__module__.startswith("accelerate.") for name in found):
        said += (
            " accelerate's state has ended with the ranks: a later cell begins with `accelerator = Accelerator()`; "
            "a prepared loader has a rank's share of the data."
        )
    return (said,)


def _remembers(value: Any) -> bool:
    parts, seen = [value], {id(value)}
    for part in parts:  # it grows meanwhile
        if isinstance(part, torch.device):
            if part.type == "cuda":
                return True
        elif len(parts) < _MOST and not isinstance(part, _CLOSED) and not _is_long(part):
            new = [inner for inner in gc.get_referents(part) if id(inner) not in seen]
            parts += new[: _MOST - len(parts)]
            seen.update(map(id, new))
    return False


def _is_long(part: Any) -> bool:
    return isinstance(part, (list, tuple, dict, set)) and len(part) > _MOST
