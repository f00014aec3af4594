"""Rehearses ``torch.cuda`` and ``torch.accelerator`` with as many GPUs as the run has on this VM.

Every name in ``torch.cuda.__all__`` is rehearsed here, rejected in ``refused``, or works without a
GPU; a test lists the last kind, and compares all names with torch's. Memory figures are not
rehearsed: programs that print them get 0, and one warning for each name. ``mem_get_info`` and
``total_memory`` return the rehearsed GPU's size, because programs divide by them.

Each device has streams of work, with their events. Every operator has finished when it returns, so
there is nothing to wait for. All devices share one stream of random numbers.
``torch.cuda.manual_seed`` does not reseed the CPU, and ``torch.rand(3, device="cuda")`` repeats
after ``torch.cuda.manual_seed(0)``. Operators that draw random numbers (dropout) have CPU tensors,
and draw from the CPU's stream. All numbers are those of CPU generators, never a GPU's.
"""

from __future__ import annotations

import functools
import itertools
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any

import torch
import torch.cuda.nvtx
import torch.cuda.profiler

from taas.errors import RehearsalWarning
from taas.rehearsal.devices import as_cpu, existing, machine, ordinal, use
from taas.rehearsal.patches import always, replace_all, stand_in

_GIB = 1 << 30


_PROPERTIES = SimpleNamespace(
    name="NVIDIA A100-SXM4-80GB (rehearsed)",
    major=8,
    minor=0,
    total_memory=80 * _GIB,
    multi_processor_count=108,
    warp_size=32,
    max_threads_per_multi_processor=2048,
    max_threads_per_block=1024,
    regs_per_multiprocessor=65536,
    shared_memory_per_block=48 << 10,
    shared_memory_per_multiprocessor=164 << 10,
    L2_cache_size=40 << 20,
)
"""The properties of an NVIDIA A100 with 80 GiB, the GPU of the catalog's g2 instances."""


def _get_device_properties(device: Any = None) -> SimpleNamespace:
    use()
    if not 0 <= ordinal(device) < machine.device_count:
        raise AssertionError("Invalid device id")  # torch raises the same
    return _PROPERTIES


def _set_device(device: Any) -> None:
    """Make a device current; a negative one changes nothing."""
    index = ordinal(device)
    if index >= 0:
        machine.current = existing(index)


class device:  # noqa: N801 - torch's name
    """A context in which a device is the current one (``with torch.cuda.device(d)``).

    ``None`` and negative numbers change nothing.
    """

    def __init__(self, device: Any) -> None:
        self.idx = -1 if device is None else ordinal(device)
        self.prev_idx = -1

    def __enter__(self) -> None:
        self.prev_idx = machine.current
        _set_device(self.idx)

    def __exit__(self, *exc: object) -> None:
        machine.current = self.prev_idx


def _exchange_device(index: int) -> int:
    before = machine.current
    _set_device(index)
    return before


def _synchronize(device: Any = None) -> None:
    existing(device)


# ---------------------------------------------------------------- streams and events

_ids = itertools.count(1)
_defaults: dict[int, Stream] = {}


class Event:
    """A point in time, by the CPU's clock."""

    def __init__(self, *first: Any, enable_timing: bool = False, **_: Any) -> None:
        self.device = torch.device("cuda", existing())
        self.cuda_event = self.event_id = 0
        # torch.cuda.Event takes it as the first argument, torch.Event a device
        self._timed = enable_timing or True in first
        self._recorded: float | None = None

    def record(self, stream: Stream | None = None) -> None:
        """Record the current time."""
        self._recorded = time.perf_counter()

    query = always(True)
    wait = synchronize = always(None)

    def elapsed_time(self, end_event: Event) -> float:
        """Return the milliseconds of CPU time between two recorded events.

        Raises:
            RuntimeError: an event does not measure time, or was not recorded, as with CUDA.
        """
        if not (self._timed and end_event._timed):
            raise RuntimeError("Both events must be created with argument 'enable_timing=True'.")
        if self._recorded is None or end_event._recorded is None:
            raise RuntimeError("Both events must be recorded before calculating elapsed time.")
        return (end_event._recorded - self._recorded) * 1e3


