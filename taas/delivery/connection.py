"""A rank's connection to its data workers and the coordinator. No thread: it is drained when asked.

zmq's own I/O thread receives while the rank computes. Data workers make an element at least once; here it is yielded
exactly once: what is here already, or was yielded, is dropped by its number.
"""

from __future__ import annotations

import contextlib
import errno
import os
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import msgspec
import zmq

from taas.delivery.config import DeliveryConfig, ResumePoint
from taas.delivery.holdings import Element, Holdings, Pinning
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
from taas.delivery.transport import ControlClient, DataReceiver, map_slabs, new_context
from taas.errors import DeliveryError
from taas.wire.framing import authenticate

_FLUSH = 0.002
_FLUSH_COUNT = 16
_AT_ONCE = 256
_NO_DESCRIPTOR = ". Raise the limit of open files (ulimit -n)"
_ADVICE = {
    errno.EMFILE: _NO_DESCRIPTOR,
    errno.ENFILE: _NO_DESCRIPTOR,
    errno.ENOMEM: ". Raise the limit of address space (ulimit -v), or make the buffer smaller ([delivery] buffer in taas.toml)",
}


@dataclass(slots=True)
class _Iteration:
    """What is here of a plan."""

    ready: dict[int, Element] = field(default_factory=dict)  # elements by their number in it
    next: int = 0  # the step that the loader asks for next; what comes of earlier ones is dropped
    ended: Ended | None = None  # how it ends, once that is known


class Turn:
    """``with`` it, a thread has the sockets to itself; what others, or a collection of garbage, leave to it is done then.

    An interrupt that strikes on the way in keeps nobody out: the same thread may come in again.
    """

    def __init__(self) -> None:
        self._lock, self._left = threading.RLock(), deque[Callable[[], None]]()
        self._inside, self._thread = False, threading.get_ident()

    def __enter__(self) -> None:
        self._lock.acquire()
        self._inside, self._thread = True, threading.get_ident()
        try:
            while self._left:
                self._left.popleft()()
        except BaseException:
            self.__exit__()
            raise

    def __exit__(self, *_: object) -> None:
        self._inside = False
        self._lock.release()

    def leave(self, what: Callable[[], None]) -> None:
        """Have something done by the thread that has, or last had, its turn: at once if it is this one, and free."""
        self._left.append(what)
        free = self._thread == threading.get_ident() and not self._inside
        if free and self._lock.acquire(blocking=False):
            try:
                with self:
                    pass
            finally:
                self._lock.release()


