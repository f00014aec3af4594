"""The face of ``torch.cuda`` and ``torch.accelerator``: GPUs are there, as many as the run has on this VM.

Every name of ``torch.cuda.__all__`` is rehearsed here or in ``random_streams``, ``streams`` and
``memory_figures``, refused in ``refused``, or works by itself without a GPU; a test holds the list against torch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import torch
import torch.cuda.nvtx
import torch.cuda.profiler

from taas.rehearsal.devices import existing, machine, ordinal
from taas.rehearsal.patches import replace_all

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
    shared_memory_per_block_optin: int = 163 << 10
    shared_memory_per_multiprocessor: int = 164 << 10
    L2_cache_size: int = 40 << 20
    clock_rate: int = 1_410_000
    memory_clock_rate: int = 1_593_000
    memory_bus_width: int = 5120
    is_integrated: int = 0
    is_multi_gpu_board: int = 0
    gcnArchName: str = ""  # noqa: N815 - torch's name
    uuid: str = field(default="00000000-0000-0000-0000-000000000000")
    pci_bus_id: int = 0
    pci_device_id: int = 0
    pci_domain_id: int = 0


_PROPERTIES = DeviceProperties()


def get_device_properties(device: Any = None) -> DeviceProperties:
    """What the device can do.

    Raises:
        AssertionError: the device isn't there, as torch raises it.
    """
    if not 0 <= ordinal(device) < machine.device_count:
        raise AssertionError("Invalid device id")
    return _PROPERTIES


def get_device_name(device: Any = None) -> str:
    """The name of the device."""
    return get_device_properties(device).name


def get_device_capability(device: Any = None) -> tuple[int, int]:
    """Major and minor CUDA capability."""
    properties = get_device_properties(device)
    return properties.major, properties.minor


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

    def __exit__(
        self, etype: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        machine.current = self.prev_idx


class device_of(device):  # noqa: N801 - torch's name
    """``with torch.cuda.device_of(x)``: changes nothing, since no tensor is a CUDA tensor."""

    def __init__(self, obj: Any) -> None:
        super().__init__(-1)


def can_device_access_peer(device: Any, peer_device: Any) -> bool:
    """Whether one device reads another's memory: any other."""
    return existing(device) != existing(peer_device)


def _exchange_device(index: int) -> int:
    before = machine.current
    set_device(index)
    return before


def _always(value: Any) -> Callable[..., Any]:
    def answer(*args: Any, **kwargs: Any) -> Any:
        return value

    return answer


def _synchronize(device: Any = None) -> None:
    existing(device)


def _accelerator(check_available: bool = False) -> torch.device:
    return torch.device("cuda")


CUDA: dict[str, Any] = {
    "_exchange_device": _exchange_device,
    "_is_compiled": _always(True),
    "_is_in_bad_fork": _always(False),
    "_lazy_init": _always(None),
    "_maybe_exchange_device": _exchange_device,
    "_sleep": _always(None),
    "can_device_access_peer": can_device_access_peer,
    "check_error": _always(None),
    "current_device": lambda: machine.current,
    "device": device,
    "device_count": lambda: machine.device_count,
    "device_of": device_of,
    "get_arch_list": lambda: ["sm_80"],
    "get_device_capability": get_device_capability,
    "get_device_name": get_device_name,
    "get_device_properties": get_device_properties,
    "get_gencode_flags": lambda: "-gencode compute=compute_80,code=sm_80",
    "get_sync_debug_mode": _always(0),
    "init": _always(None),
    "ipc_collect": _always(None),
    "is_available": _always(True),
    "is_bf16_supported": _always(True),
    "is_current_stream_capturing": _always(False),
    "is_initialized": _always(True),
    "is_tf32_supported": _always(True),
    "set_device": set_device,
    "set_sync_debug_mode": _always(None),
    "synchronize": _synchronize,
}

# what needs no GPU: modules, classes, flags, and switches that only set a variable
BY_ITSELF = (
    *("ComplexDoubleStorage", "ComplexFloatStorage", "CudaError", "DeferredCudaCallError", "cudaStatus"),
    *(
        "amp",
        "graph_annotations",
        "graphs",
        "jiterator",
        "memory",
        "nccl",
        "nvtx",
        "profiler",
        "random",
        "sparse",
    ),
    *(
        "caching_allocator_disabled",
        "caching_allocator_enable",
        "get_allocator_backend",
        "streams",
        "tunable",
    ),
    *("has_half", "has_magma"),
)

ACCELERATOR: dict[str, Any] = {
    "current_accelerator": _accelerator,
    "current_device_idx": lambda: machine.current,
    "current_device_index": lambda: machine.current,
    "device_count": lambda: machine.device_count,
    "device_index": device,
    "is_available": _always(True),
    "set_device_idx": set_device,
    "set_device_index": set_device,
    "synchronize": _synchronize,
}

PROFILER = {"init": _always(None), "start": _always(None), "stop": _always(None)}

NVTX = {"mark": _always(None), "range_push": _always(0), "range_pop": _always(0), "range_start": _always(0),
        "range_end": _always(None)}  # fmt: skip


def _get_device_module(device: Any = None) -> Any:
    return torch.cuda if device is None else _device_module(device)


_device_module = torch.get_device_module


def install() -> None:
    """Replace the face of ``torch.cuda`` and ``torch.accelerator``."""
    replace_all(torch.cuda, CUDA)
    torch.cuda._initialized = True
    replace_all(torch.accelerator, ACCELERATOR)
    replace_all(torch.cuda.profiler, PROFILER)
    replace_all(torch.cuda.nvtx, NVTX)
    replace_all(torch, {"get_device_module": _get_device_module})
