"""The planner process: it runs the user's samplers, and sends their indices to the coordinator.

Samplers run exactly as torch's DataLoader runs them. DataLoader draws in a fixed sequence, which
these plans repeat (``torch/utils/data/dataloader.py``): a new iterator calls
``iter(index_sampler)``, then draws its base seed from the loader's generator; with workers it
calls ``iter(index_sampler)`` again. Persistent workers keep that iterator, so a later iteration
only calls ``iter(index_sampler)`` once.

Each loader has its own RNG streams, which begin with the notebook's states at launch. The order of
one loader therefore does not depend on how far another one is planned ahead.
"""

from __future__ import annotations

import copy
import itertools
import pickle
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import cloudpickle
import torch
from torch.utils.data import BatchSampler
from torch.utils.data.distributed import DistributedSampler

from taas.delivery.failures import pack_failure
from taas.delivery.making import RngStates, apply_rngs, load_loaders, rngs_now
from taas.delivery.registered import LoaderParts
from taas.delivery.transport import connect_control
from taas.protocol.delivery_messages import (
    PLANNER,
    Cancel,
    Draw,
    Final,
    FinishPlans,
    Hello,
    LoaderFacts,
    Planned,
    ToPlanner,
)
from taas.protocol.delivery_orders import DataOrder
from taas.protocol.framing import Leave, pack

_SLICE = 0.02
"""After this many seconds a slow sampler's indices are sent, even if more were requested."""


# ── one loader's iterations ───────────────────────────────────────────────────────────────────────


_Snapshot = tuple[RngStates, dict[str, Any]]
"""Everything that determines an iteration's order.

These are the states of process-wide RNGs, and those of the sampler's own generators, by path.
"""


@dataclass(slots=True)
class Iteration:
    """One iteration of a loader, drawn as far as was requested.

    ``error`` is the exception of its sampler; it comes after all indices that were drawn before.
    """

    number: int
    base_seed: int = 0
    streams: list[Iterator[Any]] = field(default_factory=list)
    turn: int = 0
    ended: bool = False
    error: BaseException | None = None


