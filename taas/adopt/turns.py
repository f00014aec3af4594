"""Ranks that want the same file take turns: one makes it, the others find it there.

Inside the project that one is rank 0, the only rank that writes there; outside it is the first rank of each
VM. The others wait until it has ended, through the run's store; then they go on together, or, if it failed
or wrote where they cannot see, one after another. A lock file keeps other runs of this user out meanwhile. It is held
with ``flock``, which ends with the process that holds it, however that ends. Every wait is bounded.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import tempfile
import threading
import time
import zlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from taas.adopt.membership import Membership

BEGIN_SECONDS = 30.0  # for the first rank to come; one that never does must not hold up the others
END_SECONDS = 3600.0
LONGEST_PAUSE = 0.1


@dataclass(frozen=True)
class Turn:
    """A rank's turn at a place.

    Attributes:
        leads: whether this rank goes first.
        ready: whether the first rank has done it, on a file system that this rank sees.
    """

    leads: bool
    ready: bool = False


class Turns:
    """Takes this rank's turns."""

    def __init__(self, membership: Membership) -> None:
        self._membership = membership
        self._counts: Counter[str] = Counter()
        self._own = threading.local()

    @property
    def current(self) -> Turn | None:
        """The turn that this thread has now."""
        turn: Turn | None = getattr(self._own, "turn", None)
        return turn

    @contextlib.contextmanager
    def take(self, place: Path, what: str) -> Iterator[Turn]:
        """Wait for this rank's turn at ``place``, and have it inside.

        Args:
            place: the file or folder that is about to be written.
            what: what is done there, in words that are the same on every rank.

        Raises:
            TimeoutError: somebody has held the place for an hour.
        """
        if self.current is not None:
            yield self.current
            return
        me, place = self._membership, Path(os.path.realpath(place))
        inside = place.is_relative_to(os.path.realpath(me.project))
        leader = 0 if inside else me.node * me.local_world_size
        name = f"turn/{leader}/{zlib.crc32(f'{place}: {what}'.encode()):08x}"
        self._counts[name] += 1
        name += f"/{self._counts[name]}"
        if me.rank == leader:
            with self._led(name), self._locked(place, fcntl.LOCK_EX):
                yield from self._have(Turn(leads=True))
            return
        near = leader // me.local_world_size == me.node
        ready = self._await(name, leader, what) and (near or place.exists())
        with self._locked(place, fcntl.LOCK_SH if ready else fcntl.LOCK_EX):
            yield from self._have(Turn(leads=False, ready=ready))

    def _have(self, turn: Turn) -> Iterator[Turn]:
        self._own.turn = turn
        try:
            yield turn
        finally:
            self._own.turn = None

    @contextlib.contextmanager
    def _led(self, name: str) -> Iterator[None]:
        """Tell the others when the first rank begins and how it ended."""
        store, ended = self._membership.store(name), "failed"
        store.set("begun", "")
        try:
            yield
            ended = "done"
        finally:
            store.set("ended", ended)

    def _await(self, name: str, leader: int, what: str) -> bool:
        """Whether the first rank has done it, when it has ended or nothing more is to be expected of it."""
        me = self._membership
        if not me.wait_for(name, "begun", BEGIN_SECONDS):
            return False
        if not me.wait_for(name, "ended", END_SECONDS):
            raise TimeoutError(
                f"Rank {leader} has not finished {what} within an hour. Stop the run and look at it."
            )
        return me.store(name).get("ended") == b"done"

    @contextlib.contextmanager
    def _locked(self, place: Path, kind: int) -> Iterator[None]:
        file = _lock_file(place, self._membership.project)
        until, pause = time.monotonic() + END_SECONDS, 0.001
        try:
            while not _try_lock(file, kind):
                if time.monotonic() > until:
                    raise TimeoutError(
                        f"Another process has been writing {place} for an hour. End it, or wait."
                    )
                time.sleep(pause)  # a blocking flock cannot be given a limit
                pause = min(2 * pause, LONGEST_PAUSE)
            yield
        finally:
            os.close(file)  # and with it the lock


def _try_lock(file: int, kind: int) -> bool:
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _lock_file(place: Path, project: Path) -> int:
    """Open the lock file of a place, which lies outside of the project: not every rank may write there."""
    from jupyter_core.paths import jupyter_runtime_dir

    folders = (Path(jupyter_runtime_dir()), Path(tempfile.gettempdir()) / f"taas-{os.getuid()}")
    outside = [f for f in folders if not Path(os.path.realpath(f)).is_relative_to(os.path.realpath(project))]
    folder = (outside or folders)[0] / "taas-locks"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return os.open(folder / f"{zlib.crc32(str(place).encode()):08x}.lock", os.O_RDWR | os.O_CREAT, 0o600)
