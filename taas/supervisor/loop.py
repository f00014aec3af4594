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
from zmq.auth.thread import ThreadAuthenticator

from taas.agent.endings import become_subreaper, sweep_orphans
from taas.agent.forkserver import read_at_import
from taas.catalog import DATA_VM
from taas.connections import Connection, write_connection
from taas.engines import Demand, EngineChoice
from taas.engines.local import LocalEngine
from taas.errors import EngineError, NotEnoughDevices
from taas.heartbeat import BEAT_SECONDS, LAST_WORD_SECONDS, set_heartbeat
from taas.messages.agents import AgentSays, AgentUp, Leave, MakerEnded, Printed, Seen
from taas.messages.clients import (
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
from taas.messages.hosts import Beat
from taas.messages.wire import WIRE_LIMIT, Message, Reader, pack
from taas.places import crash_report
from taas.records import ProcessMark, read_records
from taas.retention import make_room
from taas.supervised import SupervisorConfig, SupervisorUp
from taas.supervisor.books import Book
from taas.supervisor.data_side import DataSide, DataVms
from taas.supervisor.rank_writes import settle_leftovers
from taas.supervisor.runs import Run
from taas.supervisor.vms import Pool, Vm


class Supervisor:
    """All runs of one kernel."""

    def __init__(self, config: SupervisorConfig, scratch: Path) -> None:
        self._config, self._scratch = config, scratch
        self._kernel = os.pidfd_open(config.kernel)
        self._kernel_mark = ProcessMark.of(config.kernel)
        self._context = zmq.Context()
        visitor, visitor_secret = zmq.curve_keypair()
        self._clients = {config.client_key, visitor.decode()}
        self._allowed = set(self._clients)
        self._auth = ThreadAuthenticator(self._context)
        self._auth.start()
        self._auth.configure_curve_callback("*", self)
        public, secret = zmq.curve_keypair()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.curve_server = True
        self._socket.curve_publickey, self._socket.curve_secretkey = public, secret
        self._socket.set(zmq.MAXMSGSIZE, WIRE_LIMIT)
        self._socket.set_hwm(0)  # credits bound what is on its way
        port = self._socket.bind_to_random_port("tcp://127.0.0.1")
        self.up = SupervisorUp(os.getpid(), f"tcp://127.0.0.1:{port}", public.decode())
        self._connection_file = write_connection(
            Connection(
                endpoint=self.up.endpoint,
                server_key=self.up.server_key,
                public_key=visitor.decode(),
                secret_key=visitor_secret.decode(),
                supervisor=ProcessMark.of(os.getpid()),
                kernel=self._kernel_mark,
            )
        )
        self._routes: dict[str, bytes] = {}
        self._endpoints: dict[str, str] = {}
        self._socket.set(zmq.ROUTER_MANDATORY, 1)  # a remote agent out of reach is heard of by sending
        self._unreachable: dict[str, float] = {}
        self._next_beat = 0.0
        address = (self.up.endpoint, self.up.server_key)
        self._local = Pool(LocalEngine(), address, scratch, self._send)
        self._data_pool = Pool(self._local.engine, address, scratch, self._send, data=True)
        self._pools = {"local": self._local, "data": self._data_pool}
        self._runs: dict[str, Run] = {}
        self._books: dict[str, Book] = {}
        self._kernel_gone = False
        self._poller = zmq.Poller()
        self._actions: dict[Any, Callable[[], None]] = {}
        self._read_client = Reader(ClientSays)
        self._read_agent = Reader(AgentSays)

    def callback(self, domain: str, key: bytes) -> bool:
        """Decide, for zmq's authenticator, whether a public key may connect."""
        del domain
        name = zmq.utils.z85.encode(key).decode() if len(key) == 32 else key.decode()
        return name in self._allowed

    # ------------------------------------------------------------ the loop

    def run(self) -> None:
        """Serve until the kernel is gone and no run is left."""
        self._on(self._socket, self._hear)
        self._on(self._kernel, self._lose_kernel)
        settle_leftovers()
        threading.Thread(target=make_room, name="taas-retention", daemon=True).start()
        if self._config.warm:  # whoever starts a supervisor is about to submit a run
            self._local.start(Demand(), 1)
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
            self._connection_file.unlink(missing_ok=True)
            for vm in self._vms():
                if vm.remote:
                    vm.send(Leave())
            for pool in self._pools.values():
                pool.engine.close()
            sweep_orphans(())
            self._socket.close(linger=1000)
            self._auth.stop()
            self._context.term()

    def _pause_ms(self) -> int | None:
        waits = [wait for run in self._runs.values() if (wait := run.hangs.wait()) is not None]
        if any(vm.remote for vm in self._vms()):
            waits.append(max(0.0, self._next_beat - time.monotonic()))
        return int(min(waits) * 1000) + 1 if waits else None

    def _vms(self) -> list[Vm]:
        return [vm for pool in self._pools.values() for vm in pool.vms]

    def _on(self, source: Any, action: Callable[[], None]) -> None:
        self._actions[source] = action
        self._poller.register(source, zmq.POLLIN)

    def _off(self, source: Any) -> None:
        del self._actions[source]
        self._poller.unregister(source)

    def _send(self, key: str, message: Message) -> None:
        route = self._routes.get(key)
        if route is not None and not self._reply(route, message):
            self._unreachable.setdefault(key, time.monotonic())

    def _reply(self, route: bytes, message: Message) -> bool:
        """Send a message; returns whether there is a way to the peer, who may have left."""
        try:
            self._socket.send_multipart([route, pack(message)])
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            return False
        return True

    def _hear(self) -> None:
        for _ in range(64):  # then look at the other sources
            try:
                route, frame = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            key = str(frame.get("User-Id"))
            self._routes[key] = route.bytes
            if key in self._clients:
                self._hear_client(key, route.bytes, self._read_client(frame.buffer))
            else:
                self._hear_agent(key, self._read_agent(frame.buffer))

    def _lose_kernel(self) -> None:
        self._kernel_gone = True
        self._off(self._kernel)
        for run in list(self._runs.values()):
            if run.state == "over":
                self._forget(run)  # its names were on their way
            elif run.submit.waiting:
                run.interrupt()

    # ------------------------------------------------------------ clients

    def _hear_client(self, key: str, route: bytes, message: Message) -> None:
        """Do what the kernel, or a visitor who could read the connection file, asks for."""
        run = self._runs.get(getattr(message, "run", ""))
        if isinstance(message, Submit):
            self._submit(key, message)
        elif isinstance(message, Prepare):
            self._pool_of(message.engine)
            self._watch_vms()
        elif isinstance(message, Release):
            self._reply(route, Released(count=self._release_idle()))
        elif isinstance(message, AskStacks) and run is None:
            self._reply(route, Stacks(run=message.run, places=()))
        elif run is None:
            return  # it ended meanwhile
        elif isinstance(message, AskStacks):
            run.hangs.ask(partial(self._reply, route))
        elif isinstance(message, Interrupt):
            run.interrupt()
        elif isinstance(message, Seen):
            run.vms[message.vm].send(message)
        elif isinstance(message, AnswerTaken):
            self._forget(run)

    def _submit(self, key: str, submit: Submit) -> None:
        spec = submit.spec
        gpus = () if spec.rehearse else submit.gpus
        book: Book | None = None
        try:
            if spec.name in self._runs:
                raise EngineError(f"a run called {spec.name} is going on: give this one another --name")
            gpus = self._not_elsewhere(gpus)
            book = Book(submit, self._kernel_mark)
            name = book.record.name
            demand = _demand(submit, spec.instance, spec.ranks_per_vm * spec.gpus_per_rank)
            vms = self._pool_of(submit.engine).lease(name, demand, spec.vms, gpus)
            data = self._lease_data(name, submit, vms)
            run = Run(name, book.submit, vms, data, book.record.folder, partial(self._tell, key, book))
        except (EngineError, OSError) as error:
            if book is not None:
                self._release(book.record.name)
                book.discard()
            if isinstance(error, EngineError):
                refused = Refused(error=type(error).__name__, message=str(error))
            else:
                refused = Refused(error=EngineError.__name__, message=f"the run could not begin: {error}")
            self._send(key, refused)
            return
        self._watch_vms()
        book.begin(tuple(gpu for vm in vms for gpu in vm.gpus))
        self._send(key, Accepted(run=name, folder=str(book.record.folder)))
        self._books[name] = book
        self._begin(run)

    def _tell(self, key: str, book: Book, message: Message) -> None:
        """Write down what the client of a run is told, and tell it, if it waits."""
        book.note(message)
        if book.submit.waiting:
            self._send(key, message)

    def _begin(self, run: Run) -> None:
        self._runs[run.name] = run
        if run.data is not None:
            self._on(run.data.fileno(), partial(self._hear_data, run))
        run.look_at_machines()

    def _restart(self, run: Run, why: str) -> bool:
        """Start a run again, with new VMs in place of those it lost; returns whether they could be had."""
        try:
            new = self._pool_of(run.submit.engine).replace([vm for vm in run.vms if vm.gone])
            vms = [new.get(vm, vm) for vm in run.vms]
            data = self._lease_data(run.name, run.submit, vms)
            again = run.again(vms, data)
        except (EngineError, OSError) as error:
            run.say(f"it could not be started again: {error}")
            return False
        self._watch_vms()
        run.tell(StartedAgain(run=run.name, restarts=again.restarts, why=why))
        self._begin(again)
        return True

    def _lease_data(self, run: str, submit: Submit, vms: list[Vm]) -> DataVms | None:
        """Return VMs for the data of a run, if it has any: those that it has already, and others."""
        if submit.delivery is None:
            return None
        pool = self._pool_of(submit.engine, data=True)
        demand = _demand(submit, DATA_VM)
        planner = vms[0] if pool is self._data_pool else own_vms(run, self._data_pool, 1, demand)[0]
        data_vms = own_vms(run, pool, submit.spec.data_vms, demand)
        return DataVms(data_vms, planner, lambda: pool.engine.here)

    def _replace_data_vm(self, run: Run) -> Vm | None:
        choice = run.submit.engine
        if run.state in ("ending", "over"):
            return None
        try:
            [vm] = self._pool_of(choice, data=True).lease(run.name, _demand(run.submit, DATA_VM), 1, ())
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

    def _not_elsewhere(self, gpus: tuple[str, ...]) -> tuple[str, ...]:
        """Return the GPUs that no run of another kernel has."""
        if not gpus:
            return gpus
        mine = os.getpid()
        others = [record for record in read_records() if record.live and record.supervisor.pid != mine]
        taken = {gpu for record in others for gpu in record.gpus}
        free = tuple(gpu for gpu in gpus if gpu not in taken)
        if taken and not free:
            names = ", ".join(record.name for record in others)
            raise NotEnoughDevices(
                f"runs of other notebooks have all {len(gpus)} GPUs ({names}). `%taas status` shows them; wait for "
                "one, or `%taas stop` it."
            )
        return free

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
        for pool in self._pools.values():
            mine = [vm for vm in pool.vms if vm.run == run]
            pool.release(mine)
            if not pool.engine.keeps_warm:
                for vm in mine:
                    self._give_back(pool, vm)

    def _give_back(self, pool: Pool, vm: Vm) -> None:
        self._off(vm.machine.fileno())
        self._allowed.discard(vm.key)
        pool.give_back(vm)

    def _release_idle(self) -> int:
        """Give back the VMs that no run uses."""
        idle = [(pool, vm) for pool in self._pools.values() for vm in pool.vms if vm.run is None]
        for pool, vm in idle:
            self._give_back(pool, vm)
        return len(idle)

    # ------------------------------------------------------------ engines

    def _pool_of(self, choice: EngineChoice, *, data: bool = False) -> Pool:
        """Return the VMs of an engine for ranks, or for data; the engine is started when it is first asked for."""
        if choice.kind == "local":
            return self._data_pool if data else self._local
        name = f"{choice.kind} {choice.address}"
        if name not in self._pools:
            from taas.engines.ray import RayEngine

            engine = RayEngine(choice.address, self._listen, self._scratch / "ray.log")
            address = ("", self.up.server_key)
            self._pools[name] = Pool(engine, address, self._scratch, self._send)
            self._pools[f"{name} data"] = Pool(engine, address, self._scratch, self._send, data=True)
        return self._pools[f"{name} data" if data else name]

    def _listen(self, host: str) -> str:
        """Listen on an address that other machines reach; peers that connect there have to show signs of life."""
        if host not in self._endpoints:
            set_heartbeat(self._socket)
            port = self._socket.bind_to_random_port(f"tcp://{host}")
            self._endpoints[host] = f"tcp://{host}:{port}"
        return self._endpoints[host]

    def _hear_engine(self, pool: Pool, source: int) -> None:
        pool.engine.step()
        if pool.engine.fileno() != source:
            self._off(source)
        for run in self._runs.values():
            run.look_at_machines()

    def _beat(self) -> None:
        """Find out which remote agents are out of reach."""
        if time.monotonic() < self._next_beat:
            return
        self._next_beat = time.monotonic() + BEAT_SECONDS
        for vm in self._vms():
            if vm.remote and vm.up:
                vm.send(Beat())
        for vm in self._vms():
            since = self._unreachable.get(vm.key)
            if since is not None and time.monotonic() > since + LAST_WORD_SECONDS:
                self._lose_vm(vm, f"lost: {vm.machine.place} does not answer any more")

    # ------------------------------------------------------------ agents

    def _watch_vms(self) -> None:
        for vm in self._vms():
            if vm.machine.fileno() not in self._actions:
                self._on(vm.machine.fileno(), partial(self._lose_vm, vm))
            self._allowed.add(vm.key)
        for pool in self._pools.values():
            source = pool.engine.fileno()
            if source >= 0 and source not in self._actions:
                self._on(source, partial(self._hear_engine, pool, source))

    def _hear_agent(self, key: str, message: Message) -> None:
        vm = next((vm for vm in self._vms() if vm.key == key), None)
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
            self._send(self._config.client_key, message)
        else:
            run.hear(message)

    def _lose_vm(self, vm: Vm, how: str = "") -> None:
        self._off(vm.machine.fileno())
        self._allowed.discard(vm.key)
        how = next(pool for pool in self._pools.values() if vm in pool.vms).lose(vm, how)
        makers = [pid for run in self._runs.values() if run.data is not None for pid in run.data.pids()]
        sweep_orphans([*makers, *(pid for pool in self._pools.values() for pid in pool.engine.pids())])
        run = self._runs.get(vm.run or "")
        if run is None:
            return
        if vm in run.vms:
            run.vm_lost(vm, how)
        elif run.data is not None:
            run.data.lose(vm, how, partial(self._replace_data_vm, run))


def _demand(submit: Submit, instance: str | None, gpus: int = 0) -> Demand:
    return Demand(
        instance,
        gpus,
        submit.spec.rehearse,
        submit.engine.wait,
        read_at_import(submit.environ),
        submit.changed,
    )


def own_vms(run: str, pool: Pool, count: int, demand: Demand) -> list[Vm]:
    """Return so many VMs of a run: those that it has, and others, asked for one by one, since each may come alone."""
    own = [vm for vm in pool.vms if vm.run == run]
    for _ in range(count - len(own)):
        own += pool.lease(run, demand, 1, ())
    return own


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
