"""The net below the patches: allocations on CUDA that no Python entry point saw are made on the CPU.

Two kernels for the CUDA dispatch key catch what bypasses ``torch``'s namespace: TorchScript, C++ extensions, and
pickles that name ``torch._C._VariableFunctionsClass``.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch

from taas.rehearsal.devices import CPU

_library: torch.library.Library | None = None


def _empty(
    size: Any, *, memory_format: Any = None, dtype: Any = None, layout: Any = None, **_: Any
) -> torch.Tensor:
    return torch.ops.aten.empty.memory_format(  # type: ignore[no-any-return]
        size, dtype=dtype, layout=layout, device=CPU, memory_format=memory_format
    )


def _empty_strided(
    size: Any, stride: Any, *, dtype: Any = None, layout: Any = None, **_: Any
) -> torch.Tensor:
    return torch.ops.aten.empty_strided(  # type: ignore[no-any-return]
        size, stride, dtype=dtype, layout=layout, device=CPU
    )


def install() -> None:
    """Register both kernels; torch warns that they replace its own, which is their purpose."""
    global _library
    if _library is not None:
        return
    _library = torch.library.Library("aten", "IMPL")  # lives as long as the process: its end unregisters
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _library.impl("empty.memory_format", _empty, "CUDA")
        _library.impl("empty_strided", _empty_strided, "CUDA")
