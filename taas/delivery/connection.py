"""A rank's connection to its data workers and the coordinator.

zmq's own I/O thread receives messages while the rank computes; the rank drains the connection when
it requests a batch. Data workers make a batch at least once, and the rank yields it exactly
once: it drops copies of batches that it has received or yielded before. ``Holdings`` tracks the
memory of yielded batches until it is free again.
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

from taas.delivery.encoding import decode
from taas.delivery.plan import plan_number
from taas.delivery.slab import Slabs, lease_slot
from taas.delivery.transport import ControlClient, DataReceiver, map_slabs, new_context
from taas.errors import DeliveryError
from taas.protocol.delivery_messages import (
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
from taas.protocol.delivery_orders import DeliveryConfig, ResumePoint
from taas.protocol.framing import authenticate

_FLUSH = 0.002
_FLUSH_COUNT = 16
_AT_ONCE = 256


@dataclass(slots=True)
class Element:
    """A batch that has arrived: a reference to its memory, or a failure."""

    arrival: ElementArrival
    stream: Any
    frame: Any


@dataclass(slots=True)
class Ahead:
    """A batch that is pinned before the loop takes it.

    Call ``taken`` when the loop takes it.
    """

    element: Element
    memory: Any
    taken: Callable[[], None]

    def build(self) -> Any:
        """Return the batch's object; call it once, because it hands the memory over."""
        memory, self.memory = self.memory, None
        return decode(self.element.stream, memory)


class Holdings:
    """The batches that this rank has yielded and whose memory is still in use.

    A rank that holds more than ``limit`` bytes of slots gets copies.
    """

    def __init__(self, slabs: Slabs | None, limit: int) -> None:
        self._slabs, self._limit = slabs, limit
        # numbers of batches that are no longer held, with the bytes of their slots
        self.freed: deque[tuple[int, int]] = deque()
        self._held = 0

    def release(self, element: Element) -> None:
        """Record that the memory of a batch is no longer used."""
        self.freed.append((element.arrival.number, 0))

    def build(self, element: Element) -> Any:
        """Return the batch's object.

        Its memory is the slot itself; beyond the limit, a copy.
        """
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
            # a finalizer may run in any thread: append is atomic
            freed = partial(self.freed.append, (arrival.number, arrival.capacity))
            memory = lease_slot(slabs, arrival.offset, arrival.capacity, freed)
        return decode(element.stream, memory)

    def hold_ahead(self, element: Element) -> Ahead | None:
        """Hold a batch's memory before the loop takes it; return None beyond the limit."""
        arrival, slabs = element.arrival, self._slabs
        if arrival.offset < 0 or not arrival.used:
            return Ahead(element, _memory_of_frame(element), partial(self.release, element))
        if self._held and self._held + arrival.capacity > self._limit:
            return None
        assert slabs is not None
        slabs.fault_in(arrival.offset, arrival.capacity)
        # Two events free the slot: the loop takes the batch, and its memory is no longer
        # referenced. The second one happens in any thread, and comes first if pinning has copied
        # all of it. The later one releases the slot. If the loop never takes the batch, the slot
        # is not released here: closing the plan does that.
        events = itertools.count()

        def note() -> None:
            if next(events) == 1:
                self.freed.append((arrival.number, arrival.capacity))

        def take() -> None:
            self._held += arrival.capacity
            note()

        return Ahead(element, lease_slot(slabs, arrival.offset, arrival.capacity, note), take)

    def take_released(self) -> list[int]:
        """Return the batches that were released since the last call."""
        released = []
        while self.freed:
            number, capacity = self.freed.popleft()
            self._held -= capacity
            released.append(number)
        return released


def _memory_of_frame(element: Element) -> Any:
    """Return the memory of a batch that arrived as a frame; empty if it has none."""
    if element.frame is None:
        return b""
    array = np.frombuffer(element.frame.buffer, np.uint8)
    # small frames share one of zmq's buffers
    shared = array.ctypes.data % 64 or not array.flags.writeable
    return array.copy() if shared else element.frame.buffer


