"""The ranks of one run on one VM: started by elastic, watched and ended here.

elastic's own wait is no authority over the end (a rank that leaves without returning makes it wait for ever), so
each process's sentinel is watched, and what the rank itself said last.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import struct
import time
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path

import msgspec
from torch.distributed import TCPStore

from taas.agent.endings import Ladder
from taas.agent.processes import RankProcess, start_ranks
from taas.agent.remote import interface_of
from taas.agent.tails import RankTail
from taas.devices import present_gpus
from taas.messages.agents import StartRanks
from taas.messages.ranks import Dismissed, Preparation, RankEnded, RankOrder, RankReady, RankSays, RankStart
from taas.messages.wire import Endpoint, Memory, pack

EXIT_SECONDS = 15.0
"""How long a rank may take to leave after its cell has ended."""
_LOOPBACK = "127.0.0.1"
_INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


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

    @property
    def waiting(self) -> bool:
        """Whether a peer waits to be let in."""
        return bool(select.select([self._socket], [], [], 0)[0])

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

    def __init__(self, number: int, process: RankProcess, folder: Path) -> None:
        self.number, self.process = number, process
        self.tail = RankTail(folder)
        self.ended: RankEnded | None = None
        self.ended_at = 0.0
        self.gone = False
        self.signalled: signal.Signals | None = None

    @property
    def pid(self) -> int:
        """Its process id."""
        return self.process.pid

    def send(self, number: signal.Signals) -> None:
        """Signal the rank, if it is still there."""
        if not self.gone:
            self.signalled = number
            self.process.send(number)

    def kill_tree(self) -> None:
        """SIGKILL the rank and all its descendants."""
        if not self.gone:
            self.process.kill_tree()

    def post_mortem(self, forkserver_outlived: Callable[[int | None], bool]) -> RankEnded:
        """Say how a rank ended that did not say so itself."""
        code = self.process.exitcode
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
        if not forkserver_outlived(code):
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
        self._control = listener.name

    @property
    def preparation(self) -> Preparation:
        """What a process has to have done before it can become one of these ranks."""
        return self._order.preparation

    @property
    def size(self) -> int:
        """How many ranks the run has on this VM."""
        return self._order.local_world_size

    def start(self, spares: list[RankProcess], *, survey: bool) -> None:
        """Give the ranks' orders to spare processes, and fork those that are missing.

        Args:
            spares: prepared for this group.
            survey: whether the first rank says which pages it copied.
        """
        order = self._order
        numbers = range(order.first_rank, order.first_rank + order.local_world_size)
        folders = [self.folder / str(number) for number in numbers]
        for folder in folders:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        orders = [
            pack(
                RankStart(
                    order=order,
                    local_rank=local,
                    environ=rank_environ(order, local),
                    surveyed=survey and local == 0,
                )
            )
            for local in range(order.local_world_size)
        ]
        for process, encoded in zip(spares, orders, strict=False):
            process.give(encoded)
        processes = spares + start_ranks(self._control, orders[len(spares) :])
        self.ranks = [
            Rank(number, process, folder)
            for number, process, folder in zip(numbers, processes, folders, strict=True)
        ]

    def connected(self, pid: int, connection: Connection) -> Rank | None:
        """Give a new connection to its rank; None for a stranger's."""
        for rank in self.ranks:
            if rank.pid == pid and rank.process.connection is None:
                rank.process.connect(connection)
                return rank
        return None

    def hear(self, rank: Rank) -> RankSays | None:
        """Read one message of a rank; None when it closed its end."""
        said = rank.process.hear()
        if said is None or isinstance(said, RankReady):
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
        rank.process.tell(pack(Dismissed()))

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
        for rank in self.ranks:
            rank.tail.close()
            rank.process.disconnect()
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
        "TORCHELASTIC_ERROR_FILE": Path(order.log_dir) / str(rank) / "error.json",
    }
    if order.gpus:
        environ["CUDA_VISIBLE_DEVICES"] = ",".join(order.gpus)
    elif present_gpus():  # a rehearsal, or a CPU type, on a machine that has some
        environ["CUDA_VISIBLE_DEVICES"] = ""
    if order.store.host == _LOOPBACK:  # nothing of the run can be reached from another machine
        interface: str | None = "lo"
    else:
        interface = interface_of(order.host)
    if interface is not None:
        environ |= {name: interface for name in _INTERFACES if name not in order.environ}
    if order.local_world_size > 1 and "OMP_NUM_THREADS" not in order.environ:
        environ["OMP_NUM_THREADS"] = 1
    return {name: str(value) for name, value in environ.items()}
