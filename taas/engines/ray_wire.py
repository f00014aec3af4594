"""What the supervisor and its Ray driver tell each other: one JSON line each, over the driver's standard streams."""

from __future__ import annotations

from typing import Any

import msgspec

from taas.engines import AgentConfig, Demand

__all__ = [
    "Acquire",
    "Asks",
    "Connected",
    "Gone",
    "Got",
    "Release",
    "Reports",
    "Severed",
    "Unreachable",
    "Waiting",
]


class _Line(msgspec.Struct, frozen=True, tag=True):
    """Base of all lines."""


class Acquire(_Line, frozen=True):
    """Get a VM for each configuration, each on a node of its own.

    Attributes:
        machines: their numbers.
        lost: the numbers of those whose places they take, if they do.
    """

    machines: tuple[int, ...]
    demand: Demand
    configs: tuple[AgentConfig, ...]
    lost: tuple[int, ...] = ()


class Release(_Line, frozen=True):
    """Give a VM back, or stop waiting for it."""

    machine: int


class Connected(_Line, frozen=True):
    """The driver is part of the cluster; ``host`` is this node's address there."""

    host: str


class Unreachable(_Line, frozen=True):
    """The driver could not become part of the cluster, and ends."""

    message: str


class Severed(_Line, frozen=True):
    """The driver is not part of the cluster any more, and ends; why, in words."""

    message: str


class Waiting(_Line, frozen=True):
    """What a VM waits for, in words."""

    machine: int
    text: str


class Got(_Line, frozen=True):
    """A VM is there; its agent starts.

    Attributes:
        host: its address.
        gpus: its GPUs, as CUDA_VISIBLE_DEVICES names them.
    """

    machine: int
    host: str
    gpus: tuple[str, ...]


class Gone(_Line, frozen=True):
    """A VM is gone, or cannot be had.

    Attributes:
        how: in words that go on after "the agent of g2.8-0 was".
        error: the class of :mod:`taas.errors`.
    """

    machine: int
    how: str
    error: str = "RunLost"


Asks = Acquire | Release
Reports = Connected | Unreachable | Severed | Waiting | Got | Gone

encode = msgspec.json.Encoder().encode


def decoder(kinds: Any) -> msgspec.json.Decoder[Any]:
    """Return what reads the lines of one side."""
    return msgspec.json.Decoder(kinds)