class Stream:
    """A queue of work that is always empty."""

    def __init__(self, device: Any = None, priority: int = 0, **_: Any) -> None:
        self.device_index = existing(device)
        self.device = torch.device("cuda", self.device_index)
        self.priority = priority
        self.stream_id = next(_ids)
        self.cuda_stream = 0
        self.device_type = 1
        self._before: list[int] = []

    priority_range = staticmethod(always((0, -5)))
    query = always(True)
    is_capturing = always(False)
    synchronize = wait_event = wait_stream = always(None)

    def record_event(self, event: Event | None = None) -> Event:
        """Record an event: the given one, or a new one."""
        event = Event() if event is None else event
        event.record(self)
        return event

    def __enter__(self) -> Stream:
        self._before.append(_exchange_device(self.device_index))
        return self

    def __exit__(self, *exc: object) -> None:
        machine.current = self._before.pop()

    def __repr__(self) -> str:
        return f"<torch.cuda.Stream device={self.device} stream_id={self.stream_id} (rehearsed)>"


def _stream(stream: Stream | None) -> AbstractContextManager[Any]:
    return nullcontext() if stream is None else stream


def _default_stream(device: Any = None) -> Stream:
    index = existing(device)
    if index not in _defaults:
        _defaults[index] = Stream(index)
        _defaults[index].stream_id = 0
    return _defaults[index]


def _set_stream(stream: Stream | None) -> None:
    """Make a stream's device current.

    No stream has work, so the current stream is always the default one.
    """
    if stream is not None:
        machine.current = stream.device_index


# ---------------------------------------------------------------- random numbers

_RealGenerator = torch.Generator
_GPU_STATE_BYTES = 16  # of a CUDA generator: seed and offset, int64 each


@functools.cache
def gpu_generator() -> torch.Generator:
    """Return the generator of all devices.

    It is created on first use, because the notebook's variables, and the CPU's seed, arrive after
    the installation.
    """
    return _RealGenerator().manual_seed(torch.initial_seed())


def _manual_seed(seed: int) -> None:  # torch.manual_seed() calls this
    gpu_generator().manual_seed(int(seed))


def _set_rng_state(new_state: torch.Tensor, device: Any = "cuda") -> None:
    existing(device)
    if new_state.numel() == _GPU_STATE_BYTES:  # a GPU's state
        _manual_seed(int(new_state[:8].view(torch.int64).item()))
    else:
        gpu_generator().set_state(new_state)


def _set_rng_state_all(new_states: Iterable[torch.Tensor]) -> None:
    for index, state in enumerate(new_states):
        _set_rng_state(state, index)


def _get_rng_state(device: Any = "cuda") -> torch.Tensor:
    existing(device)
    return gpu_generator().get_state()  # 5056 bytes; a GPU's state has 16


RANDOM: dict[str, Any] = {
    "get_rng_state": _get_rng_state,
    "get_rng_state_all": lambda: [_get_rng_state(index) for index in range(machine.device_count)],
    "initial_seed": lambda: gpu_generator().initial_seed(),
    **dict.fromkeys(("manual_seed", "manual_seed_all"), _manual_seed),
    **dict.fromkeys(("seed", "seed_all"), lambda: gpu_generator().seed()),
    "set_rng_state": _set_rng_state,
    "set_rng_state_all": _set_rng_state_all,
}

# ---------------------------------------------------------------- the tables

CUDA: dict[str, Any] = {
    **RANDOM,
    "Event": Event,
    "ExternalStream": Stream,
    "Stream": Stream,
    "StreamContext": _stream,
    "_exchange_device": _exchange_device,
    "_is_compiled": always(True),
    "_is_in_bad_fork": lambda: machine.forked,
    "_lazy_init": lambda: use(),
    "_maybe_exchange_device": _exchange_device,
    "_sleep": always(None),
    "can_device_access_peer": lambda device, peer_device: existing(device) != existing(peer_device),
    "check_error": always(None),
    "current_device": lambda: existing(),
    "current_stream": _default_stream,
    "default_stream": _default_stream,
    "device": device,
    "device_count": lambda: machine.device_count,
    "device_of": lambda obj: device(None),  # changes nothing, since no tensor is a CUDA tensor
    "get_arch_list": lambda: ["sm_80"],
    "get_device_capability": lambda device=None: (
        (of := _get_device_properties(device)).major,
        of.minor,
    ),
    "get_device_name": lambda device=None: _get_device_properties(device).name,
    "get_device_properties": _get_device_properties,
    "get_gencode_flags": lambda: "-gencode compute=compute_80,code=sm_80",
    "get_stream_from_external": lambda data_ptr, device=None: Stream(device),
    "get_sync_debug_mode": always(0),
    "init": lambda: use(),
    "ipc_collect": always(None),
    "is_available": always(True),
    "is_bf16_supported": always(True),
    "is_current_stream_capturing": always(False),
    "is_initialized": lambda: not machine.forked,
    "is_tf32_supported": always(True),
    "set_device": _set_device,
    "set_stream": _set_stream,
    "set_sync_debug_mode": always(None),
    "stream": _stream,
    "synchronize": _synchronize,
}

