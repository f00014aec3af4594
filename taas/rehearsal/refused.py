"""What cannot be rehearsed says so by name, where it is called.

Nothing here stops an import: libraries that import these modules and never use them go on. ``import cupy`` fails
as if it were not installed, for the same libraries.
"""

from __future__ import annotations

import importlib.abc
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, NoReturn

import torch

from taas.errors import CannotRehearse
from taas.rehearsal.after_import import patch_module
from taas.rehearsal.patches import replace

GRAPHS = "CUDA graphs record what a GPU executes"
NVML = "it reads the sensors of a GPU"
MEMORY = "it looks into GPU memory"
KERNELS = "it compiles or runs a CUDA kernel"
RAW = "it hands out the CUDA library itself"

TORCH_CUDA = {
    "CUDAGraph": GRAPHS,
    "CUDAPluggableAllocator": MEMORY,
    "GreenContext": RAW,
    "MemPool": MEMORY,
    "MemPoolContext": MEMORY,
    "_compile_kernel": KERNELS,
    "caching_allocator_alloc": MEMORY,
    "caching_allocator_delete": MEMORY,
    "change_current_allocator": MEMORY,
    "clock_rate": NVML,
    "cudart": RAW,
    "current_blas_handle": RAW,
    "current_solver_handle": RAW,
    "device_memory_used": NVML,
    "export_dot": GRAPHS,
    "export_graph_data": GRAPHS,
    "graph": GRAPHS,
    "graph_pool_handle": GRAPHS,
    "make_graphed_callables": GRAPHS,
    "memory_snapshot": MEMORY,
    "memory_usage": NVML,
    "power_draw": NVML,
    "temperature": NVML,
    "use_mem_pool": MEMORY,
    "utilization": NVML,
}
TORCH_CUDA_MEMORY = dict.fromkeys(
    ("_record_memory_history", "_snapshot", "_dump_snapshot", "memory_snapshot"), MEMORY
)
TORCH_CUDA_JITERATOR = dict.fromkeys(("_create_jit_fn", "_create_multi_output_jit_fn"), KERNELS)
TORCH_CUDA_NCCL = dict.fromkeys(
    ("all_reduce", "reduce", "broadcast", "all_gather", "reduce_scatter"),
    "it calls NCCL; use torch.distributed",
)


def refuse(name: str, reason: str) -> NoReturn:
    """Raise the error that names what was called.

    Raises:
        CannotRehearse: always.
    """
    raise CannotRehearse(_message(name, reason))


def _message(name: str, reason: str) -> str:
    return (
        f"{name} cannot be rehearsed: {reason}, and this run has CPU ranks in place of GPUs. "
        "Run the cell where there are GPUs, or guard the call with `if x.is_cuda:`, which is False here."
    )


def _refusing(name: str, reason: str) -> Callable[..., NoReturn]:
    def refused(*args: Any, **kwargs: Any) -> NoReturn:
        refuse(name, reason)

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
    load, load_inline = module.load, module.load_inline

    def load_without_cuda(name: str, sources: Any, *args: Any, **kwargs: Any) -> Any:
        files = [sources] if isinstance(sources, str) else list(sources)
        if kwargs.get("with_cuda") or any(str(file).endswith((".cu", ".cuh")) for file in files):
            refuse(f"torch.utils.cpp_extension.load({name!r}) with CUDA sources", KERNELS)
        return load(name, sources, *args, **kwargs)

    def load_inline_without_cuda(
        name: str, cpp_sources: Any, cuda_sources: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        if cuda_sources or kwargs.get("with_cuda"):
            refuse(f"torch.utils.cpp_extension.load_inline({name!r}) with CUDA sources", KERNELS)
        return load_inline(name, cpp_sources, cuda_sources, *args, **kwargs)

    module.load, module.load_inline = load_without_cuda, load_inline_without_cuda


def _refuse_triton(module: Any) -> None:
    """``triton.runtime.jit``: kernels may be defined, launching one is refused under its name."""

    def run(self: Any, *args: Any, **kwargs: Any) -> NoReturn:
        refuse(f"the Triton kernel {self.fn.__name__}", "Triton compiles for a GPU")

    module.JITFunction.run = run


def _no_triton(module: Any) -> None:
    """``torch.utils._triton``: libraries that choose Triton kernels where there are GPUs keep to their others."""
    module.has_triton = lambda: False


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
    _refuse_names(torch.accelerator, {"Graph": GRAPHS})
    patch_module("torch.utils.cpp_extension", _refuse_cuda_sources)
    patch_module("torch.utils._triton", _no_triton)
    patch_module("triton.runtime.jit", _refuse_triton)
    patch_module("pynvml", _refuse_nvml)
    sys.meta_path.insert(0, _NoCupy())
