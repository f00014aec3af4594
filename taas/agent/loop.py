"""An agent's life: one loop over its supervisor, its ranks, their files and the clock."""

from __future__ import annotations

import contextlib
import multiprocessing.util
import os
import shutil
import signal
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import psutil
import zmq

from taas.agent.endings import become_subreaper, bury_orphans, kill_tree, sweep_orphans
from taas.agent.forkserver import Forkserver
from taas.agent.inotify import BLIND_SECONDS, Inotify
from taas.agent.intake import Intake
from taas.agent.maker_desk import MakerDesk
from taas.agent.mirror import Mirror
from taas.agent.remote import SupervisorLink, environment
from taas.delivery.config import read_line
from taas.engines import AgentConfig
from taas.heartbeat import set_heartbeat
from taas.messages.agents import (
    AgentHears,
    AgentTrouble,
    AgentUp,
    EndRanks,
    Leave,
    LookAtRanks,
    Printed,
    RankReport,
    RanksSeen,
    RunOver,
    Seen,
    StartRanks,
    StoreUp,
    Unwatch,
    VmDone,
)
from taas.messages.hosts import Beat, FileChangeTaken, WantPiece, WroteTaken
from taas.messages.ranks import PagesCopied, RankEnded
from taas.messages.wire import WIRE_LIMIT, Memory, Message, Reader, pack
from taas.pieces import piece_of

WINDOW = 4 << 20
"""Bytes of output on their way to the cell, per VM, before the agent waits for an acknowledgement."""
_READ = 1 << 18


class _Watched:
    """Which ranks' output of the run is wanted, and how much more may be on its way."""

    def __init__(self, ranks: tuple[int, ...] | None) -> None:
        self.ranks = ranks
        self.window = WINDOW

    def wants(self, rank: int) -> bool:
        return self.ranks is None or rank in self.ranks

    @property
    def nobody(self) -> bool:
        return self.ranks == ()


