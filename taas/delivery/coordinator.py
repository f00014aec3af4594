"""The coordinator process: one for each run; it owns the ledger and the slabs' memory.

``python -m taas.delivery.coordinator`` reads its DeliveryConfig as one JSON line from stdin, then a
``Command`` in each line, and writes its ``Report`` messages as JSON lines to stdout. The end of
stdin ends it. It imports no torch and unpickles nothing of the user's.
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import time
from collections.abc import Callable
from typing import Any

import msgspec

from taas.base import linux
from taas.base.poll_loop import PollLoop, raise_limit
from taas.delivery.ledger import Ledger
from taas.delivery.plans import LoaderState
from taas.delivery.slab import SlabFile
from taas.delivery.transport import ControlServer, SlabServer, new_context
from taas.protocol.delivery_messages import (
    PLANNER,
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
    ProgressReport,
    Report,
    WorkerLost,
)
from taas.protocol.delivery_orders import Delivered, DeliveryConfig, read_line
from taas.protocol.framing import Alive, Leave, MessageReader, Unreadable

_decode_command = msgspec.json.Decoder(Command).decode
_decode = {
    "planner": MessageReader(FromPlanner),
    "pool": MessageReader(FromPool),
    "worker": MessageReader(FromWorker),
    "rank": MessageReader(FromRank),
}
"""By role: a peer can only send the messages of its role."""
_TICK = 0.25
_END_SECONDS = 4.0
"""How many seconds a coordinator may take to end."""
_RATE_SECONDS = 2.0
"""Rates are measured over at least this many seconds."""


class ProgressMeter:
    """Reads the progress from the ledger, and whether the ranks may begin, and reports both."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._since: tuple[float, int] | None = None
        self._last: ProgressReport | None = None
        self._prebuffered = False

    def tell(self, now: float, report: Callable[[Report], None]) -> None:
        """Report progress at ``now`` (monotonic seconds), if it has changed."""
        ledger = self._ledger
        loaders = ledger.plans.loaders
        if not self._prebuffered and loaders and all(map(self._is_prebuffered, loaders)):
            self._prebuffered = True
        if (progress := self.progress(now)) != self._last:
            self._last = progress
            report(progress)

    def progress(self, now: float) -> ProgressReport:
        """Return the progress of the delivery at ``now``."""
        ledger = self._ledger
        loaders = ledger.plans.loaders
        delivered = sum(loader.delivered for loader in loaders)
        waited = [rank.waited for rank in ledger.room.ranks]
        return ProgressReport(
            Delivered(
                ready=sum(loader.ready for loader in loaders),
                delivered=delivered,
                planned=sum(
                    loader.count_planned(begun=True) if loader.units is None else loader.units
                    for loader in loaders
                ),
                rate=self._rate(now, delivered),
                waited=round(sum(waited) / len(waited), 4),
            ),
            len(ledger.workers),
            self._prebuffered,
            ledger.plans.is_over,
            {loader.facts.name: place for loader in loaders if (place := loader.place) is not None},
        )

    def _is_prebuffered(self, loader: LoaderState) -> bool:
        return bool(
            self._lacks(loader) <= 0
            or loader.facts.error
            or any(plan.ended and not plan.rows for plan in loader.plans.values())
            or self._ledger.is_full(loader)
        )

    def _lacks(self, loader: LoaderState) -> int:
        """Return how many more batches have to be made before the ranks begin."""
        asked = self._ledger.plans.prebuffer_rows * loader.ranks
        return min(asked, loader.count_planned() or 1) - loader.ready

    def _rate(self, now: float, delivered: int) -> float:
        since, before = self._since or (now, delivered)
        if self._since is None or now - since > _RATE_SECONDS:
            self._since = now, delivered
        return round((delivered - before) / (now - since), 3) if now > since else 0.0


