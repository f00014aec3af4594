"""How an element is made: torch's own fetch and collate, with a seed per element or a stream's own RNG."""

from __future__ import annotations

import os
import pickle
import random
import sys
import traceback
from collections.abc import Callable
from typing import Any

import cloudpickle
import torch
from torch.utils.data import _utils
from torch.utils.data._utils import fetch

from taas.delivery.encoding import pack_failure
from taas.delivery.parts import LoaderParts
from taas.delivery.sampling import RngStates

__all__ = ["Failure", "MapMaker", "Rngs", "Stream"]


class Failure:
    """A packed exception that takes an element's place."""

    __slots__ = ("packed",)

    def __init__(self, error: BaseException, where: str) -> None:
        text = "".join(traceback.format_exception(error))
        self.packed = pack_failure(error, f"{where}\n\n{text}")


class Rngs:
    """The process's generators, which element and stream they belong to just now."""

    def __init__(self) -> None:
        self._stream: Stream | None = None

    def seed(self, seed: int) -> None:
        """Set all generators for one element."""
        self._leave()
        torch.default_generator.manual_seed(seed)
        random.seed(seed)
        numpy = sys.modules.get("numpy")
        if numpy is not None:
            numpy.random.seed(seed & 0xFFFF_FFFF)

    def enter(self, stream: Stream) -> None:
        """Go on where a stream's generators stood."""
        if self._stream is not stream:
            self._leave()
            if stream.rngs is None:
                stream.seed()
            else:
                stream.rngs.apply()
            self._stream = stream

    def _leave(self) -> None:
        if self._stream is not None:
            self._stream.rngs = RngStates.now()
            self._stream = None


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


def _short(index: Any) -> str:
    if isinstance(index, list) and len(index) > 8:
        return f"indices [{', '.join(map(repr, index[:6]))}, … {index[-1]!r}] ({len(index)})"
    return f"index {index!r}" if not isinstance(index, list) else f"indices {index!r}"


class Stream:
    """One stream of an iterable loader: what one DataLoader worker (or the notebook itself) would yield.

    ``held`` keeps the elements from ``floor`` on until each was taken. torch seeds worker w with
    ``base_seed + w``; so does this, and the stream keeps its generators' states to itself, so that its
    elements are those the notebook would get from its workers.
    """

    def __init__(
        self, name: str, parts: LoaderParts, dataset: Any, iteration: int, stream: int, base_seed: int
    ) -> None:
        self.name, self._parts, self._dataset = name, parts, dataset
        self.iteration, self.stream, self.base_seed = iteration, stream, base_seed
        self.rngs: RngStates | None = None
        self.held: dict[int, Any] = {}
        self.made = 0
        self.floor = 0
        self.upto = 0
        self.ended = False
        self._next: Callable[[], Any] | None = None
        self._info: dict[str, Any] = {}
        if parts.num_workers > 0:
            seed = base_seed + stream
            self._info = {"id": stream, "num_workers": parts.num_workers, "seed": seed, "dataset": dataset}

    def seed(self) -> None:
        """Set the generators as torch does for worker ``stream``."""
        seed = self.base_seed + self.stream
        random.seed(seed)
        torch.manual_seed(seed)
        numpy = sys.modules.get("numpy")
        if numpy is not None:
            generate = getattr(_utils.worker, "_generate_state", None)
            numpy.random.seed(generate(self.base_seed, self.stream) if generate else seed & 0xFFFF_FFFF)

    @property
    def hungry(self) -> bool:
        """Whether it may make another element now."""
        return not self.ended and self.made < self.upto

    def step(self, rngs: Rngs) -> None:
        """Make the next element, or find the end."""
        rngs.enter(self)
        _set_worker_info(**self._info)
        element: Any
        try:
            if self._next is None:
                self._next = self._begin()
            element = self._next()
        except StopIteration:
            self.ended = True
            return
        except Exception as error:
            where = f"raised while making element {self.made} of stream {self.stream} of '{self.name}'"
            element = Failure(error, where)
            if self._next is None:
                self._next = _nothing
        if self.made >= self.floor:
            self.held[self.made] = element
        self.made += 1

    def _begin(self) -> Callable[[], Any]:
        parts = self._parts
        if parts.num_workers > 0 and parts.worker_init_fn is not None:
            parts.worker_init_fn(self.stream)
        if parts.plain:
            step: Callable[[], Any] = iter(self._dataset).__next__
            return step
        fetcher = fetch._IterableDatasetFetcher(
            self._dataset, parts.auto_collation, parts.collate_fn, parts.drop_last
        )
        batch = range(parts.batch_size or 1)
        return lambda: fetcher.fetch(batch)

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


def _nothing() -> Any:
    raise StopIteration


def fresh_copy(dataset: Any) -> Any:
    """Return a dataset as it was at launch, for a stream that torch would have forked from the notebook."""
    return cloudpickle.loads(cloudpickle.dumps(dataset))
