"""A rank's connection to its data workers and the coordinator. No thread: it is drained when asked.

zmq's own I/O thread receives while the rank computes. Every call of ``take`` first takes in what has come,
so a rank that asks answers the coordinator's questions before it waits.
"""

from __future__ import annotations

import os
import time
from collections import deque
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import zmq

from taas.delivery.config import RankConfig
from taas.delivery.encoding import decode
from taas.delivery.messages import (
    Arrival,
    Begin,
    Close,
    Decoder,
    Doomed,
    Ended,
    Forget,
    Lacking,
    LoaderFacts,
    Opened,
    Progress,
    RankHello,
    RunFailed,
    ToRank,
    Welcome,
    Which,
    encode,
)
from taas.delivery.slab import Slab, lease_slot
from taas.delivery.transport import DataReceiver, authenticate, connect_control, fetch_fds, new_context
from taas.errors import DeliveryError

__all__ = ["Connection", "Element"]

_FLUSH = 0.002
_FLUSH_COUNT = 16


@dataclass(slots=True)
class Element:
    """One element that is here: a reference to its memory, or a failure, or the reason there is none."""

    arrival: Arrival | None
    stream: Any
    frame: Any
    doomed: Doomed | None = None


class Connection:
    """All delivery of one rank. Used by one thread at a time."""

    def __init__(self, config: RankConfig) -> None:
        self.config = config
        self.waited = 0.0
        self.facts: list[LoaderFacts] = []
        self._context = new_context()
        self._slab = self._map_slab()
        self._receiver = DataReceiver(
            self._context, local=bool(config.slabs), host=config.host, encrypt=config.encrypt
        )
        self._control = connect_control(self._context, config.endpoint, config.keys, f"r{config.rank}")
        self._poller = zmq.Poller()
        self._poller.register(self._control, zmq.POLLIN)
        self._poller.register(self._receiver.socket, zmq.POLLIN)
        self._decode = Decoder(ToRank)
        self._decode_arrivals = msgspec.msgpack.Decoder(list[Arrival]).decode
        self._ready: dict[int, dict[int, Element]] = {}
        self._next: dict[int, int] = {}
        self._opened: dict[tuple[int, int], Opened] = {}
        self._ended: dict[int, Ended] = {}
        self._abandoned: set[tuple[int, int]] = set()
        self._closed: set[int] = set()
        self._failed = ""
        self._here: set[int] = set()
        self._disowned: set[int] = set()
        self._freed: deque[tuple[int, int]] = deque()
        self._released: list[int] = []
        self._spoilt: list[int] = []
        self._consumed: dict[int, int] = {}
        self._held = 0
        self._flushed = self._drained = 0.0
        self._limit = 0
        hello = RankHello(
            config.rank, os.getpid(), self._receiver.address, self._receiver.key, self._slab is not None
        )
        self._control.send(encode(hello))

    def _map_slab(self) -> Slab | None:
        if not self.config.slabs:
            return None
        try:
            fds = fetch_fds(self.config.keys, self.config.slabs, self.config.ranks)
        except OSError:
            return None
        slab = Slab(fds[self.config.rank])
        for fd in fds:
            os.close(fd)
        return slab

    # ── what a loader asks ────────────────────────────────────────────────────────────────────────

    def welcome(self) -> list[LoaderFacts]:
        """Return the loaders' facts; waits until the planner has them."""
        while not self.facts:
            self._wait()
        return self.facts

    def begin(self, loader: int, iteration: int, epoch: int | None, start: int = 0, taken: int = 0) -> None:
        """Say that ``iter()`` was called, for an iteration from step ``start`` on."""
        self._control.send(encode(Begin(loader, iteration, epoch, start, taken)))

    def opened(self, loader: int, iteration: int) -> Opened:
        """Return the coordinator's answer to ``begin``."""
        key = (loader, iteration)
        began = time.perf_counter()
        while key not in self._opened:
            self._wait()
        self.waited += time.perf_counter() - began
        answer = self._opened.pop(key)
        self._next.setdefault(answer.plan, 0)
        return answer

    def abandon(self, loader: int, iteration: int) -> None:
        """Nobody will ask for an iteration that was begun: close it as soon as its plan is known."""
        answer = self._opened.pop((loader, iteration), None)
        if answer is None:
            self._abandoned.add((loader, iteration))
        elif answer.plan >= 0:
            self.close(answer.plan, 0, 0)

    def skip(self, plan: int, step: int) -> None:
        """Nobody will ask for steps of a plan before this one: give back what has come of them."""
        self._next[plan] = step
        here = self._ready.get(plan, {})
        for seq in [seq for seq in here if seq // self.config.ranks < step]:
            self.discard(here.pop(seq))

    def take(self, plan: int, step: int, consumed: int) -> Element | Ended:
        """Return this rank's element of a plan, or how the plan ended. The step before counts as consumed.

        Raises:
            DeliveryError: nothing will come any more.
        """
        self._consumed[plan] = consumed
        self._next[plan] = step
        now = time.perf_counter()
        if now - self._drained > _FLUSH:
            self._drain()
        seq = step * self.config.ranks + self.config.rank
        here = self._ready.get(plan, {}).pop(seq, None)
        element = self._wait_for(plan, seq, step) if here is None else here
        if now - self._flushed > _FLUSH or len(self._released) + len(self._freed) >= _FLUSH_COUNT:
            self._flush()
        if isinstance(element, Element):
            self._next[plan] = step + 1
        return element

    def ended(self, plan: int) -> Ended:
        """Return how a plan ends of which this rank takes nothing; waits until that is known.

        Raises:
            DeliveryError: nothing will come any more.
        """
        while plan not in self._ended:
            self._wait()
        return self._ended[plan]

    def _wait_for(self, plan: int, seq: int, step: int) -> Element | Ended:
        began = time.perf_counter()
        self._flush()
        self._drain()
        try:
            while True:
                element = self._ready.get(plan, {}).pop(seq, None)
                if element is not None:
                    return element
                ended = self._ended.get(plan)
                if ended is not None and step >= ended.steps:
                    return ended
                self._wait()
        finally:
            self.waited += time.perf_counter() - began

    def build(self, element: Element) -> Any:
        """Return the element's object. Its memory is the slot itself, unless this rank hoards."""
        arrival = element.arrival
        assert arrival is not None
        if arrival.offset < 0:
            self._release(arrival.attempt)
            exporter = b"" if element.frame is None else _exporter(element.frame)
            return decode(element.stream, exporter, arrival.buffers)
        assert self._slab is not None
        slab, attempt, capacity = self._slab, arrival.attempt, arrival.capacity
        if not arrival.used:
            self._release(attempt)
            return decode(element.stream, b"", arrival.buffers)
        if self._held + capacity > self._limit and self._held:
            copied = np.frombuffer(slab.map, np.uint8, arrival.used, arrival.offset).copy()
            self._release(attempt)
            return decode(element.stream, copied, arrival.buffers)
        slab.fault_in(arrival.offset, capacity)
        self._held += capacity
        freed = self._freed

        def on_free() -> None:
            freed.append((attempt, capacity))  # in any thread: a deque's append is atomic

        return decode(element.stream, lease_slot(slab, arrival.offset, capacity, on_free), arrival.buffers)

    def discard(self, element: Element) -> None:
        """Give an element back unused."""
        if element.arrival is not None:
            self._release(element.arrival.attempt)

    def close(self, plan: int, consumed: int, asked: int) -> None:
        """No more of this plan: what is here of it is given back. ``asked``: steps that were asked beyond."""
        if plan in self._closed:
            return
        self._give_back(plan)
        self._flush()
        self._control.send(encode(Close(plan, consumed, asked)))

    def _give_back(self, plan: int) -> None:
        self._closed.add(plan)
        for element in self._ready.pop(plan, {}).values():
            self.discard(element)
        self._ended.pop(plan, None)
        self._consumed.pop(plan, None)
        self._next.pop(plan, None)

    def shut(self) -> None:
        """End the connection; delivered elements stay valid."""
        self._flush()
        self._control.close()
        self._receiver.socket.close()
        self._context.term()

    # ── sockets ───────────────────────────────────────────────────────────────────────────────────

    def _wait(self) -> None:
        if self._failed:
            raise DeliveryError(f"{self._failed}\nThe run cannot go on; start the cell again")
        self._poller.poll()
        self._drain()

    def _drain(self) -> None:
        """Take in all that has come."""
        self._drained = time.perf_counter()
        receive = self._receiver.socket.recv_multipart
        while True:
            try:
                frames = receive(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                break
            self._arrived(frames)
        while True:
            try:
                message = self._decode(self._control.recv(zmq.NOBLOCK))
            except zmq.Again:
                return
            self._told(message)

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
            self._accept(arrival, streams[start:end], frame)
            start = end

    def _accept(self, arrival: Arrival, stream: bytes, frame: Any) -> None:
        attempt, plan = arrival.attempt, arrival.plan
        if attempt in self._disowned or (arrival.offset >= 0 and self._slab is None):
            return
        self._here.add(attempt)
        if arrival.spoilt:
            self._spoilt.append(attempt)
        known = self._ready.setdefault(plan, {})
        late = arrival.seq // self.config.ranks < self._next.get(plan, 0)
        if plan in self._closed:
            self._ready.pop(plan, None)
            self._release(attempt)
        elif late or arrival.seq in known:
            self._release(attempt)
        else:
            known[arrival.seq] = Element(arrival, stream, frame)

    def _told(self, message: Any) -> None:
        if isinstance(message, Which):
            self._answer_which(message)
        elif isinstance(message, Opened):
            self._opened[message.loader, message.iteration] = message
            if (message.loader, message.iteration) in self._abandoned:
                self._abandoned.discard((message.loader, message.iteration))
                self.abandon(message.loader, message.iteration)
        elif isinstance(message, Ended):
            if message.plan not in self._closed:
                self._ended[message.plan] = message
        elif isinstance(message, Welcome):
            self.facts = message.loaders
            self._limit = message.slab // 2
        elif isinstance(message, Forget):
            self._give_back(message.plan)
        elif isinstance(message, Doomed):
            if message.plan not in self._closed:
                self._ready.setdefault(message.plan, {})[message.seq] = Element(None, b"", None, message)
        elif isinstance(message, RunFailed):
            self._failed = message.reason

    def _answer_which(self, message: Which) -> None:
        lacking = [attempt for attempt in message.attempts if attempt not in self._here]
        self._disowned.update(lacking)
        self._flush()
        self._control.send(encode(Lacking(message.attempts, lacking)))

    def _release(self, attempt: int) -> None:
        self._released.append(attempt)

    def _flush(self) -> None:
        self._flushed = time.perf_counter()
        while self._freed:
            attempt, capacity = self._freed.popleft()
            self._held -= capacity
            self._released.append(attempt)
        if self._released or self._consumed:
            self._here.difference_update(self._released)
            progress = Progress(list(self._consumed.items()), self._released, self.waited, self._spoilt)
            self._control.send(encode(progress))
            self._released, self._spoilt = [], []
            self._consumed = {}


def _exporter(frame: Any) -> Any:
    """Return the frame's memory, or a copy where tensors could not lie (small frames share a buffer of zmq's)."""
    array = np.frombuffer(frame.buffer, np.uint8)
    if array.ctypes.data % 64 or not array.flags.writeable:
        return array.copy()
    return frame.buffer
