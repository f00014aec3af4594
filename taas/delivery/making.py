"""How an element is made: torch's own fetch and collate, with a seed per element or generators of its own."""

from __future__ import annotations

import ctypes
import os
import pickle
import random
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cloudpickle
import torch
from torch.utils.data import _utils
from torch.utils.data._utils import fetch

from taas.capture.arriving import unpack
from taas.capture.process_state import set_generators, states_of_generators
from taas.delivery.encoding import pack_failure
from taas.delivery.loader import DeliveredLoader
from taas.delivery.plan import unpack_place
from taas.delivery.registered import LoaderParts, Loaders


def load_loaders(path: str) -> Loaders:
    """Unpack the ranks' payload in this data process, which has no GPU; return the registered loaders in it.

    Raises:
        CaptureError: one of them cannot be rebuilt here.
    """
    torch.set_num_threads(1)  # a pool of threads would not be there in forked workers
    fd = os.open(path, os.O_RDONLY)
    try:
        objects = unpack(fd, vars(sys.modules["__main__"]), Path.cwd(), DeliveredLoader)
    finally:
        os.close(fd)
    return [(loader.taas_name, loader.taas_parts) for loader in objects]


class WorkerStatus(ctypes.Structure):
    """What a worker is on, in memory that its pool still reads when it is dead.

    That is the number of an element (-1 for none), or the element of a stream that it makes before it is asked for.
    """

    _fields_ = (("number", ctypes.c_int64), ("ahead", ctypes.c_int64 * 3))
    number: int
    ahead: Any  # the numbers of a StreamPlace


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


RngStates = dict[str, Any]
"""States of the process-wide generators that samplers and datasets draw from, of those that are loaded."""


def rngs_now() -> RngStates:
    """Return this process's."""
    return states_of_generators(cuda=False)


def apply_rngs(states: RngStates) -> None:
    """Make them this process's."""
    set_generators(states, cuda=False)


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


def worker_facts(number: int, workers: int, seed: int, dataset: Any) -> dict[str, Any]:
    """Return what ``get_worker_info()`` says of a worker."""
    return {"id": number, "num_workers": workers, "seed": seed, "dataset": dataset}


def set_worker_info(**facts: Any) -> None:
    """Let ``get_worker_info()`` say this; nothing: that this is no worker."""
    _utils.worker._worker_info = None if not facts else _utils.worker.WorkerInfo(**facts)


class MapFetcher:
    """Makes elements of one map-style loader in this process."""

    def __init__(self, name: str, parts: LoaderParts, worker: int, workers: int) -> None:
        self.name, self._parts = name, parts
        self._worker, self._workers = worker, workers
        self._fetch: Callable[[Any], Any] | None = None
        self._info: dict[str, Any] = {}

    def make(self, index: bytes, seed: int, rngs: Rngs) -> Any:
        """Return the element, or a Failure with what user code raised."""
        if self._fetch is None:
            self._fetch = self._begin(seed, rngs)
        rngs.seed(seed)
        set_worker_info(**self._info)
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
        self._info = worker_facts(self._worker, self._workers, seed, parts.dataset)
        set_worker_info(**self._info)
        try:
            if parts.worker_init_fn is not None:
                parts.worker_init_fn(self._worker)
        except BaseException as error:
            where = f"raised by worker_init_fn of '{self.name}' in data worker {self._worker}"
            broken = Failure(error, where)
            return lambda _: broken
        return fetch._MapDatasetFetcher(
            parts.dataset, parts.auto_collation, parts.collate_fn, parts.drop_last
        ).fetch


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


def fresh_copy(dataset: Any) -> Any:
    """Return a dataset as it was at launch, for a stream that torch would have forked from the notebook."""
    return cloudpickle.loads(cloudpickle.dumps(dataset))
