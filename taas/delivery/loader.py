"""The rank's side of registered loaders: the object that represents one in a rank.

A ``DeliveredLoader`` is an instance of DataLoader; its iterator requests this rank's batches from
the data workers. Libraries that shard loaders (Lightning, accelerate) find a DistributedSampler
and a prepared loader, and leave both unchanged.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterator, Mapping
from typing import Any, NoReturn

import torch
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from taas.adopt import own_gpu
from taas.delivery import pinning
from taas.delivery.connection import DeliveryConnection, Element
from taas.delivery.failures import raise_remote
from taas.delivery.pinning import PinAhead
from taas.errors import DeliveryError, RanksDisagree, UnitsExhausted
from taas.protocol.delivery_messages import Ended, LoaderFacts
from taas.protocol.delivery_orders import DeliveryConfig, ResumePoint

_connection: DeliveryConnection | None = None
_parents: DeliveryConnection | None = None  # the rank's connection, in a process that it forked
_START = ResumePoint(0, 0, 0)


def connect(config: DeliveryConfig, rank: int, host: str) -> None:
    """Connect this process, so that its DeliveredLoaders yield."""
    global _connection
    _connection = DeliveryConnection(config, rank, host)


def disconnect() -> None:
    """End the connection; delivered batches stay valid."""
    global _connection
    if _connection is not None:
        _connection.shut()
        _connection = None


def _leave_to_parent() -> None:
    """Leave the connection to the rank; called in a process that the rank forked."""
    global _connection, _parents
    _connection, _parents = None, _connection or _parents


os.register_at_fork(after_in_child=_leave_to_parent)


def _get_connection() -> DeliveryConnection:
    if _parents is not None:
        raise DeliveryError(
            f"process {os.getpid()} was forked by a rank, and a registered loader yields in the"
            " rank alone: iterate it there and hand what it yields to the process, or give the"
            " process a loader that is not registered"
        )
    if _connection is None:
        raise DeliveryError(
            "this process has no data workers: a registered loader yields only in the ranks of a"
            " cell with --cpus"
        )
    return _connection


def resume(given: Mapping[str, tuple[int, int]]) -> dict[str, ResumePoint]:
    """Let loaders begin at the position of an earlier start of the run, or at a ``given`` one.

    A position is (iteration, step). Return the position at which each loader begins.
    """
    connection = _connection
    if connection is None:
        return {}
    if connection.begun:
        raise DeliveryError(
            "taas.resume() comes too late: a loop over a registered loader has begun. Call it"
            " before the first one"
        )
    known = connection.welcome()
    for name, (iteration, step) in given.items():
        if name not in known:
            raise DeliveryError(
                f"taas.resume({name}=…): '{name}' is not a loader of this run. Its loaders are"
                f" {', '.join(known)}"
            )
        if iteration < 0 or step < 0:
            raise DeliveryError(
                f"taas.resume({name}=({iteration}, {step})): allowed are an iteration and a step"
                " from 0 on"
            )
    config = connection.config
    connection.places.update(
        (name, place) for name, place in config.places.items() if name in known
    )
    for name, (iteration, step) in given.items():
        # Steps taken before: as an earlier start counted them, otherwise those of whole
        # iterations.
        at, taken = config.places.get(name), iteration * (_steps(config, known[name][1]) or 0)
        taken = at.taken if at is not None and at.iteration == iteration else taken
        connection.places[name] = ResumePoint(iteration, step, taken)
    return dict(connection.places)


def _steps(config: DeliveryConfig, facts: LoaderFacts) -> int | None:
    """Return a rank's steps in a whole iteration, or None for a loader without a length."""
    if facts.length is None:
        return None
    return (
        -(-facts.length // config.ranks) if config.uneven == "pad" else facts.length // config.ranks
    )


class PlannedSampler(DistributedSampler[Any]):
    """The sampler as a rank sees it; its epoch is sent to the plan, and it has no indices."""

    def __init__(self, loader: DeliveredLoader, attributes: dict[str, Any]) -> None:
        # DistributedSampler.__init__ needs a process group and the dataset's length. The plan
        # takes care of both, so it is not called.
        self._loader = loader
        self.__dict__.update(attributes)

    @property
    def epoch(self) -> int:
        """Return the epoch of the next iteration; ``set_epoch`` changes it."""
        return self._loader._epoch

    @epoch.setter
    def epoch(self, epoch: int) -> None:
        self._loader._epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        raise DeliveryError(
            f"the indices of '{self._loader.taas_name}' are drawn where its data workers are;"
            " iterate the loader itself, which yields this rank's elements already"
        )

    def __len__(self) -> int:
        size = self._loader.batch_size
        return len(self._loader) * (size or 1)


class PlannedBatchSampler(PlannedSampler):
    """The batch sampler as a rank sees it."""

    @property
    def sampler(self) -> Any:
        """Return the sampler inside."""
        return self._loader.sampler

    def __len__(self) -> int:
        return len(self._loader)


class DeliveredLoader(DataLoader[Any]):
    """A registered DataLoader in a rank.

    It is created when the rank's variables are unpacked (``registered.delivering``).
    """

    __taas_stays__ = True  # capture: the notebook keeps its own loader
    _is_accelerate_prepared = True  # accelerate does not change a loader with this mark
    _iterations = _yielded = 0
    _begun = False

    def __init__(
        self, name: str, attributes: dict[str, Any], sampler: dict[str, Any], parts: Any
    ) -> None:
        # DataLoader.__init__ would build samplers and check workers that a rank does not have.
        self.__dict__.update(attributes)
        self.taas_name, self.taas_parts = name, parts  # registered.LoaderParts, for data processes
        self._epoch: int = sampler["epoch"]
        facts = {key: value for key, value in sampler.items() if key != "epoch"}
        self.__dict__["sampler"] = PlannedSampler(self, facts)
        batched = attributes.get("batch_sampler") is not None
        self.__dict__["batch_sampler"] = PlannedBatchSampler(self, facts) if batched else None

    def __reduce__(self) -> tuple[Any, ...]:
        raise pickle.PicklingError(
            f"'{self.taas_name}' is a registered loader: it lives in the ranks of its run and"
            " cannot be sent elsewhere"
        )

    def _facts(self) -> tuple[int, LoaderFacts]:
        if (known := _get_connection().welcome().get(self.taas_name)) is None:
            raise DeliveryError(
                f"'{self.taas_name}' is not among the loaders of this run: register it before the"
                " cell"
            )
        return known

    def __len__(self) -> int:
        """Return this rank's steps in one iteration."""
        steps = _steps(_get_connection().config, self._facts()[1])
        steps = self._allowed() if steps is None else steps
        if steps is None:
            said = "has no length: its sampler or dataset has none"
            raise TypeError(f"registered loader '{self.taas_name}' {said}")
        return steps

    def _allowed(self) -> int | None:
        config = _get_connection().config
        units = config.units_of(self.taas_name)
        return None if units is None else units // config.ranks

    def __iter__(self) -> Any:
        """Begin the next iteration; raise UnitsExhausted if ``--units`` allows no more.

        A loop that an earlier start of the run has finished is empty and raises nothing, because
        the restarted cell still has to reach its save.
        """
        connection = _get_connection()
        index, facts = self._facts()
        place = _START
        if not self._begun:  # batches that an earlier start of the run took also count
            place = connection.places.get(self.taas_name, place)
            self._iterations, self._yielded = place.iteration, place.taken + place.step
        self._begun = connection.begun = True
        allowed = self._allowed()
        used_up = allowed is not None and self._yielded >= allowed
        if allowed is not None and used_up and place == _START:
            ranks = connection.config.ranks
            raise UnitsExhausted(
                f"--units: {allowed * ranks} elements of '{self.taas_name}' were taken ({allowed}"
                f" steps in each of {ranks} ranks) and the cell asks for another iteration. Give"
                f" more with --units {self.taas_name}=NUMBER, or iterate fewer times"
            )
        epoch = None if facts.epoch is None else self._epoch
        plan = connection.begin(index, self._iterations, epoch, place)
        self._iterations += 1
        iterator = DeliveredIterator(self, connection, plan, place.step)
        if used_up:
            iterator.finish(place.step)
        return iterator


class DeliveredIterator:
    """One iteration in one rank, from step ``first`` on."""

    def __init__(
        self, loader: DeliveredLoader, connection: DeliveryConnection, plan: int, first: int
    ) -> None:
        self._loader, self._connection, self._plan = loader, connection, plan
        self._step = self._first = first
        self._over = False
        self._pinning: PinAhead | None = None

    def __iter__(self) -> DeliveredIterator:
        return self

    def __len__(self) -> int:
        return len(self._loader)

    def __next__(self) -> Any:
        if self._over:
            raise StopIteration
        loader, connection = self._loader, self._connection
        allowed = loader._allowed()
        if allowed is not None and loader._yielded >= allowed:
            self.finish(asked=self._left_at)
            raise StopIteration
        element = connection.take(self._plan, self._step)
        if isinstance(element, Ended):
            self._end(element)
        self._step += 1
        loader._yielded += 1
        data = self._unpack(element)
        self._pin_next()
        return data

    def _end(self, ended: Ended) -> NoReturn:
        self.finish(asked=self._step)
        if ended.failure:
            raise_remote(ended.failure)
        if ended.refusal:
            raise (RanksDisagree if ended.disagree else DeliveryError)(ended.refusal)
        raise StopIteration

    def _unpack(self, element: Element) -> Any:
        holdings = self._connection.holdings
        if element.arrival.failed:
            holdings.release(element)
            raise_remote(element.stream)
        if not (self._loader.pin_memory and torch.cuda.is_available()):
            return holdings.build(element)
        pinned = None if self._pinning is None else self._pinning.take(element)
        return pinning.pin(holdings.build(element)) if pinned is None else pinned

    def _pin_next(self) -> None:
        """Pin the next batch in a thread, if it has arrived, while the program uses this one."""
        if not (self._loader.pin_memory and own_gpu.with_contexts()):
            return
        element = self._connection.peek(self._plan, self._step)
        if element is None or element.arrival.failed:
            return
        ahead = self._connection.holdings.hold_ahead(element)
        if ahead is not None:
            if self._pinning is None:
                self._pinning = PinAhead()
            self._pinning.begin(ahead)

    def finish(self, asked: int) -> None:
        """End the iteration, of which ``asked`` steps were requested."""
        self._over = True
        if self._pinning is not None:
            self._pinning.end()
        self._connection.close(self._plan, self._step, asked)

    @property
    def _left_at(self) -> int:
        """Return how many steps a loop has requested when it is left: none after its last."""
        return max(self._first, self._step - 1)

    def __del__(self) -> None:
        if not self._over and self._pinning is not None:
            self._pinning.end()
        if not self._over and _connection is self._connection:
            self._connection.close(self._plan, self._step, self._left_at)
