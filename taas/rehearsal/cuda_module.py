"""The face of ``torch.cuda`` and ``torch.accelerator``: GPUs are there, as many as the run has on this VM.

Every name of ``torch.cuda.__all__`` is rehearsed here or in ``streams``, refused in
``refused``, or works by itself without a GPU; a test has those and holds the list against torch.

Memory figures are not rehearsed: programs that print them go on, with 0 and one warning by name. ``mem_get_info``
and ``total_memory`` are the rehearsed GPU's size, since programs divide by them.
"""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.cuda.nvtx
import torch.cuda.profiler

from taas.errors import RehearsalWarning
from taas.rehearsal.devices import existing, machine, ordinal, use
from taas.rehearsal.patches import always, replace_all

_GIB = 1 << 30


@dataclass(frozen=True)
class DeviceProperties:
    """Those of an NVIDIA A100 with 80 GiB, the GPU of the catalog's g2 instances."""

    name: str = "NVIDIA A100-SXM4-80GB (rehearsed)"
    major: int = 8
    minor: int = 0
    total_memory: int = 80 * _GIB
    multi_processor_count: int = 108
    warp_size: int = 32
    max_threads_per_multi_processor: int = 2048
    max_threads_per_block: int = 1024
    regs_per_multiprocessor: int = 65536
    shared_memory_per_block: int = 48 << 10
    shared_memory_per_multiprocessor: int = 164 << 10
    L2_cache_size: int = 40 << 20


_PROPERTIES = DeviceProperties()


def get_device_properties(device: Any = None) -> DeviceProperties:
    """What the device can do.

    Raises:
        AssertionError: the device isn't there, as torch raises it.
    """
    use()
    if not 0 <= ordinal(device) < machine.device_count:
        raise AssertionError("Invalid device id")
    return _PROPERTIES


def set_device(device: Any) -> None:
    """Make a device current; a negative one changes nothing."""
    index = ordinal(device)
    if index >= 0:
        machine.current = existing(index)


class device:  # noqa: N801 - torch's name
    """``with torch.cuda.device(d)``: current inside, the one before outside; ``None`` and negative change nothing."""

    def __init__(self, device: Any) -> None:
        self.idx = -1 if device is None else ordinal(device)
        self.prev_idx = -1

    def __enter__(self) -> None:
        self.prev_idx = machine.current
        set_device(self.idx)

    def __exit__(self, *exc: object) -> None:
        machine.current = self.prev_idx


class device_of(device):  # noqa: N801 - torch's name
    """``with torch.cuda.device_of(x)``: changes nothing, since no tensor is a CUDA tensor."""

    def __init__(self, obj: Any) -> None:
        super().__init__(-1)


def _exchange_device(index: int) -> int:
    before = machine.current
    set_device(index)
    return before


def _synchronize(device: Any = None) -> None:
    existing(device)


CUDA: dict[str, Any] = {
    "_exchange_device": _exchange_device,
    "_is_compiled": always(True),
    "_is_in_bad_fork": lambda: machine.forked,
    "_lazy_init": lambda: use(),
    "_maybe_exchange_device": _exchange_device,
    "_sleep": always(None),
    "can_device_access_peer": lambda device, peer_device: existing(device) != existing(peer_device),
    "check_error": always(None),
    "current_device": lambda: existing(),
    "device": device,
    "device_count": lambda: machine.device_count,
    "device_of": device_of,
    "get_arch_list": lambda: ["sm_80"],
    "get_device_capability": lambda device=None: ((of := get_device_properties(device)).major, of.minor),
    "get_device_name": lambda device=None: get_device_properties(device).name,
    "get_device_properties": get_device_properties,
    "get_gencode_flags": lambda: "-gencode compute=compute_80,code=sm_80",
    "get_sync_debug_mode": always(0),
    "init": lambda: use(),
    "ipc_collect": always(None),
    "is_available": always(True),
    "is_bf16_supported": always(True),
    "is_current_stream_capturing": always(False),
    "is_initialized": lambda: not machine.forked,
    "is_tf32_supported": always(True),
    "set_device": set_device,
    "set_sync_debug_mode": always(None),
    "synchronize": _synchronize,
}

