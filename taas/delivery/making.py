"""How an element is made: torch's own fetch and collate, with a seed per element or a stream's own RNG."""

from __future__ import annotations

import functools
import os
import pickle
import random
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import cloudpickle
import msgspec
import torch
from torch.utils.data import _utils
from torch.utils.data._utils import fetch

from taas.delivery.encoding import pack_failure
from taas.delivery.messages import Feed, StreamState
from taas.delivery.parts import LoaderParts
from taas.delivery.plan import element_seed, unpack_place
from taas.delivery.sampling import RngStates
from taas.delivery.snapshots import Snapshot, StateUnusable, fingerprint, is_stateful, said
from taas.delivery.states import States

__all__ = ["Failure", "Home", "MapMaker", "Rngs", "Stream", "fresh_copy", "place_of"]

_RESTS = 20
"""Taking states of a stream takes one part in so many of its time."""


class Failure:
    """A packed exception that takes an element's place."""

    __slots__ = ("packed",)

    def __init__(self, error: BaseException, where: str) -> None:
        text = "".join(traceback.format_exception(error))
        self.packed = pack_failure(error, f"{where}\n\n{text}")


@dataclass(slots=True)
class Home:
    """What of one of torch's own workers lasts where it persists: its dataset, and its generators when others use them.

    ``rngs``: None, they have yet to be seeded. ``begun``: ``worker_init_fn`` was called.
    """

    dataset: Any
    rngs: RngStates | None = None
    begun: bool = False


class Rngs:
    """The process's generators, and whose they are just now."""

    def __init__(self) -> None:
        self._home: Home | None = None

    def seed(self, seed: int) -> None:
        """Set all generators for one element."""
        self.leave()
        torch.default_generator.manual_seed(seed)
        random.seed(seed)
        numpy = sys.modules.get("numpy")
        if numpy is not None:
            numpy.random.seed(seed & 0xFFFF_FFFF)

    def enter(self, stream: Stream) -> None:
        """Go on where a stream's generators stood."""
        if self._home is not stream.home:
            self.leave()
            if stream.home.rngs is None:
                stream.seed()
            else:
                stream.home.rngs.apply()
            self._home = stream.home

    def leave(self) -> None:
        """Let others use them."""
        if self._home is not None:
            self._home.rngs = RngStates.now()
            self._home = None


def _set_worker_info(**facts: Any) -> None:
    _utils.worker._worker_info = None if not facts else _utils.worker.WorkerInfo(**facts)


class MapMaker:
    """Makes elements of one map-style loader in this process."""

    def __init__(self, name: str, parts: LoaderParts, worker: int, workers: int) -> None:
        self.name, self._parts = name, parts
        self._worker, self._workers = worker, workers
        self._fetch: Callable[[Any], Any] | None = None
        self._info: dict[str, Any] = {}
        self._broken: Failure | None = None

    def make(self, index: bytes, seed: int, rngs: Rngs) -> Any:
        """Return the element, or a Failure with what user code raised."""
        if self._fetch is None and self._broken is None:
            self._begin(seed, rngs)
        if self._broken is not None:
            return self._broken
        assert self._fetch is not None
        rngs.seed(seed)
        _set_worker_info(**self._info)
        where = self.name
        try:
            at = pickle.loads(index)
            where = f"'{self.name}' at {_short(at)} in data worker {self._worker} (pid {os.getpid()})"
            return self._fetch(at)
        except Exception as error:
            return Failure(error, f"raised while making {where}")

    def _begin(self, seed: int, rngs: Rngs) -> None:
        parts = self._parts
        rngs.seed(seed)
        self._info = {
            "id": self._worker,
            "num_workers": self._workers,
            "seed": seed,
            "dataset": parts.dataset,
        }
        _set_worker_info(**self._info)
        try:
            if parts.worker_init_fn is not None:
                parts.worker_init_fn(self._worker)
        except Exception as error:
            self._broken = Failure(
                error, f"raised by worker_init_fn of '{self.name}' in data worker {self._worker}"
            )
            return
        fetcher = fetch._MapDatasetFetcher(
            parts.dataset, parts.auto_collation, parts.collate_fn, parts.drop_last
        )
        self._fetch = fetcher.fetch


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


