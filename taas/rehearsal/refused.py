"""What cannot be rehearsed says so by name, where it is called.

Nothing here stops an import: libraries that import these modules and never use them go on. ``import cupy`` fails
as if it were not installed, for the same libraries.
"""

from __future__ import annotations

import functools
import importlib.abc
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, NoReturn

import torch
from torch.nn.parallel import comm  # torch.cuda.comm takes its names from here

from taas.errors import CannotRehearse
from taas.import_hooks import after_import
from taas.rehearsal.patches import Arguments, replace, rewrite_calls

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


def _refusing(name: str, reason: str) -> Callable[..., NoReturn]:
    def refused(*args: Any, **kwargs: Any) -> NoReturn:
        raise CannotRehearse(_message(name, reason))

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
        _refusing(f"torch.utils.cpp_extension.{function}({given['name']!r}) with CUDA sources", KERNELS)()


def _refuse_triton(module: Any) -> None:
    """``triton.runtime.jit``: kernels may be defined, launching one is refused under its name."""

    def run(self: Any, *args: Any, **kwargs: Any) -> NoReturn:
        _refusing(f"the Triton kernel {self.fn.__name__}", "Triton compiles for a GPU")()

    module.JITFunction.run = run


def _no_triton(module: Any) -> None:
    """``torch.utils._triton``: libraries that choose Triton kernels where there are GPUs keep to their others."""
    module.has_triton = lambda *args, **kwargs: False


def _refuse_nvml(module: Any) -> None:
    """``pynvml``: initialising fails with an error that those who expect NVML's own also catch."""
    own = getattr(module, "NVMLError_LibraryNotFound", Exception)

    class NVMLCannotBeRehearsed(CannotRehearse, own):  # type: ignore[misc, valid-type]
        def __str__(self) -> str:
            return _message("pynvml", NVML)

    def fail(*args: Any, **kwargs: Any) -> NoReturn:
        raise NVMLCannotBeRehearsed

    for name in ("nvmlInit", "nvmlInit_v2", "nvmlInitWithFlags"):
        if hasattr(module, name):
            setattr(module, name, fail)


class _CupyCannotBeRehearsed(CannotRehearse, ImportError):
    """Also an ImportError: libraries that can do without cupy go on."""


class _NoCupy(importlib.abc.MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname == "cupy":
            raise _CupyCannotBeRehearsed(_message("cupy", "it computes on a GPU"))
        return None


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
    sys.meta_path.insert(0, _NoCupy())
