"""The coordinator process: one per run, owner of the ledger and of the slabs' memory.

``python -m taas.delivery.coordinator`` reads its DeliveryConfig as one JSON line from stdin, then a ``Command`` in each
line, and writes its ``Report`` messages as JSON lines to stdout. The end of stdin ends it. It imports no torch and
unpickles nothing of the user's.
"""

from __future__ import annotations

import contextlib
import gc
import os
import select
import signal
import time
from collections.abc import Callable
from typing import Any

import msgspec

from taas import _linux
from taas.delivery.config import DeliveryConfig, read_line
from taas.delivery.ledger import Ledger
from taas.delivery.messages import (
    PLANNER,
    Announced,
    Begin,
    Command,
    Failed,
    Final,
    FinishPlans,
    FromPlanner,
    FromPool,
    FromRank,
    FromWorker,
    Hello,
    HostLost,
    Note,
    Peer,
    Planned,
    Progress,
    Report,
    WorkerLost,
)
from taas.delivery.progress import ProgressMeter, notes_of_registration
from taas.delivery.slab import SlabFile
from taas.delivery.transport import ControlServer, SlabServer, new_context
from taas.wire.framing import Alive, Leave, MessageReader
from taas.wire.poll_loop import PollLoop, raise_limit

_decode_command = msgspec.json.Decoder(Command).decode
_decode = {
    "planner": MessageReader(FromPlanner),
    "pool": MessageReader(FromPool),
    "worker": MessageReader(FromWorker),
    "rank": MessageReader(FromRank),
}
"""By role: nobody is understood who says what is another's to say."""
_TICK = 0.25
_END_SECONDS = 4.0
"""So long the end of a coordinator may take."""


