"""The ranks of one run on one VM: started by elastic, watched and ended here.

elastic's own wait is no authority over the end (a rank that leaves without returning makes it wait for ever), so
each process's sentinel is watched, and what the rank itself said last.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgspec
import psutil
from torch.distributed import TCPStore
from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs, start_processes

from taas import messages
from taas.agent.endings import Ladder, kill_tree, send
from taas.agent.tails import STDERR, STDOUT, RankTail
from taas.devices import visible_gpus
from taas.messages import Endpoint, Memory, RankEnded, RankOrder, RankUp, StartRanks
from taas.rank import entry

_FORKSERVER_SECONDS = 0.3
EXIT_SECONDS = 15.0
"""How long a rank may take to leave after its cell has ended."""
_LOOPBACK = "127.0.0.1"
_INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
_read_rank = messages.Reader(messages.RankSays)
logging.getLogger("torch.distributed.elastic").setLevel(
    logging.CRITICAL
)  # the agent says what happened itself


class _RunLogs(LogsSpecs):
    """One folder a rank, named by its global rank."""

    def __init__(self, folder: Path, ranks: range) -> None:
        super().__init__()
        self._folder, self._ranks = folder, ranks

    @property
    def root_log_dir(self) -> str:
        """Return the folder of all ranks."""
        return str(self._folder)

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Make the folders and name the files in them."""
        folders = {local: self._folder / str(rank) for local, rank in enumerate(self._ranks)}
        for local, folder in folders.items():
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            envs[local]["TORCHELASTIC_ERROR_FILE"] = str(folder / "error.json")
        return LogsDest(
            {local: str(folder / STDOUT) for local, folder in folders.items()},
            {local: str(folder / STDERR) for local, folder in folders.items()},
            {},
            {},
            {local: str(folder / "error.json") for local, folder in folders.items()},
        )


class Listener:
    """Where ranks connect: a socket without a file, which only this agent's own ranks can use."""

    def __init__(self) -> None:
        self.name = f"taas-{os.getpid()}-{os.urandom(8).hex()}"
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        self._socket.bind("\0" + self.name)
        self._socket.listen(1024)

    def fileno(self) -> int:
        """Return the descriptor that becomes readable when a rank connects."""
        return self._socket.fileno()

    def accept(self) -> tuple[int, Connection]:
        """Return the next peer's process id, as the system knows it, and its connection."""
        peer, _ = self._socket.accept()
        pid = struct.unpack("3i", peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0]
        return pid, Connection(peer.detach())

    def close(self) -> None:
        """Stop listening."""
        self._socket.close()


class Rank:
    """One rank, as its agent knows it."""

    def __init__(self, number: int, process: Any, folder: Path) -> None:
        self.number = number
        self.pid: int = process.pid
        self.sentinel: int = process.sentinel
        self._process = process
        self._recorded: psutil.Process | None = None
        with contextlib.suppress(psutil.NoSuchProcess):  # gone already: its sentinel says so
            self._recorded = psutil.Process(self.pid)
        self.tail = RankTail(folder)
        self.connection: Connection | None = None
        self.ended: RankEnded | None = None
        self.ended_at = 0.0
        self.gone = False
        self.signalled: signal.Signals | None = None

    def send(self, number: signal.Signals) -> None:
        """Signal the rank, if it is still there."""
        if self._recorded is not None and not self.gone:
            self.signalled = number
            send(self._recorded, number)

    def kill_tree(self) -> None:
        """SIGKILL the rank and all its descendants."""
        if self._recorded is not None and not self.gone:
            kill_tree([self._recorded])

    def post_mortem(self, forkserver_lives: Callable[[float], bool]) -> RankEnded:
        """Say how a rank ended that did not say so itself.

        Args:
            forkserver_lives: tells it, after some seconds of patience. A forkserver that is killed closes the
                ranks' sentinels a moment before it is dead; multiprocessing makes a status of 255 of that.
        """
        code = self._process.exitcode
        at = time.time()
        if code is not None and code < 0:
            name = signal.Signals(-code).name
            hint = ": out of memory?" if name == "SIGKILL" else ""
            if self.signalled is not None:
                return RankEnded(
                    rank=self.number, outcome="ended", at=at, etype=name, message=f"ended by {name}"
                )
            return RankEnded(
                rank=self.number, outcome="died", at=at, etype=name, message=f"killed by {name}{hint}"
            )
        if not forkserver_lives(_FORKSERVER_SECONDS if code == 255 else 0.0):
            return RankEnded(rank=self.number, outcome="orphaned", at=at, message="its forkserver was killed")
        if self.signalled is not None:
            return RankEnded(
                rank=self.number, outcome="ended", at=at, etype="SIGINT", message="ended while starting"
            )
        return RankEnded(
            rank=self.number,
            outcome="died",
            at=at,
            etype="os._exit",
            message=f"left with status {code} before the cell ended (os._exit, or an abort in C code)",
        )


