"""A rank's connection to its data workers and the coordinator, and what it does with the memory of its elements.

zmq's own I/O thread receives while the rank computes; the connection is drained when asked. Data
workers make an element at least once; here it is yielded exactly once: what is here already, or was
yielded, is dropped by its number.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import msgspec
import numpy as np
import zmq

from taas.delivery.config import DeliveryConfig, ResumePoint
from taas.delivery.encoding import decode
from taas.delivery.messages import (
    Begin,
    Cancel,
    ElementArrival,
    Ended,
    Failed,
    Hello,
    LoaderFacts,
    Peer,
    PlanProgress,
    Progress,
    ToRank,
)
from taas.delivery.plan import plan_number
from taas.delivery.slab import Slabs, lease_slot
from taas.delivery.transport import ControlClient, DataReceiver, map_slabs, new_context
from taas.errors import DeliveryError
from taas.wire.framing import authenticate

_FLUSH = 0.002
_FLUSH_COUNT = 16
_AT_ONCE = 256


@dataclass(slots=True)
class Element:
    """One element that is here: a reference to its memory, or a failure."""

    arrival: ElementArrival
    stream: Any
    frame: Any


@dataclass(slots=True)
class Ahead:
    """An element that is worked on before it is taken; ``taken`` is to be called when it is."""

    element: Element
    memory: Any
    taken: Callable[[], None]

    def build(self) -> Any:
        """Return its object, once; its memory is its own from then on."""
        memory, self.memory = self.memory, None
        return decode(self.element.stream, memory)


class Holdings:
    """Elements that this rank has yielded, until nobody uses their memory any more.

    A rank that hoards more than ``limit`` bytes of slots gets copies.
    """

    def __init__(self, slabs: Slabs | None, limit: int) -> None:
        self._slabs, self._limit = slabs, limit
        self.freed: deque[tuple[int, int]] = (
            deque()
        )  # elements and bytes of slots that are held no more
        self._held = 0

    def release(self, element: Element) -> None:
        """Nobody uses this element's memory."""
        self.freed.append((element.arrival.number, 0))

    def build(self, element: Element) -> Any:
        """Return the element's object. Its memory is the slot itself, unless this rank hoards."""
        arrival, slabs = element.arrival, self._slabs
        if arrival.offset < 0 or not arrival.used:
            self.release(element)
            memory = _memory_of_frame(element)
        elif slabs is not None and self._held and self._held + arrival.capacity > self._limit:
            memory = np.frombuffer(slabs.map, np.uint8, arrival.used, arrival.offset).copy()
            self.release(element)
        else:
            assert slabs is not None
            slabs.fault_in(arrival.offset, arrival.capacity)
            self._held += arrival.capacity
            freed = partial(
                self.freed.append, (arrival.number, arrival.capacity)
            )  # in any thread: atomic
            memory = lease_slot(slabs, arrival.offset, arrival.capacity, freed)
        return decode(element.stream, memory)

    def hold_ahead(self, element: Element) -> Ahead | None:
        """Lay hold of an element's memory before it is taken; None where this rank hoards."""
        arrival, slabs = element.arrival, self._slabs
        if arrival.offset < 0 or not arrival.used:
            return Ahead(element, _memory_of_frame(element), partial(self.release, element))
        if self._held and self._held + arrival.capacity > self._limit:
            return None
        assert slabs is not None
        slabs.fault_in(arrival.offset, arrival.capacity)
        # It may be used no more before it is taken, as all of it was copied, or only after that: in
        # any thread. What comes second gives it back; of an element that is never taken nobody says
        # anything.
        events = itertools.count()

        def note() -> None:
            if next(events) == 1:
                self.freed.append((arrival.number, arrival.capacity))

        def take() -> None:
            self._held += arrival.capacity
            note()

        return Ahead(element, lease_slot(slabs, arrival.offset, arrival.capacity, note), take)

    def told(self) -> list[int]:
        """Return which elements were released since this was asked last."""
        released = []
        while self.freed:
            number, capacity = self.freed.popleft()
            self._held -= capacity
            released.append(number)
        return released


