"""What a rank does with the memory of its elements: objects are built over it, or of copies; what is free is told."""

from __future__ import annotations

import threading
from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

import numpy as np
import torch
from torch.utils.data import _utils

from taas.delivery.encoding import decode
from taas.delivery.messages import ElementArrival
from taas.delivery.slab import Slabs, lease_slot


@dataclass(slots=True)
class Element:
    """One element that is here: a reference to its memory, or a failure."""

    arrival: ElementArrival
    stream: Any
    frame: Any
    pinned: Future[Any] | None = None  # its object, once that is asked for


class Holdings:
    """Elements that this rank has yielded, until nobody uses their memory any more.

    Args:
        limit: bytes of slots that may be held; beyond, a rank that hoards gets copies.
    """

    def __init__(self, slabs: Slabs | None, limit: int) -> None:
        self._slabs, self._limit = slabs, limit
        self._freed: deque[tuple[int, int]] = deque()
        """Elements and bytes of slots that are held no more."""
        self._held = 0

    def release(self, element: Element) -> None:
        """Nobody uses this element's memory."""
        self._freed.append((element.arrival.number, 0))

    def build(self, element: Element) -> Any:
        """Return the element's object. Its memory is the slot itself, unless this rank hoards."""
        arrival, slabs = element.arrival, self._slabs
        if arrival.offset < 0 or not arrival.used:
            self.release(element)
            memory = b"" if element.frame is None else _exporter(element.frame)
        elif slabs is not None and self._held and self._held + arrival.capacity > self._limit:
            memory = np.frombuffer(slabs.map, np.uint8, arrival.used, arrival.offset).copy()
            self.release(element)
        else:
            assert slabs is not None
            number, capacity, freed = arrival.number, arrival.capacity, self._freed
            slabs.fault_in(arrival.offset, capacity)
            self._held += capacity

            def on_free() -> None:
                freed.append((number, capacity))  # in any thread: a deque's append is atomic

            memory = lease_slot(slabs, arrival.offset, capacity, on_free)
        return decode(element.stream, memory)

    @property
    def to_tell(self) -> int:
        """How many releases the coordinator does not know of."""
        return len(self._freed)

    def told(self) -> list[int]:
        """Return which elements were released since this was asked last."""
        released = []
        while self._freed:
            number, capacity = self._freed.popleft()
            self._held -= capacity
            released.append(number)
        return released


def _exporter(frame: Any) -> Any:
    """Return the frame's memory, or a copy where tensors could not lie (small frames share a buffer of zmq's)."""
    array = np.frombuffer(frame.buffer, np.uint8)
    if array.ctypes.data % 64 or not array.flags.writeable:
        return array.copy()
    return frame.buffer


class Pinning:
    """A thread that copies elements into page-locked memory, for the device that is current where it is made.

    As torch's DataLoader has it, while the rank computes. Slabs themselves are not page-locked: a copy from them to a GPU is
    over when the call returns, so that a slot may be given back at any time. What is pinned is torch's own memory, which
    torch keeps until the copies from it are over.
    """

    def __init__(self) -> None:
        self._todo: SimpleQueue[tuple[Future[Any], Any] | None] = SimpleQueue()
        # No daemon's end is waited for at the end of a cell.
        threading.Thread(
            target=self._run, args=(torch.cuda.current_device(),), name="taas-pin", daemon=True
        ).start()

    def pin(self, done: Future[Any], data: Any) -> None:
        """Let a future have the pinned copy of an element, or what pinning it raises."""
        self._todo.put((done, data))

    def close(self) -> None:
        """Let the thread end when it has done what was asked."""
        self._todo.put(None)

    def _run(self, device: int) -> None:
        torch.set_num_threads(1)  # this thread's: a copy is not to take all processors
        torch.cuda.set_device(device)
        while (asked := self._todo.get()) is not None:
            done, data = asked
            try:
                done.set_result(_utils.pin_memory.pin_memory(data))
            except BaseException as error:
                done.set_exception(error)
            del asked, done, data  # nothing is held until the next one
