"""The notebook's own order: a loader's sampler iterated exactly as torch's DataLoader would iterate it.

torch draws in a fixed sequence, which these plans repeat (``torch/utils/data/dataloader.py``): a new
iterator calls ``iter(index_sampler)``, then draws its base seed from the loader's generator; with workers it
calls ``iter(index_sampler)`` once more. Persistent workers keep that iterator: a later iteration of theirs only
calls ``iter(index_sampler)``, once.

Each loader plans on RNG streams of its own that begin where the notebook's stood at launch: how far one
loader is planned ahead never shows in the order of another.
"""

from __future__ import annotations

import copy
import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import BatchSampler
from torch.utils.data.distributed import DistributedSampler

from taas.delivery.messages import LoaderFacts
from taas.delivery.parts import LoaderParts

__all__ = ["LoaderPlans", "RngStates"]


@dataclass(slots=True)
class RngStates:
    """States of the process-wide generators that samplers draw from."""

    torch_state: Any
    random_state: Any
    numpy_state: Any = None

    @classmethod
    def of_notebook(cls, states: tuple[Any, Any, Any] | None) -> RngStates:
        """Return the notebook's at launch (torch, random, numpy), this process's where one is missing."""
        here = cls.now()
        if states is None:
            return here
        given = (
            new if new is not None else old
            for new, old in zip(states, (here.torch_state, here.random_state, here.numpy_state), strict=True)
        )
        return cls(*given)

    @classmethod
    def now(cls) -> RngStates:
        """Return this process's."""
        numpy = sys.modules.get("numpy")
        return cls(
            torch.get_rng_state(), random.getstate(), None if numpy is None else numpy.random.get_state()
        )

    def apply(self) -> None:
        """Make them this process's."""
        torch.set_rng_state(self.torch_state)
        random.setstate(self.random_state)
        numpy = sys.modules.get("numpy")
        if numpy is not None and self.numpy_state is not None:
            numpy.random.set_state(self.numpy_state)


@dataclass(slots=True)
class _Snapshot:
    """Everything an iteration's order hangs on: process-wide RNGs and the sampler's own generators."""

    rngs: RngStates
    generators: dict[str, Any]


@dataclass(slots=True)
class _Open:
    iteration: int
    base_seed: int
    streams: list[Iterator[Any]]
    turn: int = 0
    ended: bool = False
    error: Exception | None = None


