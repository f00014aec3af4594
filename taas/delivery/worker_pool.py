"""A data VM's worker pool: it holds the registered loaders, and forks the data workers.

Workers share the dataset's pages with the worker pool, so that a VM has one copy of it. A worker
receives tickets, makes batches, and writes them to the memory from which the rank reads them, or
sends them to the rank's host. The pool reports how workers end, and replaces them.
"""

from __future__ import annotations

import contextlib
import gc
import mmap
import os
import signal
import sys
import time
import traceback
import warnings
from collections import deque
from pathlib import Path
from typing import Any

import zmq

from taas.base import linux
from taas.base.wording import killed_by
from taas.delivery.encoding import (
    PackedElement,
    RawRegion,
    install_collate,
    pack_element,
    stacking_into,
)
from taas.delivery.making import Failure, MapFetcher, OwnedStreams, load_loaders, place_of
from taas.delivery.registered import Loaders
from taas.delivery.slab import slot_size
from taas.delivery.transport import (
    ControlClient,
    connect_control,
    connect_data,
    map_slabs,
    new_context,
)
from taas.errors import DeliveryError
from taas.protocol.delivery_messages import (
    Cancel,
    ElementArrival,
    Hello,
    Peer,
    Result,
    Ticket,
    ToWorker,
    WorkerLost,
)
from taas.protocol.delivery_orders import DataOrder
from taas.protocol.framing import Alive, Leave, pack, seal

_FLUSH = 0.002
"""Results may wait for this many seconds, so that several are sent together."""


