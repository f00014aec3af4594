"""The rank's side: what the registered variable is in a rank.

A ``DeliveredLoader`` is a DataLoader to everybody who looks (``isinstance``, ``len``, ``dataset``,
``batch_size``, ``sampler.set_epoch``), whose iterator asks the data workers for this rank's elements. It is
already sharded: what would shard it again (Lightning, accelerate) finds a DistributedSampler and a loader
that is prepared, and leaves both alone.
"""

from __future__ import annotations

import pickle
import struct
from collections.abc import Iterator, Mapping
from typing import Any, NoReturn

import torch
from torch.utils.data import DataLoader, _utils
from torch.utils.data.distributed import DistributedSampler

from taas.delivery.config import Place, RankConfig
from taas.delivery.connection import Connection, Element
from taas.delivery.messages import Doomed, Ended, LoaderFacts
from taas.delivery.plan import killer, unpack_place
from taas.errors import DeliveryError, RanksDisagree, UnitsExhausted

__all__ = ["DeliveredLoader", "connect", "disconnect", "rebuild_loader", "resume"]

_connection: Connection | None = None
_places: dict[str, Place] = {}
"""Where loaders begin that do not begin at their start, by name."""
_START = Place(0, 0, 0)
_begun = False
"""Whether any loader has begun."""


def connect(config: RankConfig) -> None:
    """Connect this process; from now on its DeliveredLoaders yield."""
    global _connection, _begun
    _connection, _begun = Connection(config), False
    _places.clear()


def disconnect() -> None:
    """End the connection; elements that were delivered stay valid."""
    global _connection
    if _connection is not None:
        _connection.shut()
        _connection = None


def _connected() -> Connection:
    if _connection is None:
        raise DeliveryError(
            "this process has no data workers: a registered loader yields only in the ranks of a cell with --cpus"
        )
    return _connection


def resume(given: Mapping[str, tuple[int, int]]) -> dict[str, Place]:
    """Let loaders begin where an earlier start of the run was, or at a ``given`` (iteration, step); return where.

    Raises:
        DeliveryError: a loader has begun already, or a given name is not a delivered loader's.
    """
    connection = _connection
    if connection is None:
        return {}
    if _begun:
        raise DeliveryError(
            "taas.resume() comes too late: a loop over a registered loader has begun. Call it before the first one"
        )
    known = {facts.name: facts for facts in connection.welcome()}
    for name, (iteration, step) in given.items():
        if name not in known:
            raise DeliveryError(
                f"taas.resume({name}=…): '{name}' is not a loader of this run. Its loaders are {', '.join(known)}"
            )
        if iteration < 0 or step < 0:
            raise DeliveryError(
                f"taas.resume({name}=({iteration}, {step})): allowed are an iteration and a step from 0 on"
            )
    places = connection.config.places | {
        name: _given_place(connection, known[name], *place) for name, place in given.items()
    }
    _places.update((name, place) for name, place in places.items() if name in known)
    return dict(_places)


def _given_place(connection: Connection, facts: LoaderFacts, iteration: int, step: int) -> Place:
    """Return a place with what was taken before it: as an earlier start knows, else whole iterations."""
    at = connection.config.places.get(facts.name)
    if at is not None and at.iteration == iteration:
        return Place(iteration, step, at.taken)
    return Place(iteration, step, iteration * (_steps(connection.config, facts) or 0))


