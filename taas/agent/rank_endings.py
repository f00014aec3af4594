"""How the ranks of a run are brought to their end: by patience, by patience with a limit, or now.

After an interrupt each rank comes out of the call of C that it is in, and runs the cell's own ``except`` and ``finally``,
however long that takes. A rank other than 0 that gives no sign of it is stuck: it is ended once no other rank of this VM
is still at work. After a failure
all ranks have the same short time, and are not interrupted before they can have come to the same end. Who is out of time gets SIGTERM and SIGKILL; rank 0 is asked for its names before.
"""

from __future__ import annotations

import signal
import time

from taas.agent.processes import Rank
from taas.wire.agents import How
from taas.wire.rank_connection import NOTICE
from taas.wire.ranks import RankOrder, RankRequest

NOTICE_SECONDS = 2.0
"""So long a rank may take to say that it is at work on an interrupt."""
FAILURE_SECONDS = 3.5
"""So long the cell may go on in a rank after another one has failed."""
_SAME_END_SECONDS = 0.3
"""So long a rank that has begun the cell may go on unhindered after another one has failed: it may fail itself."""
_TERM_SECONDS = 0.6
"""So long after SIGTERM comes SIGKILL."""
_ANSWER_SECONDS = 10.0
"""So long rank 0 may take to begin packing its names."""
_PACKING_SECONDS = 60.0
_NOW_SECONDS = 1.5
"""So long rank 0 has for its names where all is to end now."""
_LOOK_SECONDS = 0.1
_PATIENCE: tuple[How, ...] = ("now", "failure", "interrupt")


class Ending:
    """The end of one run's ranks on this VM; not begun at first.

    Args:
        order: the run's. Ranks that stay are left alone once their cell has ended; those that stayed are not ended
            while they take in the names of their next cell, but interrupted when that begins.
    """

    def __init__(self, order: RankOrder) -> None:
        self._stay, self._stayed = order.cell.spec.keep, order.continues
        self._how: How | None = None
        self._began = 0.0
        self._names = True
        self._seen: dict[int, float] = {}
        self._interrupted: set[int] = set()
        self._asked = 0.0
        self._packing = 0.0
        self._terminated: dict[int, float] = {}
        self._killed: set[int] = set()

    def begin(self, how: How, *, names: bool) -> None:
        """Let the ranks end; an ending that has begun can become less patient, never more."""
        self._names = self._names and names
        if self._how is None or _PATIENCE.index(how) < _PATIENCE.index(self._how):
            self._how, self._began = how, time.monotonic()

    def wait(self) -> float | None:
        """Return the seconds until :meth:`step` may have something to do; None: it has not."""
        return None if self._how is None else _LOOK_SECONDS

    def step(self, ranks: list[Rank]) -> None:
        """Do what is due.

        Args:
            ranks: those whose processes are there.
        """
        if self._how is None:
            return
        self._interrupt([rank for rank in ranks if rank.ended is None])
        if self._is_time(ranks):
            for rank in ranks:
                self._end(rank)

    def _interrupt(self, ranks: list[Rank]) -> None:
        now, failure = time.monotonic(), self._how == "failure"
        for rank in ranks:
            if rank.number in self._interrupted or ((self._stayed or failure) and not rank.started):
                continue
            if now < self._seen.setdefault(rank.number, now) + _SAME_END_SECONDS * failure:
                continue
            self._interrupted.add(rank.number)
            if rank.started:
                rank.send(signal.SIGINT)
                rank.process.send(
                    NOTICE
                )  # at once: its except may wait for others by the time that it has the message
                rank.tell(RankRequest(what="notice"))
            else:  # it has nothing to finish, and may be deaf to SIGINT yet
                rank.send(signal.SIGTERM)

    def _is_time(self, ranks: list[Rank]) -> bool:
        """Whether ranks that are still in the cell are to be ended."""
        passed = time.monotonic() - self._began
        if self._how == "interrupt":
            at_work = [
                rank.at_work or (rank.number == 0 and rank.started) for rank in ranks if rank.ended is None
            ]
            return passed >= NOTICE_SECONDS and not any(at_work)
        return passed >= FAILURE_SECONDS or self._how == "now"

    def _end(self, rank: Rank) -> None:
        now = time.monotonic()
        if rank.ended is not None and (self._stay or self._how == "interrupt"):
            return  # it leaves, or stays
        if self._names and rank.number == 0 and rank.started and rank.ended is None:
            until, rank.too_late = self._names_until(rank)
            if now >= until:
                self._kill(rank)
        elif rank.number not in self._terminated:
            self._terminated[rank.number] = now
            if rank.ended is None:
                rank.send(signal.SIGTERM)
        elif now >= self._terminated[rank.number] + _TERM_SECONDS:
            self._kill(rank)

    def _names_until(self, rank: Rank) -> tuple[float, str]:
        """Ask rank 0 for its names; returns until when they may come, and what it is to be said not to have done by then."""
        now = time.monotonic()
        if not self._asked:
            self._asked = now
            rank.tell(RankRequest(what="names"))
        if self._how == "now":
            return self._began + _NOW_SECONDS, "had no time to pack them"
        if not rank.packing:
            return self._asked + _ANSWER_SECONDS, f"did not answer for {_ANSWER_SECONDS:.0f} s"
        self._packing = self._packing or now
        return self._packing + _PACKING_SECONDS, f"had not packed them after {_PACKING_SECONDS:.0f} s"

    def _kill(self, rank: Rank) -> None:
        if rank.number not in self._killed:
            self._killed.add(rank.number)
            rank.kill()
