"""Makes batches with torch's own fetch and collate and a seed for each, or as part of a stream.

For an iterable dataset, one data worker runs torch's own DataLoader, with its own processes, and
delivers the batches that it yields.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import pickle
import random
import signal
import sys
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, _utils
from torch.utils.data._utils import fetch

from taas.base import linux
from taas.capture.moves.arriving import unpack
from taas.capture.settings.random_states import set_generators, states_of_generators
from taas.delivery.encoding import PackedElement, RawRegion, pack_element
from taas.delivery.failures import pack_failure
from taas.delivery.loader import DeliveredLoader
from taas.delivery.plan import element_seed
from taas.delivery.registered import LoaderParts, Loaders
from taas.protocol.delivery_messages import Cancel, Ticket
from taas.protocol.delivery_orders import DeliveryConfig


def load_loaders(path: str) -> Loaders:
    """Unpack the ranks' payload in this data process; return the registered loaders in it.

    Data processes have no GPU.
    """
    torch.set_num_threads(1)  # a thread pool would be missing in forked workers
    fd = os.open(path, os.O_RDONLY)
    try:
        objects = unpack(fd, vars(sys.modules["__main__"]), Path.cwd(), DeliveredLoader)
    finally:
        os.close(fd)
    return [(loader.taas_name, loader.taas_parts) for loader in objects]


class Failure:
    """A packed exception that replaces a batch."""

    __slots__ = ("packed",)

    def __init__(self, error: BaseException, where: str) -> None:
        self.packed = pack_failure(error, where)


RngStates = dict[str, Any]
"""States of the process-wide generators that samplers and datasets draw from.

Those of libraries that are not loaded are missing.
"""
rngs_now = partial(states_of_generators, cuda=False)
apply_rngs = partial(set_generators, cuda=False)


def seed_all(seed: int, for_numpy: Any) -> None:
    """Seed the process's generators."""
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    np.random.seed(for_numpy)


def _worker_info(number: int, workers: int, seed: int, dataset: Any) -> Any:
    return _utils.worker.WorkerInfo(id=number, num_workers=workers, seed=seed, dataset=dataset)


class MapFetcher:
    """Makes batches of one map-style loader in this process."""

    def __init__(self, name: str, parts: LoaderParts, worker: int, workers: int) -> None:
        self.name, self._parts = name, parts
        self._worker, self._workers = worker, workers
        self._fetch: Callable[[Any], Any] | None = None
        self._info: Any = None

    def make(self, index: bytes, seed: int) -> Any:
        """Return the batch, or a Failure with the exception of user code."""
        if self._fetch is None:
            self._fetch = self._begin(seed)
        seed_all(seed, seed & 0xFFFF_FFFF)
        _utils.worker._worker_info = self._info
        where = self.name
        try:
            at = pickle.loads(index)
            where = (
                f"'{self.name}' at {_short(at)} in data worker {self._worker} (pid {os.getpid()})"
            )
            return self._fetch(at)
        except BaseException as error:
            return Failure(error, f"raised while making {where}")

    def _begin(self, seed: int) -> Callable[[Any], Any]:
        parts = self._parts
        seed_all(seed, seed & 0xFFFF_FFFF)
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


def place_of(index: bytes, *, streamed: bool) -> str:
    """Return a ticket's index in words for the user."""
    found = pickle.loads(index)
    return f"its stream from element {found[0]} on" if streamed else _short(found)


def _short(index: Any) -> str:
    if isinstance(index, list) and len(index) > 8:
        return f"indices [{', '.join(map(repr, index[:6]))}, … {index[-1]!r}] ({len(index)})"
    return f"index {index!r}" if not isinstance(index, list) else f"indices {index!r}"


# ── iterable datasets ─────────────────────────────────────────────────────────────────────────────


class _Elements(IterableDataset[Any]):
    """The dataset of one of torch's own workers: it makes and packs a loader's batches.

    If a batch raises, it yields a Failure instead. With ``num_workers=0`` the worker makes the
    batches that the notebook itself would make, from the same dataset in all iterations.
    """

    def __init__(self, name: str, parts: LoaderParts) -> None:
        self._name, self._parts = name, parts
        self.keeps = parts.persistent_workers or parts.num_workers == 0
        # base seed of the iteration, which the workers read
        self.base_seed = ctypes.c_int64.from_buffer(mmap.mmap(-1, 8))
        self._number = -1

    def __iter__(self) -> Iterator[PackedElement | Failure]:
        make, made, region = None, 0, RawRegion.of_size(0)
        while True:
            try:
                make = make or self._begin()
                region, stream = pack_element(make(), region)
                yield PackedElement(stream, np.frombuffer(region.buffer, np.uint8, region.used))
                region = RawRegion.of_size(region.capacity)
            except StopIteration:
                return
            except BaseException as error:
                # an iteration that could not begin has ended
                make = make or partial(next, iter(()))
                yield Failure(
                    error, f"raised while making element {made} of '{self._name}', or packing it"
                )
            made += 1

    def _begin(self) -> Callable[[], Any]:
        """Set this process up as torch sets up its worker in the notebook."""
        parts, base_seed = self._parts, self.base_seed.value
        first = self._number < 0
        if first:
            linux.set_parent_death_signal(signal.SIGKILL)
            self._number = _utils.worker._worker_info.id  # type: ignore[union-attr]
        number, workers = self._number, parts.num_workers
        if first or not parts.persistent_workers:
            seed_all(base_seed + number, _utils.worker._generate_state(base_seed, number))
            info = (
                _worker_info(number, workers, base_seed + number, parts.dataset)
                if workers
                else None
            )
            _utils.worker._worker_info = info
        if first and workers and parts.worker_init_fn is not None:
            parts.worker_init_fn(number)
        if parts.plain:
            return partial(next, iter(parts.dataset))
        how = parts.auto_collation, parts.collate_fn, parts.drop_last
        return partial(
            fetch._IterableDatasetFetcher(parts.dataset, *how).fetch, range(parts.batch_size or 1)
        )