@dataclass(slots=True)
class _Iteration:
    """The batches of a plan that have arrived."""

    ready: dict[int, Element] = field(default_factory=dict)  # by number in the plan
    next: int = 0  # the step that the loader requests next; batches of earlier steps are dropped
    ended: Ended | None = None  # how the iteration ends; None until this is known

    def take(self, seq: int, step: int) -> Element | Ended | None:
        """Return a step's batch, or how the iteration ended before it; None: not here yet."""
        if self.ended is not None and step >= self.ended.steps:
            return self.ended
        return self.ready.pop(seq, None)


class DeliveryConnection:
    """One rank's side of the delivery.

    Data VMs elsewhere reach the rank at ``host``. One thread at a time uses the sockets.
    """

    def __init__(self, config: DeliveryConfig, rank: int, host: str) -> None:
        self.config, self._rank = config, rank
        self._lock = threading.Lock()  # its holder may use the sockets
        self._left = deque[PlanProgress]()  # closed loops, for the coordinator
        self.places: dict[str, ResumePoint] = {}  # for loaders that do not begin at their start
        self.begun = False  # whether any loader has begun
        self.waited = 0.0  # total seconds spent waiting
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

    # ── for loaders ───────────────────────────────────────────────────────────────────────────────

    def welcome(self) -> dict[str, tuple[int, LoaderFacts]]:
        """Return the loaders' facts; wait until the planner has sent them."""
        with self._lock:
            self._close_left()
            while not self.facts:
                self._wait()
            return self.facts

    def begin(self, loader: int, iteration: int, epoch: int | None, place: ResumePoint) -> int:
        """Announce an iteration that begins at ``place``; return its plan."""
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
        """Return this rank's batch of a plan, or how the plan ended.

        The step before counts as consumed.
        """
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
        """Return this rank's batch of a step if it has arrived, without removing it."""
        with self._lock:
            iteration = self._iterations.get(plan)
            return None if iteration is None else iteration.ready.get(self._seq(step))

    def _seq(self, step: int) -> int:
        return step * self.config.ranks + self._rank

    def close(self, plan: int, consumed: int, asked: int) -> None:
        """Drop the batches of a plan; its loop has requested ``asked`` steps.

        Any thread may call it at any moment, because a garbage collection may.
        """
        self._left.append(PlanProgress(plan, consumed, asked, closed=True))
        # if another call has the lock, that call or the next one closes the plan
        if self._lock.acquire(blocking=False):
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
        """End the connection; delivered batches stay valid."""
        with self._lock:
            self._close_left()
            self._flush()
        self._context.destroy()

    # ── sockets ───────────────────────────────────────────────────────────────────────────────────

    def _wait(self) -> None:
        """Wait for a message.

        Raises a DeliveryError if no more messages will come.
        """
        if self._failed:
            raise DeliveryError(f"{self._failed}\nThe run cannot go on; start the cell again")
        self._poller.poll()
        self._drain()

    def _drain(self) -> None:
        """Read the messages that have arrived, up to a number that bounds the caller's wait."""
        self._drained = time.perf_counter()
        if self._receiver.gate is not None:
            self._receiver.gate.answer()
        receive = self._receiver.socket.recv_multipart
        with contextlib.suppress(zmq.Again):
            for _ in range(_AT_ONCE):
                self._take_in(receive(zmq.NOBLOCK, copy=False))
        with contextlib.suppress(zmq.Again):
            for _ in range(_AT_ONCE):
                self._on_message(self._control.receive(zmq.NOBLOCK))

    def _take_in(self, frames: list[Any]) -> None:
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
                step = arrival.seq // self.config.ranks
                if step >= iteration.next:  # otherwise it was yielded already
                    element = Element(arrival, streams[start:end], frame)
                    iteration.ready.setdefault(arrival.seq, element)
            start = end

    def _on_message(self, message: Any) -> None:
        if isinstance(message, Ended):
            if message.plan in self._iterations:  # otherwise it was closed meanwhile
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
        released, plans = self.holdings.take_released(), self._progress
        if released or plans:
            self._progress = {}
            self._control.send(Progress(list(plans.values()), released, self.waited))