class LoaderPlans:
    """One loader's iterations, which are opened in order and drawn lazily.

    An iteration can begin again from the same state.
    """

    def __init__(self, name: str, parts: LoaderParts, rngs: RngStates, ranks: int) -> None:
        self.name, self.parts, self.ranks = name, parts, ranks
        self.note = ""
        self._rngs = rngs
        self._generators = _generators_of(parts)
        # the states at the starts of iterations; an iteration's end is the next one's start
        self._starts: dict[int, _Snapshot] = {}
        self._base_seed = 0
        self._distributed = _find_distributed(parts)
        self._index_samplers = [parts.index_sampler]
        if self._distributed is not None:
            self._index_samplers = self._per_rank(self._distributed)
        self.facts = self._facts()

    def _facts(self) -> LoaderFacts:
        epochs = [
            getattr(sampler, "epoch", None) for sampler in _with_epochs(self.parts.index_sampler)
        ]
        epoch = epochs[0] if epochs and isinstance(epochs[0], int) else None
        per_rank = self._distributed is not None
        return LoaderFacts(
            self.name, self._length(), self.parts.iterable, epoch, per_rank, self.note
        )

    def _length(self) -> int | None:
        try:
            if self.parts.iterable:
                return self.parts.iterable_length()
            return len(self._index_samplers[0]) * (
                self.ranks if self._distributed is not None else 1
            )
        except (TypeError, NotImplementedError, AttributeError):
            return None

    def _per_rank(self, sampler: Any) -> list[Any]:
        """Return the index sampler once for each rank, each with that rank's share."""
        if sampler.num_replicas != self.ranks:
            self.note = (
                f"'{self.name}': its DistributedSampler was built for {sampler.num_replicas}"
                f" replicas, the run has {self.ranks} ranks; it is used with {self.ranks}"
            )
        copies = []
        for rank in range(self.ranks):
            own = copy.copy(sampler)
            own.num_replicas, own.rank = self.ranks, rank
            if isinstance(own, DistributedSampler):
                size = len(own.dataset)  # type: ignore[arg-type]
                dropped = own.drop_last and size % self.ranks
                own.num_samples = size // self.ranks if dropped else -(-size // self.ranks)
                own.total_size = own.num_samples * self.ranks
            copies.append(own)
        return [_with_sampler(self.parts.index_sampler, sampler, own) for own in copies]

    # ── iterations ────────────────────────────────────────────────────────────────────────────────

    def open(self, number: int, epoch: int | None, *, repeats: bool = False) -> Iteration:
        """Begin an iteration; one that has begun before starts from the same state again.

        With ``repeats`` all iterations before it run to their ends first, as in an earlier start of
        the run.
        """
        opened = Iteration(number)
        try:
            for earlier in range(number) if repeats else ():
                past = self.open(earlier, None if epoch is None else epoch - number + earlier)
                self._run_out(past, most=(self._length() or 0) + 1)
            self._begin(opened, epoch)
        except BaseException as error:
            opened.error = error
        opened.base_seed = self._base_seed
        return opened

    def _begin(self, opened: Iteration, epoch: int | None) -> None:
        number = opened.number
        streams: list[Iterator[Any]] = []
        if (start := self._starts.get(number)) is not None:
            self._rngs, generators = start
            for path, state in generators.items():
                self._generators[path].set_state(state)
        apply_rngs(self._rngs)
        self._starts[number] = self._snapshot()
        self._starts.pop(number - 8, None)
        if epoch is not None:
            for index_sampler in self._index_samplers:
                for sampler in _with_epochs(index_sampler):
                    sampler.set_epoch(epoch)
        goes_on = self.parts.persistent_workers and number > 0
        try:
            for sampler in self._index_samplers:
                iterator = iter(sampler)
                if not goes_on and not streams:
                    drawn = torch.empty((), dtype=torch.int64).random_(
                        generator=self.parts.generator
                    )
                    self._base_seed = int(drawn.item())
                if not goes_on and self.parts.num_workers > 0:
                    iterator = iter(sampler)
                streams.append(iterator)
        finally:
            self._rngs = rngs_now()
        if self.parts.iterable:
            streams = [((position, number, self._base_seed) for position in itertools.count())]
        opened.streams = streams

    def draw(
        self,
        opened: Iteration,
        count: int,
        until: float,
        pack: Callable[[Any], Any] = lambda index: index,
    ) -> list[Any]:
        """Return up to ``count`` indices.

        There are fewer at the iteration's end or error, or when the clock passes ``until``.
        """
        indices: list[Any] = []
        if opened.ended or opened.error is not None or not opened.streams:
            return indices
        apply_rngs(self._rngs)
        try:
            while len(indices) < count:
                index = next(opened.streams[opened.turn], _END)
                if index is _END:
                    opened.ended = True
                    break
                indices.append(pack(index))
                opened.turn = (opened.turn + 1) % len(opened.streams)
                if len(indices) % 32 == 0 and time.monotonic() > until:
                    break
        except BaseException as error:
            opened.error = error
        finally:
            self._rngs = rngs_now()
        return indices

    def final_states(
        self, number: int, epoch: int | None, opened: Iteration | None
    ) -> dict[str, bytes | int]:
        """Return the states of the loader's own generators after an iteration.

        They are keyed by attribute path; the epoch is among them.

        ``opened`` is that iteration, if it was not dropped. An error of the sampler is raised.
        """
        if opened is not None and number + 1 not in self._starts:
            self._run_out(opened)
        _, generators = self._starts.get(number + 1) or self._snapshot()
        states: dict[str, bytes | int] = {
            f"{path}!state": state.numpy().tobytes() for path, state in generators.items()
        }
        if epoch is not None:
            states["epoch"] = epoch
        return states

    def _run_out(self, opened: Iteration, most: int = 1_000_000) -> None:
        """Draw the rest of an iteration that the ranks left early, up to ``most`` indices."""
        left = most if self._length() is not None and not self.parts.iterable else 0
        while left > 0 and not opened.ended and opened.error is None:
            left -= len(self.draw(opened, min(left, 1000), float("inf")))
        if opened.error is not None:
            raise opened.error

    def _snapshot(self) -> _Snapshot:
        return self._rngs, {
            path: generator.get_state() for path, generator in self._generators.items()
        }


_END = object()


def _with_epochs(index_sampler: Any) -> list[Any]:
    """Return those of the index sampler and the sampler inside it that have epochs."""
    samplers = index_sampler, getattr(index_sampler, "sampler", None)
    return [sampler for sampler in samplers if hasattr(sampler, "set_epoch")]


def _find_distributed(parts: LoaderParts) -> Any:
    distributed = (
        sampler
        for sampler in _with_epochs(parts.index_sampler)
        if hasattr(sampler, "num_replicas") and hasattr(sampler, "rank")
    )
    return next(distributed, None)