class Worker:
    """One data worker.

    ``status`` tells its pool which batch it is making; ``number`` is ``get_worker_info().id``.
    """

    def __init__(
        self, config: DataOrder, name: Peer, number: int, loaders: Loaders, status: memoryview
    ) -> None:
        common = config.common
        self._keys, self._loaders, self._status = common.keys, loaders, status
        count = max(common.hosts, config.vm + 1) * config.processes
        self._fetchers = [MapFetcher(title, parts, number, count) for title, parts in loaders]
        self._streams = OwnedStreams(loaders, common)
        self._todo: deque[Ticket] = deque()
        self._results: list[Result] = []
        self._flushed = 0.0
        self._sizes: dict[int, int] = {}
        self._plain_stack: set[int] = set()
        self._context = new_context()
        self._control = ControlClient(self._context, common, name, ToWorker)
        self._data: dict[int, zmq.Socket[bytes]] = {}
        self._outgoing: dict[int, tuple[list[ElementArrival], list[bytes]]] = {}
        self._unsent: dict[int, list[list[Any]]] = {}
        self._slabs = None
        with contextlib.suppress(OSError):  # if this fails, its batches are sent as frames
            self._slabs = map_slabs(common.folder)

    # ── the loop ──────────────────────────────────────────────────────────────────────────────────

    def run(self) -> None:
        """Work until the pool kills this process."""
        self._control.send(Hello(shared=self._slabs is not None))
        while True:
            self._listen()
            if self._todo:
                self._serve(self._todo.popleft())

    def _listen(self) -> None:
        """Read the messages that have arrived; wait for one if there is nothing to do."""
        idle = not self._todo
        if idle or time.perf_counter() - self._flushed > _FLUSH:
            self._flush()
        if idle:
            self._control.socket.poll()
        with contextlib.suppress(zmq.Again):
            while True:
                message = self._control.receive(zmq.NOBLOCK)
                if isinstance(message, list):
                    self._todo.extend(message)
                elif isinstance(message, Hello):
                    self._connect(message)
                elif isinstance(message, Cancel):
                    self._streams.cancel(message)

    def _flush(self) -> None:
        self._flushed = time.perf_counter()
        for rank, (arrivals, streams) in self._outgoing.items():
            self._post(rank, arrivals, b"".join(streams), None)
        self._outgoing.clear()
        if self._results:
            self._control.send(self._results)
            self._results = []

    def _connect(self, rank: Hello) -> None:
        if old := self._data.get(rank.rank):
            old.close(0)
        data = self._data[rank.rank] = connect_data(
            self._context, rank.address, rank.key, self._keys
        )
        for frames in self._unsent.pop(rank.rank, []):
            data.send_multipart(frames, copy=False)

    # ── batches ──────────────────────────────────────────────────────────────────────────────────

    def _serve(self, ticket: Ticket) -> None:
        self._status[0] = ticket.number
        began = time.perf_counter()
        slot = self._region(ticket)
        made = self._make(ticket, slot)
        if isinstance(made, int):
            self._results.append(Result(ticket.number, 0, 0.0, end=made))
        else:
            if failed := isinstance(made, Failure):
                slot.used = 0
                made = slot, made.packed
            region, stream = made
            self._send(ticket, region, stream, failed)
            # this includes a batch that did not fit into the slot, and is elsewhere
            leaked = slot.slot and slot.is_held()
            if leaked:
                self._plain_stack.add(ticket.loader)
            nbytes, seconds = region.used + len(stream), time.perf_counter() - began
            self._results.append(Result(ticket.number, nbytes, seconds, leaked))
        self._status[0] = -1

    def _region(self, ticket: Ticket) -> RawRegion:
        slabs = self._slabs
        if ticket.capacity and slabs is not None:
            slabs.fault_in(ticket.offset, ticket.capacity)
            view = memoryview(slabs.map)[ticket.offset : ticket.offset + ticket.capacity]
            return RawRegion(view, slot=True, address=slabs.address + ticket.offset)
        return RawRegion.of_size(self._sizes.get(ticket.loader, 0))

    def _unpackable(self, ticket: Ticket) -> str:
        title, place = self._loaders[ticket.loader][0], place_of(ticket.which, streamed=False)
        return (
            f"raised while '{title}' at {place} was packed for its rank. An element travels as a"
            " pickle: make what cannot be pickled (a generator, a lock, an open file) in the loop,"
            " out of what the dataset returns"
        )

    def _make(self, ticket: Ticket, region: RawRegion) -> tuple[RawRegion, bytes] | Failure | int:
        """Return a batch, packed into this region or another one.

        If its stream has ended, return the stream's number of batches.
        """
        title, parts = self._loaders[ticket.loader]
        if ticket.poison:
            place = place_of(ticket.which, streamed=parts.iterable)
            return Failure(
                DeliveryError(
                    f"'{title}': {place} killed the data worker that made it, again and again"
                    f" ({ticket.poison}). Look at what the dataset does there, or leave it out"
                ),
                "given up",
            )
        if parts.iterable:
            self._flush()  # the next batch may take long
            found = self._streams.make(ticket)
            return _place(found, region) if isinstance(found, PackedElement) else found
        with stacking_into(None if ticket.loader in self._plain_stack else region):
            element = self._fetchers[ticket.loader].make(ticket.which, ticket.seed)
        try:
            return element if isinstance(element, Failure) else pack_element(element, region)
        except BaseException as error:
            return Failure(error, self._unpackable(ticket))

    def _send(self, ticket: Ticket, region: RawRegion, stream: bytes, failed: bool) -> None:
        if not region.slot:
            self._sizes[ticket.loader] = max(
                self._sizes.get(ticket.loader, 0), slot_size(region.used)
            )
        place = ticket.offset if region.slot else -1, ticket.capacity, region.used
        arrival = ElementArrival(
            ticket.number, ticket.plan, ticket.seq, *place, failed, len(stream)
        )
        if not region.slot and region.used:
            self._post(ticket.rank, [arrival], stream, region.buffer[: region.used])
            return
        arrivals, streams = self._outgoing.setdefault(ticket.rank, ([], []))
        arrivals.append(arrival)
        streams.append(stream)

    def _post(self, rank: int, arrivals: list[ElementArrival], streams: bytes, memory: Any) -> None:
        header = pack(arrivals)
        frames: list[Any] = [seal(self._keys.mac, header, streams) + header, streams]
        if memory is not None:
            frames.append(memory)
        if rank in self._data:
            self._data[rank].send_multipart(frames, copy=memory is None)
        else:
            self._unsent.setdefault(rank, []).append(frames)


def _place(found: PackedElement, region: RawRegion) -> tuple[RawRegion, bytes]:
    """Return a packed batch with its memory in this region, if there is room."""
    nbytes = found.memory.nbytes
    if region.take(nbytes) is None:
        region = RawRegion(found.memory.data)
        region.used = nbytes
    else:
        region.buffer[:nbytes] = found.memory.data
    return region, found.stream


