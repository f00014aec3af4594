"""Streams of iterable datasets in a data worker: made in their order, ahead of the ranks."""

from __future__ import annotations

import functools
import random
import sys
from collections.abc import Callable
from typing import Any

import msgspec
import torch
from torch.utils.data import _utils
from torch.utils.data._utils import fetch

from taas.delivery.making import (
    Failure,
    Home,
    Rngs,
    RngStates,
    WorkerStatus,
    fresh_copy,
    rngs_now,
    set_worker_info,
    worker_facts,
)
from taas.delivery.messages import NOWHERE, Announced, Cancel, Feed, StreamPlace
from taas.delivery.plan import element_seed, unpack_place
from taas.delivery.registered import LoaderParts, Loaders
from taas.wire.framing import Message

_END = object()


# ── one stream ────────────────────────────────────────────────────────────────────────────────────────


class ElementStream:
    """One stream of an iterable loader: what one DataLoader worker (or the notebook itself) would yield.

    ``held`` keeps the elements from ``floor`` on until each was taken. torch seeds worker w with
    ``base_seed + w``; so does this, and the stream's ``home`` keeps its generators' states to itself, so that its
    elements are those the notebook would get from its workers. Workers that persist are seeded once: all iterations
    of a stream have one home then.

    ``started``: where the generators stood when it began.
    """

    def __init__(self, name: str, parts: LoaderParts, home: Home, feed: Feed) -> None:
        self.name, self._parts, self.home, self.feed = name, parts, home, feed
        self.started: RngStates | None = None
        self.held: dict[int, Any] = {}
        self.made = 0
        self.floor, self.upto = feed.floor, feed.upto
        self.ended = False
        self._next: Callable[[], Any] | None = None
        self._info: dict[str, Any] = {}
        if parts.num_workers > 0:
            seed = feed.base_seed + feed.stream
            self._info = worker_facts(feed.stream, parts.num_workers, seed, home.dataset)

    def _seed(self) -> None:
        """Set the generators as torch does for its worker.

        One that would persist, but has died since, or whose run was started again, has no place to go on from: it begins
        otherwise than before.
        """
        feed, base_seed = self.feed, self.feed.base_seed
        if self._parts.persistent_workers and feed.iteration > 0:
            base_seed = element_seed(base_seed, feed.iteration, 0)
        seed = base_seed + feed.stream
        random.seed(seed)
        torch.manual_seed(seed)
        numpy = sys.modules.get("numpy")
        if numpy is not None:
            generate = getattr(_utils.worker, "_generate_state", None)
            numpy.random.seed(generate(base_seed, feed.stream) if generate else seed & 0xFFFF_FFFF)

    @property
    def has_demand(self) -> bool:
        """Whether it may make another element now."""
        return not self.ended and self.made < self.upto

    def step(self, rngs: Rngs) -> None:
        """Make the next element, or find the end."""
        rngs.enter(self.home, self._seed)
        set_worker_info(**self._info)
        element = self._produce()
        if element is _END:
            self.ended = True
            return
        if self.made >= self.floor:
            self.held[self.made] = element
        self.made += 1

    def let_go(self, floor: int) -> None:
        """Nobody will ask for what lies below ``floor``."""
        self.floor = max(self.floor, floor)
        for position in [position for position in self.held if position < self.floor]:
            del self.held[position]

    def take(self, position: int, rngs: Rngs) -> Any:
        """Return and forget the element at a position; make what is missing up to it."""
        while position not in self.held and self.made <= position and not self.ended:
            self.step(rngs)
        return self.held.pop(position, None)

    def _produce(self) -> Any:
        """Return the next element, a Failure, or ``_END``."""
        try:
            if self._next is None:
                self._next = self._begin()
            return self._next()
        except StopIteration:
            return _END
        except BaseException as error:
            if self._next is None:
                self._next = functools.partial(next, iter(()))  # it has not begun, and is at its end
            where = f"raised while making element {self.made} of stream {self.feed.stream} of '{self.name}'"
            return Failure(error, where)

    def _begin(self) -> Callable[[], Any]:
        parts = self._parts
        if parts.num_workers > 0 and parts.worker_init_fn is not None and not self.home.begun:
            parts.worker_init_fn(self.feed.stream)
        self.home.begun = True
        self.started = rngs_now()
        if parts.plain:
            return functools.partial(next, iter(self.home.dataset))
        fetcher = fetch._IterableDatasetFetcher(
            self.home.dataset, parts.auto_collation, parts.collate_fn, parts.drop_last
        )
        return functools.partial(fetcher.fetch, range(parts.batch_size or 1))


