"""Where this rank stands in the run, and how it talks to the run's store."""

from __future__ import annotations

import functools
import os
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import quote

from torch.distributed import FileStore, PrefixStore, Store, TCPStore

from taas.adopt.waits import Waits
from taas.wire.framing import SEAL_BYTES, StoreAddress, authenticate, seal

CONNECT_TIMEOUT = timedelta(seconds=60)
FOREVER = float("inf")
SHORTEST_PAUSE, LONGEST_PAUSE = 0.001, 0.05


@dataclass
class Membership:
    """This process's place in the run.

    Attributes:
        pid: the rank's own process. Its forked children (DataLoader workers) inherit every patch, and
            for them each one steps aside: they are not members of the run.
    """

    rank: int  # global
    world_size: int  # ranks of the run
    local_rank: int  # on this VM
    local_world_size: int  # ranks on this VM; the same on every VM
    address: StoreAddress  # where the run's store is
    rehearsed: bool  # whether this is a run without GPUs
    notice: Callable[[str], None]  # shows one line to the user; called on rank 0 only
    project: Path  # the notebook's directory tree; only rank 0 writes it
    pid: int = field(default_factory=os.getpid)
    waits: Waits = field(default_factory=Waits)
    _client: TCPStore | None = None
    _files: dict[str, FileStore] = field(default_factory=dict)
    _told: set[str] = field(default_factory=set)
    _numbers: Counter[str] = field(default_factory=Counter)

    def __getstate__(self) -> dict[str, Any]:
        """What a child that is started afresh knows: it tells nothing, and has no connection."""
        return {**self.__dict__, "notice": None, "waits": Waits(), "_client": None, "_files": {}}

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

    def in_rank(self, native: Callable[..., Any], ours: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that is ``ours`` in the rank itself, and the native one in its children.

        It bears the native one's name, by which a notebook that imports it gets its own back.
        """

        @functools.wraps(native)
        def function(*args: Any, **kwargs: Any) -> Any:
            return (ours if self.active else native)(*args, **kwargs)

        return function

    def sealed(self, title: str, content: bytes) -> bytes:
        """Return content for the other ranks, with the run's seal before it: the store, and gloo, let everybody in.

        ``title`` says whose it is, and which: the seal holds for nothing else.
        """
        return seal(self.address.secret, title.encode(), content) + content

    def opened(self, title: str, sealed: bytes) -> bytes | None:
        """Return what another rank sealed under this title; None: it was somebody else, or something else."""
        content = sealed[SEAL_BYTES:]
        whose = authenticate(self.address.secret, sealed[:SEAL_BYTES] + title.encode(), content)
        return None if whose is None else content

    def tell(self, text: str) -> None:
        """Show ``text`` to the user, once in this run and from rank 0 alone."""
        if self.rank == 0 and text not in self._told:
            self._told.add(text)
            self.notice(text)

    def begin_run(self, address: StoreAddress) -> bool:
        """Be a member of the next run of kept ranks; returns whether that has another store, as after a failure."""
        self._told.clear()
        if address == self.address:
            return False
        self.leave_store()
        self.address = address
        self._numbers.clear()
        return True

    def numbered(self, what: str) -> str:
        """Return a prefix for the store: each rank's first, second, … use of it meets those of the others."""
        self._numbers[what] += 1
        return f"{what}/{self._numbers[what]}"

    def store(self, prefix: str) -> Store:
        """The run's store, with keys under ``prefix``.

        On one machine each prefix has a file of its own, so that groups do not wait for each other's locks. On several,
        all share one connection, as torch's own groups do: each new one asks the name service for the name of the other
        end, which takes seconds where that service is slow. Keys carry the restart count there, because the store may
        outlive a restart.
        """
        if self.address.folder:
            if prefix not in self._files:
                self._files[prefix] = FileStore(str(self._file(prefix)))
                self._files[prefix].set_timeout(CONNECT_TIMEOUT)
            return self._files[prefix]
        if self._client is None:
            self._client = TCPStore(
                self.address.host, self.address.port, is_master=False, timeout=CONNECT_TIMEOUT
            )
        return PrefixStore(f"taas/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}/{prefix}", self._client)

    def _file(self, prefix: str) -> Path:
        return Path(self.address.folder, quote(prefix, safe=""))

    def leave_store(self) -> list[Path]:
        """Forget the store as it is open here, to open it anew; returns the files that it is."""
        files = [self._file(prefix) for prefix in self._files]
        self._client = None
        self._files.clear()
        return files

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


def in_time(seconds: float, close: Callable[[], object]) -> bool:
    """Close something in a thread, which may wait for ever; returns whether that is done after some seconds."""
    closer = threading.Thread(target=close, name="taas-closes", daemon=True)
    closer.start()
    closer.join(seconds)
    return not closer.is_alive()
