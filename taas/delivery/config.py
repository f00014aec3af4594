"""What each process of a delivery is told at its start, and the secrets of one run.

All structs travel as JSON over the child's stdin or inside an agent's authenticated message, never on a
command line: they hold keys.
"""

from __future__ import annotations

import os
import secrets
from typing import Literal

import msgspec
import zmq

__all__ = [
    "DeliveryConfig",
    "Keys",
    "Place",
    "PlannerConfig",
    "RankConfig",
    "WorkerConfig",
    "new_keys",
    "read_line",
]


class Keys(msgspec.Struct, frozen=True):
    """Secrets of one run's delivery.

    Attributes:
        server_public, server_secret: the coordinator's CURVE pair; peers get an empty secret.
        client_public, client_secret: the pair that every peer of this run proves itself with.
        mac: key of the MAC over each element's header on the data path.
    """

    server_public: str
    server_secret: str
    client_public: str
    client_secret: str
    mac: bytes

    def for_peers(self) -> Keys:
        """Return the keys without what only the coordinator may hold."""
        return msgspec.structs.replace(self, server_secret="")


def read_line(fd: int) -> bytes:
    """Read one line from a descriptor and nothing beyond it: what follows is for whoever polls it."""
    line = bytearray()
    while not line.endswith(b"\n"):
        piece = os.read(fd, 1)
        if not piece:
            break
        line += piece
    return bytes(line)


def new_keys() -> Keys:
    """Return fresh keys for one run."""
    server_public, server_secret = zmq.curve_keypair()
    client_public, client_secret = zmq.curve_keypair()
    return Keys(
        server_public.decode(),
        server_secret.decode(),
        client_public.decode(),
        client_secret.decode(),
        secrets.token_bytes(32),
    )


class Place(msgspec.Struct, frozen=True):
    """Where a loader goes on after a restart.

    Attributes:
        iteration: which ``iter()``, from 0.
        step: the lowest one of it that not every rank had asked beyond.
        taken: steps that were taken of the iterations before.
    """

    iteration: int
    step: int
    taken: int


class DeliveryConfig(msgspec.Struct, frozen=True):
    """The coordinator's.

    Attributes:
        keys: all of them.
        ranks: world size N.
        slab: bytes of elements under way or held, per rank; the stated bound of memory.
        shared: ranks and data workers are on this host and share memory.
        host: address to listen on.
        uneven: what becomes of an incomplete last row.
        units: elements per loader name, "*" for all.
        prebuffer: elements ready before the ranks are asked for; None: two a rank.
        hosts: data VMs that will join.
        alone: seconds that ranks may be without any data worker before the run fails; another VM may be on its way.
        patience: seconds that the planner has, when the ranks have ended, to tell where the generators are.
    """

    keys: Keys
    ranks: int
    slab: int
    shared: bool = True
    host: str = "127.0.0.1"
    uneven: Literal["drop", "pad", "raise"] = "drop"
    units: dict[str, int] = {}
    prebuffer: int | None = None
    hosts: int = 1
    alone: float = 300.0
    patience: float = 30.0


class PlannerConfig(msgspec.Struct, frozen=True):
    """The planner's. ``payload`` is a path (``/proc/<pid>/fd/<n>`` for a memfd) to the packed loaders."""

    keys: Keys
    endpoint: str
    payload: str
    ranks: int
    sys_path: list[str] = []
    cwd: str = ""


class WorkerConfig(msgspec.Struct, frozen=True):
    """One data VM's: a keeper process that holds the loaders and forks ``processes`` workers.

    Attributes:
        vm: number of this data VM, from 0.
        vms: number of data VMs at the start (for ``WorkerInfo.num_workers``).
        slabs: abstract socket that hands out the slabs, or "" when nothing is shared.
        encrypt: CURVE on the data path between hosts.
    """

    keys: Keys
    endpoint: str
    payload: str
    vm: int
    vms: int
    processes: int
    ranks: int
    slabs: str = ""
    encrypt: bool = True
    sys_path: list[str] = []
    cwd: str = ""


class RankConfig(msgspec.Struct, frozen=True):
    """One rank's.

    Attributes:
        slabs: abstract socket that hands out the slabs, or "" when nothing is shared.
        host: address this rank can be reached at from the data VMs.
        units: as in DeliveryConfig.
        places: where the loaders go on, by name, if the run was started again and the cell resumes.
    """

    keys: Keys
    endpoint: str
    rank: int
    ranks: int
    slabs: str = ""
    host: str = "127.0.0.1"
    encrypt: bool = True
    units: dict[str, int] = {}
    uneven: Literal["drop", "pad", "raise"] = "drop"
    places: dict[str, Place] = {}
