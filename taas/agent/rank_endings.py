"""How the ranks of a run are brought to their end: by patience, by patience with a limit, or now.

After an interrupt each rank comes out of the call of C that it is in, and runs the cell's own
``except`` and ``finally``, however long that takes. A rank other than 0 that gives no sign of it is
stuck: it is ended once no other rank of this VM is still at work. After a failure all ranks have
the same short time, and are not interrupted before they can have come to the same end. Who is out
of time gets SIGTERM and SIGKILL; rank 0 is asked for its names before.

How far a rank is on this way is its :class:`EndStage`. :class:`Ending` decides which step is due,
:data:`STEPS` says which steps there are, and :class:`Rank` takes them.
"""

from __future__ import annotations

import enum
import logging
import signal
import time
from functools import partial

from taas.agent.processes import RankProcess
from taas.base import linux
from taas.base.wording import killed_by
from taas.protocol import deadlines
from taas.protocol.agents import How
from taas.protocol.framing import Message, pack
from taas.protocol.ranks import RankEnded, RankKept, RankOrder, RankRequest

logger = logging.getLogger(__name__)

_PATIENCE: tuple[How, ...] = ("now", "failure", "interrupt")


class EndStage(enum.Enum):
    """What the agent has done so far to end a rank.

    A cell that comes to its end by itself leaves its rank ``RUNNING``.
    """

    RUNNING = "running"  # nothing
    LET_FAIL = "let fail"  # nothing yet: another rank has failed, and this one may do so itself
    INTERRUPTED = "interrupted"  # sent SIGINT: the cell's ``except`` and ``finally`` run
    CALLED_OFF = "called off"  # sent SIGTERM before its cell began
    TERMINATED = "terminated"  # sent SIGTERM: the time of its cell is over
    TO_LEAVE = "to leave"  # nothing: its cell has ended, and it has a moment to leave by itself
    KILLED = "killed"  # sent SIGKILL


STEPS: dict[EndStage, frozenset[EndStage]] = {
    EndStage.RUNNING: frozenset(EndStage) - {EndStage.RUNNING},
    EndStage.LET_FAIL: frozenset(
        {EndStage.INTERRUPTED, EndStage.TERMINATED, EndStage.TO_LEAVE, EndStage.KILLED}
    ),
    EndStage.INTERRUPTED: frozenset({EndStage.TERMINATED, EndStage.TO_LEAVE, EndStage.KILLED}),
    EndStage.CALLED_OFF: frozenset({EndStage.TERMINATED, EndStage.TO_LEAVE, EndStage.KILLED}),
    EndStage.TERMINATED: frozenset({EndStage.KILLED}),
    EndStage.TO_LEAVE: frozenset({EndStage.KILLED}),
    EndStage.KILLED: frozenset(),
}
"""Which stage may follow which; ARCHITECTURE.md explains them."""


class Rank:
    """One rank, as its agent knows it.

    Attributes:
        stage: how far its end is, and ``since``, from when on (of the monotonic clock).
        started: whether it has begun the cell.
        at_work: whether it has noticed that it is interrupted, or is in C code that takes its time.
        packing: whether it packs its names.
        kept: it waits for the next order.
        imported: the installed modules that it has imported, if they are many.
        too_late: whether it was killed since its names had not come in time.
        asleep: whether it still slept when its time was out: an interrupt wakes Python code, but no
            collective.
    """

    def __init__(self, number: int, process: RankProcess) -> None:
        self.number, self.process = number, process
        self.stage, self.since = EndStage.RUNNING, time.monotonic()
        self.started = self.at_work = self.packing = False
        self.ended: RankEnded | None = None
        self.ended_at = 0.0
        self.kept: RankKept | None = None
        self.imported: tuple[str, ...] = ()
        self.too_late = self.asleep = False

    def __repr__(self) -> str:
        return f"<rank {self.number}, process {self.process.pid}, {self.stage.value}>"

    # ------------------------------------------------------------ the steps of its end

    def let_fail(self) -> None:
        """Give it a moment to fail by itself, as another rank has failed."""
        self._take_step(EndStage.LET_FAIL)

    def interrupt(self) -> None:
        """Interrupt it, and the programs that it runs."""
        self._take_step(EndStage.INTERRUPTED)
        self.process.interrupt()

    def call_off(self) -> None:
        """End it before its cell begins: there is nothing to finish."""
        self._take_step(EndStage.CALLED_OFF)
        self.process.send(signal.SIGTERM)  # it may be deaf to SIGINT yet

    def terminate(self) -> None:
        """End it while it is in its cell; note whether it sleeps, after a signal that wakes."""
        was_signalled = self.stage in (EndStage.INTERRUPTED, EndStage.CALLED_OFF)
        if self.started and was_signalled:
            seen = linux.process(self.process.pid)
            self.asleep = seen is not None and seen.state == "S"
        self._take_step(EndStage.TERMINATED)
        self.process.send(signal.SIGTERM)

    def expect_to_leave(self) -> None:
        """Give it a moment to leave by itself, as its cell has ended."""
        self._take_step(EndStage.TO_LEAVE)

    def kill(self) -> None:
        """SIGKILL it and all its descendants, once."""
        if self.stage is not EndStage.KILLED:
            self._take_step(EndStage.KILLED)
            self.process.kill_tree()
            self.process.send(signal.SIGKILL)

    def kill_session(self) -> None:
        """SIGKILL it and its session, once; other ranks may use what has left the session."""
        if self.stage is not EndStage.KILLED:
            self._take_step(EndStage.KILLED)
            self.process.send(signal.SIGKILL)

    def _take_step(self, to: EndStage) -> None:
        """Go on to another stage.

        Raises:
            RuntimeError: no such step is in the table.
        """
        if to not in STEPS[self.stage]:
            raise RuntimeError(f"the end of {self!r} has no step to {to.value!r}")
        logger.info("rank %d: %s -> %s", self.number, self.stage.value, to.value)
        self.stage, self.since = to, time.monotonic()

    @property
    def seconds_in_stage(self) -> float:
        """How long it has been in its stage."""
        return time.monotonic() - self.since

    # ------------------------------------------------------------ what it is told, and what is said

    def tell(self, message: Message) -> None:
        """Send it a message."""
        self.process.tell(pack(message))

    def leave(self) -> None:
        """Let it go: its agent has all it needs."""
        self.kept, self.ended_at = None, time.monotonic()
        self.tell(RankRequest(what="leave"))

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
            if self._was_ended_by(signal.Signals(-code)):
                why = ", since its names did not come in time" if self.too_late else ""
                message = f"was ended by {name}{why}"
                return ended(outcome="ended", etype=name, message=message, asleep=self.asleep)
            return ended(outcome="died", etype=name, message=f"was killed by {killed_by(code)}")
        if not forkserver_outlived:
            return ended(outcome="orphaned", message="was killed with its forkserver")
        if self.stage not in (EndStage.RUNNING, EndStage.LET_FAIL):
            return ended(outcome="ended", etype="SIGINT", message="was ended while it started")
        return ended(
            outcome="died",
            etype="os._exit",
            message=(
                f"left with status {code} before the cell ended (os._exit, or an abort in C code)"
            ),
        )

    def _was_ended_by(self, number: signal.Signals) -> bool:
        """Whether the agent brought about the signal of which it died.

        An interrupt lets the cell go on: of the signals after it, only SIGINT is the agent's. After
        SIGTERM and SIGKILL every one is.
        """
        if self.stage is EndStage.INTERRUPTED:
            return number == signal.SIGINT
        return self.stage in (EndStage.CALLED_OFF, EndStage.TERMINATED, EndStage.KILLED)


