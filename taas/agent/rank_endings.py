"""How the ranks of a run are brought to their end: by patience, by patience with a limit, or now.

After an interrupt each rank comes out of the call of C that it is in, and runs the cell's own
``except`` and ``finally``, however long that takes. A rank other than 0 that gives no sign of it is
stuck: it is ended once no other rank of this VM is still at work. After a failure all ranks have
the same short time, and are not interrupted before they can have come to the same end. Who is out
of time gets SIGTERM and SIGKILL; rank 0 is asked for its names before.
"""

from __future__ import annotations

import signal
import time
from functools import partial

from taas import _linux
from taas.agent.processes import RankProcess
from taas.wire import deadlines
from taas.wire.agents import How
from taas.wire.framing import Message, pack
from taas.wire.ranks import RankEnded, RankKept, RankOrder, RankRequest
from taas.wording import killed_by

_PATIENCE: tuple[How, ...] = ("now", "failure", "interrupt")


class Rank:
    """One rank, as its agent knows it.

    Attributes:
        started: whether it has begun the cell.
        at_work: whether it has noticed that it is interrupted, or is in C code that takes its time.
        packing: whether it packs its names.
        kept: it waits for the next order.
        imported: the installed modules that it has imported, if they are many.
        signalled: the last signal that it was sent.
        to_end, out_of_time: since when it has been to end, and out of time for that; 0: it has not.
        too_late: whether it was ended since its names had not come in time.
        asleep: whether it still slept when its time was out: an interrupt wakes Python code, but no
            collective.
    """

    def __init__(self, number: int, process: RankProcess) -> None:
        self.number, self.process = number, process
        self.started = self.at_work = self.packing = False
        self.ended: RankEnded | None = None
        self.ended_at = self.to_end = self.out_of_time = 0.0
        self.kept: RankKept | None = None
        self.imported: tuple[str, ...] = ()
        self.signalled: signal.Signals | None = None
        self.too_late = self.asleep = False

    def send(self, number: signal.Signals) -> None:
        """Signal the rank, if it is still there."""
        if not self.process.gone:
            self.signalled = number
            self.process.send(number)

    def interrupt(self) -> None:
        """Interrupt it, and the programs that it runs."""
        if not self.process.gone:
            self.signalled = signal.SIGINT
            self.process.interrupt()

    def tell(self, message: Message) -> None:
        """Send it a message."""
        self.process.tell(pack(message))

    def leave(self) -> None:
        """Let it go: its agent has all it needs."""
        self.kept, self.ended_at = None, time.monotonic()
        self.tell(RankRequest(what="leave"))

    def kill(self) -> None:
        """SIGKILL it and all its descendants, once."""
        if not self.process.gone and self.signalled != signal.SIGKILL:
            self.process.kill_tree()
            self.send(signal.SIGKILL)

    @property
    def leaving(self) -> bool:
        """Whether its cell has ended, and it is still there, but not for the next one."""
        return self.ended is not None and self.kept is None and not self.process.gone

    def post_mortem(self, *, forkserver_outlived: bool) -> RankEnded:
        """Say how a rank ended that did not say so itself."""
        code = self.process.exitcode
        ended = partial(RankEnded, rank=self.number, at=time.time())
        if code is not None and code < 0:
            name = signal.Signals(-code).name
            if self.signalled not in (None, signal.SIGINT) or self.signalled == -code:
                why = ", since its names did not come in time" if self.too_late else ""
                message = f"was ended by {name}{why}"
                return ended(outcome="ended", etype=name, message=message, asleep=self.asleep)
            return ended(outcome="died", etype=name, message=f"was killed by {killed_by(code)}")
        if not forkserver_outlived:
            return ended(outcome="orphaned", message="was killed with its forkserver")
        if self.signalled is not None:
            return ended(outcome="ended", etype="SIGINT", message="was ended while it started")
        return ended(
            outcome="died",
            etype="os._exit",
            message=(
                f"left with status {code} before the cell ended (os._exit, or an abort in C code)"
            ),
        )


class Ending:
    """The end of one run's ranks on this VM; not begun at first.

    Ranks that stay are left alone once their cell has ended; those that stayed are not ended while
    they take in the names of their next cell, but interrupted when that begins.
    """

    def __init__(self, order: RankOrder) -> None:
        self._stay, self._stayed = order.cell.spec.keep, order.continues
        self._how: How | None = None
        self._began = self._asked = self._packing = 0.0
        self._names = True

    def begin(self, how: How, *, names: bool) -> None:
        """Let the ranks end; an ending that has begun can become less patient, never more."""
        self._names = self._names and names
        if self._how is None or _PATIENCE.index(how) < _PATIENCE.index(self._how):
            self._how, self._began = how, time.monotonic()

    def step(self, ranks: list[Rank]) -> None:
        """Do what is due to ranks whose processes are there."""
        if self._how is None:
            return
        in_cell = [rank for rank in ranks if rank.ended is None]
        self._interrupt(in_cell)
        if self._is_time(in_cell):
            for rank in ranks:
                self._end(rank)

    def _interrupt(self, in_cell: list[Rank]) -> None:
        now, failure = time.monotonic(), self._how == "failure"
        for rank in in_cell:
            if rank.signalled is not None or ((self._stayed or failure) and not rank.started):
                continue
            rank.to_end = rank.to_end or now
            if now < rank.to_end + deadlines.SAME_END * failure:
                continue
            if rank.started:
                rank.interrupt()
            else:  # it has nothing to finish, and may be deaf to SIGINT yet
                rank.send(signal.SIGTERM)

    def _is_time(self, in_cell: list[Rank]) -> bool:
        """Whether ranks that are still in the cell are to be ended."""
        passed = time.monotonic() - self._began
        if self._how == "interrupt":
            at_work = any(rank.at_work or (rank.number == 0 and rank.started) for rank in in_cell)
            return passed >= deadlines.NOTICE and not at_work
        patience = deadlines.FAILURE_OF_KEPT if self._stay else deadlines.FAILURE
        return passed >= patience or self._how == "now"

    def _end(self, rank: Rank) -> None:
        now = time.monotonic()
        if rank.ended is not None and (self._stay or self._how == "interrupt"):
            return  # it leaves, or stays
        if self._names and rank.number == 0 and rank.started and rank.ended is None:
            if now >= self._names_until(rank):
                rank.too_late = True
                rank.kill()
        elif not rank.out_of_time:
            rank.out_of_time = now
            if rank.ended is None:
                seen = _linux.process(rank.process.pid)
                rank.asleep = (
                    rank.started
                    and rank.signalled is not None
                    and seen is not None
                    and seen.state == "S"
                )
                rank.send(signal.SIGTERM)
        elif now >= rank.out_of_time + deadlines.TERM_TO_KILL:
            rank.kill()

    def _names_until(self, rank: Rank) -> float:
        """Ask rank 0 for its names; returns until when they may come."""
        now = time.monotonic()
        if not self._asked:
            self._asked = now
            rank.tell(RankRequest(what="names"))
        if self._how == "now":
            return self._began + deadlines.NAMES_NOW
        if not rank.packing:
            return self._asked + deadlines.NAMES_BEGIN
        self._packing = self._packing or now
        return self._packing + deadlines.NAMES_PACKED
