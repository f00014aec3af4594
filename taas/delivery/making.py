"""How an element is made: torch's own fetch and collate, with a seed per element, or as one of a stream.

Streams of iterable datasets are made in their order, ahead of the ranks, with generators of their own.
"""

from __future__ import annotations

import ctypes
import os
import pickle
import random
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import cloudpickle
import msgspec
import numpy as np
import torch
from torch.utils.data import _utils
from torch.utils.data._utils import fetch

from taas.capture.arriving import unpack
from taas.capture.process_state import set_generators, states_of_generators
from taas.delivery.encoding import pack_failure
from taas.delivery.loader import DeliveredLoader
from taas.delivery.messages import NOWHERE, Announced, Cancel, Feed, StreamPlace
from taas.delivery.plan import element_seed, unpack_place
from taas.delivery.registered import LoaderParts, Loaders
from taas.wire.framing import Message


def load_loaders(path: str) -> Loaders:
    """Unpack the ranks' payload in this data process, which has no GPU; return the registered loaders in it."""
    torch.set_num_threads(1)  # a pool of threads would not be there in forked workers
    fd = os.open(path, os.O_RDONLY)
    try:
        objects = unpack(fd, vars(sys.modules["__main__"]), Path.cwd(), DeliveredLoader)
    finally:
        os.close(fd)
    return [(loader.taas_name, loader.taas_parts) for loader in objects]


class WorkerStatus(ctypes.Structure):
    """What a worker is on, in memory that its pool still reads when it is dead."""

    _fields_ = (("number", ctypes.c_int64), ("ahead", ctypes.c_int64 * 3))
    number: int  # of an element; -1 for none
    ahead: Any  # the numbers of a StreamPlace: the element of a stream that it makes before it is asked for


class Failure:
    """A packed exception that takes an element's place."""

    __slots__ = ("packed",)

    def __init__(self, error: BaseException, where: str) -> None:
        text = "".join(traceback.format_exception(error))
        self.packed = pack_failure(error, f"{where}\n\n{text}")


@dataclass(slots=True)
class Home:
    """What of one of torch's own workers lasts where it persists: its dataset, and its generators when others use them."""

    dataset: Any
    rngs: RngStates | None = None  # None: they have yet to be seeded
    begun: bool = False  # whether ``worker_init_fn`` was called


RngStates = dict[str, Any]
"""States of the process-wide generators that samplers and datasets draw from, of those that are loaded."""
rngs_now = partial(states_of_generators, cuda=False)
apply_rngs = partial(set_generators, cuda=False)


class Rngs:
    """The process's generators, and whose they are just now."""

    def __init__(self) -> None:
        self._home: Home | None = None

    def seed(self, seed: int) -> None:
        """Set all generators for one element."""
        self.leave()
        torch.default_generator.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed & 0xFFFF_FFFF)

    def enter(self, home: Home, seed: Callable[[], None]) -> None:
        """Go on where the generators of a home stood; those that have yet to be seeded are, by ``seed``."""
        if self._home is not home:
            self.leave()
            if home.rngs is None:
                seed()
            else:
                apply_rngs(home.rngs)
            self._home = home

    def leave(self) -> None:
        """Let others use them."""
        if self._home is not None:
            self._home.rngs = rngs_now()
            self._home = None


def _worker_info(number: int, workers: int, seed: int, dataset: Any) -> Any:
    return _utils.worker.WorkerInfo(id=number, num_workers=workers, seed=seed, dataset=dataset)


class MapFetcher:
    """Makes elements of one map-style loader in this process."""

    def __init__(self, name: str, parts: LoaderParts, worker: int, workers: int) -> None:
        self.name, self._parts = name, parts
        self._worker, self._workers = worker, workers
        self._fetch: Callable[[Any], Any] | None = None
        self._info: Any = None

    def make(self, index: bytes, seed: int, rngs: Rngs) -> Any:
        """Return the element, or a Failure with what user code raised."""
        if self._fetch is None:
            self._fetch = self._begin(seed, rngs)
        rngs.seed(seed)
        _utils.worker._worker_info = self._info
        where = self.name
        try:
            at = pickle.loads(index)
            where = f"'{self.name}' at {_short(at)} in data worker {self._worker} (pid {os.getpid()})"
            return self._fetch(at)
        except BaseException as error:
            return Failure(error, f"raised while making {where}")

    def _begin(self, seed: int, rngs: Rngs) -> Callable[[Any], Any]:
        parts = self._parts
        rngs.seed(seed)
        self._info = _worker_info(self._worker, self._workers, seed, parts.dataset)
        _utils.worker._worker_info = self._info
        try:
            if parts.worker_init_fn is not None:
                parts.worker_init_fn(self._worker)
        except BaseException as error:
            where = f"raised by worker_init_fn of '{self.name}' in data worker {self._worker}"
            broken = Failure(error, where)
            return lambda _: broken
        how = parts.auto_collation, parts.collate_fn, parts.drop_last
        return fetch._MapDatasetFetcher(parts.dataset, *how).fetch


