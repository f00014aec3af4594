"""``taas.resume()``: going on where an earlier start of the run was."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import Any, NamedTuple

from taas.errors import DeliveryError

__all__ = ["Place", "Resumed", "resume"]


class Place(NamedTuple):
    """Where a registered loader begins.

    Attributes:
        iteration: of its loops over the loader, from 0, which one the first loop of the cell is.
        step: the step of that iteration which the first loop of the cell begins at, in each rank.
    """

    iteration: int
    step: int


_START = Place(0, 0)


class Resumed:
    """Where the loaders of a cell begin; ``resumed[loader]`` (or ``resumed["name"]``) is a ``Place``.

    A loader that is not delivered by data workers begins at its start: ``Place(0, 0)``.

    Attributes:
        restart: how often this run was started again; 0 in its first start, in the notebook, and in a plain script.
    """

    def __init__(self, restart: int, places: Mapping[str, Place]) -> None:
        self.restart = restart
        self._places = dict(places)

    def __getitem__(self, loader: Any) -> Place:
        name = loader if isinstance(loader, str) else getattr(loader, "taas_name", "")
        return self._places.get(name, _START)

    def __repr__(self) -> str:
        places = ", ".join(f"{name}: {tuple(place)}" for name, place in self._places.items())
        return f"Resumed(restart={self.restart}{', ' if places else ''}{places})"


def resume(**places: tuple[int, int]) -> Resumed:
    """Let the registered loaders go on where the run's earlier start was lost; call it before the first loop.

    After a restart of the ranks (``--max-restarts``), each loader goes on at the lowest step that not every rank had
    completed. In a first start, and where a cell has no data workers, every loader begins at its start, and this
    only says so.

    Args:
        places: ``name=(iteration, step)`` of registered loaders that shall go on elsewhere, such as where the
            checkpoint stands that the cell goes on from. All ranks have to give the same.

    Returns:
        Where each loader begins now.

    Raises:
        DeliveryError: a loop over a registered loader has begun already, or a name in ``places`` is not that of a
            loader that data workers deliver.
    """
    loader = sys.modules.get("taas.delivery.loader")
    found = loader.resume(places) if loader is not None else {}
    if places and not found:
        raise DeliveryError(
            f"taas.resume({next(iter(places))}=…): this process has no data workers, and a loader that they do not "
            "deliver begins at its start. Give the cell --cpus, or skip in the loop what was seen"
        )
    return Resumed(
        int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)),
        {name: Place(place.iteration, place.step) for name, place in found.items()},
    )
