"""The coordinator process: one per run, owner of the ledger and of the slabs' memory.

``python -m taas.delivery.coordinator`` reads its DeliveryConfig as one JSON line from stdin, then commands, one
JSON line each (``{"type": "finish"}``, ``{"type": "fail", "reason": …}``, ``{"type": "lost", "vm": …, "cause": …}``
for a data VM whose processes this host does not see), and writes reports (``reports.py``) as JSON lines to stdout. The
end of stdin ends it. It imports no torch and unpickles nothing of the user's.
"""

from __future__ import annotations

import contextlib
import gc
import os
import select
import time
from typing import Any

import msgspec
import zmq

from taas.delivery import notices
from taas.delivery.config import DeliveryConfig, read_line
from taas.delivery.hosts import Hosts
from taas.delivery.ledger import Ledger
from taas.delivery.messages import (
    Announced,
    Beat,
    Begin,
    Close,
    Decoder,
    FinalStates,
    FinishPlans,
    HostHello,
    Lacking,
    Made,
    Planned,
    PlannerHello,
    Progress,
    Quit,
    RankHello,
    RunFailed,
    Stateless,
    ToCoordinator,
    WorkerHello,
    WorkerLost,
    encode,
)
from taas.delivery.planbook import LoaderBook
from taas.delivery.progress import ProgressMeter
from taas.delivery.reports import (
    Failed,
    Final,
    HostLost,
    Places,
    Prebuffered,
    Report,
    Serving,
)
from taas.delivery.slab import SlabFile
from taas.delivery.transport import ControlServer, FdServer, new_context
from taas.delivery.watch import Watch

__all__ = ["Coordinator", "main"]

_TICK = 0.25