# ── the pool ──────────────────────────────────────────────────────────────────────────────────────

_BEAT = 0.5


class WorkerPool:
    """Forks ``processes`` workers and replaces those that die."""

    def __init__(self, config: DataOrder, loaders: Loaders) -> None:
        self._config, self._loaders = config, loaders
        self._serial = 0
        self._slots = memoryview(mmap.mmap(-1, 8 * config.processes)).cast("q")
        self._children: dict[int, tuple[int, int, int]] = {}  # by pidfd: serial, number, pid

    def run(self) -> None:
        """Keep the workers running until told to exit."""
        for number in range(self._config.processes):
            self._fork(number)
        name = Peer("pool", self._config.vm)
        # after the forks, because it has threads
        with connect_control(self._config.common, name, ToWorker) as control:
            control.send(Hello())
            try:
                self._watch(control)
            finally:
                for pidfd in self._children:
                    signal.pidfd_send_signal(pidfd, signal.SIGKILL)
                for _, _, pid in self._children.values():
                    os.waitpid(pid, 0)

    def _watch(self, control: ControlClient) -> None:
        poller = zmq.Poller()
        poller.register(control.socket, zmq.POLLIN)
        for pidfd in self._children:
            poller.register(pidfd, zmq.POLLIN)
        next_beat = 0.0
        while True:
            for source, _ in poller.poll(int(_BEAT * 1000)):
                if source is control.socket:
                    if isinstance(control.receive(), Leave):
                        return
                else:
                    poller.unregister(source)
                    number, lost = self._reap(source)
                    control.send(lost)
                    poller.register(self._fork(number), zmq.POLLIN)
            if time.monotonic() >= next_beat:
                next_beat = time.monotonic() + _BEAT
                control.send(Alive())
                self._kill_stopped()

    def _fork(self, number: int) -> int:
        serial = self._serial
        self._serial += 1
        status = self._slots[number : number + 1]
        status[0] = -1  # it makes no batch yet
        parent = os.getpid()
        with warnings.catch_warnings():
            # The only other thread is zmq's. A child never takes its locks, because it creates its
            # own context.
            warnings.simplefilter("ignore", DeprecationWarning)
            pid = os.fork()
        if pid == 0:
            self._become_worker(Peer("worker", self._config.vm, serial), number, parent, status)
        pidfd = os.pidfd_open(pid)
        self._children[pidfd] = serial, number, pid
        return pidfd

    def _become_worker(self, name: Peer, number: int, parent: int, status: memoryview) -> None:
        try:
            linux.set_parent_death_signal(signal.SIGKILL)
            if os.getppid() != parent:
                os._exit(0)
            Path("/proc/self/comm").write_text("taas-worker")
            worker = self._config.vm * self._config.processes + number
            Worker(self._config, name, worker, self._loaders, status).run()
        except BaseException:
            traceback.print_exc()
        finally:
            with contextlib.suppress(OSError, ValueError):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(1)

    def _kill_stopped(self) -> None:
        """Kill workers that are stopped (SIGSTOP), since ranks would wait for them."""
        for pidfd in self._children:
            with contextlib.suppress(ChildProcessError):  # it has ended
                if os.waitid(os.P_PIDFD, pidfd, os.WSTOPPED | os.WNOHANG):
                    signal.pidfd_send_signal(pidfd, signal.SIGKILL)

    def _reap(self, pidfd: int) -> tuple[int, WorkerLost]:
        serial, number, pid = self._children.pop(pidfd)
        os.close(pidfd)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        cause = killed_by(code) if code < 0 else f"exit code {code}"
        return number, WorkerLost(serial, self._slots[number], cause)


def main(config: DataOrder) -> None:
    """Run one data VM until told to exit."""
    linux.keep_freed_memory(1 << 30)
    install_collate()
    try:
        loaders = load_loaders(config.payload)
    except BaseException:
        with connect_control(config.common, Peer("pool", config.vm), ToWorker) as control:
            control.send(Hello(traceback.format_exc()))
        return
    gc.collect()
    gc.freeze()  # a collection in a worker would write to, and so copy, every page it shares
    WorkerPool(config, loaders).run()
