"""Streams of iterable datasets in a data worker: made in their order, ahead of the ranks, taken up from their states.

The convention of states is that of torchdata's StatefulDataLoader: a dataset, or the iterator that its ``__iter__``
returns, that has both ``state_dict`` and ``load_state_dict`` is asked for its state. Where they are two objects, each
has its own: the dataset's is loaded before ``iter(dataset)``, the iterator's after it. The process's generators
are part of a snapshot here.
"""

from __future__ import annotations

import functools
import pickle
import random
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import cloudpickle
import msgspec
import torch
from torch.utils.data import _utils
from torch.utils.data._utils import fetch

from taas.capture.generators import undrawn
from taas.delivery.making import (
    Failure,
    Home,
    Rngs,
    RngStates,
    WorkerStatus,
    apply_rngs,
    fresh_copy,
    rngs_now,
    set_worker_info,
    worker_facts,
)
from taas.delivery.messages import NOWHERE, Announced, Cancel, Feed, Note, StreamPlace, StreamState
from taas.delivery.plan import States, element_seed, unpack_place
from taas.delivery.registered import LoaderParts, Loaders
from taas.wire.framing import Message

_RESTS = 20
"""Taking states of a stream takes one part in so many of its time."""
_STATE_LIMIT = 16 << 20
_END = object()


class StateUnusable(Exception):
    """A state cannot be taken; its text says why."""


# ── states ────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(slots=True)
class Snapshot:
    """Pickled states of the dataset and of its iterator (None: has none), and the generators' after that was made.

    ``start``: the generators before it was made, where they go on from an iteration before.
    """

    dataset: bytes | None = None
    iterator: bytes | None = None
    rngs: RngStates | None = None
    start: RngStates | None = None

    @property
    def leads_on(self) -> bool:
        """Whether there is more in it than where the generators stood."""
        return not (self.dataset is None and self.iterator is None)

    @classmethod
    def take(cls, dataset: Any, iterator: Any) -> Snapshot:
        """Return the states that there are. Generators are left as they are.

        ``iterator`` is None before there is one.

        Raises:
            StateUnusable: ``state_dict`` raised, or what it returned cannot be pickled.
        """
        try:
            with undrawn():  # the notebook calls nothing of this
                own = _pickled_state(None if iterator is dataset else dataset)
                inner = _pickled_state(iterator)
        except BaseException as error:
            raise StateUnusable(f"state_dict() gives nothing that travels ({said(error)})") from error
        return cls(own, inner, None if iterator is None else rngs_now())

    def pack(self) -> bytes:
        """Return it as bytes.

        Raises:
            StateUnusable: it is too large.
        """
        packed = pickle.dumps(self)
        if len(packed) > _STATE_LIMIT:
            limit = _STATE_LIMIT >> 20
            raise StateUnusable(f"a state takes {len(packed) >> 20} MiB; up to {limit} MiB are kept")
        return packed

    def load_dataset(self, dataset: Any) -> None:
        """Bring the dataset where it was, before its iterator is made."""
        if self.dataset is not None:
            with undrawn():
                dataset.load_state_dict(pickle.loads(self.dataset))

    def load_iterator(self, iterator: Any) -> None:
        """Bring the iterator where it was, and the generators."""
        if self.iterator is not None:
            iterator.load_state_dict(pickle.loads(self.iterator))
        if self.rngs is not None:
            apply_rngs(self.rngs)


def _pickled_state(thing: Any) -> bytes | None:
    state = thing.state_dict() if _is_stateful(thing) else None
    return None if state is None else cloudpickle.dumps(state)


def _is_stateful(thing: Any) -> bool:
    """Whether an object offers its state."""
    return callable(getattr(thing, "state_dict", None)) and callable(getattr(thing, "load_state_dict", None))


def said(error: BaseException) -> str:
    """Return an exception's kind and first line, in words for the user."""
    if isinstance(error, StateUnusable):
        return str(error)
    return f"{type(error).__name__}: {error}".split("\n")[0][:200].removesuffix(": ")


# ── one stream ────────────────────────────────────────────────────────────────────────────────────────