class Ending:
    """The end of one run's ranks on this VM; not begun at first.

    Ranks that stay are left alone once their cell has ended; those that stayed are not ended while
    they take in the names of their next cell, but interrupted when that begins.
    """

    def __init__(self, order: RankOrder) -> None:
        self._stay, self._stayed = order.cell.spec.keep, order.continues
        self._how: How | None = None
        self._began = 0.0
        self._names_wanted = True
        self._names_asked_at: float | None = None
        self._packing_since: float | None = None

    def begin(self, how: How, *, names: bool) -> None:
        """Let the ranks end; an ending that has begun can become less patient, never more."""
        self._names_wanted = self._names_wanted and names
        if self._how is None or _PATIENCE.index(how) < _PATIENCE.index(self._how):
            logger.info("the ranks are to end: %s", how)
            self._how, self._began = how, time.monotonic()

    def step(self, ranks: list[Rank]) -> None:
        """Do what is due to ranks whose processes are there."""
        if self._how is None:
            return
        in_cell = [rank for rank in ranks if rank.ended is None]
        for rank in in_cell:
            if rank.stage in (EndStage.RUNNING, EndStage.LET_FAIL):
                self._ask_to_end(rank)
        if self._is_time(in_cell):
            for rank in ranks:
                self._end(rank)

    def _ask_to_end(self, rank: Rank) -> None:
        """Interrupt a rank in its cell; before that, call it off, or wait until it has begun."""
        failure = self._how == "failure"
        if not rank.started:
            if not failure and not self._stayed:
                rank.call_off()
            return
        if failure and rank.stage is EndStage.RUNNING:
            rank.let_fail()
        if not failure or rank.seconds_in_stage >= deadlines.SAME_END:
            rank.interrupt()

    def _is_time(self, in_cell: list[Rank]) -> bool:
        """Whether ranks that are still in the cell are to be ended."""
        passed = time.monotonic() - self._began
        if self._how == "now":
            return True
        if self._how == "failure":
            return passed >= (deadlines.FAILURE_OF_KEPT if self._stay else deadlines.FAILURE)
        at_work = any(rank.at_work or (rank.number == 0 and rank.started) for rank in in_cell)
        return passed >= deadlines.NOTICE and not at_work

    def _end(self, rank: Rank) -> None:
        """Take the next step with a rank whose time is over; rank 0's names come before."""
        if rank.ended is not None and (self._stay or self._how == "interrupt"):
            return  # it leaves, or stays
        in_cell = rank.started and rank.ended is None
        if rank.number == 0 and in_cell and self._names_wanted:
            if time.monotonic() >= self._names_until(rank):
                rank.too_late = True
                rank.kill()
            return
        match rank.stage:
            case EndStage.TERMINATED | EndStage.TO_LEAVE:
                if rank.seconds_in_stage >= deadlines.TERM_TO_KILL:
                    rank.kill()
            case EndStage.KILLED:
                pass  # a large process takes a while to die
            case _ if rank.ended is None:
                rank.terminate()
            case _:
                rank.expect_to_leave()

    def _names_until(self, rank: Rank) -> float:
        """Ask rank 0 for its names; returns until when they may come."""
        now = time.monotonic()
        if self._names_asked_at is None:
            logger.info("rank 0 is asked for its names")
            self._names_asked_at = now
            rank.tell(RankRequest(what="names"))
        if self._how == "now":
            return self._began + deadlines.NAMES_NOW
        if not rank.packing:
            return self._names_asked_at + deadlines.NAMES_BEGIN
        if self._packing_since is None:
            self._packing_since = now
        return self._packing_since + deadlines.NAMES_PACKED
