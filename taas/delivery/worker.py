"""A data worker: takes tickets, makes elements, writes them where the rank will read them."""

from __future__ import annotations

import os
import pickle
import time
from collections import deque
from typing import Any

import msgspec
import zmq

from taas.delivery.board import NOTHING_AHEAD, Board
from taas.delivery.config import WorkerConfig
from taas.delivery.encoding import Region, encode, stacking_into
from taas.delivery.making import Failure, Home, MapMaker, Rngs, Stream, fresh_copy, place_of
from taas.delivery.messages import (
    Announced,
    Arrival,
    Cancel,
    Decoder,
    Feed,
    Lease,
    Made,
    RankAddress,
    Result,
    Stateless,
    StreamState,
    Ticket,
    ToWorker,
    WorkerHello,
)
from taas.delivery.messages import encode as encode_message
from taas.delivery.parts import LoaderParts
from taas.delivery.plan import unpack_place
from taas.delivery.slab import Slab
from taas.delivery.slots import slot_size
from taas.delivery.snapshots import said
from taas.delivery.transport import authenticate, connect_control, connect_data, fetch_fds, new_context, seal

__all__ = ["Worker"]

_FLUSH = 0.002
"""Seconds for which results may wait to travel together."""


class Worker:
    """One process. On ``board`` its keeper sees what it is on."""

    def __init__(
        self,
        config: WorkerConfig,
        name: str,
        number: int,
        loaders: list[tuple[str, LoaderParts]],
        board: Board,
    ) -> None:
        self._config, self._name, self._board = config, name, board
        self._loaders = loaders
        count = config.vms * config.processes
        self._makers = [MapMaker(title, parts, number, count) for title, parts in loaders]
        self._streams: dict[tuple[int, int], Stream] = {}
        self._homes: dict[tuple[int, int], Home] = {}
        self._stateless: set[int] = set()
        self._rngs = Rngs()
        self._todo: deque[Ticket] = deque()
        self._results: list[Result] = []
        self._flushed = 0.0
        self._sizes: dict[int, int] = {}
        self._plain_stack: set[int] = set()
        self._context = new_context()
        self._control = connect_control(self._context, config.endpoint, config.keys, name)
        self._data: dict[int, zmq.Socket[bytes]] = {}
        self._outgoing: dict[int, tuple[list[Arrival], list[bytes]]] = {}
        self._unsent: dict[int, list[list[Any]]] = {}
        self._decode = Decoder(ToWorker)
        self._encode_header = msgspec.msgpack.Encoder().encode
        self._slabs = self._map_slabs()

    def _map_slabs(self) -> list[Slab]:
        if not self._config.slabs:
            return []
        try:
            fds = fetch_fds(self._config.keys, self._config.slabs, self._config.ranks)
        except OSError:
            return []  # another network namespace: frames on the socket do
        slabs = [Slab(fd) for fd in fds]
        for fd in fds:
            os.close(fd)
        return slabs

    # ── the loop ──────────────────────────────────────────────────────────────────────────────────

    def run(self) -> None:
        """Work until told to quit."""
        hello = WorkerHello(os.getpid(), bool(self._slabs))
        self._control.send(encode_message(hello))
        while self._listen():
            if self._todo:
                self._serve(self._todo.popleft())
            else:
                self._feed_one()

    def _listen(self) -> bool:
        """Take what has come; wait for it if there is nothing to do. False: quit."""
        idle = not self._todo and not any(stream.hungry for stream in self._streams.values())
        if idle or time.perf_counter() - self._flushed > _FLUSH:
            self._flush()
        if idle:
            self._control.poll()
        while True:
            try:
                data = self._control.recv(zmq.NOBLOCK)
            except zmq.Again:
                return True
            message = self._decode(data)
            if isinstance(message, Lease):
                self._todo.extend(message.tickets)
            elif isinstance(message, RankAddress):
                self._connect(message)
            elif isinstance(message, Feed):
                self._fed(message)
            elif isinstance(message, Cancel):
                self._cancel(message)
            else:
                return False

    def _flush(self) -> None:
        self._flushed = time.perf_counter()
        for rank, (arrivals, streams) in self._outgoing.items():
            self._post(rank, arrivals, b"".join(streams), None)
        self._outgoing.clear()
        if self._results:
            self._control.send(encode_message(Made(self._results)))
            self._results = []

    def _connect(self, message: RankAddress) -> None:
        old = self._data.get(message.rank)
        if old is not None:
            old.close(0)
        data = connect_data(self._context, message.address, message.key, self._config.keys)
        self._data[message.rank] = data
        for frames in self._unsent.pop(message.rank, []):
            data.send_multipart(frames, copy=False)

    def _cancel(self, message: Cancel) -> None:
        kept: deque[Ticket] = deque()
        for ticket in self._todo:
            if ticket.plan == message.plan and message.rank in (ticket.rank, -1):
                self._results.append(Result(ticket.attempt, ticket.loader, 0, 0.0, False))
            else:
                kept.append(ticket)
        self._todo = kept
        if message.rank == -1:
            for key in [key for key in self._streams if key[0] == message.plan]:
                stream = self._streams.pop(key)
                if message.undone:
                    self._rewind(stream)

    # ── elements ──────────────────────────────────────────────────────────────────────────────────

    def _serve(self, ticket: Ticket) -> None:
        self._board.attempt = ticket.attempt
        began = time.perf_counter()
        region = self._region(ticket)
        stacked = ticket.loader not in self._plain_stack
        with stacking_into(region if stacked else None):
            element = self._make(ticket)
        if not isinstance(element, Failure):
            try:
                region, stream, buffers = self._encode(element, region)
            except Exception as error:
                element = Failure(error, self._unpackable(ticket))
        failed = isinstance(element, Failure)
        if failed:
            region.used, stream, buffers = 0, element.packed, []
        del element
        in_slot = bool(ticket.capacity) and region.capacity == ticket.capacity and region.slot
        spoilt = bool(in_slot and region.is_held())
        if spoilt:
            self._plain_stack.add(ticket.loader)
        self._send(ticket, region, stream, buffers, failed, bool(in_slot), spoilt)
        seconds = time.perf_counter() - began
        self._results.append(Result(ticket.attempt, ticket.loader, region.used + len(stream), seconds, True))
        self._board.attempt = -1

    def _region(self, ticket: Ticket) -> Region:
        if ticket.capacity and self._slabs:
            slab = self._slabs[ticket.rank]
            slab.fault_in(ticket.offset, ticket.capacity)
            view = memoryview(slab.map)[ticket.offset : ticket.offset + ticket.capacity]
            return Region(view, slot=True, address=slab.address + ticket.offset)
        return Region.of_size(self._sizes.get(ticket.loader, 0))

    def _encode(self, element: Any, region: Region) -> tuple[Region, bytes, list[tuple[int, int]]]:
        encoded = encode(element, region)
        while encoded is None:
            region = Region.of_size(slot_size(max(region.needed, 2 * region.capacity)))
            encoded = encode(element, region)
        return region, *encoded

    def _unpackable(self, ticket: Ticket) -> str:
        title, parts = self._loaders[ticket.loader]
        place = place_of(ticket.index, streams=bool(parts.streams))
        return (
            f"raised while '{title}' at {place} was packed for its rank. An element travels as a pickle: make what "
            "cannot be pickled (a generator, a lock, an open file) in the loop, out of what the dataset returns"
        )

    def _make(self, ticket: Ticket) -> Any:
        if not self._loaders[ticket.loader][1].streams:
            return self._makers[ticket.loader].make(ticket.index, ticket.seed, self._rngs)
        number, position = unpack_place(ticket.index)
        stream = self._streams[ticket.plan, number]
        if position < stream.made and position not in stream.held:
            stream = self._streams[ticket.plan, number] = self._replay(stream, position)
        return stream.take(position, self._rngs)

    def _send(
        self,
        ticket: Ticket,
        region: Region,
        stream: bytes,
        buffers: list[tuple[int, int]],
        failed: bool,
        in_slot: bool,
        spoilt: bool,
    ) -> None:
        if not in_slot:
            self._sizes[ticket.loader] = max(self._sizes.get(ticket.loader, 0), slot_size(region.used))
        offset = ticket.offset if in_slot else -1
        attempt, plan, seq = ticket.attempt, ticket.plan, ticket.seq
        arrival = Arrival(
            attempt, plan, seq, offset, ticket.capacity, region.used, failed, buffers, len(stream), spoilt
        )
        if not in_slot and region.used:
            self._post(ticket.rank, [arrival], stream, region.buffer[: region.used])
            return
        arrivals, streams = self._outgoing.setdefault(ticket.rank, ([], []))
        arrivals.append(arrival)
        streams.append(stream)

    def _post(self, rank: int, arrivals: list[Arrival], streams: bytes, memory: Any) -> None:
        header = self._encode_header(arrivals)
        frames: list[Any] = [seal(self._config.keys.mac, header, streams) + header, streams]
        if memory is not None:
            frames.append(memory)
        data = self._data.get(rank)
        if data is None:
            self._unsent.setdefault(rank, []).append(frames)
        else:
            data.send_multipart(frames, copy=len(frames) == 2)

    # ── streams of iterable datasets ──────────────────────────────────────────────────────────────

    def _fed(self, message: Feed) -> None:
        key = (message.plan, message.stream)
        stream = self._streams.get(key)
        if stream is None:
            feed = self._authentic(message)
            stream = self._resumed(feed)
            if stream is None:
                stream = self._stream(feed, self._home(feed.loader, feed.stream))
            self._remember(stream)
            self._streams[key] = stream
        stream.let_go(message.floor)
        stream.upto = message.upto
        if stream.ended:
            self._announce(key, stream)

    def _stream(self, feed: Feed, home: Home) -> Stream:
        title, parts = self._loaders[feed.loader]
        stream = Stream(title, parts, home, feed)
        if feed.loader in self._stateless:
            stream.take_no_states()
        return stream

    def _home(self, loader: int, stream: int) -> Home:
        """As torch would have it: a worker that persists, a fresh one, or one with the notebook's own dataset."""
        known, parts = self._homes.get((loader, stream)), self._loaders[loader][1]
        if parts.num_workers > 0:
            return known or Home(fresh_copy(parts.dataset))
        return Home(parts.dataset if known is None else known.dataset)

    def _remember(self, stream: Stream) -> None:
        """Later iterations go on with this home, or its dataset, where torch's would."""
        parts = self._loaders[stream.feed.loader][1]
        if parts.num_workers == 0 or parts.persistent_workers:
            self._homes[stream.feed.loader, stream.feed.stream] = stream.home

    def _resumed(self, feed: Feed) -> Stream | None:
        """Return the stream where its newest state was taken, over a copy of the dataset; None if that fails."""
        if not feed.states or feed.loader in self._stateless:
            return None
        if not pickle.loads(feed.states[-1].packed).leads_on:
            return None
        try:
            known = self._homes.get((feed.loader, feed.stream))
            dataset = self._loaders[feed.loader][1].dataset if known is None else known.dataset
            stream = self._stream(feed, Home(fresh_copy(dataset)))
            self._board.ahead = (feed.plan, feed.stream, feed.states[-1].position)
            stream.resume(self._rngs)
        except Exception as error:
            self._tell_stateless(feed.loader, f"it cannot go on from a state of its own ({said(error)})")
            return None
        finally:
            self._board.ahead = NOTHING_AHEAD
        return stream

    def _replay(self, old: Stream, position: int) -> Stream:
        """Go back: an element that was made and given away is asked for once more."""
        states = old.states.before(position)
        feed = msgspec.structs.replace(old.feed, floor=position, upto=old.upto, states=states)
        stream = self._resumed(feed) or self._stream(feed, Home(fresh_copy(old.home.dataset)))
        stream.aside = old.aside or old.ended
        if not stream.aside:
            self._remember(stream)
        return stream

    def _rewind(self, stream: Stream) -> None:
        try:
            stream.rewind(self._rngs)
        except Exception as error:
            self._tell_stateless(stream.feed.loader, f"it cannot go back to its own state ({said(error)})")

    def _feed_one(self) -> None:
        for key, stream in self._streams.items():
            if stream.hungry:
                self._board.ahead = (*key, stream.made)
                stream.step(self._rngs)
                self._board.ahead = NOTHING_AHEAD
                self._announce(key, stream)
                return

    def _announce(self, key: tuple[int, int], stream: Stream) -> None:
        self._flush()
        states = [msgspec.structs.replace(state, seal=self._seal(key, state)) for state in stream.told]
        stream.told.clear()
        self._control.send(encode_message(Announced(*key, stream.made, stream.ended, states)))
        if stream.trouble:
            self._tell_stateless(stream.feed.loader, stream.trouble)

    def _seal(self, key: tuple[int, int], state: StreamState) -> bytes:
        return seal(self._config.keys.mac, self._encode_header([*key, state.position]), state.packed)

    def _authentic(self, feed: Feed) -> Feed:
        """Return the message with those states that a worker of this run has packed, for this stream."""
        key = self._config.keys.mac
        states = [
            state
            for state in feed.states
            if authenticate(
                key,
                state.seal + self._encode_header([feed.plan, feed.stream, state.position]),
                state.packed,
            )
        ]
        return msgspec.structs.replace(feed, states=states)

    def _tell_stateless(self, loader: int, reason: str) -> None:
        """Do without states of this loader from now on."""
        if loader not in self._stateless:
            self._stateless.add(loader)
            self._control.send(encode_message(Stateless(loader, reason)))


def run_worker(config: WorkerConfig, name: str, number: int, loaders: Any, board: Board) -> None:
    """Entry of a forked worker."""
    Worker(config, name, number, loaders, board).run()