class Stream:
    """One stream of an iterable loader: what one DataLoader worker (or the notebook itself) would yield.

    ``held`` keeps the elements from ``floor`` on until each was taken. torch seeds worker w with
    ``base_seed + w``; so does this, and the stream's ``home`` keeps its generators' states to itself, so that its
    elements are those the notebook would get from its workers. Workers that persist are seeded once: all iterations
    of a stream have one home then, and where each of them began is told to whoever may have to begin it again.

    Where the dataset offers states, one is taken whenever the last one has become usable (nothing before it will
    be asked for), in a twentieth of the time at most. ``told`` are those that nobody was told of yet, ``trouble``
    says why there are none. ``aside``: begun again after its end, for elements that are asked for once more.
    """

    def __init__(self, name: str, parts: LoaderParts, home: Home, feed: Feed) -> None:
        self.name, self._parts, self.home = name, parts, home
        self.feed = msgspec.structs.replace(feed, states=[])
        stream, base_seed = self.stream, self.base_seed = feed.stream, feed.base_seed
        self.held: dict[int, Any] = {}
        self.made = 0
        self.floor = feed.floor
        self.upto = feed.upto
        self.ended = False
        self.aside = False
        self.states = States(feed.states)
        self.told: list[StreamState] = []
        self.trouble = ""
        self._takes_states = True
        self._rests_until = 0.0
        self._pending: Snapshot | None = None
        self._next: Callable[[], Any] | None = None
        self._iterator: Any = None
        self._fetcher: Any = None
        self._info: dict[str, Any] = {}
        if parts.num_workers > 0:
            seed = base_seed + stream
            self._info = {
                "id": stream,
                "num_workers": parts.num_workers,
                "seed": seed,
                "dataset": home.dataset,
            }

    def seed(self) -> None:
        """Set the generators as torch does for worker ``stream``.

        One that would persist, but has died since, has no place to go on from: it begins otherwise than before.
        """
        base_seed, feed = self.base_seed, self.feed
        if self._parts.persistent_workers and feed.iteration > 0:
            base_seed = element_seed(base_seed, feed.iteration, 0)
        seed = base_seed + self.stream
        random.seed(seed)
        torch.manual_seed(seed)
        numpy = sys.modules.get("numpy")
        if numpy is not None:
            generate = getattr(_utils.worker, "_generate_state", None)
            numpy.random.seed(generate(base_seed, self.stream) if generate else seed & 0xFFFF_FFFF)

    @property
    def hungry(self) -> bool:
        """Whether it may make another element now."""
        return not self.ended and self.made < self.upto

    def step(self, rngs: Rngs) -> None:
        """Make the next element, or find the end."""
        rngs.enter(self)
        _set_worker_info(**self._info)
        self._file(self._produce())

    def resume(self, rngs: Rngs) -> None:
        """Begin where the last of its feed's states was taken, and make the element that comes there.

        Raises:
            StateUnusable: it is not the element that came there before.
            Exception: what user code raised.
        """
        state = self.states.known[-1]
        snapshot: Snapshot = pickle.loads(state.packed)
        rngs.enter(self)
        _set_worker_info(**self._info)
        self._next = self._begin(snapshot)
        self.made = state.position
        element = self._produce()
        if _mark(element) != snapshot.following:
            raise StateUnusable("after load_state_dict() comes another element than the one that came there")
        self._file(element)

    def rewind(self, rngs: Rngs) -> None:
        """Bring a dataset that offers its state, and generators that last, where they were before the stream began."""
        for start in self.states.before(0):
            _set_worker_info(**self._info)
            snapshot: Snapshot = pickle.loads(start.packed)
            snapshot.load_dataset(self.home.dataset)
            rngs.leave()
            self.home.rngs = snapshot.start

    def take_no_states(self) -> None:
        """They have been of no use."""
        self._takes_states, self._pending = False, None

    def _produce(self) -> Any:
        """Return the next element, a Failure, or ``_END``."""
        try:
            if self._next is None:
                self._next = self._begin(None)
            if self._state_is_due():
                self._take_state(self._iterator)
            return self._next()
        except StopIteration:
            return _END
        except Exception as error:
            self.take_no_states()  # whoever went on from one would not have failed
            if self._next is None:
                self._next = _nothing
            where = f"raised while making element {self.made} of stream {self.stream} of '{self.name}'"
            return Failure(error, where)

    def _file(self, element: Any) -> None:
        if self._pending is not None:
            self._complete_state(element)
        if element is _END:
            self.ended = True
            return
        if self.made >= self.floor:
            self.held[self.made] = element
        self.made += 1

    def _begin(self, snapshot: Snapshot | None) -> Callable[[], Any]:
        parts = self._parts
        if parts.num_workers > 0 and parts.worker_init_fn is not None and not self.home.begun:
            parts.worker_init_fn(self.stream)
        self.home.begun = True
        for start in self.states.before(0):  # of another owner, which has begun this iteration
            pickle.loads(start.packed).load_start()
        if snapshot is None:
            self._take_start()
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
        if not (is_stateful(self.home.dataset) or is_stateful(self._iterator)):
            self._takes_states = False
        if snapshot is not None:
            snapshot.load_iterator(self._iterator)
        return step

    def _state_is_due(self) -> bool:
        return (
            self._takes_states
            and self._pending is None
            and self.states.last <= self.floor <= self.made
            and self.states.last < self.made
            and time.monotonic() >= self._rests_until
            and not getattr(self._fetcher, "ended", False)
        )

    def _take_start(self) -> None:
        self._take_state(None)
        if self._parts.persistent_workers:
            self._pending = self._pending or Snapshot()
            self._pending.start = RngStates.now()

    def _take_state(self, iterator: Any) -> None:
        """Take one here, before the next element; what comes next completes it."""
        began = time.monotonic()
        try:
            self._pending = Snapshot.take(self.home.dataset, iterator) if self._takes_states else None
        except StateUnusable as error:
            self.trouble = said(error)
            self.take_no_states()
        self._rest(began)

    def _complete_state(self, element: Any) -> None:
        began = time.monotonic()
        assert self._pending is not None
        try:
            mark = _mark(element) if self._pending.leads_on else b""
            state = StreamState(self.made, self._pending.pack(mark))
            self.states.add(state)
            self.told.append(state)
            self._pending = None
        except Exception as error:
            self.trouble = said(error)
            self.take_no_states()
        self._rest(began)

    def _rest(self, began: float) -> None:
        """Take no other state for so many times as long as this one took."""
        now = time.monotonic()
        self._rests_until = max(self._rests_until, now) + _RESTS * (now - began)

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


_END = object()


def _nothing() -> Any:
    raise StopIteration


def _mark(element: Any) -> bytes:
    """What an element is known by again; none for the end."""
    return b"" if element is _END else fingerprint(element)


def fresh_copy(dataset: Any) -> Any:
    """Return a dataset as it was at launch, for a stream that torch would have forked from the notebook."""
    return cloudpickle.loads(cloudpickle.dumps(dataset))