def _memory_of_frame(element: Element) -> Any:
    """Return the memory of an element that came as a frame, or of one that has none."""
    if element.frame is None:
        return b""
    array = np.frombuffer(element.frame.buffer, np.uint8)
    # small frames share a buffer of zmq's
    shared = array.ctypes.data % 64 or not array.flags.writeable
    return array.copy() if shared else element.frame.buffer


@dataclass(slots=True)
class _Iteration:
    """What is here of a plan."""

    ready: dict[int, Element] = field(default_factory=dict)  # elements by their number in it
    next: int = 0  # the step that the loader asks for next; what comes of earlier ones is dropped
    ended: Ended | None = None  # how it ends, once that is known

    def take(self, seq: int, step: int) -> Element | Ended | None:
        """Return the element of a step, or how it ended before; None where neither is here yet."""
        if self.ended is not None and step >= self.ended.steps:
            return self.ended
        return self.ready.pop(seq, None)


class DeliveryConnection:
    """All delivery of one rank, which data VMs elsewhere reach at ``host``. One thread at a time touches the sockets."""

    def __init__(self, config: DeliveryConfig, rank: int, host: str) -> None:
        self.config, self._rank = config, rank
        self._lock = threading.Lock()  # who has it may use the sockets
        self._left = deque[PlanProgress]()  # of loops that were left
        self.places: dict[
            str, ResumePoint
        ] = {}  # where loaders begin that do not begin at their start
        self.begun = False  # whether any loader has
        self.waited = 0.0  # seconds spent waiting in all
        self.facts: dict[str, tuple[int, LoaderFacts]] = {}  # by name, with the loader's number
        try:
            slabs = map_slabs(config.folder)
        except OSError as error:
            said = f"this rank cannot map the memory that its data workers write to: {error}"
            raise DeliveryError(f"{said}. Raise the limit that it has met (ulimit -a)") from error
        self.holdings = Holdings(slabs, config.slab // 2)
        self._context = new_context()
        self._receiver = DataReceiver(self._context, config, rank, host)
        self._control = ControlClient(self._context, config, Peer("rank", rank), ToRank)
        self._poller = zmq.Poller()
        self._poller.register(self._control.socket, zmq.POLLIN)
        self._poller.register(self._receiver.socket, zmq.POLLIN)
        if self._receiver.gate is not None:
            self._poller.register(self._receiver.gate.socket, zmq.POLLIN)
        self._decode_arrivals = msgspec.msgpack.Decoder(list[ElementArrival]).decode
        self._iterations: defaultdict[int, _Iteration] = defaultdict(_Iteration)
        self._closed: set[int] = set()
        self._progress: dict[int, PlanProgress] = {}
        self._failed = ""
        self._flushed = self._drained = 0.0
        address, key = self._receiver.address, self._receiver.key
        self._control.send(Hello(address=address, key=key))

    # ── what a loader asks ────────────────────────────────────────────────────────────────────────

    def welcome(self) -> dict[str, tuple[int, LoaderFacts]]:
        """Return the loaders' facts; waits until the planner has them."""
        with self._lock:
            self._close_left()
            while not self.facts:
                self._wait()
            return self.facts

    def begin(self, loader: int, iteration: int, epoch: int | None, place: ResumePoint) -> int:
        """Say that ``iter()`` was called, for an iteration that begins where ``place`` says; return its plan."""
        plan = plan_number(loader, iteration, epoch)
        with self._lock:
            self._close_left()
            self._control.send(Begin(loader, iteration, epoch, place.step, place.taken))
            self._closed.discard(plan)
            begun = self._iterations[plan]
            begun.next = place.step
            for seq in [seq for seq in begun.ready if seq // self.config.ranks < place.step]:
                del begun.ready[seq]
        return plan

    def take(self, plan: int, step: int) -> Element | Ended:
        """Return this rank's element of a plan, or how the plan ended. The step before counts as consumed."""
        with self._lock:
            self._close_left()
            self._progress[plan] = PlanProgress(plan, step, step)
            iteration = self._iterations[plan]
            iteration.next = step
            now = time.perf_counter()
            if now - self._drained > _FLUSH:
                self._drain()
            seq = self._seq(step)
            if (element := iteration.take(seq, step)) is None:
                self._flush()
                self._drain()
                while (element := iteration.take(seq, step)) is None:
                    self._wait()
                self.waited += time.perf_counter() - now
            if now - self._flushed > _FLUSH or len(self.holdings.freed) >= _FLUSH_COUNT:
                self._flush()
            if isinstance(element, Element):
                iteration.next = step + 1
            return element

    def peek(self, plan: int, step: int) -> Element | None:
        """Return this rank's element of a step, if it is here; it is not taken, and nothing is waited for."""
        with self._lock:
            iteration = self._iterations.get(plan)
            return None if iteration is None else iteration.ready.get(self._seq(step))

    def _seq(self, step: int) -> int:
        return step * self.config.ranks + self._rank

    def close(self, plan: int, consumed: int, asked: int) -> None:
        """Drop what is here of a plan, whichever thread says so, in the middle of whatever; it asked beyond some steps."""
        self._left.append(PlanProgress(plan, consumed, asked, closed=True))
        if self._lock.acquire(
            blocking=False
        ):  # else whoever has it does it, or the next one to have it
            try:
                self._close_left()
                self._flush()
            finally:
                self._lock.release()

    def _close_left(self) -> None:
        while self._left:
            progress = self._left.popleft()
            self._closed.add(progress.plan)
            self._iterations.pop(progress.plan, None)
            self._progress[progress.plan] = progress

    def shut(self) -> None:
        """End the connection; delivered elements stay valid."""
        with self._lock:
            self._close_left()
            self._flush()
        self._context.destroy()

    # ── sockets ───────────────────────────────────────────────────────────────────────────────────

    def _wait(self) -> None:
        """Wait for something to come. Raises a DeliveryError where nothing will any more."""
        if self._failed:
            raise DeliveryError(f"{self._failed}\nThe run cannot go on; start the cell again")
        self._poller.poll()
        self._drain()

    def _drain(self) -> None:
        """Take in what has come, up to a number: whoever asks waits for no more than that."""
        self._drained = time.perf_counter()
        if self._receiver.gate is not None:
            self._receiver.gate.answer()
        receive = self._receiver.socket.recv_multipart
        with contextlib.suppress(zmq.Again):
            for _ in range(_AT_ONCE):
                self._arrived(receive(zmq.NOBLOCK, copy=False))
        with contextlib.suppress(zmq.Again):
            for _ in range(_AT_ONCE):
                self._on_message(self._control.receive(zmq.NOBLOCK))

    def _arrived(self, frames: list[Any]) -> None:
        if len(frames) not in (2, 3):
            return
        streams = frames[1].bytes
        header = authenticate(self.config.keys.mac, frames[0].bytes, streams)
        if header is None:
            return  # not from this run's workers
        frame = frames[2] if len(frames) == 3 else None
        start = 0
        for arrival in self._decode_arrivals(header):
            end = start + arrival.pickled
            if arrival.plan not in self._closed:
                iteration = self._iterations[arrival.plan]
                if (
                    arrival.seq // self.config.ranks >= iteration.next
                ):  # else it was yielded already
                    iteration.ready.setdefault(
                        arrival.seq, Element(arrival, streams[start:end], frame)
                    )
            start = end

    def _on_message(self, message: Any) -> None:
        if isinstance(message, Ended):
            if message.plan in self._iterations:  # else it was closed meanwhile
                self._iterations[message.plan].ended = message
        elif isinstance(message, Hello):
            self.facts = {
                facts.name: (number, facts) for number, facts in enumerate(message.loaders)
            }
        elif isinstance(message, Cancel):
            self._closed.add(message.plan)
            self._iterations[message.plan].ready.clear()
        elif isinstance(message, Failed):
            self._failed = message.reason

    def _flush(self) -> None:
        self._flushed = time.perf_counter()
        released, plans = self.holdings.told(), self._progress
        if released or plans:
            self._progress = {}
            self._control.send(Progress(list(plans.values()), released, self.waited))
