"""What each process of a delivery is told at its start, and the secrets of one run.

All structs travel as JSON over the child's stdin or inside an agent's authenticated message, never on a
command line: they hold keys.
"""

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
    clients = {holder: _new_pair() for holder in holders}
    return Keys(*_new_pair(), clients, secrets.token_bytes(32))


def _new_pair() -> tuple[str, str]:
    public, secret = zmq.curve_keypair()
    return public.decode(), secret.decode()


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
    """What all processes of a delivery are told, and the coordinator nothing else.

    Attributes:
        folder: where the delivery's sockets on this host are, which nobody else can enter: ranks and data workers are here
            and share memory. Empty: they are elsewhere.
        alone: seconds that ranks may be without any data worker before the run fails; another VM may be on its way.
        silence: seconds without a beat after which a data VM counts as lost; a worker pool on this host is killed.
        patience: seconds that the planner has, when the ranks have ended, to tell where the generators are.
        places: where the loaders go on, if the run was started again and the cell resumes.
    """

    keys: Keys  # all of them for the coordinator; for others see for_peers
    ranks: int  # world size N
    slab: int  # bytes of elements under way or held, per rank: the stated bound of memory
    folder: str = ""
    host: str = "127.0.0.1"  # address for the coordinator to listen on where there is no folder
    endpoint: str = ""  # where it listens, once that is known
    encrypt: bool = True  # CURVE on the data path between hosts
    uneven: Uneven = "drop"
    units: dict[str, int] = {}  # elements per loader name, "*" for all
    prebuffer: int | None = None  # elements ready before the ranks are asked for; None: two a rank
    hosts: int = 1  # data VMs that will join
    alone: float = ALONE_SECONDS
    silence: float = 20.0
    patience: float = 30.0
    places: dict[str, ResumePoint] = {}

    def for_peers(self, endpoint: str, *holders: str) -> DeliveryConfig:
        """Return what peers with these names are told: where the coordinator listens, and of all keys their own."""
        clients = {holder: self.keys.clients[holder] for holder in holders}
        keys = msgspec.structs.replace(self.keys, server_secret="", clients=clients)
        return msgspec.structs.replace(self, keys=keys, endpoint=endpoint)

    def units_of(self, name: str) -> int | None:
        """Return the elements that ``--units`` allows of a loader; None without a limit."""
        return self.units.get(name, self.units.get("*"))


class DataOrder(Message, frozen=True):
    """Be a process of the data side: the planner, or a data VM's worker pool, which holds the loaders.

    Attributes:
        vm: number of this data VM, from 0; a lost one may be replaced under a new number.
        processes: workers that the pool forks; 0 for the planner.
        payload: path of the packed loaders, a memory file's; known where the process is started.
        rehearsed: as the run's ranks on this VM will be; None where it gets none.
    """

    common: DeliveryConfig
    vm: int = 0
    processes: int = 0
    payload: str = ""
    rehearsed: bool | None = None

    @property
    def plans(self) -> bool:
        """Whether it is the planner's."""
        return not self.processes
