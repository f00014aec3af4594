"""The configuration of each process of a delivery, which it reads when it starts.

It holds the secrets of a run, so it never appears on a command line.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterable
from typing import Literal

import msgspec
import zmq

from taas.protocol.framing import Message


class Keys(msgspec.Struct, frozen=True):
    """The secrets of one run's delivery."""

    server_public: str  # the coordinator's CURVE pair
    server_secret: str  # empty in what peers get
    clients: dict[str, tuple[str, str]]
    """The key pair with which a peer proves itself, by ``Peer.holder``; no other peer has it."""
    mac: bytes  # key of the MAC over each element's header on the data path


def read_line(fd: int) -> bytes:
    """Read one line from a descriptor and no byte more.

    The rest is for the loop that polls the descriptor afterwards.
    """
    line = bytearray()
    while not line.endswith(b"\n"):
        piece = os.read(fd, 1)
        if not piece:
            break
        line += piece
    return bytes(line)


def new_keys(holders: Iterable[str] = ()) -> Keys:
    """Return fresh keys for one run, and a pair for each of its peers."""

    def pair() -> tuple[str, str]:
        public, secret = zmq.curve_keypair()
        return public.decode(), secret.decode()

    return Keys(*pair(), {holder: pair() for holder in holders}, secrets.token_bytes(32))


class ResumePoint(msgspec.Struct, frozen=True):
    """Where a loader continues after a restart."""

    iteration: int  # which iter(), from 0
    step: int  # the lowest step of it that not every rank has asked beyond
    taken: int  # steps of earlier iterations that were taken


class Delivered(msgspec.Struct, frozen=True, kw_only=True):
    """How far all registered loaders of a run are together."""

    ready: int  # elements that are prepared and wait for their rank
    delivered: int  # elements that ranks have consumed
    planned: int  # elements of all iterations that have begun, or what --units allows
    rate: float  # delivered elements a second
    waited: float  # seconds that the ranks have waited, on average


ALONE_SECONDS = 300.0
Uneven = Literal["drop", "pad", "raise"]
"""How to treat an incomplete last row."""


class DeliveryConfig(msgspec.Struct, frozen=True):
    """The configuration that all processes of a delivery share; the coordinator gets no other."""

    keys: Keys  # the coordinator gets all of them; for_peers gives the others theirs
    ranks: int  # world size N
    slab: int  # bytes of elements under way or held, for each rank: the documented bound of memory
    folder: str = ""
    """A private folder with this host's sockets; empty: ranks and data workers share no memory."""
    host: str = "127.0.0.1"  # the coordinator's address to listen on if there is no folder
    endpoint: str = ""  # where it listens, once it does
    encrypt: bool = True  # CURVE on the data path between hosts
    uneven: Uneven = "drop"
    units: dict[str, int] = {}  # elements per loader name, "*" for all
    prebuffer: int | None = None  # elements ready before ranks start; None: two for each rank
    hosts: int = 1  # data VMs that will join
    # seconds that ranks wait without any data worker: another VM may be on its way
    alone: float = ALONE_SECONDS
    silence: float = 20.0  # seconds until a data VM counts as lost; on this host its pool is killed
    patience: float = 30.0  # seconds for the planner to report the generators' final states
    places: dict[str, ResumePoint] = {}  # where loaders continue in a run that was started again

    def for_peers(self, endpoint: str, *holders: str) -> DeliveryConfig:
        """Return the configuration for the peers with these names.

        It has the coordinator's address, and only these peers' keys.
        """
        clients = {holder: self.keys.clients[holder] for holder in holders}
        keys = msgspec.structs.replace(self.keys, server_secret="", clients=clients)
        return msgspec.structs.replace(self, keys=keys, endpoint=endpoint)

    def units_of(self, name: str) -> int | None:
        """Return how many elements ``--units`` allows of a loader; None without a limit."""
        return self.units.get(name, self.units.get("*"))


class DataOrder(Message, frozen=True):
    """Tells a process to be the planner or the worker pool of a data VM.

    Both hold the registered loaders.
    """

    common: DeliveryConfig
    vm: int = 0  # number of this data VM; the replacement of a lost one has a new number
    processes: int = 0  # workers that the pool forks; 0 for the planner
    payload: str = ""  # path of the memory file with the packed loaders; its agent fills it in
    rehearsed: bool | None = None  # whether this VM's ranks are rehearsed; None: it has no ranks

    @property
    def plans(self) -> bool:
        """Return whether this order is for the planner."""
        return not self.processes