# ── all streams of a worker ───────────────────────────────────────────────────────────────────────────


class OwnedStreams:
    """The streams that a worker owns, by plan and number. ``send`` tells the coordinator."""

    def __init__(
        self, loaders: Loaders, rngs: Rngs, status: WorkerStatus, send: Callable[[Message], None]
    ) -> None:
        self._loaders, self._rngs, self._status, self._send = loaders, rngs, status, send
        self._streams: dict[tuple[int, int], ElementStream] = {}
        self._homes: dict[tuple[int, int], Home] = {}

    @property
    def have_demand(self) -> bool:
        """Whether an element may be made ahead."""
        return any(stream.has_demand for stream in self._streams.values())

    def feed(self, message: Feed) -> None:
        """Own a stream, or make it further than before."""
        key = (message.plan, message.stream)
        stream = self._streams.get(key)
        if stream is None:
            home = self._home(message.loader, message.stream)
            stream = self._streams[key] = ElementStream(*self._loaders[message.loader], home, message)
            self._remember(stream)
        stream.let_go(message.floor)
        stream.upto = message.upto
        if stream.ended:
            self._announce(key, stream)

    def cancel(self, message: Cancel) -> None:
        """All ranks are through with a plan."""
        for key in [key for key in self._streams if key[0] == message.plan]:
            stream = self._streams.pop(key)
            if message.undone:
                self._homes.pop((stream.feed.loader, stream.feed.stream), None)

    def make(self, plan: int, index: bytes) -> Any:
        """Return an element, or a Failure with what user code raised."""
        number, position = unpack_place(index)
        stream = self._streams.get((plan, number))
        if stream is None:
            return Failure(LookupError(), f"plan {plan} was closed")  # nobody looks at it
        if position < stream.made and position not in stream.held:
            stream = self._streams[plan, number] = self._replay(stream, position)
        return stream.take(position, self._rngs)

    def make_ahead(self) -> None:
        """Make one element that was not asked for yet."""
        for key, stream in self._streams.items():
            if stream.has_demand:
                self._status.ahead[:] = StreamPlace(*key, stream.made)
                stream.step(self._rngs)
                self._status.ahead[:] = NOWHERE
                self._announce(key, stream)
                return

    def _announce(self, key: tuple[int, int], stream: ElementStream) -> None:
        self._send(Announced(*key, stream.made, stream.ended))

    def _home(self, loader: int, stream: int) -> Home:
        """As torch would have it: a worker that persists, a fresh one, or one with the notebook's own dataset."""
        known, parts = self._homes.get((loader, stream)), self._loaders[loader][1]
        if parts.num_workers > 0:
            return known or Home(fresh_copy(parts.dataset))
        return Home(parts.dataset if known is None else known.dataset)

    def _remember(self, stream: ElementStream) -> None:
        """Later iterations go on with this home, or its dataset, where torch's would."""
        parts = self._loaders[stream.feed.loader][1]
        if parts.num_workers == 0 or parts.persistent_workers:
            self._homes[stream.feed.loader, stream.feed.stream] = stream.home

    def _replay(self, old: ElementStream, position: int) -> ElementStream:
        """Go back: an element that was made and given away is asked for once more."""
        feed = msgspec.structs.replace(old.feed, floor=position, upto=old.upto)
        home = Home(fresh_copy(old.home.dataset), old.started, old.home.begun)
        stream = ElementStream(*self._loaders[feed.loader], home, feed)
        if not old.ended and self._homes.get((feed.loader, feed.stream)) is old.home:
            self._remember(stream)  # else later iterations do not go on from it
        return stream