class Coordinator:
    """Turns messages into ledger events and the ledger's outbox into messages."""

    def __init__(self, config: DeliveryConfig, report: Any) -> None:
        self.config = config
        self._report = report
        self._context = new_context()
        self._server = ControlServer(self._context, config.host, config.keys)
        shared = config.shared
        self._slabs = [SlabFile(config.slab, f"slab-{r}") for r in range(config.ranks)] if shared else []
        self._fds = FdServer(config.keys, [slab.fd for slab in self._slabs]) if shared else None
        self.ledger = Ledger(
            config.ranks,
            config.slab,
            shared=shared,
            uneven=config.uneven,
            units=config.units,
            prebuffer=config.prebuffer,
            reserve=lambda rank, upto: self._slabs[rank].reserve(upto),
        )
        self._poller = zmq.Poller()
        self._poller.register(self._server.router, zmq.POLLIN)
        self._poller.register(self._server.zap, zmq.POLLIN)
        if self._fds is not None:
            self._poller.register(self._fds.fileno(), zmq.POLLIN)
        self._watch = Watch(self._poller)
        self._decode = Decoder(ToCoordinator)
        self._hosts = Hosts()
        self._dead: dict[str, float] = {}
        self._since_worker = time.monotonic()
        self._failed = False
        self._prebuffered = False
        self._finishing = False
        self._final_by = 0.0
        self._planner_died = False
        self._reported: list[Any] = []
        self._stateless: set[int] = set()
        self._held_up: set[int] = set()
        self._meter = ProgressMeter(self.ledger)
        self._next_tick = 0.0
        self._report(Serving(self._server.endpoint, self._fds.name if self._fds else "", os.getpid()))

    # ── the loop ──────────────────────────────────────────────────────────────────────────────────

    def serve(self, commands: int) -> None:
        """Serve until ``commands`` (a descriptor) is at its end, or the run's last report is out."""
        self._poller.register(commands, zmq.POLLIN)
        unread = b""
        try:
            while True:
                ready = self._poller.poll(int(_TICK * 1000))
                for source, _ in ready:
                    if source == commands:
                        data = os.read(commands, 65536)
                        if not data:
                            return
                        *lines, unread = (unread + data).split(b"\n")
                        for line in lines:
                            self._command(line)
                    else:
                        self._handle(source)
                now = time.monotonic()
                if now >= self._next_tick:
                    self._tick(now)
                self._flush(now)
                if self._finishing and self._reported:
                    return
        finally:
            try:
                self._last_word()
            finally:
                self._close()

    def _handle(self, source: Any) -> None:
        if source is self._server.router:
            for peer, data in self._server.receive(1000):
                try:
                    message = self._decode(data)
                except msgspec.DecodeError:
                    continue
                self._on_message(peer, message)
        elif source is self._server.zap:
            self._server.answer_zap()
        elif self._fds is not None and source == self._fds.fileno():
            self._fds.answer()
        else:
            name = self._watch.ended(source)
            if name is not None:
                self._on_end(name, "ended")

    def _flush(self, now: float) -> None:
        self.ledger.pump(now)
        outbox = self.ledger.outbox
        for peer, message in outbox:
            self._server.send(peer, encode(message))
        outbox.clear()

    def _command(self, line: bytes) -> None:
        if not line.strip():
            return
        command = msgspec.json.decode(line)
        if command.get("type") == "fail":
            self._fail(command["reason"])
        if command.get("type") == "lost":
            self._host_lost(f"h{command['vm']}", command["cause"])
        if command.get("type") == "finish" and not self._finishing:
            self._finish(time.monotonic())

    # ── the end ───────────────────────────────────────────────────────────────────────────────────

    def _finish(self, now: float) -> None:
        """The ranks have ended: ask the planner where the loaders' generators are now."""
        self._finishing, self._final_by = True, now + self.config.patience
        self._tell_progress(now)
        begun = [(book.index, *book.last_begun) for book in self.ledger.book.loaders if book.last_begun]
        if self._planner_died or not self._server.send("p", encode(FinishPlans(begun))):
            self._finish_without("has died")

    def _finish_without(self, why: str) -> None:
        """The planner will not answer: what it would say is not worth a run that does not end."""
        begun = [book.facts.name for book in self.ledger.book.loaders if book.last_begun]
        self._final(b"", dict.fromkeys(begun, f"the process that iterates its sampler {why}"))

    def _final(self, states: bytes, unknown: dict[str, str]) -> None:
        if self._reported:
            return
        for name, why in unknown.items():
            self._report(notices.generator_stays(name, why))
        self._reported.append(states)
        self._report(Final(states))

    # ── messages ──────────────────────────────────────────────────────────────────────────────────

    def _on_message(self, peer: str, message: Any) -> None:
        kind = type(message)
        ledger = self.ledger
        if kind is Made:
            ledger.made(peer, message.results)
        elif kind is Progress:
            rank = int(peer[1:])
            for plan, consumed in message.consumed:
                ledger.book.consume(rank, plan, consumed)
            ledger.spoilt(message.spoilt)
            ledger.released(message.released)
            ledger.progressed(rank, message.waited, [plan for plan, _ in message.consumed])
        elif kind is Planned:
            ledger.book.planned(message)
        elif kind is Announced:
            ledger.announced(peer, message)
        elif kind is Begin:
            ledger.book.begin(int(peer[1:]), message)
        elif kind is Close:
            ledger.book.close(int(peer[1:]), message)
        elif kind is Lacking:
            ledger.lacking(message.asked, message.lacking)
        elif kind is Beat and not self._hosts.is_lost(peer):
            self._hosts.hear(peer, time.monotonic(), message.stopped)
            self._suspect()
        elif kind is not Beat:
            self._on_arrival(peer, message)

    def _on_arrival(self, peer: str, message: Any) -> None:
        """Somebody joins, or says a last word."""
        if isinstance(message, PlannerHello):
            self._watch.add(peer, message.pid)  # it is on this host wherever the others are
            self._on_planner(message)
        elif isinstance(message, RankHello):
            self.ledger.rank_joined(message)
        elif isinstance(message, WorkerHello):
            host = "h" + peer[1:].split(".")[0]
            if self._hosts.is_lost(host):
                return  # said before it was lost
            self.ledger.worker_joined(peer, host, message.shared)
            if self.config.shared:
                self._watch.add(peer, message.pid)
        elif isinstance(message, HostHello):
            self._hosts.hear(peer, time.monotonic())
            if message.error:
                self._fail(f"a data VM cannot load the registered loaders:\n{message.error}")
            elif self.config.shared:
                self._watch.add(peer, message.pid)
        elif isinstance(message, WorkerLost):
            self._dead.pop(message.worker, None)
            self.ledger.worker_lost(message.worker, message.attempt, message.cause, message.ahead)
        elif isinstance(message, Stateless):
            self._on_stateless(message)
        elif isinstance(message, FinalStates):
            self._final(message.states, message.unknown)

    def _on_planner(self, message: PlannerHello) -> None:
        if message.loaders and not message.loaders[0].name:
            self._fail(f"the planner cannot load the registered loaders:\n{message.loaders[0].error}")
            return
        self.ledger.book.hello(message.loaders)
        for rank in range(self.config.ranks):
            self.ledger.welcome(rank)
        for book in self.ledger.book.loaders:
            for note in notices.of_registration(book, self.config):
                self._report(note)

    def _on_stateless(self, message: Stateless) -> None:
        if message.loader not in self._stateless:
            self._stateless.add(message.loader)
            book = self.ledger.book.loaders[message.loader]
            self._report(notices.stream_is_read_again(book, message.reason))

    def _suspect(self) -> None:
        self.ledger.suspect(self._hosts.suspects(self.ledger.workers.values()))

    def _on_end(self, name: str, cause: str) -> None:
        """A process on this host ended, for certain."""
        if name.startswith("w"):
            self._dead[name] = time.monotonic()  # its keeper is about to say what it was on
        elif name == "p":
            self._planner_died = True
            if self._finishing:
                self._finish_without("has died")
            else:
                self._fail("the process that iterates the registered loaders' samplers died")
        elif name.startswith("h"):
            self._host_lost(name, cause)

    def _host_lost(self, host: str, cause: str) -> None:
        if not self._hosts.lose(host):
            return
        if not self._finishing:
            self._report(HostLost(int(host[1:]), cause))
        if not self.config.shared:
            for worker in [w.name for w in self.ledger.workers.values() if w.host == host]:
                self.ledger.worker_lost(worker, -1, "its data VM is gone")

    # ── time ──────────────────────────────────────────────────────────────────────────────────────

    def _tick(self, now: float) -> None:
        self._next_tick = now + _TICK
        for host in [] if self.config.shared else self._hosts.gone(now):
            self._host_lost(host, self._hosts.silent_for)
        if self._hosts.fall_silent(now):
            self._suspect()
        for worker, since in list(self._dead.items()):
            if now - since > _TICK or "h" + worker[1:].split(".")[0] not in self._hosts:
                del self._dead[worker]
                self.ledger.worker_lost(worker, -1, "its data VM is gone, too")
        if self._finishing and now > self._final_by:
            self._finish_without(f"has not answered for {self.config.patience:g} s")
        self.ledger.overdue(now)
        if self.ledger.workers:
            self._since_worker = now
        elif now - self._since_worker > self.config.alone and any(rank.joined for rank in self.ledger.ranks):
            self._fail(f"no data worker has been there for {self.config.alone:.0f} s: all data VMs are gone")
        if not self._prebuffered and self._is_prebuffered():
            self._begin()
        self._tell_held_up()
        self._tell_progress(now)

    def _is_prebuffered(self) -> bool:
        books = self.ledger.book.loaders
        return bool(books) and all(
            self._lacks(book) <= 0
            or book.facts.error
            or any(plan.ended and not plan.rows for plan in book.plans.values())
            or self.ledger.is_full(book)
            for book in books
        )

    def _lacks(self, book: LoaderBook) -> int:
        """Elements that are still to be made before the ranks begin."""
        asked = self.ledger.book.prebuffer_rows * self.config.ranks
        return min(asked, book.planned or 1) - book.prepared

    def _begin(self) -> None:
        self._prebuffered = True
        for book in self.ledger.book.loaders:
            if self._lacks(book) > 0 and self.ledger.is_full(book):
                self._report(notices.prebuffer_is_too_large(book, self._lacks(book)))
        self._report(Prebuffered())

    def _tell_held_up(self) -> None:
        for loader in self.ledger.held_up - self._held_up:
            self._held_up.add(loader)
            self._report(notices.ranks_are_held_up(self.ledger.book.loaders[loader]))

    def _tell_progress(self, now: float) -> None:
        report = self._meter.read(now)
        if report is not None:
            self._report(report)

    def _fail(self, reason: str) -> None:
        if self._failed:
            return
        self._failed = True
        self._report(Failed(reason))
        for rank in range(self.config.ranks):
            self._server.send(f"r{rank}", encode(RunFailed(reason)))
        self.ledger.fail(reason)

    def _last_word(self) -> None:
        """Say where a run that is started again goes on, once all that dead ranks had said is heard."""
        self._handle(self._server.router)
        books = self.ledger.book.loaders
        places = {book.facts.name: book.place for book in books}
        with contextlib.suppress(BrokenPipeError):  # the supervisor may be what is gone
            self._report(Places({name: place for name, place in places.items() if place is not None}))

    def _close(self) -> None:
        quit_now = encode(Quit())
        for peer in ("p", *self._hosts, *self.ledger.workers):
            self._server.send(peer, quit_now)
        self._watch.close()
        self._server.close()
        if self._fds is not None:
            self._fds.close()
        for slab in self._slabs:
            slab.close()
        self._context.term()


def main(config: DeliveryConfig, commands: int, reports: int) -> None:
    """Run one delivery; ``commands`` and ``reports`` are descriptors of JSON lines."""
    gc.collect()
    gc.freeze()  # collections look at tickets only, and stay short
    encoder = msgspec.json.Encoder()

    def report(message: Report) -> None:
        line = memoryview(encoder.encode(message) + b"\n")
        while line:
            _, writable, _ = select.select([], [reports], [])
            if writable:
                line = line[os.write(reports, line) :]

    Coordinator(config, report).serve(commands)


if __name__ == "__main__":
    first = read_line(0)
    if first:  # else the run ended before it was known where to listen
        main(msgspec.json.decode(first, type=DeliveryConfig), 0, 1)