def _steps(config: RankConfig, facts: LoaderFacts) -> int | None:
    """Return a rank's steps of one whole iteration; None for a loader without a length."""
    if facts.length is None:
        return None
    return -(-facts.length // config.ranks) if config.uneven == "pad" else facts.length // config.ranks


class RemoteTraceback(Exception):
    """The traceback in the data worker, as text."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text

    def __str__(self) -> str:
        return f'\n"""\n{self.text.rstrip()}\n"""'

    def __reduce__(self) -> tuple[Any, ...]:
        return RemoteTraceback, (self.text,)


def raise_remote(packed: bytes) -> NoReturn:
    """Raise what user code raised on the data side, with its traceback there as the cause."""
    error, text = pickle.loads(packed)
    if error is None or isinstance(error, StopIteration):
        raise DeliveryError(f"the registered loader's own code failed\n{text.rstrip()}")
    raise error from RemoteTraceback(text)


class PlannedSampler(DistributedSampler[Any]):
    """The sampler as a rank sees it: its epoch reaches the plan, its indices do not exist here."""

    def __init__(self, loader: DeliveredLoader, attributes: dict[str, Any]) -> None:
        # DistributedSampler.__init__ wants a process group and a dataset's length; the plan has both.
        self._loader = loader
        self.__dict__.update(attributes)

    @property
    def epoch(self) -> int:
        """The epoch that the next iteration is planned for; ``set_epoch`` changes it."""
        return self._loader._epoch

    @epoch.setter
    def epoch(self, epoch: int) -> None:
        self._loader._epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        raise DeliveryError(
            f"the indices of '{self._loader.taas_name}' are drawn where its data workers are; iterate the loader "
            "itself, which yields this rank's elements already"
        )

    def __len__(self) -> int:
        size = self._loader.batch_size
        return len(self._loader) * (size or 1)


class PlannedBatchSampler(PlannedSampler):
    """The same for a batch sampler."""

    @property
    def sampler(self) -> Any:
        """The sampler inside."""
        return self._loader.sampler

    def __len__(self) -> int:
        return len(self._loader)


class DeliveredLoader(DataLoader[Any]):
    """A registered DataLoader in a rank. Made by ``rebuild_loader`` when names are unpacked."""

    __taas_stays__ = True  # capture: the notebook keeps the loader it has

    taas_name: str
    _epoch: int
    _iterations: int
    _yielded: int
    _begun: bool
    _is_accelerate_prepared = True
    """accelerate passes a loader with this mark through as it is."""

    def __init__(self, name: str, attributes: dict[str, Any], sampler: dict[str, Any]) -> None:
        sampler = dict(sampler)
        # DataLoader.__init__ would build samplers and check workers that are not here.
        self.__dict__.update(attributes)
        self.taas_name = name
        self._iterations = 0
        self._yielded = 0
        self._begun = False
        self._epoch = sampler.pop("epoch", 0)
        self.__dict__["sampler"] = PlannedSampler(self, sampler)
        batched = attributes.get("batch_sampler") is not None
        self.__dict__["batch_sampler"] = PlannedBatchSampler(self, sampler) if batched else None

    def __reduce__(self) -> tuple[Any, ...]:
        raise pickle.PicklingError(
            f"'{self.taas_name}' is a registered loader: it lives in the ranks of its run and cannot be sent elsewhere"
        )

    def _facts(self) -> tuple[int, LoaderFacts]:
        for index, facts in enumerate(_connected().welcome()):
            if facts.name == self.taas_name:
                return index, facts
        raise DeliveryError(
            f"'{self.taas_name}' is not among the loaders of this run: register it before the cell"
        )

    def __len__(self) -> int:
        """Steps of this rank in one iteration."""
        _, facts = self._facts()
        steps = _steps(_connected().config, facts)
        if steps is None:
            allowed = self._allowed()
            if allowed is None:
                raise TypeError(
                    f"registered loader '{self.taas_name}' has no length: its sampler or dataset has none"
                )
            return allowed
        return steps

    def _allowed(self) -> int | None:
        config = _connected().config
        units = config.units.get(self.taas_name, config.units.get("*"))
        return None if units is None else units // config.ranks

    def __iter__(self) -> Any:
        """Begin the next iteration.

        Raises:
            UnitsExhausted: ``--units`` elements were taken already. The loop that an earlier start of the run had
                ended with them is no error, but empty: the cell was on its way to its save.
        """
        connection = _connected()
        index, facts = self._facts()
        place = self._begin_at()
        allowed = self._allowed()
        used_up = allowed is not None and self._yielded >= allowed
        if allowed is not None and used_up and place == _START:
            taken = allowed * connection.config.ranks
            raise UnitsExhausted(
                f"--units: {taken} elements of '{self.taas_name}' were taken ({allowed} steps in each of "
                f"{connection.config.ranks} ranks) and the cell asks for another iteration. Give more with "
                f"--units {self.taas_name}=NUMBER, or iterate fewer times"
            )
        iteration = self._iterations
        self._iterations += 1
        epoch = None if facts.epoch is None else self._epoch
        connection.begin(index, iteration, epoch, place.step, place.taken)
        return DeliveredIterator(self, connection, index, iteration, place.step, empty=used_up)

    def _begin_at(self) -> Place:
        """Where the next iteration begins; what an earlier start of the run took counts as taken."""
        global _begun
        place = _START
        if not self._begun:
            place = _places.get(self.taas_name, place)
            self._iterations = place.iteration
            self._yielded = place.taken + place.step
        self._begun = _begun = True
        return place


class DeliveredIterator:
    """One iteration in one rank: explicit requests for (plan, step).

    An ``empty`` one was at its end before the run was started again: its plan ends where it begins.
    """

    def __init__(
        self,
        loader: DeliveredLoader,
        connection: Connection,
        index: int,
        iteration: int,
        first: int,
        *,
        empty: bool,
    ) -> None:
        self._loader, self._connection = loader, connection
        self._index, self._iteration = index, iteration
        self._plan = -1
        self._step = self._first = first
        self._over, self._empty = False, empty

    def __iter__(self) -> DeliveredIterator:
        return self

    def __len__(self) -> int:
        return len(self._loader)

    def __next__(self) -> Any:
        if self._over:
            raise StopIteration
        loader, connection = self._loader, self._connection
        allowed = loader._allowed()
        if allowed is not None and loader._yielded >= allowed and not self._empty:
            self._finish()
            raise StopIteration
        if self._plan < 0:
            self._open()
        if self._empty:
            self._end(connection.ended(self._plan))
        element = connection.take(self._plan, self._step, self._step)
        if isinstance(element, Ended):
            self._end(element)
        self._step += 1
        loader._yielded += 1
        return self._unpack(element)

    def _open(self) -> None:
        opened = self._connection.opened(self._index, self._iteration)
        if opened.plan < 0:
            self._over = True
            error = RanksDisagree if opened.disagree else DeliveryError
            raise error(opened.refusal)
        self._plan = opened.plan
        self._connection.skip(self._plan, self._first)

    def _end(self, ended: Ended) -> NoReturn:
        self._finish(asked=self._step)
        if ended.failure:
            raise_remote(ended.failure)
        if ended.refusal:
            raise DeliveryError(f"'{self._loader.taas_name}': {ended.refusal}")
        raise StopIteration

    def _unpack(self, element: Element) -> Any:
        if element.doomed is not None:
            raise DeliveryError(self._obituary(element.doomed))
        assert element.arrival is not None
        if element.arrival.failed:
            self._connection.discard(element)
            raise_remote(element.stream)
        data = self._connection.build(element)
        if self._loader.pin_memory and torch.cuda.is_available():
            data = _utils.pin_memory.pin_memory(data)
        return data

    def _obituary(self, doomed: Doomed) -> str:
        try:
            stream, position = unpack_place(doomed.index)
            place = f"element {position} of stream {stream}"
        except struct.error:
            place = f"index {pickle.loads(doomed.index)!r}"
        place = f"{place} (element {doomed.seq} of this iteration)"
        return f"'{self._loader.taas_name}': {killer(place, doomed.cause)}"

    def _finish(self, asked: int | None = None) -> None:
        """Close the plan; whoever leaves the loop has not asked beyond its last step."""
        self._over = True
        if self._plan >= 0:
            asked = max(self._first, self._step - 1) if asked is None else asked
            self._connection.close(self._plan, self._step, asked)

    def __del__(self) -> None:
        if not self._over and _connection is self._connection:
            if self._plan < 0:
                self._connection.abandon(self._index, self._iteration)
            self._finish()


def rebuild_loader(name: str, attributes: dict[str, Any], sampler: dict[str, Any]) -> DeliveredLoader:
    """Return a rank's loader; what ``dataloader_registry.reduce_registered`` names in the pickle."""
    return DeliveredLoader(name, attributes, sampler)
