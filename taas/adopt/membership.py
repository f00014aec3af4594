"""Where this rank stands in the run, and how it talks to the run's store."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

from torch.distributed import PrefixStore, Store, TCPStore

CONNECT_TIMEOUT = timedelta(seconds=60)
FOREVER = float("inf")
SHORTEST_PAUSE, LONGEST_PAUSE = 0.001, 0.05


@dataclass
class Membership:
    """This process's place in the run.

    Attributes:
        rank: global rank.
        world_size: ranks of the run.
        local_rank: rank on this VM.
        local_world_size: ranks on this VM; the same on every VM.
        store_addr: host of the run's ``TCPStore``.
        store_port: its port.
        rehearsed: whether this is a run without GPUs.
        notice: shows one line to the user; called on rank 0 only.
        project: the notebook's directory tree; only rank 0 writes it.
        pid: the rank's own process. Its forked children (DataLoader workers) inherit every patch, and
            for them each one steps aside: they are not members of the run.
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    store_addr: str
    store_port: int
    rehearsed: bool
    notice: Callable[[str], None]
    project: Path
    pid: int = field(default_factory=os.getpid)
    _client: TCPStore | None = None
    _told: set[str] = field(default_factory=set)

    @property
    def active(self) -> bool:
        """Whether this is the rank itself, and not a child that it forked."""
        return os.getpid() == self.pid

    @property
    def node(self) -> int:
        """Number of this VM in the run."""
        return self.rank // self.local_world_size

    @property
    def nodes(self) -> int:
        """VMs of the run."""
        return self.world_size // self.local_world_size

    def tell(self, text: str) -> None:
        """Show ``text`` to the user, once in this run and from rank 0 alone."""
        if self.rank == 0 and text not in self._told:
            self._told.add(text)
            self.notice(text)

    def store(self, prefix: str) -> Store:
        """The run's store, with keys under ``prefix``.

        All share one connection, as torch's own groups do: each new one asks the name service for the name of
        the other end, which takes seconds where that service is slow. Keys carry the restart count, because the
        store may outlive a restart.
        """
        if self._client is None:
            self._client = TCPStore(
                self.store_addr, self.store_port, is_master=False, timeout=CONNECT_TIMEOUT
            )
        return PrefixStore(f"taas/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}/{prefix}", self._client)

    def wait_for(self, prefix: str, key: str, seconds: float = FOREVER) -> bool:
        """Wait until ``key`` is set under ``prefix``; ``False`` if it isn't after ``seconds``.

        Asks again and again: the store's own wait is C++, deaf to an interrupt of the cell, and holds the
        connection.
        """
        store, until, pause = self.store(prefix), time.monotonic() + seconds, SHORTEST_PAUSE
        while not store.check([key]):
            if time.monotonic() >= until:
                return False
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)
        return True