class RankGroup:
    """All ranks of a run on this VM."""

    def __init__(self, start: StartRanks, listener: Listener) -> None:
        self.run, self.vm = start.run, start.vm
        self.folder = Path(start.order.log_dir)
        self.ladder = Ladder()
        self._payload = start.order.payload.open()
        order = msgspec.structs.replace(
            start.order,
            control=listener.name,
            payload=Memory(os.getpid(), self._payload, start.order.payload.nbytes),
        )
        self._store = None if start.store is not None else _open_store(order)
        self.store = start.store or Endpoint(order.store.host, self._store.port)  # type: ignore[union-attr]
        self._order = msgspec.structs.replace(order, store=self.store)
        self.ranks: list[Rank] = []
        self._context: Any = None

    def start(self) -> None:
        """Fork the ranks."""
        order = self._order
        numbers = range(order.first_rank, order.first_rank + order.local_world_size)
        envs = {local: rank_environ(order, local) for local in range(order.local_world_size)}
        names = (*envs[0], "TORCHELASTIC_ERROR_FILE")
        encoded = messages.pack(msgspec.structs.replace(order, rank_names=names))
        folder = Path(order.log_dir)
        with _handlers_kept():
            self._context = start_processes(
                "rank",
                entry.main,
                {local: (encoded, local) for local in envs},
                envs,
                _RunLogs(folder, numbers),
                start_method="forkserver",
            )
        processes = self._context._pc.processes  # elastic has no public way to their sentinels
        self.ranks = [
            Rank(n, process, folder / str(n)) for n, process in zip(numbers, processes, strict=True)
        ]

    def connected(self, pid: int, connection: Connection) -> Rank | None:
        """Give a new connection to its rank; None for a stranger's."""
        for rank in self.ranks:
            if rank.pid == pid and rank.connection is None:
                rank.connection = connection
                return rank
        return None

    def hear(self, rank: Rank) -> messages.RankSays | None:
        """Read one message of a rank; None when it closed its end."""
        assert rank.connection is not None
        try:
            said: messages.RankSays = _read_rank(rank.connection.recv_bytes())
        except (EOFError, ConnectionResetError):
            rank.connection.close()
            rank.connection = None
            return None
        if isinstance(said, RankUp):
            return None
        if isinstance(said, RankEnded):
            rank.ended, rank.ended_at = said, time.monotonic()
        return said

    def explain(self, ended: RankEnded) -> RankEnded:
        """Add to the end of a rank that died where it stood."""
        if ended.outcome != "died":
            return ended
        from taas.agent.stacks import last_words

        words = last_words(self.folder / str(ended.rank), self._order.cell, self._order.execution_count)
        return msgspec.structs.replace(ended, message=ended.message + words)

    def dismiss(self, rank: Rank) -> None:
        """Tell a rank that all it holds was taken."""
        if rank.connection is not None:
            with contextlib.suppress(BrokenPipeError):  # it was killed meanwhile: its sentinel says so
                rank.connection.send_bytes(messages.pack(messages.Dismissed()))

    def step_ladder(self) -> bool:
        """Send the signals that are due; returns whether the last one is behind us."""
        number = self.ladder.due()
        if number is not None:
            for rank in self.ranks:
                if number == signal.SIGKILL:
                    rank.kill_tree()
                if rank.ended is None or number != signal.SIGINT:
                    rank.send(number)
        late = [rank for rank in self.ranks if rank.ended is not None and not rank.gone and self._late(rank)]
        for rank in late:
            rank.send(signal.SIGKILL)
        return self.ladder.begun and self.ladder.wait() is None

    @staticmethod
    def _late(rank: Rank) -> bool:
        return time.monotonic() > rank.ended_at + EXIT_SECONDS

    def wait(self) -> float | None:
        """Return the seconds until :meth:`step_ladder` has something to do."""
        waits = [self.ladder.wait()]
        waits += [EXIT_SECONDS for rank in self.ranks if rank.ended is not None and not rank.gone]
        return min((wait for wait in waits if wait is not None), default=None)

    @property
    def gone(self) -> bool:
        """Whether no rank is left."""
        return all(rank.gone for rank in self.ranks)

    def close(self) -> None:
        """Give back what the group held; all ranks are gone."""
        if self._context is not None:
            self._context.close()
        for rank in self.ranks:
            rank.tail.close()
            if rank.connection is not None:
                rank.connection.close()
                rank.connection = None
        os.close(self._payload)
        self._store = None


def _open_store(order: RankOrder) -> TCPStore:
    """Open the run's store on a port that the system chooses, and on the VM's own address alone.

    A store without a socket of its own listens on all addresses, and answers whoever comes.
    """
    listener = socket.create_server((order.store.host, 0), backlog=1024)
    return TCPStore(
        order.store.host,
        listener.getsockname()[1],
        order.world_size,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(minutes=30),
        master_listen_fd=listener.detach(),
    )


def rank_environ(order: RankOrder, local_rank: int) -> dict[str, str]:
    """Return the variables torchrun sets in a rank (https://docs.pytorch.org/docs/stable/elastic/run.html)."""
    rank = order.first_rank + local_rank
    environ = {
        "RANK": rank,
        "LOCAL_RANK": local_rank,
        "WORLD_SIZE": order.world_size,
        "LOCAL_WORLD_SIZE": order.local_world_size,
        "GROUP_RANK": order.group_rank,
        "GROUP_WORLD_SIZE": order.group_world_size,
        "ROLE_NAME": "default",
        "ROLE_RANK": rank,
        "ROLE_WORLD_SIZE": order.world_size,
        "MASTER_ADDR": order.store.host,
        "MASTER_PORT": order.store.port,
        "TORCHELASTIC_RUN_ID": order.run,
        "TORCHELASTIC_RESTART_COUNT": order.restart_count,
        "TORCHELASTIC_MAX_RESTARTS": order.spec.max_restarts,
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    if order.gpus:
        environ["CUDA_VISIBLE_DEVICES"] = ",".join(order.gpus)
    elif visible_gpus():  # a rehearsal, or a CPU type, on a machine that has some
        environ["CUDA_VISIBLE_DEVICES"] = ""
    if order.store.host == _LOOPBACK:  # nothing of the run can be reached from another machine
        environ |= {name: "lo" for name in _INTERFACES if name not in order.environ}
    if order.local_world_size > 1 and "OMP_NUM_THREADS" not in order.environ:
        environ["OMP_NUM_THREADS"] = 1
    return {name: str(value) for name, value in environ.items()}


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