class Coordinator:
    """Turns messages into events of the ledger, and the ledger's outbox into messages."""

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
        # Ticks, not seconds: if this process was paused (by a container's freezer), the seconds
        # would count against the pools.
        self._ticks = 0
        self._heard: dict[Peer, int | None] = {}
        """The tick at which each data VM's worker pool last sent a message.

        None: the VM counts as lost, even if more of its messages arrive.
        """
        self._meter = ProgressMeter(self.ledger)
        ledger = self.ledger
        self._handlers: dict[type, Callable[[Peer, Any], object]] = {
            list: ledger.take_results,
            Progress: lambda rank, progress: ledger.take_progress(rank.number, progress),
            Planned: lambda _, planned: ledger.plans.take_planned(planned),
            Begin: lambda rank, begin: ledger.plans.begin(rank.number, begin),
            Hello: self._on_hello,
            Final: lambda _, final: self._end(final),
            Alive: lambda pool, _: self._hear(pool),
            WorkerLost: self._on_worker_lost,
        }
        self._lost: set[Peer] = set()
        """The planner and the workers that have ended, some before their Hello arrived."""
        self._since_worker = time.monotonic()
        self._final_by: float | None = None
        """The planner has to report the generators by this time; None while the ranks run."""
        self._unread = b""
        self._next_tick = 0.0
        self._over = False
        self._report(Hello(address=self._server.endpoint))

    # ── the loop ──────────────────────────────────────────────────────────────────────────────────

    def serve(self, commands: int) -> None:
        """Serve until the descriptor ``commands`` is at end-of-file, or the last report is out."""
        self._loop.on(commands, lambda: self._obey(os.read(commands, 65536)))
        try:
            while not self._over:
                self._loop.step(_TICK)
                now = time.monotonic()
                if now >= self._next_tick:
                    self._tick(now)
                self._flush()
        finally:
            linux.kill_in(_END_SECONDS)
            try:
                self._last_word()
            finally:
                for peer in (PLANNER, *self._heard):
                    self._server.send(peer, Leave())
                self._context.destroy()

    def _receive(self) -> None:
        for peer, data in self._server.receive(1000):
            try:
                message = _decode[peer.role](data)
            except Unreadable:  # a message that this role may not send
                continue
            self._handlers[type(message)](peer, message)

    def _flush(self) -> None:
        self.ledger.pump()
        for peer, message in self.ledger.outbox:
            self._server.send(peer, message)
        self.ledger.outbox.clear()

    def _obey(self, data: bytes) -> None:
        """Execute the supervisor's commands; end-of-file of its input is the end of the run."""
        self._over = self._over or not data
        *lines, self._unread = (self._unread + data).split(b"\n")
        for command in map(_decode_command, lines):
            if isinstance(command, Failed):
                self._fail(command.reason)
            elif isinstance(command, HostLost) and command.vm < 0:
                self._planner_lost()
            elif isinstance(command, HostLost):
                self._host_lost(Peer("pool", command.vm), command.cause, ended=True)
            elif self._final_by is None:
                self._finish(time.monotonic())

    # ── the end ───────────────────────────────────────────────────────────────────────────────────

    def _finish(self, now: float) -> None:
        """Request from the planner, after the ranks' end, the states of the loaders' generators."""
        self._final_by = now + self.config.patience
        self._meter.tell(now, self._report)
        begun = [
            (loader.index, *loader.last_begun)
            for loader in self.ledger.plans.loaders
            if loader.last_begun
        ]
        if PLANNER in self._lost or not self._server.send(PLANNER, FinishPlans(begun)):
            self._finish_without("has died")

    def _finish_without(self, why: str) -> None:
        """End without the planner's answer.

        A run has to end even if the generators' states get lost.
        """
        begun = [loader.facts.name for loader in self.ledger.plans.loaders if loader.last_begun]
        self._end(Final(b"", dict.fromkeys(begun, f"the process that iterates its sampler {why}")))

    def _end(self, final: Final) -> None:
        if self._over:
            return
        for name, why in final.unknown.items():
            text = (
                f"'{name}': {why}; so its generator in the notebook is as it was before the cell."
                " Seed it anew if the order of the next cell's elements matters"
            )
            self._report(Note(text))
        self._over = True
        self._report(final)

    @property
    def _has_all(self) -> bool:
        """Return whether the ranks no longer need the data side."""
        return self._final_by is not None or self.ledger.plans.is_over

    # ── messages ──────────────────────────────────────────────────────────────────────────────────

    def _on_worker_lost(self, pool: Peer, lost: WorkerLost) -> None:
        worker = Peer("worker", pool.number, lost.serial)
        self._lost.add(worker)
        self.ledger.worker_lost(worker, lost.number, lost.cause)

    def _hear(self, pool: Peer) -> bool:
        """Record a sign of life of a data VM; return False if the VM counts as lost."""
        if self._heard.get(pool, 0) is None:
            return False
        self._heard[pool] = self._ticks
        return True

    def _on_hello(self, peer: Peer, hello: Hello) -> None:
        if peer == PLANNER:
            self._on_planner(hello)
        elif peer.role == "rank":
            self.ledger.add_rank(peer.number, msgspec.structs.replace(hello, rank=peer.number))
        elif hello.error:
            self._fail(f"a data VM cannot load the registered loaders:\n{hello.error}")
        elif self._hear(peer.pool) and peer.role == "worker" and peer not in self._lost:
            self.ledger.add_worker(peer, hello.shared)  # otherwise its Hello came after its loss

    def _on_planner(self, hello: Hello) -> None:
        if hello.error:
            self._fail(f"the planner cannot load the registered loaders:\n{hello.error}")
            return
        self.ledger.open_plans(hello)
        ranks = self.config.ranks
        for facts in hello.loaders:
            if facts.note:
                self._report(Note(facts.note))
            units = self.config.units_of(facts.name)
            if units is not None and units % ranks:
                steps = f"{units} units over {ranks} ranks are {units // ranks} steps a rank"
                self._report(Note(f"'{facts.name}': {steps}; {units % ranks} units are left over"))

    # ── presence ──────────────────────────────────────────────────────────────────────────────────

    def _planner_lost(self) -> None:
        self._lost.add(PLANNER)
        if self._final_by is not None:
            self._finish_without("has died")
        elif not self._has_all:
            self._fail("the process that iterates the registered loaders' samplers died")

    def _host_lost(self, pool: Peer, cause: str, *, ended: bool) -> None:
        if self._heard.get(pool, 0) is not None and not self._has_all:
            self._report(HostLost(pool.number, cause))
        self._heard[pool] = None
        # While this host's pool has not ended, its workers may still write to the slabs. The
        # system kills them with the pool.
        if ended or not self.config.folder:
            for worker in [name for name in self.ledger.workers if name.pool == pool]:
                self.ledger.worker_lost(worker, -1, "its data VM is gone")

    def _tick(self, now: float) -> None:
        self._next_tick = now + _TICK
        self._ticks += 1
        for pool, heard in self._heard.items():
            if heard is not None and (self._ticks - heard) * _TICK > self.config.silence:
                self._host_lost(pool, f"silent for {self.config.silence:.0f} s", ended=False)
        if self._final_by is not None and now > self._final_by:
            self._finish_without(f"has not answered for {self.config.patience:g} s")
        if self.ledger.workers or self._has_all:
            self._since_worker = now
        elif now - self._since_worker > self.config.alone and self.ledger.joined:
            self._fail(
                f"no data worker has been there for {self.config.alone:.0f} s: all data VMs are"
                " gone"
            )
        self._meter.tell(now, self._report)

    def _fail(self, reason: str) -> None:
        if not self.ledger.failure:
            self._report(Failed(reason))
            self.ledger.fail(reason)

    def _last_word(self) -> None:
        """Report again after all messages of dead ranks were read.

        The report tells where a restarted run continues.
        """
        self._receive()
        with contextlib.suppress(BrokenPipeError):  # the supervisor itself may be gone
            self._report(self._meter.progress(time.monotonic()))


def _report_to_stdout(message: Report) -> None:
    line = msgspec.json.encode(message) + b"\n"
    while line:
        line = line[os.write(1, line) :]


if __name__ == "__main__":
    first = read_line(0)
    if first:  # otherwise the run ended before its configuration was sent
        raise_limit()
        linux.set_parent_death_signal(signal.SIGKILL)
        gc.collect()
        gc.freeze()  # collections then traverse only tickets, and stay short
        Coordinator(msgspec.json.decode(first, type=DeliveryConfig), _report_to_stdout).serve(0)