class ElementStream:
    """One stream of an iterable loader: what one DataLoader worker (or the notebook itself) would yield.

    ``held`` keeps the elements from ``floor`` on until each was taken. torch seeds worker w with
    ``base_seed + w``; so does this, and the stream's ``home`` keeps its generators' states to itself, so that its
    elements are those the notebook would get from its workers. Workers that persist are seeded once: all iterations
    of a stream have one home then, and where each of them began is told to whoever may have to begin it again.

    Where the dataset offers states, one is taken whenever the last one has become usable (nothing before it will
    be asked for), in a twentieth of the time at most. ``told`` are those that nobody was told of yet. Of trouble with
    them ``complain`` is told; None: there are to be none. ``aside``: begun again after its end, for elements that are
    asked for once more.
    """

    def __init__(
        self, name: str, parts: LoaderParts, home: Home, feed: Feed, complain: Callable[[str], None] | None
    ) -> None:
        self.name, self._parts, self.home, self._complain = name, parts, home, complain
        self.feed = msgspec.structs.replace(feed, states=())
        self.held: dict[int, Any] = {}
        self.made = 0
        self.floor, self.upto = feed.floor, feed.upto
        self.ended = self.aside = False
        self.states = States(feed.states)
        self.told: list[StreamState] = []
        self._takes_states = complain is not None
        self._rests_until = 0.0
        self._next: Callable[[], Any] | None = None
        self._iterator: Any = None
        self._fetcher: Any = None
        self._info: dict[str, Any] = {}
        if parts.num_workers > 0:
            seed = feed.base_seed + feed.stream
            self._info = worker_facts(feed.stream, parts.num_workers, seed, home.dataset)

    def _seed(self) -> None:
        """Set the generators as torch does for its worker.

        One that would persist, but has died since, has no place to go on from: it begins otherwise than before.
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
        self._enter(rngs)
        element = self._produce()
        if element is _END:
            self.ended = True
            return
        if self.made >= self.floor:
            self.held[self.made] = element
        self.made += 1

    def resume(self, rngs: Rngs) -> None:
        """Begin where the last of its feed's states was taken.

        Raises:
            Exception: what user code raised.
        """
        state = self.states.known[-1]
        self._enter(rngs)
        self._next = self._begin(pickle.loads(state.packed))
        self.made = state.position

    def rewind(self, rngs: Rngs) -> None:
        """Bring a dataset that offers its state, and generators that last, where they were before the stream began."""
        for start in self.states.before(0):
            set_worker_info(**self._info)
            snapshot: Snapshot = pickle.loads(start.packed)
            snapshot.load_dataset(self.home.dataset)
            rngs.leave()
            self.home.rngs = snapshot.start

    def let_go(self, floor: int) -> None:
        """Nobody will ask for what lies below ``floor``."""
        self.floor = max(self.floor, floor)
        self.states.settle(self.floor)
        for position in [position for position in self.held if position < self.floor]:
            del self.held[position]

    def take(self, position: int, rngs: Rngs) -> Any:
        """Return and forget the element at a position; make what is missing up to it."""
        while position not in self.held and self.made <= position and not self.ended:
            self.step(rngs)
        return self.held.pop(position, None)

    def _enter(self, rngs: Rngs) -> None:
        rngs.enter(self.home, self._seed)
        set_worker_info(**self._info)

    def _produce(self) -> Any:
        """Return the next element, a Failure, or ``_END``."""
        try:
            if self._next is None:
                self._next = self._begin(None)
            if self._state_is_due():
                self._take_state()
            return self._next()
        except StopIteration:
            return _END
        except BaseException as error:
            self._takes_states = False  # whoever went on from one would not have failed
            if self._next is None:
                self._next = functools.partial(next, iter(()))  # it has not begun, and is at its end
            where = f"raised while making element {self.made} of stream {self.feed.stream} of '{self.name}'"
            return Failure(error, where)

    def _begin(self, snapshot: Snapshot | None) -> Callable[[], Any]:
        parts = self._parts
        if parts.num_workers > 0 and parts.worker_init_fn is not None and not self.home.begun:
            parts.worker_init_fn(self.feed.stream)
        self.home.begun = True
        for known in self.states.before(0):  # of another owner, which has begun this iteration
            start: Snapshot = pickle.loads(known.packed)
            if start.start is not None:
                apply_rngs(start.start)
        if snapshot is None:
            self._take_state(start=True)
        else:
            snapshot.load_dataset(self.home.dataset)
        if parts.plain:
            self._iterator = iter(self.home.dataset)
            step: Callable[[], Any] = self._iterator.__next__
        else:
            fetcher = self._fetcher = fetch._IterableDatasetFetcher(
                self.home.dataset, parts.auto_collation, parts.collate_fn, parts.drop_last
            )
            self._iterator = fetcher.dataset_iter
            step = functools.partial(fetcher.fetch, range(parts.batch_size or 1))
        if not (_is_stateful(self.home.dataset) or _is_stateful(self._iterator)):
            self._takes_states = False
        if snapshot is not None:
            snapshot.load_iterator(self._iterator)
        return step

    def _state_is_due(self) -> bool:
        return (
            self._takes_states
            and self.states.last <= self.floor <= self.made
            and self.states.last < self.made
            and time.monotonic() >= self._rests_until
            and not getattr(self._fetcher, "ended", False)
        )

    def _take_state(self, *, start: bool = False) -> None:
        """Take one here, before the next element; at the ``start``, also of generators that last."""
        began = time.monotonic()
        lasts = rngs_now() if start and self._parts.persistent_workers else None
        try:
            snapshot = Snapshot(start=lasts)
            if self._takes_states:
                snapshot = Snapshot.take(self.home.dataset, self._iterator)
                snapshot.start = lasts
            if snapshot.leads_on or lasts is not None:
                state = StreamState(self.made, snapshot.pack())
                self.states.add(state)
                self.told.append(state)
        except StateUnusable as error:
            self._takes_states = False
            if self._complain is not None:
                self._complain(said(error))
        now = time.monotonic()
        self._rests_until = max(self._rests_until, now) + _RESTS * (now - began)


# ── all streams of a worker ───────────────────────────────────────────────────────────────────────────


class OwnedStreams:
    """The streams that a worker owns, by plan and number. ``send`` tells the coordinator."""

    def __init__(
        self, loaders: Loaders, rngs: Rngs, status: WorkerStatus, send: Callable[[Message], None]
    ) -> None:
        self._loaders, self._rngs, self._status, self._send = loaders, rngs, status, send
        self._streams: dict[tuple[int, int], ElementStream] = {}
        self._homes: dict[tuple[int, int], Home] = {}
        self._stateless: set[int] = set()

    @property
    def have_demand(self) -> bool:
        """Whether an element may be made ahead."""
        return any(stream.has_demand for stream in self._streams.values())

    def feed(self, message: Feed) -> None:
        """Own a stream, or make it further than before."""
        key = (message.plan, message.stream)
        stream = self._streams.get(key)
        if stream is None:
            stream = self._resumed(message)
            if stream is None:
                stream = self._begun(message, self._home(message.loader, message.stream))
            self._remember(stream)
            self._streams[key] = stream
        stream.let_go(message.floor)
        stream.upto = message.upto
        if stream.ended:
            self._announce(key, stream)

    def cancel(self, message: Cancel) -> None:
        """All ranks are through with a plan."""
        for key in [key for key in self._streams if key[0] == message.plan]:
            stream = self._streams.pop(key)
            if message.undone:
                try:
                    stream.rewind(self._rngs)
                except BaseException as error:
                    why = f"it cannot go back to its own state ({said(error)})"
                    self._do_without_states(stream.feed.loader, why)

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
                self._status.ahead = StreamPlace(*key, stream.made)
                stream.step(self._rngs)
                self._status.ahead = NOWHERE
                self._announce(key, stream)
                return

    def _announce(self, key: tuple[int, int], stream: ElementStream) -> None:
        states, stream.told = stream.told, []
        self._send(Announced(*key, stream.made, stream.ended, tuple(states)))

    def _begun(self, feed: Feed, home: Home) -> ElementStream:
        complain = functools.partial(self._do_without_states, feed.loader)
        stateless = feed.loader in self._stateless
        return ElementStream(*self._loaders[feed.loader], home, feed, None if stateless else complain)

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

    def _resumed(self, feed: Feed) -> ElementStream | None:
        """Return the stream where its newest state was taken, over a copy of the dataset; None if that fails."""
        if not feed.states or feed.loader in self._stateless:
            return None
        if not pickle.loads(feed.states[-1].packed).leads_on:
            return None
        try:
            known = self._homes.get((feed.loader, feed.stream))
            dataset = self._loaders[feed.loader][1].dataset if known is None else known.dataset
            stream = self._begun(feed, Home(fresh_copy(dataset)))
            self._status.ahead = StreamPlace(feed.plan, feed.stream, feed.states[-1].position)
            stream.resume(self._rngs)
        except BaseException as error:
            self._do_without_states(feed.loader, f"it cannot go on from a state of its own ({said(error)})")
            return None
        finally:
            self._status.ahead = NOWHERE
        return stream

    def _replay(self, old: ElementStream, position: int) -> ElementStream:
        """Go back: an element that was made and given away is asked for once more."""
        states = tuple(old.states.before(position))
        feed = msgspec.structs.replace(old.feed, floor=position, upto=old.upto, states=states)
        stream = self._resumed(feed) or self._begun(feed, Home(fresh_copy(old.home.dataset)))
        stream.aside = old.aside or old.ended
        if not stream.aside:
            self._remember(stream)
        return stream

    def _do_without_states(self, loader: int, why: str) -> None:
        if loader not in self._stateless:
            self._stateless.add(loader)
            text = (
                f"'{self._loaders[loader][0]}': {why}; where a data worker dies, another one reads its stream again "
                "from the start, and skips what was delivered"
            )
            self._send(Note(text))