def place_of(index: bytes, *, streams: bool) -> str:
    """Return what a ticket's index says, in words for the user."""
    if streams:
        stream, position = unpack_place(index)
        return f"element {position} of stream {stream}"
    return _short(pickle.loads(index))


def _short(index: Any) -> str:
    if isinstance(index, list) and len(index) > 8:
        return f"indices [{', '.join(map(repr, index[:6]))}, … {index[-1]!r}] ({len(index)})"
    return f"index {index!r}" if not isinstance(index, list) else f"indices {index!r}"


# ── streams of iterable datasets ──────────────────────────────────────────────────────────────────────

_END = object()


def _fresh_copy(dataset: Any) -> Any:
    """Return a dataset as it was at launch, for a stream that torch would have forked from the notebook."""
    return cloudpickle.loads(cloudpickle.dumps(dataset))


class ElementStream:
    """One stream of an iterable loader: what one DataLoader worker (or the notebook itself) would yield.

    torch seeds worker w with ``base_seed + w``; so does this, and the stream's ``home`` keeps its generators' states to itself.
    Workers that persist are seeded once: all iterations of a stream have one home then.
    """

    def __init__(self, name: str, parts: LoaderParts, home: Home, feed: Feed) -> None:
        self.name, self._parts, self.home, self.feed = name, parts, home, feed
        self.started: RngStates | None = None  # where the generators stood when it began
        self.held: dict[int, Any] = {}  # the elements from ``floor`` on, until each was taken
        self.made = 0
        self.floor, self.upto = feed.floor, feed.upto
        self.ended = False
        self._next: Callable[[], Any] | None = None
        self._info: Any = None
        if parts.num_workers > 0:
            seed = feed.base_seed + feed.stream
            self._info = _worker_info(feed.stream, parts.num_workers, seed, home.dataset)

    def _seed(self) -> None:
        """Set the generators as torch does for its worker."""
        feed, base_seed = self.feed, self.feed.base_seed
        if self._parts.persistent_workers and feed.iteration > 0:
            # It has died since, or its run was started again: there is no place to go on from.
            base_seed = element_seed(base_seed, feed.iteration, 0)
        random.seed(base_seed + feed.stream)
        torch.manual_seed(base_seed + feed.stream)
        np.random.seed(_utils.worker._generate_state(base_seed, feed.stream))

    @property
    def has_demand(self) -> bool:
        """Whether it may make another element now."""
        return not self.ended and self.made < self.upto

    def step(self, rngs: Rngs) -> None:
        """Make the next element, or find the end."""
        rngs.enter(self.home, self._seed)
        _utils.worker._worker_info = self._info
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
        self.held = {position: element for position, element in self.held.items() if position >= self.floor}

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
                self._next = partial(next, iter(()))  # it has not begun, and is at its end
            where = f"raised while making element {self.made} of stream {self.feed.stream} of '{self.name}'"
            return Failure(error, where)

    def _begin(self) -> Callable[[], Any]:
        parts = self._parts
        if parts.num_workers > 0 and parts.worker_init_fn is not None and not self.home.begun:
            parts.worker_init_fn(self.feed.stream)
        self.home.begun = True
        self.started = rngs_now()
        if parts.plain:
            return partial(next, iter(self.home.dataset))
        how = parts.auto_collation, parts.collate_fn, parts.drop_last
        fetcher = fetch._IterableDatasetFetcher(self.home.dataset, *how)
        return partial(fetcher.fetch, range(parts.batch_size or 1))


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
            return known or Home(_fresh_copy(parts.dataset))
        return Home(parts.dataset if known is None else known.dataset)

    def _remember(self, stream: ElementStream) -> None:
        """Later iterations go on with this home, or its dataset, where torch's would."""
        parts = self._loaders[stream.feed.loader][1]
        if parts.num_workers == 0 or parts.persistent_workers:
            self._homes[stream.feed.loader, stream.feed.stream] = stream.home

    def _replay(self, old: ElementStream, position: int) -> ElementStream:
        """Go back: an element that was made and given away is asked for once more."""
        feed = msgspec.structs.replace(old.feed, floor=position, upto=old.upto)
        home = Home(_fresh_copy(old.home.dataset), old.started, old.home.begun)
        stream = ElementStream(*self._loaders[feed.loader], home, feed)
        if not old.ended and self._homes.get((feed.loader, feed.stream)) is old.home:
            self._remember(stream)  # else later iterations do not go on from it
        return stream
