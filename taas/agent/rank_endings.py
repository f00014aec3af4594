"""How the ranks of a run are ended: with patience, with patience up to a limit, or at once.

After an interrupt, each rank returns from the C call that it is in, and runs the cell's own
``except`` and ``finally`` blocks, however long that takes. A rank other than 0 that shows no sign
of this is stuck; it is ended once no other rank of this VM is still at work. After a failure, all
ranks have the same short time, and are interrupted only when they have had time to fail by
themselves. A rank that exceeds its time gets SIGTERM and then SIGKILL; rank 0 is asked for its
variables before that.

How far the agent has got in ending a rank is the rank's :class:`EndStage`. :class:`Ending` decides
which transition is due, :data:`STEPS` defines the valid transitions, and :class:`Rank` carries them
out.
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

    A rank whose cell ends by itself stays ``RUNNING``.
    """

    RUNNING = "running"  # nothing
    LET_FAIL = "let fail"  # nothing yet: another rank has failed, and this one may fail by itself
    INTERRUPTED = "interrupted"  # sent SIGINT: ``except`` and ``finally`` blocks of the cell run
    CALLED_OFF = "called off"  # sent SIGTERM before its cell began
    TERMINATED = "terminated"  # sent SIGTERM: the time of its cell is over
    TO_LEAVE = "to leave"  # nothing: its cell has ended, and it has a moment to exit by itself
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
"""The valid transitions between stages; ARCHITECTURE.md explains them."""


class Rank:
    """One rank, as its agent sees it.

    Attributes:
        stage: how far the agent has got in ending the rank.
        since: the time of the last transition, on the monotonic clock.
        started: whether the rank has begun the cell.
        at_work: whether it has noticed the interrupt, or is in C code that takes a while.
        packing: whether it is packing its variables.
        kept: the message by which it reported that it waits for the next cell; otherwise None.
        imported: the installed modules that it has imported, if they are many.
        too_late: whether it was killed because its variables had not come in time.
        asleep: whether it was still asleep when its time was over: an interrupt wakes up Python
            code, but not a collective.
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

    # ------------------------------------------------------------ transitions

    def let_fail(self) -> None:
        """Give the rank a moment to fail by itself, since another rank has failed."""
        self._take_step(EndStage.LET_FAIL)

    def interrupt(self) -> None:
        """Interrupt the rank, and the programs that it runs."""
        self._take_step(EndStage.INTERRUPTED)
        self.process.interrupt()

    def call_off(self) -> None:
        """End the rank before its cell begins: there is nothing to finish."""
        self._take_step(EndStage.CALLED_OFF)
        self.process.send(signal.SIGTERM)  # it may not have its SIGINT handler yet

    def terminate(self) -> None:
        """End the rank while it is in its cell; note whether it sleeps in spite of a signal."""
        was_signalled = self.stage in (EndStage.INTERRUPTED, EndStage.CALLED_OFF)
        if self.started and was_signalled:
            seen = linux.process(self.process.pid)
            self.asleep = seen is not None and seen.state == "S"
        self._take_step(EndStage.TERMINATED)
        self.process.send(signal.SIGTERM)

    def expect_to_leave(self) -> None:
        """Give the rank a moment to exit by itself, since its cell has ended."""
        self._take_step(EndStage.TO_LEAVE)

    def kill(self) -> None:
        """Send SIGKILL to the rank and all its descendants, once."""
        if self.stage is not EndStage.KILLED:
            self._take_step(EndStage.KILLED)
            self.process.kill_tree()
            self.process.send(signal.SIGKILL)

    def kill_session(self) -> None:
        """Send SIGKILL to the rank and its session, once.

        Processes that have left the session survive, since other ranks may use them.
        """
        if self.stage is not EndStage.KILLED:
            self._take_step(EndStage.KILLED)
            self.process.send(signal.SIGKILL)

    def _take_step(self, to: EndStage) -> None:
        """Move to another stage.

        Raises:
            RuntimeError: the table has no such transition.
        """
        if to not in STEPS[self.stage]:
            raise RuntimeError(f"the end of {self!r} has no step to {to.value!r}")
        logger.info("rank %d: %s -> %s", self.number, self.stage.value, to.value)
        self.stage, self.since = to, time.monotonic()

    @property
    def seconds_in_stage(self) -> float:
        """How long the rank has been in its stage."""
        return time.monotonic() - self.since

    # ------------------------------------------------------------ messages to the rank, and its end

    def tell(self, message: Message) -> None:
        """Send a message to the rank."""
        self.process.tell(pack(message))

    def leave(self) -> None:
        """Let the rank exit, since its agent has everything that it needs."""
        self.kept, self.ended_at = None, time.monotonic()
        self.tell(RankRequest(what="leave"))

    @property
    def leaving(self) -> bool:
        """Whether the process still exists after its cell, and is not kept for the next one."""
        return self.ended is not None and self.kept is None and not self.process.gone

    def post_mortem(self, *, forkserver_outlived: bool) -> RankEnded:
        """Describe the end of a rank that did not report it itself."""
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
        """Return whether the agent caused the signal that killed the rank.

        After an interrupt the cell goes on, so that of later signals, only SIGINT is the agent's.
        After SIGTERM or SIGKILL, any signal counts as the agent's.
        """
        if self.stage is EndStage.INTERRUPTED:
            return number == signal.SIGINT
        return self.stage in (EndStage.CALLED_OFF, EndStage.TERMINATED, EndStage.KILLED)


class Ending:
    """Ends one run's ranks on this VM, once :meth:`begin` has been called.

    Ranks that are to be kept are left alone once their cell has ended. Kept ranks of an earlier run
    are not ended while they load the variables of their next cell, but are interrupted when that
    cell begins.
    """

    def __init__(self, order: RankOrder) -> None:
        self._stay, self._stayed = order.cell.spec.keep, order.continues
        self._how: How | None = None
        self._began = 0.0
        self._names_wanted = True
        self._names_asked_at: float | None = None
        self._packing_since: float | None = None

    def begin(self, how: How, *, names: bool) -> None:
        """Begin to end the ranks; a later call can only make this less patient."""
        self._names_wanted = self._names_wanted and names
        if self._how is None or _PATIENCE.index(how) < _PATIENCE.index(self._how):
            logger.info("the ranks are to end: %s", how)
            self._how, self._began = how, time.monotonic()

    def step(self, ranks: list[Rank]) -> None:
        """Carry out due transitions of ranks whose processes exist."""
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
        """Interrupt a rank in its cell; before that, call it off, or wait until it begins."""
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
        """Return whether ranks that are still in the cell have to be ended."""
        passed = time.monotonic() - self._began
        if self._how == "now":
            return True
        if self._how == "failure":
            return passed >= (deadlines.FAILURE_OF_KEPT if self._stay else deadlines.FAILURE)
        at_work = any(rank.at_work or (rank.number == 0 and rank.started) for rank in in_cell)
        return passed >= deadlines.NOTICE and not at_work

    def _end(self, rank: Rank) -> None:
        """Carry out the next transition of a rank out of time; rank 0's variables come first."""
        if rank.ended is not None and (self._stay or self._how == "interrupt"):
            return  # it exits, or stays
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
        """Ask rank 0 for its variables; return the time until which they may come."""
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
