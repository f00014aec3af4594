"""What a delivery tells the supervisor, as JSON lines on the coordinator's stdout."""

from __future__ import annotations

import msgspec

from taas.delivery.config import Place

__all__ = [
    "Failed",
    "Final",
    "HostLost",
    "LoaderProgress",
    "Note",
    "Places",
    "Prebuffered",
    "ProgressReport",
    "Report",
    "Serving",
]


class _Report(msgspec.Struct, tag=True, frozen=True):
    """One line."""


class Serving(_Report, frozen=True):
    """The coordinator listens: peers can be started."""

    endpoint: str
    slabs: str
    pid: int


class Prebuffered(_Report, frozen=True):
    """Every loader's first elements are ready: the ranks can be asked for."""


class Note(_Report, frozen=True):
    """One line for the user."""

    text: str


class LoaderProgress(msgspec.Struct, frozen=True):
    """Elements of one loader.

    Attributes:
        prepared: made so far.
        ready: made, and not consumed yet.
        delivered: consumed by ranks.
        planned: drawn from the sampler, of the iterations that ranks have begun.
        units: allowed by ``--units``.
        rate: delivered a second.
    """

    name: str
    prepared: int
    ready: int
    delivered: int
    planned: int
    units: int | None
    rate: float


class ProgressReport(_Report, frozen=True):
    """How far the delivery is. ``waited``: seconds each rank has waited for elements so far."""

    loaders: list[LoaderProgress]
    waited: list[float]
    workers: int


class HostLost(_Report, frozen=True):
    """A data VM is gone; what it had leased is made elsewhere."""

    vm: int
    cause: str


class Failed(_Report, frozen=True):
    """Nothing will be delivered any more; ranks that ask get this as their error."""

    reason: str


class Final(_Report, frozen=True):
    """All was delivered: pickled generator states for ``dataloader_registry.apply_final``; empty if unknown."""

    states: bytes


class Places(_Report, frozen=True):
    """The last line: where each loader that ranks have begun would go on, by name."""

    places: dict[str, Place]


Report = Serving | Prebuffered | Note | ProgressReport | HostLost | Failed | Final | Places