ACCELERATOR: dict[str, Any] = {
    "current_accelerator": lambda check_available=False: torch.device("cuda"),
    "current_device_idx": lambda: machine.current,
    "current_device_index": lambda: machine.current,
    "device_count": lambda: machine.device_count,
    "device_index": device,
    "is_available": always(True),
    "set_device_idx": set_device,
    "set_device_index": set_device,
    "synchronize": _synchronize,
}

PROFILER = {"init": always(None), "start": always(None), "stop": always(None)}

NVTX = {"mark": always(None), "range_push": always(0), "range_pop": always(0), "range_start": always(0),
        "range_end": always(None)}  # fmt: skip


# ---------------------------------------------------------------- memory figures


class _Zeros(OrderedDict[str, int]):
    def __missing__(self, key: str) -> int:
        return 0


FIGURES: dict[str, Callable[[], Any]] = {
    **dict.fromkeys(
        ("host_memory_allocated", "max_memory_allocated", "max_memory_cached", "max_memory_reserved",
         "memory_allocated", "memory_cached", "memory_reserved"), lambda: 0),
    **dict.fromkeys(
        ("host_memory_stats", "host_memory_stats_as_nested_dict", "memory_stats", "memory_stats_as_nested_dict"),
        _Zeros),
    **dict.fromkeys(("mem_get_info", "get_memory_info"), lambda: (_PROPERTIES.total_memory,) * 2),
    **dict.fromkeys(("list_gpu_processes", "memory_summary"), lambda: "memory figures are not rehearsed"),
}  # fmt: skip
"""What each answers, after a warning."""
SILENT = (
    "empty_cache", "empty_host_cache", "reset_accumulated_host_memory_stats", "reset_accumulated_memory_stats",
    "reset_max_memory_allocated", "reset_max_memory_cached", "reset_peak_host_memory_stats", "reset_peak_memory_stats",
    "set_per_process_memory_fraction",
)  # fmt: skip
"""Nothing is held, so there is nothing to empty, to reset or to limit."""
_told: set[str] = set()


def _figure(name: str, answer: Callable[[], Any]) -> Callable[..., Any]:
    def figure(*args: Any, **kwargs: Any) -> Any:
        if name not in _told:
            _told.add(name)
            warnings.warn(
                f"{name}: memory figures are not rehearsed; it gives a neutral answer on CPU ranks. "
                "Measure memory in a run on GPUs.",
                RehearsalWarning,
                stacklevel=2,
            )
        return answer()

    return figure


def memory_face(module: str) -> dict[str, Callable[..., Any]]:
    """The figures that stand in for those of ``torch.cuda`` or ``torch.accelerator``, by name."""
    return {
        **{name: _figure(f"{module}.{name}", answer) for name, answer in FIGURES.items()},
        **dict.fromkeys(SILENT, always(None)),
        "get_per_process_memory_fraction": always(1.0),
    }


def _get_device_module(device: Any = None) -> Any:
    return torch.cuda if device is None else _device_module(device)


_device_module = torch.get_device_module


def install() -> None:
    """Replace the face of ``torch.cuda`` and ``torch.accelerator``, and their figures as far as torch has them."""
    replace_all(torch.cuda, CUDA)
    torch.cuda._initialized = True
    replace_all(torch.accelerator, ACCELERATOR)
    replace_all(torch.cuda.profiler, PROFILER)
    replace_all(torch.cuda.nvtx, NVTX)
    replace_all(torch, {"get_device_module": _get_device_module})
    for module in (torch.cuda, torch.cuda.memory, torch.accelerator):
        figures = memory_face("torch.cuda" if module is torch.cuda.memory else module.__name__)
        replace_all(module, {name: new for name, new in figures.items() if hasattr(module, name)})