class LoaderPlans:
    """One loader's iterations: opened in order, drawn lazily, begun again from the same state if need be."""

    def __init__(self, name: str, parts: LoaderParts, rngs: RngStates, ranks: int) -> None:
        self.name, self.parts, self.ranks = name, parts, ranks
        self.note = ""
        self._rngs = rngs
        self._generators = _generators_of(parts)
        self._starts: dict[int, _Snapshot] = {}
        self._ends: dict[int, _Snapshot] = {}
        self._base_seed = 0
        self._open: dict[int, _Open] = {}
        self._distributed = _find_distributed(parts)
        self._index_samplers = [parts.index_sampler]
        if self._distributed is not None:
            self._index_samplers = self._per_rank(self._distributed)
            parts = self.parts
        self.facts = self._facts()

    def _facts(self) -> LoaderFacts:
        epochs = [getattr(s, "epoch", None) for s in _samplers(self.parts) if hasattr(s, "set_epoch")]
        epoch = epochs[0] if epochs and isinstance(epochs[0], int) else None
        return LoaderFacts(
            self.name,
            self._length(),
            self.parts.streams,
            epoch,
            self._distributed is not None,
            self.note,
        )

    def _length(self) -> int | None:
        try:
            if self.parts.streams:
                return self.parts.iterable_length()
            return len(self._index_samplers[0]) * (self.ranks if self._distributed is not None else 1)
        except (TypeError, NotImplementedError, AttributeError):
            return None

    def _per_rank(self, sampler: Any) -> list[Any]:
        """Return the index sampler once per rank, each seeing that rank's share."""
        if sampler.num_replicas != self.ranks:
            self.note = (
                f"'{self.name}': its DistributedSampler was built for {sampler.num_replicas} replicas, the run has "
                f"{self.ranks} ranks; it is used with {self.ranks}"
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

    def open(self, plan: int, iteration: int, epoch: int | None) -> int:
        """Begin an iteration; return its base seed. One begun before starts from the same state again."""
        if iteration in self._starts:
            self._restore(self._starts[iteration])
        self._rngs.apply()
        self._starts[iteration] = self._snapshot()
        self._starts.pop(iteration - 8, None)
        self._ends.pop(iteration - 8, None)
        self._set_epoch(epoch)
        goes_on = self.parts.persistent_workers and iteration > 0
        streams: list[Iterator[Any]] = []
        try:
            for sampler in self._index_samplers:
                iterator = iter(sampler)
                if not goes_on and not streams:
                    self._base_seed = self._draw_base_seed()
                if not goes_on and self.parts.num_workers > 0:
                    iterator = iter(sampler)
                streams.append(iterator)
        finally:
            self._rngs = RngStates.now()
        self._open[plan] = _Open(iteration, self._base_seed, [] if self.parts.streams else streams)
        return self._base_seed

    def repeat(self, iteration: int, epoch: int | None) -> None:
        """Run all iterations before this one to their ends, as an earlier start of the run has."""
        for earlier in range(iteration):
            if all(opened.iteration != earlier for opened in self._open.values()):
                self.open(_PAST, earlier, None if epoch is None else epoch - iteration + earlier)
            self._run_out(earlier, most=(self._length() or 0) + 1)
            self.drop(_PAST)

    def draw(self, plan: int, count: int, until: float, clock: Any) -> tuple[list[Any], bool, int]:
        """Return up to ``count`` indices (fewer when ``clock()`` passes ``until``), whether that is all, the seed.

        Raises:
            Exception: what the sampler raised, after the indices before it were returned.
        """
        opened = self._open[plan]
        if opened.error is not None:
            raise opened.error
        indices: list[Any] = []
        if opened.ended or not opened.streams:
            return indices, opened.ended, opened.base_seed
        self._rngs.apply()
        try:
            while len(indices) < count:
                index = next(opened.streams[opened.turn], _END)
                if index is _END:
                    opened.ended = True
                    break
                indices.append(index)
                opened.turn = (opened.turn + 1) % len(opened.streams)
                if len(indices) % 32 == 0 and clock() > until:
                    break
        except Exception as error:
            opened.error = error
            if not indices:
                raise
        finally:
            self._rngs = RngStates.now()
        if opened.ended:
            self._ends[opened.iteration] = self._snapshot()
        return indices, opened.ended, opened.base_seed

    def drop(self, plan: int) -> None:
        """Nobody will draw from this plan again."""
        opened = self._open.pop(plan, None)
        if opened is not None and not opened.ended:
            self._ends.setdefault(opened.iteration, self._snapshot())

    def final_states(self, iteration: int, epoch: int | None) -> dict[str, Any]:
        """Where the loader's own generators stand after ``iteration``, by attribute path; and its epoch."""
        end = self._ends.get(iteration)
        if end is None:
            end = self._run_out(iteration) or self._snapshot()
        states: dict[str, Any] = {f"{path}!state": state for path, state in end.generators.items()}
        if epoch is not None:
            states["epoch"] = epoch
        return states

    def _run_out(self, iteration: int, most: int = 1_000_000) -> _Snapshot | None:
        """Draw the rest of an iteration that the ranks left early, if it is no more than ``most`` indices."""
        for plan, opened in self._open.items():
            if opened.iteration == iteration and opened.streams and self._length() is not None:
                left = most
                while left > 0:
                    indices, ended, _ = self.draw(plan, min(left, 1000), float("inf"), lambda: 0.0)
                    if ended:
                        return self._ends[iteration]
                    left -= len(indices)
        return None

    def _draw_base_seed(self) -> int:
        return int(torch.empty((), dtype=torch.int64).random_(generator=self.parts.generator).item())

    def _set_epoch(self, epoch: int | None) -> None:
        if epoch is None:
            return
        for index_sampler in self._index_samplers:
            sampler: Any
            for sampler in (index_sampler, getattr(index_sampler, "sampler", None)):
                if hasattr(sampler, "set_epoch"):
                    sampler.set_epoch(epoch)

    def _snapshot(self) -> _Snapshot:
        return _Snapshot(self._rngs, {p: g.get_state() for p, g in self._generators.items()})

    def _restore(self, snapshot: _Snapshot) -> None:
        self._rngs = snapshot.rngs
        for path, state in snapshot.generators.items():
            self._generators[path].set_state(state)


_END = object()
_PAST = -1
"""The plan of an iteration that is only repeated."""


def _samplers(parts: LoaderParts) -> list[Any]:
    """The index sampler and the sampler inside it."""
    outer = parts.index_sampler
    inner = getattr(outer, "sampler", None)
    return [s for s in (outer, inner) if s is not None]


def _find_distributed(parts: LoaderParts) -> Any:
    for sampler in _samplers(parts):
        if isinstance(sampler, DistributedSampler) or (
            hasattr(sampler, "num_replicas") and hasattr(sampler, "rank") and hasattr(sampler, "set_epoch")
        ):
            return sampler
    return None


def _with_sampler(index_sampler: Any, old: Any, new: Any) -> Any:
    """Return ``index_sampler`` over ``new`` where it was over ``old``."""
    if index_sampler is old:
        return new
    if type(index_sampler) is BatchSampler:
        return BatchSampler(new, index_sampler.batch_size, index_sampler.drop_last)
    own = copy.copy(index_sampler)
    own.sampler = new
    return own


def _generators_of(parts: LoaderParts) -> dict[str, torch.Generator]:
    """Every torch.Generator that the loader or its samplers hold, by attribute path, once each."""
    found: dict[str, torch.Generator] = {}
    places = [("generator", parts.generator)]
    for path, holder in zip(("index_sampler", "index_sampler.sampler"), _samplers(parts), strict=False):
        places += [(f"{path}.{name}", value) for name, value in getattr(holder, "__dict__", {}).items()]
    for path, value in places:
        if isinstance(value, torch.Generator) and not any(value is known for known in found.values()):
            found[path] = value
    return found
