"""A process forked from the forkserver: signalled by its record, and, where it is a rank's, talked to; and that rank."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
from functools import partial
from multiprocessing.connection import wait
from typing import Any

import psutil

from taas.agent.endings import kill_tree
from taas.agent.forkserver import fork
from taas.wire import deadlines
from taas.wire.framing import Message, pack
from taas.wire.rank_connection import RankConnection
from taas.wire.ranks import Preparation, RankEnded, RankKept, RankRequest, RankSays, RankStage
from taas.wording import killed_by


class ForkedProcess:
    """One process, from its fork on.

    Args:
        process: multiprocessing's, started.

    Attributes:
        pid: its process id.
        sentinel: a descriptor that becomes readable when it is gone.
        gone: whether its end was seen.
    """

    def __init__(self, process: Any) -> None:
        self.pid: int = process.pid
        self.sentinel: int = process.sentinel
        self.gone = False
        self._process = process
        self._recorded: psutil.Process | None = None
        with contextlib.suppress(psutil.NoSuchProcess):  # gone already: its sentinel says so
            self._recorded = psutil.Process(self.pid)

    @property
    def alive(self) -> bool:
        """Whether it is there."""
        return not wait([self.sentinel], 0)

    @property
    def exitcode(self) -> int | None:
        """As multiprocessing has it; 255 also for a process whose forkserver is gone. It is reaped then."""
        code: int | None = self._process.exitcode
        return code

    def send(self, number: int) -> None:
        """Signal it, if it is the process that was started here (psutil compares start times); SIGKILL goes to its session."""
        if self._recorded is not None and not self.gone:
            with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
                if number == signal.SIGKILL and self._recorded.is_running():
                    os.killpg(self.pid, number)
                else:
                    self._recorded.send_signal(number)

    def kill_tree(self) -> None:
        """SIGKILL it and all its descendants."""
        if self._recorded is not None and not self.gone:
            kill_tree([self._recorded])


class RankProcess(ForkedProcess):
    """A process that prepares itself to be a rank, waits for an order, and carries it out.

    Args:
        preparation: what it does before there is an order.

    Attributes:
        connection: its control connection, until it is closed.
        ready: whether it has done all that it can do before its order.
    """

    def __init__(self, preparation: Preparation) -> None:
        ours, its = socket.socketpair()
        with its:
            try:
                super().__init__(fork(_be_rank, its, preparation))
            except BaseException:
                ours.close()
                raise
        self.connection: RankConnection | None = RankConnection(ours)
        self.ready = False

    def tell(self, message: bytes, *descriptors: int) -> None:
        """Send it a message, if it is connected, and with it descriptors of this process."""
        if self.connection is not None:
            self.connection.send(message, *descriptors)

    def hear(self) -> list[RankSays]:
        """Return what it has said; it is disconnected when it says no more."""
        assert self.connection is not None
        heard = self.connection.receive()
        if self.connection.closed:
            self.connection = None
        self.ready = self.ready or any(isinstance(said, RankStage) for said in heard)
        return heard

    def disconnect(self) -> None:
        """Close its connection."""
        if self.connection is not None:
            self.connection.close()
            self.connection = None


class Rank:
    """One rank, as its agent knows it.

    Attributes:
        started: whether it has begun the cell.
        at_work: whether it has noticed that it is interrupted, or is in C code that takes its time.
        packing: whether it packs its names.
        ended: how the cell ended in it.
        kept: it waits for the next order.
        signalled: the last signal that it was sent.
        too_late: what it had not done in time with its names, in words, if it was ended for that.
    """

    def __init__(self, number: int, process: RankProcess) -> None:
        self.number, self.process = number, process
        self.started = self.at_work = self.packing = False
        self.ended: RankEnded | None = None
        self.kept: RankKept | None = None
        self.ended_at = 0.0
        self.signalled: signal.Signals | None = None
        self.too_late = ""

    def send(self, number: signal.Signals) -> None:
        """Signal the rank, if it is still there."""
        if not self.process.gone:
            self.signalled = number
            self.process.send(number)

    def tell(self, message: Message) -> None:
        """Send it a message."""
        self.process.tell(pack(message))

    def leave(self) -> None:
        """Let it go: its agent has all it needs."""
        self.kept, self.ended_at = None, time.monotonic()
        self.tell(RankRequest(what="leave"))

    def kill(self) -> None:
        """SIGKILL it and all its descendants."""
        if not self.process.gone:
            self.process.kill_tree()
            self.send(signal.SIGKILL)

    @property
    def late(self) -> bool:
        """Whether its cell ended long ago, and it is still there."""
        return (
            self.ended is not None
            and self.kept is None
            and not self.process.gone
            and time.monotonic() > self.ended_at + deadlines.RANK_EXITS
        )

    def post_mortem(self, *, forkserver_outlived: bool) -> RankEnded:
        """Say how a rank ended that did not say so itself."""
        code = self.process.exitcode
        ended = partial(RankEnded, rank=self.number, at=time.time())
        if code is not None and code < 0:
            name = signal.Signals(-code).name
            if self.signalled not in (None, signal.SIGINT) or self.signalled == -code:
                return ended(outcome="ended", etype=name, message=self.too_late or f"was ended by {name}")
            return ended(outcome="died", etype=name, message=f"killed by {killed_by(code)}")
        if not forkserver_outlived:
            return ended(outcome="orphaned", message="its forkserver was killed")
        if self.signalled is not None:
            return ended(outcome="ended", etype="SIGINT", message="was ended while it started")
        return ended(
            outcome="died",
            etype="os._exit",
            message=f"left with status {code} before the cell ended (os._exit, or an abort in C code)",
        )


def _be_rank(agent: socket.socket, preparation: Preparation) -> None:
    from taas.rank import entry  # the forkserver has it; an agent never imports torch

    entry.main(agent, preparation)
