"""What each process of a delivery is told at its start, and the secrets of one run: never on a command line."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterable
from typing import Literal

import msgspec
import zmq

from taas.wire.framing import Message


class Keys(msgspec.Struct, frozen=True):
    """Secrets of one run's delivery."""

    server_public: str  # the coordinator's CURVE pair
    server_secret: str  # of which peers get an empty secret
    clients: dict[str, tuple[str, str]]
    """Of each peer, by ``Peer.holder``: the pair that it, and nobody else, proves itself with."""
    mac: bytes  # key of the MAC over each element's header on the data path


def read_line(fd: int) -> bytes:
    """Read one line from a descriptor and nothing beyond it: what follows is for whoever polls it."""
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
    """Where a loader goes on after a restart."""

    iteration: int  # which iter(), from 0
    step: int  # the lowest one of it that not every rank had asked beyond
    taken: int  # steps that were taken of the iterations before


class Delivered(msgspec.Struct, frozen=True, kw_only=True):
    """How far the registered loaders of a run are, all together."""

    ready: int  # elements that are prepared and wait for their rank
    delivered: int  # elements that ranks have consumed
    planned: int  # elements that there will be: of all iterations begun, or as --units says
    rate: float  # delivered elements a second
    waited: float  # seconds that the ranks have waited, on average


ALONE_SECONDS = 300.0
Uneven = Literal["drop", "pad", "raise"]
"""What becomes of an incomplete last row."""


class DeliveryConfig(msgspec.Struct, frozen=True):
    """What all processes of a delivery are told, and the coordinator nothing else."""

    keys: Keys  # all of them for the coordinator; for others see for_peers
    ranks: int  # world size N
    slab: int  # bytes of elements under way or held, per rank: the stated bound of memory
    folder: str = ""
    """Where the sockets on this host are, which nobody else can enter; empty: ranks and data
    workers share no memory.
    """
    host: str = "127.0.0.1"  # address for the coordinator to listen on where there is no folder
    endpoint: str = ""  # where it listens, once that is known
    encrypt: bool = True  # CURVE on the data path between hosts
    uneven: Uneven = "drop"
    units: dict[str, int] = {}  # elements per loader name, "*" for all
    prebuffer: int | None = None  # elements ready before the ranks are asked for; None: two a rank
    hosts: int = 1  # data VMs that will join
    alone: float = (
        ALONE_SECONDS  # that ranks may be without any data worker: another VM may be on its way
    )
    silence: float = (
        20.0  # seconds after which a data VM counts as lost; on this host its pool is killed
    )
    patience: float = (
        30.0  # seconds that the planner has to tell where the generators are in the end
    )
    places: dict[
        str, ResumePoint
    ] = {}  # where loaders go on, if the run was started again and resumes

    def for_peers(self, endpoint: str, *holders: str) -> DeliveryConfig:
        """Return what peers with these names are told: where the coordinator listens, and of all keys their own."""
        clients = {holder: self.keys.clients[holder] for holder in holders}
        keys = msgspec.structs.replace(self.keys, server_secret="", clients=clients)
        return msgspec.structs.replace(self, keys=keys, endpoint=endpoint)

    def units_of(self, name: str) -> int | None:
        """Return the elements that ``--units`` allows of a loader; None without a limit."""
        return self.units.get(name, self.units.get("*"))


class DataOrder(Message, frozen=True):
    """Be a process of the data side: the planner, or a data VM's worker pool, which holds the loaders."""

    common: DeliveryConfig
    vm: int = 0  # number of this data VM; a lost one is replaced under a new number
    processes: int = 0  # workers that the pool forks; 0 for the planner
    payload: str = (
        ""  # path of the packed loaders, a memory file's; known where the process is started
    )
    rehearsed: bool | None = None  # as the run's ranks on this VM will be; None where it gets none

    @property
    def plans(self) -> bool:
        """Whether it is the planner's."""
        return not self.processes
