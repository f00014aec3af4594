"""The messages between a rank and its agent, and the socket pair that carries them.

The socket pair has no name, so that no other process can connect. A message is one packet (unix(7),
SOCK_SEQPACKET), so that it arrives as a whole. Descriptors travel with it, because a rank behind
its wall may not open those of other processes in ``/proc``. A long message is a memory file, the
last one of its descriptors. A rank waits for messages of its agent, and until there is room for its
own; the agent never waits.
"""

from __future__ import annotations

import contextlib
import enum
import os
import re
import signal
import socket
from array import array
from dataclasses import dataclass
from typing import Literal

import msgspec

from taas.header.options import RunSpec
from taas.protocol.delivery_orders import DeliveryConfig
from taas.protocol.framing import (
    WIRE_LIMIT,
    Memory,
    Message,
    MessageReader,
    StoreAddress,
    Unreadable,
)


class RankStage(Message, frozen=True):
    """How far a rank is.

    Attributes:
        stage: ``begun``: the cell begins to run. ``at work``: the main thread of an interrupted
            rank runs Python code, so the cell handles the interrupt. ``packing``: the rank packs
            its names, and its :class:`RankEnded` follows. ``wrote``: it has written down the
            collective in which it waits, and may be asked again.
        rank: its number, in the message to the supervisor.
    """

    stage: Literal["begun", "at work", "packing", "wrote"]
    rank: int = -1