class DeliveryConnection:
    """All delivery of one rank. Used by one thread at a time, which alone touches the sockets.

    Args:
        host: where data VMs elsewhere can reach it.

    Attributes:
        holdings: makes objects of elements.
        waited: seconds spent waiting in all.
        places: where loaders begin that do not begin at their start.
        begun: whether any loader has begun.
    """

    def __init__(self, config: DeliveryConfig, rank: int, host: str) -> None:
        self.config, self._rank = config, rank
        self._turn = Turn()
        self._pinning: Pinning | None = None
        self.places: dict[str, ResumePoint] = {}
        self.begun = False
        self.waited = 0.0
        self.facts: tuple[LoaderFacts, ...] = ()
        try:
            slabs = map_slabs(config.folder)
        except OSError as error:
            said = f"this rank cannot map the memory that its data workers write to: {error}"
            raise DeliveryError(said + _ADVICE.get(error.errno or 0, "")) from error
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
        self._control.send(Hello(os.getpid(), address=address, key=key))

    # ── what a loader asks ────────────────────────────────────────────────────────────────────────

    def welcome(self) -> tuple[LoaderFacts, ...]:
        """Return the loaders' facts; waits until the planner has them."""
        with self._turn:
            while not self.facts:
                self._wait()
            return self.facts

    def begin(self, loader: int, iteration: int, epoch: int | None, place: ResumePoint) -> int:
        """Say that ``iter()`` was called, for an iteration that begins where ``place`` says; return its plan."""
        plan = plan_number(loader, iteration, epoch)
        with self._turn:
            self._control.send(Begin(loader, iteration, epoch, place.step, place.taken))
            self._closed.discard(plan)
            begun = self._iterations[plan]
            begun.next = place.step
            for seq in [seq for seq in begun.ready if seq // self.config.ranks < place.step]:
                del begun.ready[seq]
        return plan

    def take(self, plan: int, step: int) -> Element | Ended:
        """Return this rank's element of a plan, or how the plan ended. The step before counts as consumed.

        Raises:
            DeliveryError: nothing will come any more.
        """
        with self._turn:
            self._progress[plan] = PlanProgress(plan, step, step)
            iteration = self._iterations[plan]
            iteration.next = step
            now = time.perf_counter()
            if now - self._drained > _FLUSH:
                self._drain()
            seq = self._seq(step)
            element: Element | Ended | None = None
            if iteration.ended is None or step < iteration.ended.steps:
                element = iteration.ready.pop(seq, None)
            if element is None:
                element = self._wait_for(iteration, seq, step)
            if now - self._flushed > _FLUSH or self.holdings.to_tell >= _FLUSH_COUNT:
                self._flush()
            if isinstance(element, Element):
                iteration.next = step + 1
            return element

    def ended(self, plan: int) -> Ended:
        """Return how a plan ends of which this rank takes nothing; waits until that is known.

        Raises:
            DeliveryError: nothing will come any more.
        """
        with self._turn:
            while (ended := self._iterations[plan].ended) is None:
                self._wait()
            return ended

    def _wait_for(self, iteration: _Iteration, seq: int, step: int) -> Element | Ended:
        began = time.perf_counter()
        self._flush()
        self._drain()
        try:
            while iteration.ended is None or step < iteration.ended.steps:
                if (element := iteration.ready.pop(seq, None)) is not None:
                    return element
                self._wait()
            return iteration.ended
        finally:
            self.waited += time.perf_counter() - began

    def upcoming(self, plan: int, step: int) -> Element | None:
        """Return this rank's element of a plan if it is here already; it is not asked for by that."""
        return self._iterations[plan].ready.get(self._seq(step))

    def _seq(self, step: int) -> int:
        return step * self.config.ranks + self._rank

    def pin(self, element: Element) -> Future[Any]:
        """Have the element's object in page-locked memory, which another thread copies; twice is harmless."""
        if element.pinned is None:
            element.pinned = Future()
            self._pinning = self._pinning or Pinning()
            try:
                self._pinning.pin(element.pinned, self.holdings.build(element))
            except Exception as error:  # it is raised at the element's own step
                element.pinned.set_exception(error)
        return element.pinned

    def abandon(self, plan: int, consumed: int, asked: int) -> None:
        """Close a plan, whichever thread says so, in the middle of whatever."""
        self._turn.leave(lambda: self._close(plan, consumed, asked))

    def close(self, plan: int, consumed: int, asked: int) -> None:
        """No more of this plan: what is here of it is dropped. ``asked``: steps that were asked beyond."""
        with self._turn:
            self._close(plan, consumed, asked)

    def _close(self, plan: int, consumed: int, asked: int) -> None:
        self._closed.add(plan)
        self._iterations.pop(plan, None)
        self._progress[plan] = PlanProgress(plan, consumed, asked, closed=True)
        self._flush()

    def shut(self) -> None:
        """End the connection; delivered elements stay valid."""
        with self._turn:
            self._flush()
        if self._pinning is not None:
            self._pinning.close()
        self._control.close()
        self._receiver.close()
        self._context.term()

    # ── sockets ───────────────────────────────────────────────────────────────────────────────────

    def _wait(self) -> None:
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
            self._accept(Element(arrival, streams[start:end], frame))
            start = end

    def _accept(self, element: Element) -> None:
        """Keep an element for who asks for it; drop what nobody will, and what is here or was yielded already."""
        arrival = element.arrival
        if arrival.plan not in self._closed:
            iteration = self._iterations[arrival.plan]
            if arrival.seq // self.config.ranks >= iteration.next:
                iteration.ready.setdefault(arrival.seq, element)

    def _on_message(self, message: Any) -> None:
        if isinstance(message, Ended):
            if message.plan in self._iterations:  # else it was closed meanwhile
                self._iterations[message.plan].ended = message
        elif isinstance(message, Hello):
            self.facts = message.loaders
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
