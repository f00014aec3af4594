"""Memory figures are not rehearsed: programs that print them go on, with 0 and one warning by name.

``mem_get_info`` and ``get_device_properties().total_memory`` are the rehearsed GPU's size, since programs divide
by them. What exists only to look into GPU memory (snapshots, pools) is refused.
"""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch

from taas.rehearsal import RehearsalWarning
from taas.rehearsal.cuda_module import get_device_properties
from taas.rehearsal.patches import replace_all


class _Zeros(OrderedDict[str, int]):
    def __missing__(self, key: str) -> int:
        return 0


_told: set[str] = set()


def _tell(name: str) -> None:
    if name not in _told:
        _told.add(name)
        warnings.warn(
            f"{name}: memory figures are not rehearsed; it gives a neutral answer on CPU ranks. "
            "Measure memory in a run on GPUs.",
            RehearsalWarning,
            stacklevel=3,
        )


def _figure(name: str, answer: Callable[[], Any]) -> Callable[..., Any]:
    def figure(*args: Any, **kwargs: Any) -> Any:
        _tell(name)
        return answer()

    return figure


def _size() -> tuple[int, int]:
    total = get_device_properties().total_memory
    return total, total


def _silent(*args: Any, **kwargs: Any) -> None:
    """Nothing is held, so there is nothing to empty, to reset or to limit."""


ZERO = (
    "host_memory_allocated",
    "max_memory_allocated",
    "max_memory_cached",
    "max_memory_reserved",
    "memory_allocated",
    "memory_cached",
    "memory_reserved",
)
STATS = (
    "host_memory_stats",
    "host_memory_stats_as_nested_dict",
    "memory_stats",
    "memory_stats_as_nested_dict",
)
SIZE = ("mem_get_info", "get_memory_info")
TEXT = ("list_gpu_processes", "memory_summary")
SILENT = (
    "empty_cache",
    "empty_host_cache",
    "reset_accumulated_host_memory_stats",
    "reset_accumulated_memory_stats",
    "reset_max_memory_allocated",
    "reset_max_memory_cached",
    "reset_peak_host_memory_stats",
    "reset_peak_memory_stats",
    "set_per_process_memory_fraction",
)


def face(module: str) -> dict[str, Callable[..., Any]]:
    """The figures that stand in for those of ``torch.cuda`` or ``torch.accelerator``, by name."""
    answers: list[tuple[tuple[str, ...], Callable[[], Any]]] = [
        (ZERO, lambda: 0),
        (STATS, _Zeros),
        (SIZE, _size),
        (TEXT, lambda: "memory figures are not rehearsed"),
    ]
    figures = {name: _figure(f"{module}.{name}", answer) for names, answer in answers for name in names}
    return {
        **figures,
        **dict.fromkeys(SILENT, _silent),
        "get_per_process_memory_fraction": lambda device=None: 1.0,
    }


def install() -> None:
    """Replace the figures of ``torch.cuda``, ``torch.cuda.memory`` and ``torch.accelerator``, as far as torch has them."""
    for module in (torch.cuda, torch.cuda.memory, torch.accelerator):
        figures = face("torch.cuda" if module is torch.cuda.memory else module.__name__)
        replace_all(module, {name: new for name, new in figures.items() if hasattr(module, name)})
