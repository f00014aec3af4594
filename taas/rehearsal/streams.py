"""Streams and events of a rehearsal: every operator has ended when it returns, so there is nothing to wait for."""

from __future__ import annotations

import itertools
import time
from types import TracebackType
from typing import Any

import torch

from taas.rehearsal.devices import existing, machine
from taas.rehearsal.patches import replace_all

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

    def query(self) -> bool:
        """Whether the work before the event has ended: always."""
        return True

    def wait(self, stream: Stream | None = None) -> None:
        """Let a stream wait: there is nothing to wait for."""

    def synchronize(self) -> None:
        """Wait for the event: there is nothing to wait for."""

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

    @staticmethod
    def priority_range() -> tuple[int, int]:
        """Lowest and highest priority, as on current GPUs."""
        return (0, -5)

    def query(self) -> bool:
        """Whether all work has ended: always."""
        return True

    def synchronize(self) -> None:
        """Wait for the work: there is none."""

    def wait_event(self, event: Event) -> None:
        """Wait for an event: there is nothing to wait for."""

    def wait_stream(self, stream: Stream) -> None:
        """Wait for another stream: there is nothing to wait for."""

    def record_event(self, event: Event | None = None) -> Event:
        """Record an event, a new one unless given."""
        event = Event() if event is None else event
        event.record(self)
        return event

    def is_capturing(self) -> bool:
        """Whether a CUDA graph is being captured: never."""
        return False

    def __enter__(self) -> Stream:
        self._before.append((machine.current, current_stream()))
        set_stream(self)
        return self

    def __exit__(
        self, etype: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        index, stream = self._before.pop()
        _current[self.device_index] = (
            stream if stream.device_index == self.device_index else _default(self.device_index)
        )
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


def default_stream(device: Any = None) -> Stream:
    """The stream a device has from the start."""
    return _default(existing(device))


def current_stream(device: Any = None) -> Stream:
    """The stream selected on a device."""
    index = existing(device)
    return _current.get(index) or _default(index)


def set_stream(stream: Stream | None) -> None:
    """Select a stream, and its device."""
    if stream is not None:
        _current[stream.device_index] = stream
        machine.current = stream.device_index


class StreamContext:
    """``with torch.cuda.stream(s)``; ``None`` selects nothing."""

    def __init__(self, stream: Stream | None) -> None:
        self.stream = stream

    def __enter__(self) -> None:
        if self.stream is not None:
            self.stream.__enter__()

    def __exit__(
        self, etype: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        if self.stream is not None:
            self.stream.__exit__(etype, error, tb)


def external_stream(data_ptr: int, device: Any = None) -> Stream:
    """A stream that another library owns: as empty as any."""
    return Stream(device)


CUDA = {
    "Event": Event,
    "ExternalStream": Stream,
    "Stream": Stream,
    "StreamContext": StreamContext,
    "current_stream": current_stream,
    "default_stream": default_stream,
    "get_stream_from_external": external_stream,
    "set_stream": set_stream,
    "stream": StreamContext,
}


def install() -> None:
    """Replace the streams and events of ``torch``, ``torch.cuda`` and ``torch.accelerator``."""
    for cls in (Event, Stream):
        cls.__module__ = "torch.cuda"
    replace_all(torch, {"Stream": Stream, "Event": Event})
    replace_all(torch.accelerator, {"current_stream": current_stream, "set_stream": set_stream})
    replace_all(torch.cuda.streams, {"Stream": Stream, "Event": Event, "ExternalStream": Stream})
    replace_all(torch.cuda, CUDA)
