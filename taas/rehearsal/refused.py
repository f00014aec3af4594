"""Rejects calls that cannot be rehearsed, with an error that names the function.

No import fails except cupy's, as if it were not installed. Libraries that import these modules and
never use them therefore work.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch.nn.parallel import comm  # torch.cuda.comm imports its names from there

from taas.base.import_hooks import after_import, around_import
from taas.errors import CannotRehearse
from taas.rehearsal.patches import Arguments, always, replace, rewrite_calls

GRAPHS = "CUDA graphs record what a GPU executes"
NVML = "it reads the sensors of a GPU"
MEMORY = "it looks into GPU memory"
KERNELS = "it compiles or runs a CUDA kernel"
RAW = "it hands out the CUDA library itself"

TORCH_CUDA = {
    **dict.fromkeys(
        ("CUDAGraph", "export_dot", "export_graph_data", "graph", "graph_pool_handle",
         "make_graphed_callables"),
        GRAPHS,
    ),
    **dict.fromkeys(
        ("CUDAPluggableAllocator", "MemPool", "MemPoolContext", "caching_allocator_alloc",
         "caching_allocator_delete", "change_current_allocator", "memory_snapshot", "use_mem_pool"),
        MEMORY,
    ),
    **dict.fromkeys(
        ("clock_rate", "device_memory_used", "memory_usage", "power_draw", "temperature",
         "utilization"),
        NVML,
    ),
    **dict.fromkeys(
        ("GreenContext", "cudart", "current_blas_handle", "current_solver_handle"), RAW
    ),
    "_compile_kernel": KERNELS,
}  # fmt: skip
_REFUSED = (  # a module, its name in messages, and the rejected names with the reasons
    (torch.cuda, "torch.cuda", TORCH_CUDA),
    (torch.cuda.graphs, "torch.cuda",
     {name: why for name, why in TORCH_CUDA.items() if why == GRAPHS}),
    (torch.accelerator, "torch.accelerator", {"Graph": GRAPHS}),
    (torch.cuda.memory, "torch.cuda.memory",
     dict.fromkeys(("_record_memory_history", "_snapshot", "_dump_snapshot", "memory_snapshot"),
                   MEMORY)),
    (torch.cuda.jiterator, "torch.cuda.jiterator",
     dict.fromkeys(("_create_jit_fn", "_create_multi_output_jit_fn"), KERNELS)),
    (torch.cuda.nccl, "torch.cuda.nccl",
     dict.fromkeys(("all_reduce", "reduce", "broadcast", "all_gather", "reduce_scatter"),
                   "it calls NCCL; use torch.distributed")),
    (comm, "torch.cuda.comm",
     dict.fromkeys(("broadcast", "gather", "reduce_add", "reduce_add_coalesced", "scatter"),
                   "it copies from GPU to GPU; use nn.DataParallel, or torch.distributed")),
)  # fmt: skip


def _message(name: str, reason: str) -> str:
    return (
        f"{name} cannot be rehearsed: {reason}, and this run has CPU ranks in place of GPUs. Run"
        " the cell where there are GPUs, or guard the call with `if x.is_cuda:`, which is False"
        " here."
    )


def _refusing(
    name: str, reason: str, error: type[Exception] = CannotRehearse
) -> Callable[..., NoReturn]:
    def refused(*args: Any, **kwargs: Any) -> NoReturn:
        raise error(_message(name, reason))

    return refused


def _refuse_names(module: Any, called: str, table: dict[str, str]) -> None:
    for name, reason in table.items():
        old, refused = getattr(module, name, None), _refusing(f"{called}.{name}", reason)
        if isinstance(old, type):
            old.__new__ = staticmethod(refused)  # type: ignore[method-assign]
        elif old is not None:
            replace(module, name, refused)


def _refuse_cuda_sources(module: Any) -> None:
    """Reject CUDA sources in ``torch.utils.cpp_extension``, which builds C++ extensions."""
    for name in ("load", "load_inline"):
        rewrite_calls(module, name, functools.partial(_check_sources, name))


def _check_sources(function: str, given: Arguments) -> None:
    sources = given.get("sources", ())
    files = [sources] if isinstance(sources, str) else list(sources)
    kernels = given.get("cuda_sources") or any(
        str(file).endswith((".cu", ".cuh")) for file in files
    )
    if kernels or given.get("with_cuda"):
        called = f"torch.utils.cpp_extension.{function}({given['name']!r}) with CUDA sources"
        raise CannotRehearse(_message(called, KERNELS))


def _refuse_triton(module: Any) -> None:
    """Reject launches of kernels in ``triton.runtime.jit``; defining kernels is allowed."""

    def run(self: Any, *args: Any, **kwargs: Any) -> NoReturn:
        raise CannotRehearse(
            _message(f"the Triton kernel {self.fn.__name__}", "Triton compiles for a GPU")
        )

    module.JITFunction.run = run


def _refuse_nvml(module: Any) -> None:
    """Reject the initialisation of ``pynvml``.

    Code that can work without NVML catches NVML's error.
    """

    class NVMLCannotBeRehearsed(CannotRehearse, module.NVMLError_LibraryNotFound):
        __str__ = Exception.__str__

    module.nvmlInit = module.nvmlInitWithFlags = _refusing("pynvml", NVML, NVMLCannotBeRehearsed)


class _CupyCannotBeRehearsed(CannotRehearse, ImportError):
    """The error of importing cupy; a program that works without cupy catches an ImportError."""


def install() -> None:
    """Reject functions of torch, and of libraries that may be imported later."""
    for module, called, table in _REFUSED:
        _refuse_names(module, called, table)
    after_import("torch.utils.cpp_extension", _refuse_cuda_sources)
    # libraries that choose Triton kernels for GPUs then use their other kernels
    after_import("torch.utils._triton", lambda module: replace(module, "has_triton", always(False)))
    after_import("triton.runtime.jit", _refuse_triton)
    after_import("pynvml", _refuse_nvml)
    around_import({"cupy"}, _refusing("cupy", "it computes on a GPU", _CupyCannotBeRehearsed))
