"""What each rehearsed GPU has of its own: streams of work, with their events, and a stream of random numbers.

Every operator has ended when it returns, so there is nothing to wait for. ``torch.cuda.manual_seed`` does not reseed the
CPU, and ``torch.rand(3, device="cuda")`` repeats after ``torch.cuda.manual_seed(0)``. What draws inside an operator
(dropout) has a CPU tensor and draws from the CPU's stream; the numbers are a CPU generator's, never the GPU's.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from typing import Any

import torch

from taas.rehearsal.devices import as_cpu, existing, machine
from taas.rehearsal.patches import always, replace_all, stand_in

_ids = itertools.count(1)


class Event:
    """A point in time, on the CPU's clock."""

    def __init__(
        self,
        device: Any = None,
        enable_timing: bool = False,
        blocking: bool = False,
        interprocess: bool = False,
    ) -> None:
        if isinstance(device, bool):  # torch.cuda.Event has enable_timing first, torch.Event a device
            device, enable_timing = None, device
        self.device = torch.device("cuda", existing(device))
        self.cuda_event = self.event_id = 0
        self._timed = enable_timing
        self._recorded: float | None = None

    def record(self, stream: Stream | None = None) -> None:
        """Take the time."""
        self._recorded = time.perf_counter()

    query = always(True)
    wait = synchronize = always(None)

    def elapsed_time(self, end_event: Event) -> float:
        """Milliseconds of CPU time between two recorded events.

        Raises:
            RuntimeError: an event takes no time, or was not recorded, as CUDA raises it.
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
        self._before: list[tuple[int, Stream]] = []

    priority_range = staticmethod(always((0, -5)))
    query = always(True)
    is_capturing = always(False)
    synchronize = wait_event = wait_stream = always(None)

    def record_event(self, event: Event | None = None) -> Event:
        """Record an event, a new one unless given."""
        event = Event() if event is None else event
        event.record(self)
        return event

    def __enter__(self) -> Stream:
        self._before.append((machine.current, current_stream()))
        set_stream(self)
        return self

    def __exit__(self, *exc: object) -> None:
        index, stream = self._before.pop()
        here = self.device_index
        _current[here] = stream if stream.device_index == here else _default(here)
        machine.current = index

    def __repr__(self) -> str:
        return f"<torch.cuda.Stream device={self.device} stream_id={self.stream_id} (rehearsed)>"


_defaults: dict[int, Stream] = {}
_current: dict[int, Stream] = {}


def _default(index: int) -> Stream:
    if index not in _defaults:
        _defaults[index] = Stream(index)
        _defaults[index].stream_id = 0
    return _defaults[index]


def current_stream(device: Any = None) -> Stream:
    """The stream selected on a device."""
    index = existing(device)
    return _current.get(index) or _default(index)


def set_stream(stream: Stream | None) -> None:
    """Select a stream, and its device."""
    if stream is not None:
        _current[stream.device_index] = stream
        machine.current = stream.device_index


class StreamContext(ExitStack):
    """``with torch.cuda.stream(s)``; ``None`` selects nothing."""

    def __init__(self, stream: Stream | None) -> None:
        super().__init__()
        self.stream = stream

    def __enter__(self) -> None:  # type: ignore[override]
        if self.stream is not None:
            self.enter_context(self.stream)


# ---------------------------------------------------------------- random numbers

_RealGenerator = torch.Generator
_GPU_STATE_BYTES = 16  # of a CUDA generator: seed and offset, int64 each


class DeviceGenerators(Sequence[torch.Generator]):
    """``torch.cuda.default_generators``.

    Made at first use, from the seed the CPU has then: names that travelled, and their seeds, come after install.
    """

    def __init__(self) -> None:
        self._made: dict[int, torch.Generator] = {}

    def __len__(self) -> int:
        return machine.device_count

    def __getitem__(self, index: Any) -> Any:
        if not 0 <= index < len(self):
            raise IndexError(f"cuda:{index} is not among the {len(self)} devices of this run")
        if index not in self._made:
            self._made[index] = _RealGenerator().manual_seed(torch.initial_seed())
        return self._made[index]


generators = DeviceGenerators()


def _make_generator(device: Any = "cpu") -> torch.Generator:
    return _RealGenerator(as_cpu(device))


def _generator() -> torch.Generator:
    return generators[machine.current]  # type: ignore[no-any-return]


def manual_seed(seed: int) -> None:
    """Seed the current device's stream, and no other."""
    _generator().manual_seed(int(seed))


def manual_seed_all(seed: int) -> None:
    """Seed the streams of all devices; ``torch.manual_seed`` calls this."""
    for generator in generators:
        generator.manual_seed(int(seed))


def seed() -> None:
    """Seed the current device's stream from the system."""
    _generator().seed()


def seed_all() -> None:
    """Seed the streams of all devices from the system."""
    for generator in generators:
        generator.seed()


def get_rng_state(device: Any = "cuda") -> torch.Tensor:
    """The state of one device's stream: 5056 bytes, where a GPU's has 16."""
    state: torch.Tensor = generators[existing(device)].get_state()
    return state


def set_rng_state(new_state: torch.Tensor, device: Any = "cuda") -> None:
    """Set one device's stream; a state that a GPU saved sets its seed."""
    generator = generators[existing(device)]
    if new_state.numel() == _GPU_STATE_BYTES:
        generator.manual_seed(int(new_state[:8].view(torch.int64).item()))
    else:
        generator.set_state(new_state)


def set_rng_state_all(new_states: Iterable[torch.Tensor]) -> None:
    """Set the streams of the devices, in order."""
    for index, state in enumerate(new_states):
        set_rng_state(state, index)


RANDOM: dict[str, Any] = {
    "default_generators": generators,
    "get_rng_state": get_rng_state,
    "get_rng_state_all": lambda: [generator.get_state() for generator in generators],
    "initial_seed": lambda: _generator().initial_seed(),
    "manual_seed": manual_seed,
    "manual_seed_all": manual_seed_all,
    "seed": seed,
    "seed_all": seed_all,
    "set_rng_state": set_rng_state,
    "set_rng_state_all": set_rng_state_all,
}

CUDA: dict[str, Any] = {
    **RANDOM,
    "Event": Event,
    "ExternalStream": Stream,
    "Stream": Stream,
    "StreamContext": StreamContext,
    "current_stream": current_stream,
    "default_stream": lambda device=None: _default(existing(device)),
    "get_stream_from_external": lambda data_ptr, device=None: Stream(device),
    "set_stream": set_stream,
    "stream": StreamContext,
}


def install() -> None:
    """Replace the streams, events and generators of ``torch``, ``torch.cuda`` and ``torch.accelerator``."""
    for cls in (Event, Stream):
        cls.__module__ = "torch.cuda"
    replace_all(torch, {"Stream": Stream, "Event": Event})
    replace_all(torch.accelerator, {"current_stream": current_stream, "set_stream": set_stream})
    replace_all(torch.cuda.streams, {"Stream": Stream, "Event": Event, "ExternalStream": Stream})
    replace_all(torch.cuda, CUDA)
    torch.Generator = stand_in("Generator", _RealGenerator, _make_generator)  # type: ignore[assignment, misc]
    replace_all(
        torch.cuda.random, {name: new for name, new in RANDOM.items() if name != "default_generators"}
    )
