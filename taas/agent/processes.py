"""A process that elastic started and that becomes a rank: tied to its agent, connected, signalled by its record."""

from __future__ import annotations

import contextlib
import logging
import select
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

import psutil
from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs, start_processes

from taas.agent.endings import kill_tree, send
from taas.messages.ranks import RankReady, RankSays, SpareStart
from taas.messages.wire import Reader, pack
from taas.rank import entry

_read_rank = Reader(RankSays)
logging.getLogger("torch.distributed.elastic").setLevel(
    logging.CRITICAL
)  # the agent says what happened itself


class RankProcess:
    """One process, from its fork on; it runs one rank, once it is given an order.

    Attributes:
        pid: its process id.
        sentinel: a descriptor that becomes readable when it is gone.
        connection: its control connection, once it has connected and until it closes it.
        ready: whether it has done all that it can do before its order.
    """

    def __init__(self, process: Any, context: Any) -> None:
        self.pid: int = process.pid
        self.sentinel: int = process.sentinel
        self.connection: Connection | None = None
        self.ready = False
        self._process = process
        self._context = context  # its semaphores have names until the process has opened them
        self._order = b""
        self._recorded: psutil.Process | None = None
        with contextlib.suppress(psutil.NoSuchProcess):  # gone already: its sentinel says so
            self._recorded = psutil.Process(self.pid)

    @property
    def alive(self) -> bool:
        """Whether it is there."""
        return not select.select([self.sentinel], [], [], 0)[0]

    @property
    def exitcode(self) -> int | None:
        """As multiprocessing has it; 255 also for a process whose forkserver is gone."""
        code: int | None = self._process.exitcode
        return code

    def give(self, order: bytes) -> None:
        """Give it its order: now, or as soon as it connects."""
        self._order = order
        self.tell(order)

    def connect(self, connection: Connection) -> None:
        """Take its connection."""
        self.connection, self._context = connection, None
        if self._order:
            self.tell(self._order)

    def tell(self, message: bytes) -> None:
        """Send it a message, if it is connected."""
        if self.connection is not None:
            with contextlib.suppress(BrokenPipeError):  # it was killed meanwhile: its sentinel says so
                self.connection.send_bytes(message)

    def hear(self) -> RankSays | None:
        """Read one message of it; None when it closed its end."""
        assert self.connection is not None
        try:
            said: RankSays = _read_rank(self.connection.recv_bytes())
        except (EOFError, OSError):  # it may be killed in the middle of a message, too
            self.disconnect()
            return None
        if isinstance(said, RankReady):
            self.ready = True
        return said

    def disconnect(self) -> None:
        """Close its connection."""
        if self.connection is not None:
            self.connection.close()
            self.connection = None

    def send(self, number: signal.Signals) -> None:
        """Signal it, if it is the process that was started here; SIGKILL goes to its session."""
        if self._recorded is not None:
            send(self._recorded, number)

    def kill_tree(self) -> None:
        """SIGKILL it and all its descendants."""
        if self._recorded is not None:
            kill_tree([self._recorded])


class _NoLogs(LogsSpecs):
    """Elastic redirects nothing: a rank opens its files when it knows which run it belongs to."""

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Name no files."""
        nothing = dict.fromkeys(envs, "")
        return LogsDest(dict(nothing), dict(nothing), {}, {}, dict(nothing))

    @property
    def root_log_dir(self) -> str:
        """Return no folder."""
        return ""


def start_ranks(control: str, orders: Sequence[bytes]) -> list[RankProcess]:
    """Fork processes that have their orders.

    Args:
        control: name of the agent's socket in the abstract namespace.
        orders: each a :class:`~taas.messages.ranks.RankStart`.
    """
    return _start({local: (control, b"", order) for local, order in enumerate(orders)})


def start_spare(control: str, ahead: SpareStart) -> RankProcess:
    """Fork a process that prepares itself and waits for an order.

    Args:
        control: name of the agent's socket in the abstract namespace.
        ahead: what it does before.
    """
    [process] = _start({0: (control, pack(ahead), b"")})
    return process


def _start(arguments: dict[int, tuple[Any, ...]]) -> list[RankProcess]:
    if not arguments:
        return []
    with _handlers_kept():
        context = start_processes(
            "rank",
            entry.main,
            arguments,
            {local: {} for local in arguments},
            _NoLogs(),
            start_method="forkserver",
        )
    return [RankProcess(process, context) for process in context._pc.processes]  # type: ignore[attr-defined]  # no public way


@contextmanager
def _handlers_kept() -> Iterator[None]:
    """Elastic installs raising signal handlers in the main thread: put ours back."""
    kept = {
        number: signal.getsignal(number)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
    }
    try:
        yield
    finally:
        for number, handler in kept.items():
            signal.signal(number, handler)