ACCELERATOR: dict[str, Any] = {
    "current_accelerator": lambda check_available=False: torch.device("cuda"),
    "current_device_idx": lambda: machine.current,
    "current_device_index": lambda: machine.current,
    "current_stream": _default_stream,
    "device_count": lambda: machine.device_count,
    "device_index": device,
    "is_available": always(True),
    "set_device_idx": _set_device,
    "set_device_index": _set_device,
    "set_stream": _set_stream,
    "synchronize": _synchronize,
}

_device_module = torch.get_device_module
TORCH: dict[str, Any] = {
    "Event": Event,
    "Generator": stand_in(
        "Generator", _RealGenerator, lambda device="cpu": _RealGenerator(as_cpu(device))
    ),
    "Stream": Stream,
    "get_device_module": lambda device=None: (
        torch.cuda if device is None else _device_module(device)
    ),
}

PROFILER = {"init": always(None), "start": always(None), "stop": always(None)}

NVTX = {
    "mark": always(None),
    "range_push": always(0),
    "range_pop": always(0),
    "range_start": always(0),
    "range_end": always(None),
}


# ---------------------------------------------------------------- memory figures


FIGURES: dict[str, Callable[[], Any]] = {
    **dict.fromkeys(
        ("host_memory_allocated", "max_memory_allocated", "max_memory_cached",
         "max_memory_reserved", "memory_allocated", "memory_cached", "memory_reserved"),
        lambda: 0),
    **dict.fromkeys(
        ("host_memory_stats", "host_memory_stats_as_nested_dict", "memory_stats",
         "memory_stats_as_nested_dict"),
        lambda: defaultdict(int)),
    **dict.fromkeys(("mem_get_info", "get_memory_info"), lambda: (_PROPERTIES.total_memory,) * 2),
    **dict.fromkeys(
        ("list_gpu_processes", "memory_summary"), lambda: "memory figures are not rehearsed"),
}  # fmt: skip
"""The result of each function, which comes with a warning."""
SILENT = (
    "empty_cache", "empty_host_cache", "reset_accumulated_host_memory_stats",
    "reset_accumulated_memory_stats", "reset_max_memory_allocated", "reset_max_memory_cached",
    "reset_peak_host_memory_stats", "reset_peak_memory_stats", "set_per_process_memory_fraction",
)  # fmt: skip
"""These do nothing, because no memory is held."""
_told: set[str] = set()


def _figure(name: str, answer: Callable[[], Any]) -> Callable[..., Any]:
    def figure(*args: Any, **kwargs: Any) -> Any:
        if name not in _told:
            _told.add(name)
            warnings.warn(
                f"{name}: memory figures are not rehearsed; it gives a neutral answer on CPU ranks."
                " Measure memory in a run on GPUs.",
                RehearsalWarning,
                stacklevel=2,
            )
        return answer()

    return figure


def memory_face(module: str) -> dict[str, Callable[..., Any]]:
    """Return the rehearsed figures of ``torch.cuda`` or ``torch.accelerator`` by name."""
    return {
        **{name: _figure(f"{module}.{name}", answer) for name, answer in FIGURES.items()},
        **dict.fromkeys(SILENT, always(None)),
        "get_per_process_memory_fraction": always(1.0),
    }


def install() -> None:
    """Replace the functions of ``torch.cuda`` and ``torch.accelerator``.

    Memory figures are replaced if this torch has them.
    """
    for cls in (Event, Stream):
        cls.__module__ = "torch.cuda"
    replace_all(torch.accelerator, ACCELERATOR)
    replace_all(torch.cuda, CUDA)
    torch.cuda._initialized = True
    replace_all(torch.cuda.random, RANDOM)
    replace_all(torch.cuda.streams, {"Stream": Stream, "Event": Event, "ExternalStream": Stream})
    replace_all(torch.cuda.profiler, PROFILER)
    replace_all(torch.cuda.nvtx, NVTX)
    replace_all(torch, TORCH)
    for module in (torch.cuda, torch.cuda.memory, torch.accelerator):
        figures = memory_face("torch.cuda" if module is torch.cuda.memory else module.__name__)
        replace_all(module, {name: new for name, new in figures.items() if hasattr(module, name)})