class RankEnded(Message, frozen=True):
    """How a cell ended in one rank.

    Attributes:
        outcome: ``done``, ``raised``, ``exited`` (``sys.exit(n)``, n ≠ 0), ``interrupted``. The
            agent says ``died`` (by a signal, or without a message), ``orphaned`` (with its
            forkserver) and ``ended`` (by a signal of the agent). ``stood``: the cell goes on, and
            these are the rank's names in case no other message comes.
        at: wall-clock time of its machine in seconds since the epoch.
        etype: class name of the exception, or the signal's name.
        message: the exception's text, or what is known of the end.
        answer: rank 0's names: at the end of the cell, or as they were when it failed or was ended.
        notices: lines for the user.
        asleep: it was ended while it probably waited for other ranks: its main thread slept in C
            code, from which no interrupt had woken it, or had just left a collective.
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
    """A rank's question to the person at the keyboard; the rank waits for the :class:`Answer`.

    Its first question has number 1; with 0 it withdraws its question.
    """

    rank: int
    number: int = 0
    prompt: str = ""
    hidden: bool = False


class RankKept(Message, frozen=True):
    """A rank has carried out its order, keeps its names, and waits for the next order.

    ``host_bytes`` is memory of this rank alone, ``gpu_bytes`` the GPU memory that torch has
    reserved.
    """

    rank: int
    host_bytes: int = 0
    gpu_bytes: int = 0


class RankUse(msgspec.Struct, frozen=True):
    """A rank's use of its VM, as its agent sees it.

    Attributes:
        state: ``starting``, ``running``, ``stopped`` (by SIGSTOP), or how it ended
            (:class:`RankEnded`).
        cpu: percent of one processor.
        nbytes: memory without a file behind it.
        gpu: percent of its GPUs, on average; None: it has none, or the figure is not known.
        gpu_nbytes: GPU memory that it holds, if the driver reports that for each process;
            otherwise the memory that all programs hold.
    """

    rank: int
    state: str
    cpu: int = 0
    nbytes: int = 0
    gpu: int | None = None
    gpu_nbytes: int = 0


class RankImported(Message, frozen=True):
    """The installed modules that a rank has imported beyond what it was forked with, in order."""

    modules: tuple[str, ...]


class Readiness(enum.Enum):
    """The reply of a spare to :class:`GetReady`, or to an order."""

    IMPORTED = "imported"  # it has imported all modules that it was told to, or as many as it could
    TAKES = "takes"  # the order is the one that it is ready for
    UNFIT = "unfit"  # it differs from a fresh process: it leaves, or has to be ended


class RankReady(Message, frozen=True):
    """How far a spare is with getting ready.

    ``nbytes`` is the memory that only it has. ``unfit`` says, for the log, how it differs from a
    fresh process.
    """

    state: Readiness
    nbytes: int = 0
    unfit: str = ""


RankSays = RankStage | Asking | RankEnded | RankKept | RankImported | RankReady


class Answer(Message, frozen=True):
    """The reply of the person at the keyboard to a rank's question.

    ``refused`` says why there can be none.

    It travels from a client through the supervisor and an agent to the rank.
    """

    run: str
    rank: int
    number: int
    text: str
    refused: str = ""


class RankRequest(Message, frozen=True):
    """An agent's request to a process that is a rank, or was prepared to be one.

    Attributes:
        what: ``notice``: the rank was sent a SIGINT: say when it is noticed, and break off a wait
            that prevents this; ``ignored``: the rank ignored it, as system(3) does while a program
            runs. ``names``: pack the names as they are, in another thread if the main one waits,
            and leave. ``taken``: the agent has rank 0's names, so forget them. ``leave``: no other
            order will come, and the agent has all it needs, so exit. ``collective``: write down
            the collective in which it waits (runs/stacks.py).
    """

    what: Literal["notice", "names", "taken", "leave", "collective"]
    ignored: bool = False


@dataclass(frozen=True)
class Preparation:
    """The facts that ranks of different runs share, so that a process can prepare before its order.

    Attributes:
        project: absolute path of the project, or of this VM's copy of it.
        colors, shell_class: as in :class:`Cell`.
    """

    environ: dict[str, str]
    project: str
    colors: str
    shell_class: str


class Cell(msgspec.Struct, frozen=True):
    """A headed cell, as it travels from the notebook to its ranks.

    Attributes:
        execution_count: the notebook's ``In[n]``.
        spec: the header.
        colors: name of the notebook's colour theme, for tracebacks.
        shell_class: name of the class of the notebook's shell, which libraries ask for.
        directory: the notebook's current directory; kept ranks change to it, others begin in the
            project.
        own_gpu_first: whether its program expects its own GPU to be the first one, as programs for
            DataParallel do. Programs for several processes number GPUs by ranks, and later cells
            of kept ranks may do so.
    """

    text: str
    execution_count: int
    spec: RunSpec
    colors: str
    shell_class: str = "ZMQInteractiveShell"
    directory: str = ""
    own_gpu_first: bool = False

    @property
    def local_rank_option(self) -> str:
        """Return how its program spells the option for the local rank, as a launcher passes it."""
        found = re.search("--local[_-]rank", self.text)
        return found[0] if found else ""


class AtImport(msgspec.Struct, frozen=True):
    """State of a notebook's process that a module may read at import, besides the environment.

    It is empty if it cannot be determined.

    Attributes:
        path, arguments: ``sys.path`` and ``sys.argv``, as they travel to ranks.
        settings: other state of the process, each kind as a text; equal texts mean equal state.
    """

    path: tuple[str, ...] = ()
    arguments: tuple[str, ...] = ()
    settings: dict[str, str] = {}


class Workspace(msgspec.Struct, frozen=True):
    """The environment of a notebook on its machine.

    For another VM it is staged (:mod:`taas.agent.staging`).

    ``changed`` are variables of ``environ`` that the notebook set itself; the others it inherited
    on its machine.
    """

    project: str
    environ: dict[str, str]
    changed: tuple[str, ...] = ()
    at_import: AtImport = AtImport()


class Staged(msgspec.Struct, frozen=True):
    """What a job needs, where its processes find it on their VM.

    Attributes:
        payload: the packed names, or loaders.
        replica: the copy of the project that takes its place there; empty: the project itself is
            there.
        on_demand: folder in which processes ask for files that the copy lacks
            (:mod:`taas.project.sync.files_on_demand`).
        output: folder of the ranks' output files, or a data process's log.
        scratch: folder for the project files that ranks other than 0 write.
        since_ns: when the run began, by the clock of the project's (or its copy's) file system.
        at_import: state of the notebook's process that modules may read when ranks import them.
    """

    payload: Memory
    project: str
    replica: str
    on_demand: str
    environ: dict[str, str]
    output: str
    scratch: str
    since_ns: int
    at_import: AtImport = AtImport()


class RankOrder(Message, frozen=True):
    """The order for the ranks of one run on one VM.

    The supervisor writes it; it is complete, and the same for all these ranks.

    Attributes:
        group_rank: the VM's number in the run, as torchrun's.
        store: the run's store; without a port, the agent of these ranks opens it.
        gpus: the run's GPUs on this VM, as CUDA_VISIBLE_DEVICES names them; empty if the run is
            rehearsed.
        restart_count: how often the run was restarted.
        delivery: how a rank reaches the run's data workers.
        host: this VM's own address, as the run's other VMs reach it.
        continues: these are the kept ranks of this VM.
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
        """Return how many ranks are on this VM."""
        return self.cell.spec.ranks_per_vm

    @property
    def first_rank(self) -> int:
        """Return the number of the first of them."""
        return self.group_rank * self.local_world_size

    @property
    def rehearsed(self) -> int:
        """Return how many GPUs to pretend, or 0."""
        return 0 if self.gpus else self.cell.spec.gpus_per_vm


