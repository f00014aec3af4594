"""Sends registered loaders to the ranks, and restores their generators' states in the notebook.

In the ranks' payload, a loader is replaced by a stand-in that contains its parts. Data processes
unpack the same file as the ranks, and use the parts. This module does not import torch: a
registered loader has already imported it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from taas.base.stand_ins import StandIn, standing_in
from taas.errors import HeaderError
from taas.protocol.framing import MessageReader


@dataclass(frozen=True, slots=True)
class Registration:
    """One registered loader."""

    name: str  # its name in --units and in the live view
    loader: Any
    # the variable that holds it; a cell that mentions this variable uses the loader
    variable: str | None = None


@dataclass(slots=True)
class LoaderParts:
    """A registered loader on the data side: its dataset and how it fetches."""

    dataset: Any  # map-style or iterable; or a registered iterable that is not a DataLoader
    index_sampler: Any = None  # the batch sampler or sampler that a DataLoader iterates
    auto_collation: bool = False  # whether the index sampler yields batches of indices
    batch_size: int | None = None
    drop_last: bool = False
    collate_fn: Any = None
    worker_init_fn: Any = None
    num_workers: int = 0
    persistent_workers: bool = False
    generator: Any = None
    iterable: bool = False  # whether the dataset is not map-style
    plain: bool = False  # not a DataLoader: its batches are delivered as they are

    def iterable_length(self) -> int:
        """Return the number of batches of an iterable dataset, by the length that it reports.

        Raises a TypeError if it reports no length.
        """
        length = len(self.dataset)
        if self.auto_collation and self.batch_size:
            length = length // self.batch_size if self.drop_last else -(-length // self.batch_size)
        return length


Loaders = list[tuple[str, LoaderParts]]
"""Name and parts of each registered loader of a run."""

_TAKEN = (
    "batch_size", "drop_last", "collate_fn", "worker_init_fn", "num_workers",
    "persistent_workers", "generator",
)  # fmt: skip


def take_apart(loader: Any) -> LoaderParts:
    """Return a loader's parts."""
    if not hasattr(loader, "dataset") or not hasattr(loader, "_index_sampler"):
        return LoaderParts(dataset=loader, index_sampler=(), iterable=True, plain=True)
    iterable = loader._dataset_kind != 0
    return LoaderParts(
        dataset=loader.dataset,
        index_sampler=() if iterable else loader._index_sampler,
        auto_collation=loader._auto_collation,
        iterable=iterable,
        **{name: getattr(loader, name) for name in _TAKEN},
    )


def loaders_in_use(loaders: Sequence[Registration], used: tuple[str, ...]) -> list[str]:
    """Return a line for the user for each registered loader that a cell does not use.

    A cell that uses none of them is an error.
    """
    mine = [loader for loader in loaders if loader.variable in used]
    if loaders and not mine:
        raise HeaderError(
            "--cpus, and the cell uses no registered DataLoader: leave --cpus out, or iterate one"
            " that is registered"
        )
    said = "is registered, and this cell does not use it: not run"
    return [f"{loader.name} {said}" for loader in loaders if loader not in mine]


# ── in a payload ──────────────────────────────────────────────────────────────────────────────────


class _Itself:
    """Represents a registered iterable, so that the original is sent and not its stand-in."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._loader.__reduce_ex__(protocol)


def delivering(loaders: Iterable[Registration]) -> contextlib.AbstractContextManager[None]:
    """Send these loaders as DeliveredLoader while a cell with data workers is captured.

    A DeliveredLoader has the loader's parts.
    """
    return standing_in(
        StandIn(entry.loader, partial(_reduce, entry, _parts_to_send(entry.loader)))
        for entry in loaders
    )


def _parts_to_send(loader: Any) -> LoaderParts:
    parts = take_apart(loader)
    if parts.plain:
        parts.dataset = _Itself(loader)
    return parts


_KEPT = (
    "dataset", "batch_size", "drop_last", "num_workers", "pin_memory", "pin_memory_device",
    "timeout", "prefetch_factor", "persistent_workers", "worker_init_fn", "collate_fn", "in_order",
    "_dataset_kind",
)  # fmt: skip


def _reduce(entry: Registration, parts: LoaderParts) -> tuple[Any, ...]:
    """Return the ``__reduce__`` tuple of the object that ranks get for a registered loader."""
    # imports torch, which the loader has already imported
    from taas.delivery.loader import DeliveredLoader

    loader = entry.loader
    attributes = {key: getattr(loader, key) for key in _KEPT if hasattr(loader, key)}
    attributes["dataset"] = parts.dataset
    attributes["generator"] = attributes["multiprocessing_context"] = None
    attributes["batch_sampler"] = (
        True if getattr(loader, "batch_sampler", None) is not None else None
    )
    return DeliveredLoader, (entry.name, attributes, _sampler_facts(loader), parts)


def _sampler_facts(loader: Any) -> dict[str, Any]:
    facts: dict[str, Any] = {"drop_last": getattr(loader, "drop_last", False), "epoch": 0}
    facts["batch_size"] = getattr(loader, "batch_size", None)
    for holder in _samplers(loader):
        for key in ("epoch", "seed", "shuffle"):
            value = getattr(holder, key, None)
            if isinstance(value, int):
                facts[key] = value
    return facts


# ── back to the notebook ──────────────────────────────────────────────────────────────────────────

_read_states = MessageReader(dict[str, dict[str, bytes | int]])


def apply_final(states: bytes, loaders: Iterable[Registration]) -> None:
    """Set the loaders' own generators to ``Final.states``, if it is not empty.

    Nothing is unpickled.
    """
    known = {entry.name: entry.loader for entry in loaders}
    for name, values in _read_states(states).items() if states else ():
        for path, value in values.items():
            if name in known:
                _set(known[name], path, value)


def _set(loader: Any, path: str, value: Any) -> None:
    if path == "epoch":
        for holder in _samplers(loader):
            if hasattr(holder, "set_epoch"):
                holder.set_epoch(value)
        return
    target = loader
    for part in path.removesuffix("!state").split("."):
        target = getattr(target, "_index_sampler" if part == "index_sampler" else part, None)
    if target is not None:
        import torch  # the loader has imported it

        target.set_state(torch.frombuffer(bytearray(value), dtype=torch.uint8))


def _samplers(loader: Any) -> list[Any]:
    return [getattr(loader, "batch_sampler", None), getattr(loader, "sampler", None)]