class Agent:
    """The processes of one VM. It serves one run at a time."""

    def __init__(self, config: AgentConfig) -> None:
        self._context = zmq.Context()
        self._socket = make_socket(self._context, config)
        self._poller = zmq.Poller()
        self._actions: dict[Any, Callable[[], None]] = {}
        self._read = Reader(AgentHears)
        self._forkserver = Forkserver(data=config.data)
        self._inotify = Inotify()
        self._group: Any = None
        self._makers = MakerDesk(
            config, self._forkserver, self._forget_spares, self._on, self._off, self._inotify.add, self._say
        )
        self._listener: Any = None
        self._spares: Any = None  # a VM that makes elements has neither
        self._looks: list[Any] = []
        self._watched = _Watched(())
        self._answer = -1
        self._done_sent = False
        self._supervisor_gone = False
        self._config = config
        self._scratch = Path(config.scratch)
        self._parent = os.getppid()
        self._mirror: Mirror | None = None
        self._intake = Intake(config, self._start, self._say)
        self._link = SupervisorLink(self._socket, config.endpoint) if config.remote else None
        self._socket.connect(config.endpoint)

    # ------------------------------------------------------------ the loop

    def run(self) -> None:
        """Serve until the supervisor is gone, then end all that was started here."""
        self._import_ahead()  # torch, while this process does so, too
        self._on(self._socket, self._hear_supervisor)
        self._on(sys.stdin.fileno(), self._lose_supervisor)
        if self._link is not None:
            self._on(self._link.source, self._look_at_link)
        if not self._config.data:
            from taas.agent.ranks import Listener
            from taas.agent.spares import Spares

            self._listener = Listener()
            self._spares = Spares(self._listener.name, self._watch_spare, self._unwatch)
            self._on(self._listener.fileno(), self._accept)
        self._on(self._inotify.fileno(), self._files_grew)
        self._say(AgentUp(pid=os.getpid(), forkserver=self._forkserver.pid or 0))
        try:
            while not self._supervisor_gone:
                for source, _ in self._poller.poll(self._pause_ms()):
                    action = self._actions.get(source)
                    if action is not None:  # an earlier action of this round may have removed it
                        action()
                self._look_after_group()
                self._makers.step()
                if self._group is None and self._spares is not None:
                    self._spares.step()
                self._look_at_link()
        finally:
            self._end_all()

    def _import_ahead(self) -> None:
        """Start the forkserver; elsewhere as the first run will want it, for its second start takes as long."""
        config = self._config
        if config.remote:
            self._forkserver.fit(environment(config.ahead, config.changed, config), rehearsed=None)
        else:
            self._forkserver.start()

    def _pause_ms(self) -> int | None:
        waits: list[float | None] = [look.wait() for look in self._looks]
        waits.append(None if self._link is None else self._link.wait())
        if self._group is not None:
            waits.append(BLIND_SECONDS if self._inotify.blind else None)
            waits.append(self._group.wait())
            waits.append(None if self._intake.copy is None else self._intake.copy.wait())
        elif self._spares is not None:
            waits.append(self._spares.wait())
        wait = min((wait for wait in waits if wait is not None), default=None)
        return None if wait is None else int(wait * 1000) + 1

    def _on(self, source: Any, action: Callable[[], None]) -> None:
        self._actions[source] = action
        self._poller.register(source, zmq.POLLIN)

    def _off(self, source: Any) -> None:
        if self._actions.pop(source, None) is not None:
            self._poller.unregister(source)

    def _say(self, message: Message) -> None:
        self._socket.send(pack(message))

    def _lose_supervisor(self) -> None:
        self._supervisor_gone = not os.read(sys.stdin.fileno(), 4096)

    def _look_at_link(self) -> None:
        """End with the connection to a supervisor elsewhere: it gives this VM up then, too."""
        why = "" if self._link is None or self._supervisor_gone else self._link.gone()
        if why:
            self._supervisor_gone = True
            sys.stderr.write(f"{why}\n")

    def _end_all(self) -> None:
        kill_tree(psutil.Process().children())
        sweep_orphans(())  # spares whose forkserver went first
        self._intake.forget()
        self._makers.close()
        if self._listener is not None:
            self._listener.close()
        if self._link is not None:
            self._link.close()
        self._socket.close(linger=0)
        self._context.term()
        shutil.rmtree(self._scratch, ignore_errors=True)
        orphaned = os.getppid() != self._parent and not self._config.remote
        if orphaned:  # the supervisor was killed: nobody else removes its folder
            shutil.rmtree(self._scratch.parent, ignore_errors=True)

    def _end_ranks(self) -> None:
        with contextlib.suppress(psutil.NoSuchProcess):
            kill_tree(psutil.Process(self._forkserver.pid).children())

    # ------------------------------------------------------------ what the supervisor says

    def _hear_supervisor(self) -> None:
        while True:
            try:
                message = self._read(self._socket.recv(zmq.NOBLOCK))
            except zmq.Again:
                return
            if isinstance(message, StartRanks):
                self._intake.order(message)
            elif self._intake.hear(message) or self._makers.hear(message):
                continue
            elif isinstance(message, Leave):
                self._supervisor_gone = True
            elif isinstance(message, Beat):
                continue  # zmq's own thread answers to what it stands for
            elif self._group is None or message.run != self._group.run:
                continue  # said before it knew that the run is over
            elif isinstance(message, EndRanks):
                self._group.ladder.begin(at_once=message.at_once)
            elif isinstance(message, Seen):
                self._watched.window += message.size
                self._send_output()
            elif isinstance(message, Unwatch):
                self._watched = _Watched(())
            elif isinstance(message, LookAtRanks):
                self._look(message)
            elif isinstance(message, WantPiece):
                if message.fd == self._answer:  # nothing else may be asked for
                    self._say(piece_of(message, self._answer))
            elif isinstance(message, WroteTaken):
                if self._mirror is not None:
                    self._mirror.acknowledge(message.size)
            elif isinstance(message, FileChangeTaken):
                if self._intake.copy is not None:
                    self._intake.copy.acknowledge(message.size)
            elif isinstance(message, RunOver):
                self._forget_run()

    def _start(self, message: StartRanks) -> None:
        from taas.agent.ranks import RankGroup

        try:
            if self._forkserver.fit(message.order.environ, rehearsed=bool(message.order.rehearsed)):
                self._forget_spares()
            self._group = RankGroup(message, self._listener)
            if message.store is None:
                self._say(StoreUp(run=message.run, store=self._group.store))
            spares = self._spares.take(self._group.preparation, self._group.size)
            self._group.start(spares, survey=self._spares.survey)
        except Exception as error:  # the run is lost, whatever it was; the supervisor says so in the cell
            self._end_ranks()
            self._spares.end()
            self._say(
                AgentTrouble(run=message.run, vm=message.vm, message=f"{type(error).__name__}: {error}")
            )
            self._intake.forget()
            if self._group is not None:
                self._group.close()
                self._group = None
            return
        self._done_sent = False
        self._watched = _Watched(message.watched)
        folder = Path(message.order.log_dir)
        if self._config.remote:
            folders = {rank.number: folder / str(rank.number) for rank in self._group.ranks}
            self._mirror = Mirror(message.run, message.vm, folders, self._say)
        for rank in self._group.ranks:
            self._on(rank.process.sentinel, partial(self._rank_gone, rank))
            if rank.process.connection is not None:  # it was a spare
                self._on_connection(rank)
            if self._watched.wants(rank.number) or self._mirror is not None:
                self._inotify.add(folder / str(rank.number))

    def _look(self, wanted: LookAtRanks) -> None:
        from taas.agent.stacks import Look

        bury_orphans(self._forkserver.own_pids())
        self._looks.append(Look(self._group.ranks, self._group.folder, wanted))
        self._step_looks()

    def _step_looks(self) -> None:
        for look in list(self._looks):
            seen = look.result()
            if seen is not None:
                self._looks.remove(look)
                self._say(RanksSeen(run=self._group.run, vm=self._group.vm, look=look.number, ranks=seen))

    def _forget_run(self) -> None:
        self._looks.clear()
        self._intake.forget()
        group, self._group, self._mirror = self._group, None, None
        group.close()
        if self._forkserver.outlived(None) and not self._config.remote:  # a VM elsewhere is given back
            self._spares.want(group.preparation, group.size)
        else:
            self._forget_spares()
        if self._answer >= 0:
            os.close(self._answer)
            self._answer = -1

    # ------------------------------------------------------------ what ranks say and print

    def _accept(self) -> None:
        pid, connection = self._listener.accept()
        rank = self._group.connected(pid, connection) if self._group is not None else None
        spare = self._spares.find(pid)
        if rank is not None:
            self._on_connection(rank)
        elif spare is not None:
            spare.connect(connection)
            self._on(connection.fileno(), partial(self._hear_spare, spare, connection.fileno()))
        else:
            connection.close()  # a stranger

    def _on_connection(self, rank: Any) -> None:
        source = rank.process.connection.fileno()
        self._on(source, partial(self._hear_rank, rank, source))

    def _hear_rank(self, rank: Any, source: int) -> None:
        said = self._group.hear(rank)
        if rank.process.connection is None:
            self._off(source)
        if isinstance(said, PagesCopied):
            self._spares.learn(said.pages)
            return
        if isinstance(said, RankEnded) and said.answer is not None:
            try:
                said = self._hold_answer(rank, said)
            except (FileNotFoundError, ProcessLookupError):
                rank.ended = said = None  # killed, and the names with it: its sentinel says so
        if said is not None:
            self._send_output()
            self._say(RankReport(run=self._group.run, vm=self._group.vm, said=said))

    def _watch_spare(self, spare: Any) -> None:
        self._on(spare.sentinel, partial(self._lose_spare, spare))

    def _lose_spare(self, spare: Any) -> None:
        self._spares.lose(spare)
        if not self._forkserver.outlived(spare.exitcode):
            sweep_orphans(self._forkserver.own_pids())

    def _forget_spares(self) -> None:
        """Let go of those of another forkserver, which ended with it, and bury them."""
        if self._spares is not None:
            self._spares.forget()
        sweep_orphans(self._forkserver.own_pids())

    def _unwatch(self, process: Any) -> None:
        self._off(process.sentinel)
        if process.connection is not None:
            self._off(process.connection.fileno())

    def _hear_spare(self, spare: Any, source: int) -> None:
        if spare.hear() is None:  # it closed its end: it is about to be gone
            self._off(source)
            self._lose_spare(spare)

    def _hold_answer(self, rank: Any, said: RankEnded) -> RankEnded:
        """Open rank 0's answer here, so that the rank may go."""
        assert said.answer is not None
        self._answer = said.answer.open()
        self._group.dismiss(rank)
        holder = 0 if self._config.remote else os.getpid()
        return msgspec.structs.replace(said, answer=Memory(holder, self._answer, said.answer.nbytes))

    def _files_grew(self) -> None:
        self._inotify.changed()
        self._send_output()

    def _send_output(self) -> bool:
        """Send what the window allows; returns whether nothing is left."""
        group = self._group
        if group is None or self._watched.nobody:
            return True
        for rank in group.ranks:
            while self._watched.wants(rank.number):
                if self._watched.window <= 0:
                    return False
                items = rank.tail.read(_READ)
                if not items:
                    break
                size = sum(len(item.text) + len(item.body) for item in items)
                self._watched.window -= size
                self._say(
                    Printed(run=group.run, vm=group.vm, rank=rank.number, size=size, items=tuple(items))
                )
        return True

    # ------------------------------------------------------------ how ranks end

    def _rank_gone(self, rank: Any) -> None:
        while rank.process.connection is None and self._listener.waiting:
            self._accept()  # it may have connected, said all and left while others were being started
        connection = rank.process.connection
        while rank.process.connection is not None and connection.poll(0):
            self._hear_rank(rank, connection.fileno())
        self._unwatch(rank.process)
        rank.gone = True
        if rank.ended is None:
            self._send_output()
            ended = self._group.explain(rank.post_mortem(self._forkserver.outlived))
            rank.ended = ended
            self._say(RankReport(run=self._group.run, vm=self._group.vm, said=ended))

    def _look_after_group(self) -> None:
        group, copy = self._group, self._intake.copy
        if group is None:
            return
        group.step_ladder()
        self._step_looks()
        if self._inotify.blind:
            self._send_output()
        mirrored = self._mirror is None or self._mirror.step()
        if group.gone and not self._done_sent:
            sweep_orphans(self._forkserver.own_pids())
            files_sent = copy is None or copy.step(last=True)
            if self._send_output() and mirrored and files_sent:
                self._done_sent = True
                notices = () if copy is None else tuple(copy.notices)
                self._say(VmDone(run=group.run, vm=group.vm, notices=notices))
        elif copy is not None:
            copy.step(last=False)


def make_socket(context: zmq.Context[Any], config: AgentConfig) -> zmq.Socket[Any]:
    """Return a DEALER for the supervisor, authenticated and encrypted by CURVE."""
    socket: zmq.Socket[Any] = context.socket(zmq.DEALER)
    socket.curve_serverkey = config.server_key.encode()
    socket.curve_publickey = config.public_key.encode()
    socket.curve_secretkey = config.secret_key.encode()
    socket.set(zmq.MAXMSGSIZE, WIRE_LIMIT)
    socket.set_hwm(0)  # credits bound what is on its way
    if config.remote:
        set_heartbeat(socket)
    return socket


def main() -> None:
    """Read the configuration from standard input, and serve."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    line = read_line(sys.stdin.fileno())
    if not line:  # the engine changed its mind
        return
    config = msgspec.json.decode(line, type=AgentConfig)
    if config.remote:
        if os.fork():
            os._exit(0)  # nobody's child: its starter ends it by its standard input, and not by a signal
        os.setsid()
    become_subreaper()
    Agent(config).run()
    finalizers: Any = multiprocessing.util
    finalizers._run_finalizers()  # names of semaphores
    os._exit(0)  # Python would take torch apart first, for seconds on a busy machine