class RankStart(Message, frozen=True):
    """Become this rank, with these variables over the notebook's; the store is open."""

    order: RankOrder
    staged: Staged
    local_rank: int
    environ: dict[str, str]

    @property
    def rank(self) -> int:
        """Return the global rank."""
        return self.order.first_rank + self.local_rank

    @property
    def lasting_environ(self) -> dict[str, str]:
        """Return its variables without :data:`VARIABLES_OF_A_RUN`."""
        of_all = self.environ.items()
        return {name: value for name, value in of_all if name not in VARIABLES_OF_A_RUN}


def preparation_of(order: RankOrder, staged: Staged) -> Preparation:
    """Return the preparation that a process needs to become one of these ranks."""
    cell, project = order.cell, staged.replica or staged.project
    return Preparation(staged.environ, project, cell.colors, cell.shell_class)


VARIABLES_OF_A_RUN = ("MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_ERROR_FILE")
"""Variables of a rank that are new for each run; similar runs share the others."""


class GetReady(Message, frozen=True):
    """Become the rank for which the next order is expected, and import ``modules``.

    ``start`` is that rank's part of the last order, without :data:`VARIABLES_OF_A_RUN`; its scratch
    is a folder for this purpose.
    """

    start: RankStart
    modules: tuple[str, ...]


RankHears = RankStart | GetReady | RankRequest | Answer


# ---------------------------------------------------------------- the socket pair

NOTICE = signal.SIGRTMIN + 12
"""Asks the main thread of a rank to say that it runs Python code. Neither glibc, CUDA nor profilers
use this signal.
"""
_read_rank = MessageReader(RankSays)
_LONG = b"\xc1"  # the packet of a long message: no message in MessagePack has this byte
_SHORT = 4096  # the most bytes of a packet
_READS = 1024  # more packets than a socket holds
_MOST_DESCRIPTORS = 4


def socket_pair() -> tuple[socket.socket, socket.socket]:
    """Return the two ends of a connection."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def send(end: socket.socket, message: bytes, *descriptors: int, flags: int = 0) -> None:
    """Send a message, and descriptors of this process with it.

    Any thread may call this, and a signal handler.
    """
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
        EOFError: the other end is closed, and all its messages were read.
        OSError: there is no descriptor left.
    """
    descriptors = array("i")
    room = socket.CMSG_SPACE(_MOST_DESCRIPTORS * descriptors.itemsize)
    try:
        message, rights, _, _ = end.recvmsg(_SHORT, room, flags | socket.MSG_CMSG_CLOEXEC)
    except ConnectionResetError:  # raised once if the peer closed with unread messages
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
        file.seek(0)  # the sender shares the position
        return file.read(WIRE_LIMIT), descriptors.tolist()


def tell(rank: socket.socket, message: bytes, *descriptors: int) -> None:
    """Send a rank a message without waiting; a rank with hundreds of unread ones does not get it.

    Its connection stays. Code that waits for the rank's reaction has a deadline.
    """
    with contextlib.suppress(BlockingIOError, ConnectionError):  # killed: its sentinel says so
        send(rank, message, *descriptors, flags=socket.MSG_DONTWAIT)


def hear(rank: socket.socket) -> tuple[list[RankSays], bool]:
    """Return the rank's waiting messages, and whether no more will come.

    No more come if it has closed its end, or sent something that is not a message of a rank.
    """
    said: list[RankSays] = []
    try:
        for _ in range(_READS):
            message, descriptors = receive(rank, socket.MSG_DONTWAIT)
            for descriptor in descriptors:  # an agent has no use for them
                os.close(descriptor)
            said.append(_read_rank(message))
    except BlockingIOError:
        return said, False
    except (EOFError, OSError, Unreadable):
        return said, True
    return said, False
