"""The configuration of each process of a delivery, which the process reads when it starts.

The configuration contains the secrets of a run, so it never appears on a command line.
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

    server_public: str  # the coordinator's CURVE key pair
    server_secret: str  # empty in the configuration of peers
    clients: dict[str, tuple[str, str]]
    """The key pair by which a peer authenticates itself, by ``Peer.holder``; no other peer has it.
    """
    mac: bytes  # key of the MAC over each batch's header on the data path


def read_line(fd: int) -> bytes:
    """Read one line from a descriptor, and not a byte more.

    The rest is left for the loop that polls the descriptor afterwards.
    """
    line = bytearray()
    while not line.endswith(b"\n"):
        piece = os.read(fd, 1)
        if not piece:
            break
        line += piece
    return bytes(line)


def new_keys(holders: Iterable[str] = ()) -> Keys:
    """Return new keys for one run, and a pair for each of its peers."""

    def pair() -> tuple[str, str]:
        public, secret = zmq.curve_keypair()
        return public.decode(), secret.decode()

    return Keys(*pair(), {holder: pair() for holder in holders}, secrets.token_bytes(32))


class ResumePoint(msgspec.Struct, frozen=True):
    """The point from which a loader continues after a restart."""

    iteration: int  # number of the iter() call, from 0
    step: int  # the lowest step of this iteration that not every rank has gone beyond
    taken: int  # number of steps of earlier iterations that were taken


class Delivered(msgspec.Struct, frozen=True, kw_only=True):
    """The progress of all registered loaders of a run together."""

    ready: int  # batches that are prepared and wait for their rank
    delivered: int  # batches that ranks have consumed
    planned: int  # batches of all iterations that have begun, or the number that --units allows
    rate: float  # delivered batches per second
    waited: float  # seconds that the ranks have waited, on average


ALONE_SECONDS = 300.0
Uneven = Literal["drop", "pad", "raise"]
"""How to treat an incomplete last row."""


class DeliveryConfig(msgspec.Struct, frozen=True):
    """The configuration that all processes of a delivery share; the coordinator's only one."""

    keys: Keys  # the coordinator gets all keys; for_peers selects those of the other processes
    ranks: int  # world size N
    slab: int  # bytes of batches in transit or held, for each rank: the documented memory bound
    folder: str = ""
    """A private folder with this host's sockets; if empty, ranks and data workers share no memory.
    """
    host: str = "127.0.0.1"  # the address on which the coordinator listens if there is no folder
    endpoint: str = ""  # where it listens, once it does
    encrypt: bool = True  # CURVE on the data path between hosts
    uneven: Uneven = "drop"
    units: dict[str, int] = {}  # maximum number of batches by loader name, "*" for all loaders
    # number of batches that are ready before ranks start; None: two for each rank
    prebuffer: int | None = None
    hosts: int = 1  # number of data VMs that will join
    # seconds that ranks wait without any data worker: another VM may be coming up
    alone: float = ALONE_SECONDS
    silence: float = 20.0  # seconds until a data VM counts as lost; on this host its pool is killed
    patience: float = 30.0  # seconds for the planner to report the final states of the generators
    places: dict[str, ResumePoint] = {}  # where loaders continue in a run that was started again

    def for_peers(self, endpoint: str, *holders: str) -> DeliveryConfig:
        """Return the configuration for the peers with these names.

        It has the coordinator's address, and only the keys of these peers.
        """
        clients = {holder: self.keys.clients[holder] for holder in holders}
        keys = msgspec.structs.replace(self.keys, server_secret="", clients=clients)
        return msgspec.structs.replace(self, keys=keys, endpoint=endpoint)

    def units_of(self, name: str) -> int | None:
        """Return the maximum number of batches of a loader (``--units``); None without a limit."""
        return self.units.get(name, self.units.get("*"))


class DataOrder(Message, frozen=True):
    """Makes a process the planner, or the worker pool of a data VM.

    Both load the registered loaders.
    """

    common: DeliveryConfig
    vm: int = 0  # number of this data VM; the replacement of a lost one has a new number
    processes: int = 0  # number of workers that the pool forks; 0 for the planner
    payload: str = ""  # path of the memory file with the packed loaders; filled in by the agent
    rehearsed: bool | None = None  # whether this VM's ranks are rehearsed; None if it has no ranks

    @property
    def plans(self) -> bool:
        """Return whether this message is for the planner."""
        return not self.processes
