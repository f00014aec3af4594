"""What of a DataLoader travels: its dataset, its samplers and how it fetches; nothing of its own machinery."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

__all__ = ["LoaderParts", "take_apart"]


@dataclass(slots=True)
class LoaderParts:
    """A registered loader on the data side.

    Attributes:
        dataset: map-style or iterable; for a registered iterable that is no DataLoader, that iterable.
        index_sampler: what DataLoader would iterate: its batch sampler, or its sampler without batching.
        auto_collation: whether the index sampler yields batches of indices.
        streams: 0 for a map-style dataset; else over how many workers an iterable one is spread.
        plain: a registered iterable that is no DataLoader; its elements are delivered as they are.
    """

    dataset: Any
    index_sampler: Any = None
    auto_collation: bool = False
    batch_size: int | None = None
    drop_last: bool = False
    collate_fn: Any = None
    worker_init_fn: Any = None
    num_workers: int = 0
    persistent_workers: bool = False
    generator: Any = None
    streams: int = 0
    plain: bool = False

    def iterable_length(self) -> int | None:
        """Elements an iterable dataset says it has; None if it does not say."""
        if not hasattr(self.dataset, "__len__"):
            return None
        length = len(self.dataset)
        if self.auto_collation and self.batch_size:
            length = length // self.batch_size if self.drop_last else -(-length // self.batch_size)
        return length


def take_apart(loader: Any) -> LoaderParts:
    """Return a loader's parts. Needs torch only where the loader brings it."""
    if not hasattr(loader, "dataset") or not hasattr(loader, "_index_sampler"):
        return LoaderParts(dataset=loader, index_sampler=(), streams=1, plain=True)
    iterable = loader._dataset_kind != 0
    return LoaderParts(
        dataset=loader.dataset,
        index_sampler=() if iterable else loader._index_sampler,
        auto_collation=loader._auto_collation,
        batch_size=loader.batch_size,
        drop_last=loader.drop_last,
        collate_fn=loader.collate_fn,
        worker_init_fn=loader.worker_init_fn,
        num_workers=loader.num_workers,
        persistent_workers=loader.persistent_workers,
        generator=loader.generator,
        streams=max(1, loader.num_workers) if iterable else 0,
    )