def _with_sampler(index_sampler: Any, old: Any, new: Any) -> Any:
    """Return ``index_sampler`` with ``new`` instead of ``old`` inside it."""
    if index_sampler is old:
        return new
    if type(index_sampler) is BatchSampler:
        return BatchSampler(new, index_sampler.batch_size, index_sampler.drop_last)
    own = copy.copy(index_sampler)
    own.sampler = new
    return own


def _generators_of(parts: LoaderParts) -> dict[str, torch.Generator]:
    """Return each torch.Generator of the loader and its samplers, by attribute path."""
    found: dict[str, torch.Generator] = {}
    places = [("generator", parts.generator)]
    sampler = getattr(parts.index_sampler, "sampler", None)
    for path, holder in (
        ("index_sampler", parts.index_sampler),
        ("index_sampler.sampler", sampler),
    ):
        places += [
            (f"{path}.{name}", value) for name, value in getattr(holder, "__dict__", {}).items()
        ]
    for path, value in places:
        if isinstance(value, torch.Generator) and not any(
            value is known for known in found.values()
        ):
            found[path] = value
    return found


# ── the process ───────────────────────────────────────────────────────────────────────────────────


class Planner:
    """Answers the coordinator's requests for indices.

    It has the loaders that can be planned, by number; a plan is one iteration of one loader.
    """

    def __init__(self, loaders: dict[int, LoaderPlans]) -> None:
        self._loaders = loaders
        self._open: dict[int, tuple[LoaderPlans, Iteration]] = {}

    def answer(self, message: Any) -> Any:
        """Return the reply to a message, or None if it needs none."""
        match message:
            case Draw():
                return self._draw(message)
            case FinishPlans():
                return self._finish(message)
            case Cancel():
                self._open.pop(message.plan, None)
        return None

    def _draw(self, message: Draw) -> Planned:
        if message.plan not in self._open:
            plans = self._loaders[message.loader]
            opened = plans.open(message.iteration, message.epoch, repeats=message.repeats)
            self._open[message.plan] = plans, opened
        plans, opened = self._open[message.plan]
        packed = plans.draw(opened, message.count, time.monotonic() + _SLICE, _pack_index)
        if opened.error is None:
            return Planned(message.plan, opened.base_seed, packed, opened.ended)
        if packed:  # these indices come before the error, which the next reply reports
            return Planned(message.plan, opened.base_seed, packed, False)
        where = (
            f"raised by the sampler of '{plans.name}', in the process that iterates it ahead of the"
            " ranks"
        )
        return Planned(message.plan, 0, [], True, pack_failure(opened.error, where))

    def _finish(self, message: FinishPlans) -> Final:
        states, unknown = {}, {}
        for index, iteration, epoch in message.begun:
            plans = self._loaders[index]
            drawn = (it for of, it in self._open.values() if of is plans and it.number == iteration)
            try:
                states[plans.name] = plans.final_states(iteration, epoch, next(drawn, None))
            except BaseException as error:
                unknown[plans.name] = f"its sampler raised {type(error).__name__}: {error}"
        return Final(pack(states), unknown)


def _pack_index(index: Any) -> bytes:
    """Pickle an index, with cloudpickle if it is of a class defined in the notebook."""
    try:
        return pickle.dumps(index, 5)
    except (pickle.PicklingError, TypeError, AttributeError):
        by_value: bytes = cloudpickle.dumps(index, 5)
        return by_value


def _load(config: DataOrder) -> tuple[dict[int, LoaderPlans], tuple[LoaderFacts, ...]]:
    """Return the plans of the loaders that can be planned, by number, and facts of all loaders."""
    parts_of = load_loaders(config.payload)
    # the notebook's states; this process's states for generators that the notebook lacks
    rngs = rngs_now()
    plans, facts = {}, []
    for number, (name, parts) in enumerate(parts_of):
        try:
            plans[number] = LoaderPlans(name, parts, rngs, config.common.ranks)
            facts.append(plans[number].facts)
        except BaseException as error:
            reason = (
                f"the sampler of '{name}' cannot be planned ahead: {type(error).__name__}: {error}"
            )
            facts.append(LoaderFacts(name, error=reason))
    return plans, tuple(facts)


def main(config: DataOrder) -> None:
    """Serve until told to exit."""
    with connect_control(config.common, PLANNER, ToPlanner) as control:
        planner = Planner({})
        try:
            plans, facts = _load(config)
            planner = Planner(plans)
            control.send(Hello(loaders=facts))
        except BaseException:
            control.send(Hello(traceback.format_exc()))
        while not isinstance(message := control.receive(), Leave):
            reply = planner.answer(message)
            if reply is not None:
                control.send(reply)