class Coordinator:
    """Turns messages into ledger events and the ledger's outbox into messages."""

    def __init__(self, config: DeliveryConfig, report: Callable[[Report], None]) -> None:
        self.config = config
        self._report = report
        self._context = new_context()
        self._server = ControlServer(self._context, config)
        self._slabs = SlabFile(config.slab, config.ranks)
        self._slab_server = SlabServer(config.folder, self._slabs.fd) if config.folder else None
        self.ledger = Ledger(config, reserve=self._slabs.reserve)
        self._loop = PollLoop()
        self._loop.on(self._server.router, self._receive)
        self._loop.on(self._server.gate.socket, self._server.gate.answer)
        if self._slab_server is not None:
            self._loop.on(self._slab_server.fileno(), self._slab_server.answer)
        self._pidfds: dict[Peer, int] = {}
        self._ticks = 0
        self._heard: dict[Peer, int | None] = {}
        """At which tick each data VM's worker pool was last heard; None: it is struck, though it may say more.

        Seconds would count against pools that this process itself was paused (a container's freezer)."""
        self._meter = ProgressMeter(self.ledger)
        ledger = self.ledger
        self._handlers: dict[type, Callable[[Peer, Any], object]] = {
            list: ledger.made,
            Progress: lambda rank, progress: ledger.progressed(rank.number, progress),
            Planned: lambda _, planned: ledger.plans.planned(planned),
            Announced: ledger.announced,
            Begin: lambda rank, begin: ledger.plans.begin(rank.number, begin),
            Hello: self._on_hello,
            Final: lambda _, final: self._end(final),
            Alive: lambda pool, _: self._hear(pool),
            WorkerLost: self._on_worker_lost,
        }
        """What is done on hearing something."""
        self._lost: set[Peer] = set()
        """The planner, and workers, that have ended, some before their own word was heard."""
        self._since_worker = time.monotonic()
        self._final_by: float | None = None
        """When the planner has to have said where the generators are; None while the ranks run."""
        self._unread = b""
        self._next_tick = 0.0
        self._over = False
        self._report(Hello(os.getpid(), address=self._server.endpoint))

    # ── the loop ──────────────────────────────────────────────────────────────────────────────────

    def serve(self, commands: int) -> None:
        """Serve until ``commands`` (a descriptor) is at its end, or the run's last report is out."""
        self._loop.on(commands, lambda: self._obey(os.read(commands, 65536)))
        try:
            while not self._over:
                self._loop.step(_TICK)
                now = time.monotonic()
                if now >= self._next_tick:
                    self._tick(now)
                self._flush(now)
        finally:
            _linux.kill_in(_END_SECONDS)
            with contextlib.ExitStack() as last_first:
                last_first.callback(self._close)
                last_first.callback(self._last_word)

    def _receive(self) -> None:
        for peer, data in self._server.receive(1000):
            with contextlib.suppress(msgspec.DecodeError):
                message = _decode[peer.role](data)
                self._handlers[type(message)](peer, message)

    def _flush(self, now: float) -> None:
        self.ledger.pump(now)
        for peer, message in self.ledger.outbox:
            self._server.send(peer, message)
        self.ledger.outbox.clear()

    def _obey(self, data: bytes) -> None:
        """Do what the supervisor says; that it says no more is the end."""
        self._over = self._over or not data
        *lines, self._unread = (self._unread + data).split(b"\n")
        for command in map(_decode_command, lines):
            if isinstance(command, Failed):
                self._fail(command.reason)
            elif isinstance(command, HostLost):
                self._host_lost(Peer("pool", command.vm), command.cause)
            elif self._final_by is None:
                self._finish(time.monotonic())

    # ── the end ───────────────────────────────────────────────────────────────────────────────────

    def _finish(self, now: float) -> None:
        """The ranks have ended: ask the planner where the loaders' generators are now."""
        self._final_by = now + self.config.patience
        self._tell_progress(now)
        begun = [(book.index, *book.last_begun) for book in self.ledger.plans.loaders if book.last_begun]
        if PLANNER in self._lost or not self._server.send(PLANNER, FinishPlans(begun)):
            self._finish_without("has died")

    def _finish_without(self, why: str) -> None:
        """The planner will not answer: what it would say is not worth a run that does not end."""
        begun = [book.facts.name for book in self.ledger.plans.loaders if book.last_begun]
        self._end(Final(b"", dict.fromkeys(begun, f"the process that iterates its sampler {why}")))

    def _end(self, final: Final) -> None:
        if self._over:
            return
        for name, why in final.unknown.items():
            self._report(
                Note(
                    f"'{name}': {why}; so its generator stands in the notebook where it stood before the cell. Seed it "
                    "anew if the order of the next cell's elements matters"
                )
            )
        self._over = True
        self._report(final)

    @property
    def _has_all(self) -> bool:
        """Whether whoever makes elements is needed no more."""
        return self._final_by is not None or self.ledger.plans.is_over

    # ── messages ──────────────────────────────────────────────────────────────────────────────────

    def _on_worker_lost(self, pool: Peer, lost: WorkerLost) -> None:
        worker = Peer("worker", pool.number, lost.serial)
        self._lost.add(worker)
        self.ledger.worker_lost(worker, lost.number, lost.cause, lost.ahead)

    def _hear(self, pool: Peer) -> bool:
        """Somebody of a data VM said something; False: it is struck."""
        if self._heard.get(pool, 0) is None:
            return False
        self._heard[pool] = self._ticks
        return True

    def _on_hello(self, peer: Peer, hello: Hello) -> None:
        if peer == PLANNER:
            self._watch(peer, hello.pid)  # it is on this host wherever the others are
            self._on_planner(hello)
        elif peer.role == "rank":
            self.ledger.rank_joined(peer.number, msgspec.structs.replace(hello, rank=peer.number))
        elif hello.error:
            self._fail(f"a data VM cannot load the registered loaders:\n{hello.error}")
        elif self._hear(peer.pool):  # else this was said before it was lost
            if peer.role == "worker" and peer not in self._lost:
                self.ledger.worker_joined(peer, hello.shared)
            elif peer.role == "pool" and self.config.folder:
                self._watch(peer, hello.pid)

    def _on_planner(self, hello: Hello) -> None:
        if hello.error:
            self._fail(f"the planner cannot load the registered loaders:\n{hello.error}")
            return
        self.ledger.planner_joined(hello)
        for book in self.ledger.plans.loaders:
            for note in notes_of_registration(book, self.config):
                self._report(note)

    # ── who is there ──────────────────────────────────────────────────────────────────────────────

    def _watch(self, peer: Peer, pid: int) -> None:
        """Hear of the end of a process on this host within milliseconds; of one that is gone already its host tells."""
        with contextlib.suppress(OSError):
            fd = self._pidfds[peer] = os.pidfd_open(pid)
            self._loop.on(fd, lambda: self._on_end(peer))

    def _on_end(self, peer: Peer) -> None:
        """A process on this host ended, for certain."""
        fd = self._pidfds.pop(peer)
        self._loop.off(fd)
        os.close(fd)
        if peer.role == "pool":
            self._host_lost(peer, "ended")
            return
        self._lost.add(PLANNER)
        if self._final_by is not None:
            self._finish_without("has died")
        elif not self._has_all:
            self._fail("the process that iterates the registered loaders' samplers died")

    def _host_lost(self, pool: Peer, cause: str) -> None:
        if self._heard.get(pool, 0) is not None and not self._has_all:
            self._report(HostLost(pool.number, cause))
        self._heard[pool] = None
        if pool in self._pidfds:  # it is silent: its workers may write until its end is heard
            signal.pidfd_send_signal(self._pidfds[pool], signal.SIGKILL)
            return
        # The system kills workers with their pool.
        for worker in [name for name in self.ledger.workers if name.pool == pool]:
            self.ledger.worker_lost(worker, -1, "its data VM is gone")

    def _tick(self, now: float) -> None:
        self._next_tick = now + _TICK
        self._ticks += 1
        for pool, heard in self._heard.items():
            if heard is not None and (self._ticks - heard) * _TICK > self.config.silence:
                self._host_lost(pool, f"silent for {self.config.silence:.0f} s")
        if self._final_by is not None and now > self._final_by:
            self._finish_without(f"has not answered for {self.config.patience:g} s")
        self.ledger.overdue(now)
        if self.ledger.workers or self._has_all:
            self._since_worker = now
        elif now - self._since_worker > self.config.alone and self.ledger.joined:
            self._fail(f"no data worker has been there for {self.config.alone:.0f} s: all data VMs are gone")
        self._tell_progress(now)

    def _tell_progress(self, now: float) -> None:
        for report in self._meter.read(now):
            self._report(report)

    def _fail(self, reason: str) -> None:
        if not self.ledger.failure:
            self._report(Failed(reason))
            self.ledger.fail(reason)

    def _last_word(self) -> None:
        """Say where a run that is started again goes on, once all that dead ranks had said is heard."""
        self._receive()
        with contextlib.suppress(BrokenPipeError):  # the supervisor may be what is gone
            self._report(self._meter.report(time.monotonic()))

    def _close(self) -> None:
        """Tell all to quit; what cannot be closed keeps nothing else open."""
        with contextlib.ExitStack() as last_first:
            last_first.callback(self._context.term)
            last_first.callback(self._slabs.close)
            if self._slab_server is not None:
                last_first.callback(self._slab_server.close)
            last_first.callback(self._server.close)
            for fd in self._pidfds.values():
                last_first.callback(os.close, fd)
            for peer in (PLANNER, *self._heard, *self.ledger.workers):
                last_first.callback(self._server.send, peer, Leave())


def main(config: DeliveryConfig, commands: int, reports: int) -> None:
    """Run one delivery; ``commands`` and ``reports`` are descriptors of JSON lines."""
    gc.collect()
    gc.freeze()  # collections look at tickets only, and stay short

    writable = select.poll()
    writable.register(reports, select.POLLOUT)

    def report(message: Report) -> None:
        line = memoryview(msgspec.json.encode(message) + b"\n")
        while line:
            writable.poll()
            line = line[os.write(reports, line) :]

    Coordinator(config, report).serve(commands)


if __name__ == "__main__":
    first = read_line(0)
    if first:  # else the run ended before it was known where to listen
        raise_limit()
        _linux.set_parent_death_signal(signal.SIGKILL)
        main(msgspec.json.decode(first, type=DeliveryConfig), 0, 1)
