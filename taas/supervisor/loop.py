"""A supervisor's life: one loop over its clients, its agents, its kernel and the clock."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import zmq

from taas.agent.endings import become_subreaper, sweep_orphans
from taas.engines import Engine
from taas.errors import EngineError
from taas.heartbeat import BEAT_SECONDS
from taas.messages.agents import AgentSays, AgentUp, MakerEnded, Printed, Seen
from taas.messages.clients import (
    Abandon,
    Accepted,
    AnswerTaken,
    AskStacks,
    ClientSays,
    Interrupt,
    Prepare,
    Refused,
    Release,
    Released,
    Stacks,
    StartedAgain,
    Submit,
)
from taas.messages.wire import Message, Reader
from taas.places import crash_report
from taas.records import ProcessMark
from taas.retention import make_room
from taas.supervised import SupervisorConfig, SupervisorUp
from taas.supervisor.books import Book
from taas.supervisor.data_side import DataSide
from taas.supervisor.door import Door
from taas.supervisor.fleet import Fleet
from taas.supervisor.rank_writes import settle_leftovers
from taas.supervisor.runs import Run
from taas.supervisor.vms import Vm


class Supervisor:
    """All runs of one kernel."""

    def __init__(self, config: SupervisorConfig, scratch: Path) -> None:
        self._config = config
        self._kernel = os.pidfd_open(config.kernel)
        self._kernel_mark = ProcessMark.of(config.kernel)
        self._kernel_gone = False
        self._door = Door(config.client_key, self._kernel_mark)
        self._fleet = Fleet(self._door, scratch, self._strike)
        self._runs: dict[str, Run] = {}
        self._books: dict[str, Book] = {}
        self._next_beat = 0.0
        self._poller = zmq.Poller()
        self._actions: dict[Any, Callable[[], None]] = {}
        self._read_client = Reader(ClientSays)
        self._read_agent = Reader(AgentSays)

    @property
    def up(self) -> SupervisorUp:
        """What the kernel has to know."""
        return self._door.up

    # ------------------------------------------------------------ the loop

    def run(self) -> None:
        """Serve until the kernel is gone and no run is left."""
        self._on(self._door.socket, self._hear)
        self._on(self._kernel, self._lose_kernel)
        settle_leftovers()
        threading.Thread(target=make_room, name="taas-retention", daemon=True).start()
        if self._config.warm:
            self._fleet.warm_up()
            self._watch_vms()
        try:
            while not self._kernel_gone or self._runs:
                for source, _ in self._poller.poll(self._pause_ms()):
                    action = self._actions.get(source)
                    if action is not None:  # an earlier action of this round may have removed it
                        action()
                for run in self._runs.values():
                    run.hangs.step()
                self._beat()
                self._conclude_runs()
        finally:
            self._door.hide()
            self._fleet.close()
            sweep_orphans(())
            self._door.close()

    def _pause_ms(self) -> int | None:
        waits = [wait for run in self._runs.values() if (wait := run.hangs.wait()) is not None]
        if self._fleet.has_remote:
            waits.append(max(0.0, self._next_beat - time.monotonic()))
        return int(min(waits) * 1000) + 1 if waits else None

    def _on(self, source: Any, action: Callable[[], None]) -> None:
        self._actions[source] = action
        self._poller.register(source, zmq.POLLIN)

    def _off(self, source: Any) -> None:
        del self._actions[source]
        self._poller.unregister(source)

    def _hear(self) -> None:
        for letter in self._door.letters():
            if self._door.is_client(letter.key):
                with contextlib.suppress(msgspec.DecodeError):  # a terminal's taas of another release
                    self._hear_client(letter.key, letter.route, self._read_client(letter.data))
            else:
                self._hear_agent(letter.key, self._read_agent(letter.data))

    def _lose_kernel(self) -> None:
        self._kernel_gone = True
        self._off(self._kernel)
        for run in list(self._runs.values()):
            if run.submit.waiting or run.state == "over":
                self._abandon(run)

    def _abandon(self, run: Run) -> None:
        if run.state == "over":
            self._forget(run)  # its names were on their way
        else:
            run.abandon()

    # ------------------------------------------------------------ clients

    def _hear_client(self, key: str, route: bytes, message: Message) -> None:
        """Do what the kernel, or a visitor who could read the connection file, asks for."""
        run = self._runs.get(getattr(message, "run", ""))
        if isinstance(message, Submit):
            self._submit(key, message)
        elif isinstance(message, Prepare):
            self._fleet.prepare(message.engine)
            self._watch_vms()
        elif isinstance(message, Release):
            self._door.reply(route, Released(count=self._fleet.release_idle()))
        elif isinstance(message, AskStacks) and run is None:
            self._door.reply(route, Stacks(run=message.run, places=()))
        elif run is None:
            return  # it ended meanwhile
        elif isinstance(message, AskStacks):
            run.hangs.ask(partial(self._door.reply, route))
        elif isinstance(message, Interrupt):
            run.interrupt()
        elif isinstance(message, Abandon):
            self._abandon(run)
        elif isinstance(message, Seen):
            run.vms[message.vm].send(message)
        elif isinstance(message, AnswerTaken):
            self._forget(run)

    def _submit(self, key: str, submit: Submit) -> None:
        book: Book | None = None
        try:
            if submit.spec.name in self._runs:
                raise EngineError(
                    f"a run called {submit.spec.name} is going on: give this one another --name"
                )
            book = Book(submit, self._kernel_mark)
            name = book.record.name
            vms = self._fleet.lease(name, submit)
            data = self._fleet.lease_data(name, submit, vms)
            run = Run(name, book.submit, vms, data, book.record.folder, partial(self._tell, key, book))
        except (EngineError, OSError) as error:
            if book is not None:
                self._release(book.record.name)
                book.discard()
            if isinstance(error, EngineError):
                refused = Refused(error=type(error).__name__, message=str(error))
            else:
                refused = Refused(error=EngineError.__name__, message=f"the run could not begin: {error}")
            self._door.send(key, refused)
            return
        self._watch_vms()
        book.begin(tuple(gpu for vm in vms for gpu in vm.gpus))
        self._door.send(key, Accepted(run=name, folder=str(book.record.folder)))
        self._books[name] = book
        self._begin(run)

    def _tell(self, key: str, book: Book, message: Message) -> None:
        """Write down what the client of a run is told, and tell it, if it waits."""
        book.note(message)
        if book.submit.waiting:
            self._door.send(key, message)

    def _begin(self, run: Run) -> None:
        self._runs[run.name] = run
        if run.data is not None:
            self._on(run.data.fileno(), partial(self._hear_data, run))
        run.look_at_machines()

    def _restart(self, run: Run, why: str) -> bool:
        """Start a run again, with new VMs in place of those it lost; returns whether they could be had."""
        try:
            vms = self._fleet.replace(run.submit, run.vms)
            data = self._fleet.lease_data(run.name, run.submit, vms)
            again = run.again(vms, data)
        except (EngineError, OSError) as error:
            run.say(f"it could not be started again: {error}")
            return False
        self._watch_vms()
        run.tell(StartedAgain(run=run.name, restarts=again.restarts, why=why))
        self._begin(again)
        return True

    def _replace_data_vm(self, run: Run) -> Vm | None:
        if run.state in ("ending", "over"):
            return None
        try:
            vm = self._fleet.lease_data_vm(run.name, run.submit)
        except (EngineError, OSError):
            return None
        self._watch_vms()
        return vm

    def _hear_data(self, run: Run) -> None:
        assert run.data is not None
        source = run.data.fileno()
        run.data.step()
        if run.data.over:
            self._off(source)

    def _end_data(self, data: DataSide) -> None:
        """End the data side of a run whose ranks have ended, before its client hears of the end."""
        if not data.closed:
            if not data.over:
                self._off(data.fileno())
            data.close()

    def _conclude_runs(self) -> None:
        for run in list(self._runs.values()):
            if run.data is not None and run.settled:
                self._end_data(run.data)
            if run.state != "over" and run.finished:
                if run.loss and self._restart(run, run.loss):
                    continue
                answered = run.conclude()
                if not answered or self._kernel_gone or not run.submit.waiting:
                    self._forget(run)

    def _forget(self, run: Run) -> None:
        run.forget()
        self._release(run.name)
        self._books.pop(run.name).close()
        del self._runs[run.name]

    def _release(self, run: str) -> None:
        """Take all VMs of a run back, those included that were asked for just now."""
        self._watch_vms()
        self._fleet.release(run)

    # ------------------------------------------------------------ agents

    def _watch_vms(self) -> None:
        for vm in self._fleet.vms:
            if vm.machine.fileno() not in self._actions:
                self._on(vm.machine.fileno(), partial(self._lose_vm, vm))
            self._door.allow(vm.key)
        for engine in self._fleet.engines:
            source = engine.fileno()
            if source >= 0 and source not in self._actions:
                self._on(source, partial(self._hear_engine, engine, source))

    def _strike(self, vm: Vm) -> None:
        self._off(vm.machine.fileno())
        self._door.forbid(vm.key)

    def _hear_engine(self, engine: Engine, source: int) -> None:
        engine.step()
        if engine.fileno() != source:
            self._off(source)
        for run in self._runs.values():
            run.look_at_machines()

    def _beat(self) -> None:
        """Find out which remote agents are out of reach."""
        if time.monotonic() < self._next_beat:
            return
        self._next_beat = time.monotonic() + BEAT_SECONDS
        for vm in self._fleet.beat():
            self._lose_vm(vm, f"lost: {vm.machine.place} does not answer any more")

    def _hear_agent(self, key: str, message: Message) -> None:
        vm = self._fleet.find(key)
        if vm is None:
            return  # struck already: its last words came late
        run = self._runs.get(vm.run or "")
        if isinstance(message, AgentUp):
            vm.answered = True
            if run is not None:
                run.look_at_machines()
        elif run is None or message.run != run.name:  # type: ignore[attr-defined]
            return
        elif isinstance(message, MakerEnded):
            if run.data is not None:
                run.data.maker_ended(message)
        elif vm not in run.vms:
            if run.data is not None:
                run.data.hear(vm, message)
        elif isinstance(message, Printed):
            self._door.send(self._config.client_key, message)
        else:
            run.hear(message)

    def _lose_vm(self, vm: Vm, how: str = "") -> None:
        self._strike(vm)
        how = self._fleet.lose(vm, how)
        makers = [pid for run in self._runs.values() if run.data is not None for pid in run.data.pids()]
        sweep_orphans([*makers, *(pid for engine in self._fleet.engines for pid in engine.pids())])
        run = self._runs.get(vm.run or "")
        if run is None:
            return
        if vm in run.vms:
            run.vm_lost(vm, how)
        elif run.data is not None:
            run.data.lose(vm, how, partial(self._replace_data_vm, run))


def main() -> None:
    """Leave the kernel's process tree, read the configuration from standard input, and serve."""
    if os.fork():
        os._exit(0)  # an orphan is nobody's child: a kernel ends its children when it is shut down
    os.setsid()
    become_subreaper()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    config = msgspec.json.decode(sys.stdin.readline(), type=SupervisorConfig)
    scratch = Path(tempfile.mkdtemp(prefix="taas-"))
    try:
        supervisor = Supervisor(config, scratch)
        sys.stdout.write(msgspec.json.encode(supervisor.up).decode() + "\n")
        sys.stdout.flush()
        with contextlib.suppress(OSError):
            os.dup2(os.open(scratch / "supervisor.log", os.O_WRONLY | os.O_CREAT, 0o600), 1)
            os.dup2(1, 2)
        supervisor.run()
    except Exception:  # the agents end all ranks; the notebook says where to look
        crash_report(os.getpid()).write_text(traceback.format_exc())
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