class _Stream:
    """One iteration, and its batches until no rank can request them any more."""

    def __init__(self, elements: DataLoader[Any], base_seed: int) -> None:
        self.loader: DataLoader[Any] | None = elements
        self.made = 0
        elements.dataset.base_seed.value = base_seed  # type: ignore[attr-defined]
        with warnings.catch_warnings():
            # The other thread is zmq's; a child never takes its locks.
            warnings.simplefilter("ignore", DeprecationWarning)
            self._elements: Any = iter(elements)
        # so that the batches that a worker made before it died are taken first
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        self.held: dict[int, Any] = {}
        self._last: Any = None

    def take(self, position: int, floor: int, ranks: int, *, pads: bool) -> Any:
        """Return the batch at a position once its row is whole; None if there is none.

        Batches before ``floor`` are dropped.

        With ``pads`` the first row is kept, and the last one need not be whole.
        """
        row_end = position - position % ranks + ranks
        while self.made < row_end:
            element = self._next()
            if element is None:
                # A dataset that raises has ended. An incomplete row is dropped, and the error
                # would be dropped with it. Therefore the ranks whose batches would come next in
                # the row get the same error.
                in_row = self.made % ranks > 0
                if not (in_row and isinstance(self._last, Failure)):
                    break
                element = self._last
            self.held[self.made] = self._last = element
            self.made += 1
        self.held = {
            at: held for at, held in self.held.items() if at >= floor or (pads and at < ranks)
        }
        return self.held.get(position) if pads or self.made >= row_end else None

    def _next(self) -> Any:
        try:
            return next(self._elements, None)
        except RuntimeError:
            # torch raises it if one of its workers has died. This process dies the same way, and
            # another data worker reads the stream again.
            code = next(
                (worker.exitcode for worker in self._elements._workers if worker.exitcode), 1
            )
            if code < 0:
                signal.raise_signal(-code)
            os._exit(code)


class OwnedStreams:
    """The iterable loaders that a worker owns, with their open iterations by plan."""

    def __init__(self, loaders: Loaders, config: DeliveryConfig) -> None:
        self._loaders, self._ranks, self._pads = loaders, config.ranks, config.uneven == "pad"
        self._streams: dict[int, _Stream] = {}
        self._closed: set[int] = set()  # plans for which tickets may still arrive
        self._idle: dict[int, DataLoader[Any]] = {}  # with persistent workers, by loader

    def make(self, ticket: Ticket) -> PackedElement | Failure | int:
        """Return a batch, or the number of batches if there are no more."""
        position, iteration, base_seed = pickle.loads(ticket.which)
        if ticket.plan in self._closed:
            return 0  # no rank reads it
        stream = self._streams.get(ticket.plan)
        if stream is None or (position < stream.made and position not in stream.held):
            elements = self._idle.pop(ticket.loader, None)
            if elements is None:
                elements = self._new(ticket.loader)
                if iteration > 0 and self._loaders[ticket.loader][1].persistent_workers:
                    # The persistent workers have died, or the run was started again, so this
                    # iteration cannot continue their state.
                    base_seed = element_seed(base_seed, iteration, 0)
            stream = self._streams[ticket.plan] = _Stream(elements, base_seed)
        found = stream.take(position, ticket.floor, self._ranks, pads=self._pads)
        if found is None:
            self._rest(ticket.loader, stream)
        return stream.made if found is None else found

    def _new(self, loader: int) -> DataLoader[Any]:
        elements = _Elements(*self._loaders[loader])
        workers = max(1, self._loaders[loader][1].num_workers)
        how: dict[str, Any] = {"batch_size": None, "collate_fn": _as_it_is, "prefetch_factor": 1}
        return DataLoader(
            elements,
            num_workers=workers,
            persistent_workers=elements.keeps,
            multiprocessing_context="fork",
            **how,
        )

    def _rest(self, loader: int, stream: _Stream) -> None:
        """Keep the workers for a later iteration, if torch would keep them."""
        elements, stream.loader = stream.loader, None
        if elements is not None and elements.persistent_workers:
            self._idle[loader] = elements

    def cancel(self, message: Cancel) -> None:
        """Drop a plan, which all ranks have closed."""
        self._closed.add(message.plan)
        if (stream := self._streams.pop(message.plan, None)) is not None:
            self._rest(message.loader, stream)
        if message.undone:
            self._idle.pop(message.loader, None)


def _as_it_is(element: Any) -> Any:
    return element
