"""What a rank and its agent say to each other, and the socket pair between them, which has no name: nobody else can connect.

A message is one packet (unix(7), SOCK_SEQPACKET): no half of one is ever seen. Descriptors go with
it, since a rank behind its wall may not open those of other processes by ``/proc``. A long message
is a memory file, the last of its descriptors. A rank waits for what its agent says, and until there
is room for what it says; the agent never waits.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
from array import array
from dataclasses import dataclass
from typing import Literal

import msgspec

from taas.delivery.config import DeliveryConfig
from taas.header.options import RunSpec
from taas.wire.framing import WIRE_LIMIT, Memory, Message, MessageReader, StoreAddress, Unreadable


class RankStage(Message, frozen=True):
    """How far a rank is.

    Attributes:
        stage: ``begun``: the cell begins to run. ``at work``: the main thread of a rank that is
            interrupted runs Python code: what the cell makes of it takes its time. ``packing``: it
            packs its names, and its :class:`RankEnded` follows. ``wrote``: it has written down
            which collective it waits in, and may be asked again.
        rank: where the supervisor hears it.
    """

    stage: Literal["begun", "at work", "packing", "wrote"]
    rank: int = -1


class RankEnded(Message, frozen=True):
    """How a cell ended in one rank.

    Attributes:
        outcome: ``done``, ``raised``, ``exited`` (``sys.exit(n)``, n ≠ 0), ``interrupted``, or,
            said by the agent, ``died`` (by a signal, or without a word), ``orphaned`` (with its
            forkserver) and ``ended`` (by a signal of the agent's). ``stood``: it has not ended;
            these are its names if it says no more.
        at: wall-clock time of its machine in seconds since the epoch.
        etype: class name of the exception, or the signal's name.
        message: the exception's text, or what is known.
        answer: rank 0's names: at the end of the cell, or as they stood when it failed or was
            ended.
        notices: lines for the user.
        asleep: it was ended while it waited for other ranks, as far as one can tell: its main
            thread slept in C code, from which no interrupt had woken it, or had just come out of a
            collective.
    """

    rank: int
    outcome: str
    at: float
    etype: str = ""
    message: str = ""
    traceback: tuple[str, ...] = ()
    answer: Memory | None = None
    notices: tuple[str, ...] = ()
    asleep: bool = False


class Asking(Message, frozen=True):
    """What a rank asks the person at the keyboard, and waits for: its first question is number 1, with 0 it asks nothing more."""

    rank: int
    number: int = 0
    prompt: str = ""
    hidden: bool = False


class RankKept(Message, frozen=True):
    """A rank has done all that its order asked, keeps its names, and waits for the next one.

    ``host_bytes`` are memory of its own, ``gpu_bytes`` what torch has reserved of its GPUs.
    """

    rank: int
    host_bytes: int = 0
    gpu_bytes: int = 0


class RankUse(msgspec.Struct, frozen=True):
    """What a rank uses of its VM, as its agent sees it from outside.

    Attributes:
        state: ``starting``, ``running``, ``stopped`` (by SIGSTOP), or how it ended
            (:class:`RankEnded`).
        cpu: percent of one processor.
        nbytes: memory that it shares with no file.
        gpu: percent of its GPUs, on average; None: it has none, or nobody can tell.
        gpu_nbytes: memory that it holds of them, where the driver tells processes apart; else what
            all programs hold.
    """

    rank: int
    state: str
    cpu: int = 0
    nbytes: int = 0
    gpu: int | None = None
    gpu_nbytes: int = 0


RankSays = RankStage | Asking | RankEnded | RankKept


class Answer(Message, frozen=True):
    """What the person at the keyboard answers to a rank's question; ``refused`` says why nobody can.

    It goes from a client by the supervisor and an agent to the rank.
    """

    run: str
    rank: int
    number: int
    text: str
    refused: str = ""


class RankRequest(Message, frozen=True):
    """What an agent asks of a process that is, or was prepared to be, a rank.

    Attributes:
        what: ``notice``: a SIGINT was sent to the rank: say when it is noticed, and break off a
            wait that keeps it from that; ``ignored``: the rank ignored it, as system(3) does while
            a program runs. ``names``: pack the names as they stand, by another thread while the
            main one waits, and leave. ``taken``: the agent has rank 0's names: forget them.
            ``leave``: there is no other order, and the agent has all it needs: exit.
            ``collective``: write down which one it waits in (runs/stacks.py).
    """

    what: Literal["notice", "names", "taken", "leave", "collective"]
    ignored: bool = False


@dataclass(frozen=True)
class Preparation:
    """What ranks of different runs have in common, so that a process can prepare for it before there is an order.

    Attributes:
        project: absolute path of the project, or of this VM's copy of it.
        colors, shell_class: as in :class:`Cell`.
    """

    environ: dict[str, str]
    project: str
    colors: str
    shell_class: str


class Cell(msgspec.Struct, frozen=True):
    """A headed cell, from the notebook to its ranks.

    Attributes:
        execution_count: the notebook's ``In[n]``.
        spec: the header.
        colors: name of the notebook's colour theme, for tracebacks.
        shell_class: name of the class of the notebook's shell, which libraries ask for.
        directory: where the notebook is now; kept ranks go there, others begin in the project.
        own_gpu_first: whether its program takes the first GPU for its own, as those for
            DataParallel do; those for several processes number GPUs by ranks, as later cells of
            kept ranks may.
    """

    text: str
    execution_count: int
    spec: RunSpec
    colors: str
    shell_class: str = "ZMQInteractiveShell"
    directory: str = ""
    own_gpu_first: bool = False


class Workspace(msgspec.Struct, frozen=True):
    """What a notebook finds on its machine; on another VM it is staged (:mod:`taas.agent.staging`).

    ``changed`` are variables of ``environ`` that the notebook set itself; the others it inherited
    on its machine.
    """

    project: str
    environ: dict[str, str]
    changed: tuple[str, ...] = ()


class Staged(msgspec.Struct, frozen=True):
    """What a job needs, where its processes find it on their VM.

    Attributes:
        payload: the packed names, or loaders.
        replica: the copy of the project that is to stand there; empty: the project itself is there.
        on_demand: folder in which files are asked for that the copy lacks
            (:mod:`taas.project_sync.files_on_demand`).
        output: folder of the ranks' output files, or a data process's log.
        scratch: folder for what ranks other than 0 write in the project's place.
        since_ns: when the run began, by the clock of the file system that the project, or its copy,
            is on.
    """

    payload: Memory
    project: str
    replica: str
    on_demand: str
    environ: dict[str, str]
    output: str
    scratch: str
    since_ns: int


class RankOrder(Message, frozen=True):
    """What the ranks of one run on one VM are to do: complete when the supervisor writes it, the same for all of them.

    Attributes:
        group_rank: the VM's number in the run, as torchrun's.
        store: the run's store; without a port, the agent of these ranks opens it.
        gpus: the run's GPUs on this VM, as CUDA_VISIBLE_DEVICES names them; empty where it is
            rehearsed.
        restart_count: how often the run was started again.
        delivery: how a rank reaches the run's data workers.
        host: this VM's own address, as the run's other VMs reach it.
        continues: these are the ranks that this VM has kept.
    """

    run: str
    vm: str
    cell: Cell
    group_rank: int
    store: StoreAddress
    gpus: tuple[str, ...]
    delivery: DeliveryConfig | None = None
    restart_count: int = 0
    host: str = "127.0.0.1"
    continues: bool = False

    @property
    def local_world_size(self) -> int:
        """How many ranks are on this VM."""
        return self.cell.spec.ranks_per_vm

    @property
    def first_rank(self) -> int:
        """The first of them."""
        return self.group_rank * self.local_world_size

    @property
    def rehearsed(self) -> int:
        """How many GPUs to pretend, or 0."""
        return 0 if self.gpus else self.cell.spec.gpus_per_vm


class RankStart(Message, frozen=True):
    """Be this rank, with these variables over the notebook's; the store is open."""

    order: RankOrder
    staged: Staged
    local_rank: int
    environ: dict[str, str]

    @property
    def rank(self) -> int:
        """Global rank."""
        return self.order.first_rank + self.local_rank


def preparation_of(order: RankOrder, staged: Staged) -> Preparation:
    """What a process has to have done before it can become one of these ranks."""
    cell, project = order.cell, staged.replica or staged.project
    return Preparation(staged.environ, project, cell.colors, cell.shell_class)


RankHears = RankStart | RankRequest | Answer


# ---------------------------------------------------------------- the socket pair

NOTICE = signal.SIGRTMIN + 12
"""Asks the main thread of a rank to say that it runs Python code; neither glibc, CUDA nor profilers
use it.
"""
_read_rank = MessageReader(RankSays)
_LONG = b"\xc1"  # the packet of a long message: no message in MessagePack has this byte
_SHORT = 4096  # bytes of a packet, at most
_READS = 1024  # more packets than a socket holds
_MOST_DESCRIPTORS = 4


def socket_pair() -> tuple[socket.socket, socket.socket]:
    """Return the two ends of a connection."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def send(end: socket.socket, message: bytes, *descriptors: int, flags: int = 0) -> None:
    """Send a message, and with it descriptors of this process; any thread may, and a handler of signals."""
    with contextlib.ExitStack() as stack:
        if len(message) > _SHORT:
            file = stack.enter_context(os.fdopen(os.memfd_create("taas-message"), "wb"))
            file.write(message)
            file.flush()
            message, descriptors = _LONG, (*descriptors, file.fileno())
        rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", descriptors))
        end.sendmsg([message], [rights] if descriptors else [], flags)


def receive(end: socket.socket, flags: int = 0) -> tuple[bytes, list[int]]:
    """Return the next message, and the descriptors that came with it.

    Raises:
        EOFError: the other end is closed, and all that was said there was heard.
        OSError: there is no descriptor left.
    """
    descriptors = array("i")
    room = socket.CMSG_SPACE(_MOST_DESCRIPTORS * descriptors.itemsize)
    try:
        message, rights, _, _ = end.recvmsg(_SHORT, room, flags | socket.MSG_CMSG_CLOEXEC)
    except ConnectionResetError:  # said once where it was closed with messages unheard
        return receive(end, flags)
    for _, _, data in rights:
        descriptors.frombytes(data)
    if not message:
        raise EOFError("the other end is closed")
    if message != _LONG:
        return message, descriptors.tolist()
    if not descriptors:
        raise OSError("a message could not be taken: too many files are open")
    with os.fdopen(descriptors.pop(), "rb") as file:
        file.seek(0)  # its place is the sender's, too
        return file.read(WIRE_LIMIT), descriptors.tolist()


def tell(rank: socket.socket, message: bytes, *descriptors: int) -> None:
    """Send a rank a message; one that has left hundreds unheard does not get it, and keeps its connection.

    Whoever waits for what it does then has a deadline.
    """
    with contextlib.suppress(BlockingIOError, ConnectionError):  # killed: its sentinel says so
        send(rank, message, *descriptors, flags=socket.MSG_DONTWAIT)


def hear(rank: socket.socket) -> tuple[list[RankSays], bool]:
    """Return the messages that are there, and whether there will be no others: it is closed, or said what no rank says."""
    said: list[RankSays] = []
    try:
        for _ in range(_READS):
            message, descriptors = receive(rank, socket.MSG_DONTWAIT)
            for descriptor in descriptors:  # of no use here
                os.close(descriptor)
            said.append(_read_rank(message))
    except BlockingIOError:
        return said, False
    except (EOFError, OSError, Unreadable):
        return said, True
    return said, False
