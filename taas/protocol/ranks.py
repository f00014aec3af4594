"""The messages between a rank and its agent, and the socket pair that transfers them.

The socket pair has no name, so that no other process can connect. A message is one packet (unix(7),
SOCK_SEQPACKET), so that it arrives as a whole. File descriptors are sent with it, because a rank
under write protection may not open those of other processes in ``/proc``. A long message is sent as
a memory file, which is the last of the descriptors. A rank blocks while it waits for messages of
its agent or for space to send its own; the agent never blocks.
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
    """The progress of a rank.

    Attributes:
        stage: ``begun``: the cell begins to run. ``at work``: the main thread of an interrupted
            rank runs Python code, so the cell handles the interrupt. ``packing``: the rank packs
            its variables, and its :class:`RankEnded` follows. ``wrote``: the rank has written down
            the collective in which it waits, and may be asked again.
        rank: the number of the rank, in the message to the supervisor.
    """

    stage: Literal["begun", "at work", "packing", "wrote"]
    rank: int = -1


class RankEnded(Message, frozen=True):
    """How a cell ended in one rank.

    Attributes:
        outcome: ``done``, ``raised``, ``exited`` (``sys.exit(n)``, n ≠ 0) or ``interrupted``,
            reported by the rank; ``died`` (by a signal, or without a message), ``orphaned`` (with
            its forkserver) or ``ended`` (by a signal of the agent), reported by the agent.
            ``stood``: the cell is still running, and these are the rank's variables in case no
            other message comes.
        at: the wall-clock time of its machine, in seconds since the epoch.
        etype: the class name of the exception, or the name of the signal.
        message: the text of the exception, or what is known about the end.
        line: the line of the cell that raised the exception, or that called the code that raised
            it; 0 if it is not known.
        answer: rank 0's variables: at the end of the cell, or in their state when it failed or was
            ended.
        notices: lines for the user.
        asleep: whether it was ended while it was probably waiting for other ranks: its main thread
            was asleep in C code, and no interrupt had woken it, or it had just left a collective.
    """

    rank: int
    outcome: str
    at: float
    etype: str = ""
    message: str = ""
    line: int = 0
    traceback: tuple[str, ...] = ()
    answer: Memory | None = None
    notices: tuple[str, ...] = ()
    asleep: bool = False


class Asking(Message, frozen=True):
    """A rank's question to the person at the keyboard; the rank waits for the :class:`Answer`.

    The first question of a rank has number 1; with number 0 it withdraws its question.
    """

    rank: int
    number: int = 0
    prompt: str = ""
    hidden: bool = False


class RankKept(Message, frozen=True):
    """A rank has run its cell, keeps its variables, and waits for the next cell.

    ``host_bytes`` is the memory of this rank alone, ``gpu_bytes`` the GPU memory that torch has
    reserved.
    """

    rank: int
    host_bytes: int = 0
    gpu_bytes: int = 0


class RankUse(msgspec.Struct, frozen=True):
    """A rank's use of resources, as its agent sees it.

    Attributes:
        state: ``starting``, ``running``, ``stopped`` (by SIGSTOP), or the outcome
            (:class:`RankEnded`).
        cpu: percent of one processor.
        nbytes: memory that is not backed by a file.
        gpu: utilisation of its GPUs in percent, on average; None if it has none, or if unknown.
        gpu_nbytes: the GPU memory that it holds, if the driver reports this for each process;
            otherwise the memory that all programs hold.
    """

    rank: int
    state: str
    cpu: int = 0
    nbytes: int = 0
    gpu: int | None = None
    gpu_nbytes: int = 0


class RankImported(Message, frozen=True):
    """The installed modules that a rank has imported since it was forked, in order."""

    modules: tuple[str, ...]


class Readiness(enum.Enum):
    """A spare's reply to :class:`GetReady` or to :class:`RankStart`."""

    IMPORTED = "imported"  # it has imported all the requested modules, or as many as it could
    TAKES = "takes"  # it is ready for this job, and accepts it
    UNFIT = "unfit"  # it differs from a fresh process, so it exits or has to be ended


class RankReady(Message, frozen=True):
    """The progress of a spare that gets ready to be a rank.

    ``nbytes`` is the memory of this process alone. ``unfit`` describes, for the log, how it differs
    from a fresh process.
    """

    state: Readiness
    nbytes: int = 0
    unfit: str = ""


RankSays = RankStage | Asking | RankEnded | RankKept | RankImported | RankReady


class Answer(Message, frozen=True):
    """The reply of the person at the keyboard to a rank's question.

    ``refused`` is the reason if there can be no reply.

    The message is forwarded from a client through the supervisor and an agent to the rank.
    """

    run: str
    rank: int
    number: int
    text: str
    refused: str = ""


class RankRequest(Message, frozen=True):
    """An agent's request to a process that is a rank, or was prepared to be one.

    Attributes:
        what: ``notice``: the rank was sent a SIGINT; report when it is noticed, and break off a
            wait that prevents this. ``names``: pack the variables in their present state, in
            another thread if the main thread is waiting, and exit. ``taken``: the agent has rank
            0's variables, so release them. ``leave``: no other job will come, and the agent has
            everything that it needs, so exit. ``collective``: write down the collective in which
            the rank waits (runs/stacks.py).
        ignored: for ``notice``: whether the rank ignored the SIGINT, as system(3) does while a
            program runs.
    """

    what: Literal["notice", "names", "taken", "leave", "collective"]
    ignored: bool = False


@dataclass(frozen=True)
class Preparation:
    """What ranks of different runs have in common, so that a process can prepare in advance.

    Attributes:
        project: the absolute path of the project, or of this VM's copy of it.
        colors, shell_class: as in :class:`Cell`.
    """

    environ: dict[str, str]
    project: str
    colors: str
    shell_class: str


class Cell(msgspec.Struct, frozen=True):
    """A cell with a header, as it is sent from the notebook to its ranks.

    Attributes:
        execution_count: the notebook's ``In[n]``.
        spec: the parsed header.
        colors: the name of the notebook's colour theme, for tracebacks.
        shell_class: the name of the class of the notebook's shell, which libraries check.
        directory: the notebook's current directory; kept ranks change to it, other ranks begin in
            the project.
        own_gpu_first: whether the program in the cell expects its own GPU to be the first one, as
            programs for DataParallel do. Programs for several processes number GPUs by ranks, and
            so may later cells of kept ranks.
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
        """Return the spelling of the program's option for the local rank, as launchers pass it."""
        found = re.search("--local[_-]rank", self.text)
        return found[0] if found else ""


class AtImport(msgspec.Struct, frozen=True):
    """State of a notebook's process, besides the environment, that a module may read at import.

    It is empty if it cannot be determined.

    Attributes:
        path, arguments: ``sys.path`` and ``sys.argv``, as they are sent to ranks.
        settings: other state of the process, each kind as a text; equal texts mean equal state.
    """

    path: tuple[str, ...] = ()
    arguments: tuple[str, ...] = ()
    settings: dict[str, str] = {}


class Workspace(msgspec.Struct, frozen=True):
    """The environment of a notebook on its machine.

    For another VM it is staged (:mod:`taas.agent.staging`).

    ``changed`` are the names of variables in ``environ`` that the notebook set itself; it inherited
    the others on its machine.
    """

    project: str
    environ: dict[str, str]
    changed: tuple[str, ...] = ()
    at_import: AtImport = AtImport()


class Staged(msgspec.Struct, frozen=True):
    """What a job needs, at the locations where its processes find it on their VM.

    Attributes:
        payload: the packed variables, or loaders.
        replica: the copy of the project that is mounted at the project's path on that VM; empty if
            the project itself is there.
        on_demand: the folder in which processes request files that the copy lacks
            (:mod:`taas.project.sync.files_on_demand`).
        output: the folder of the ranks' output files, or a data process's log.
        scratch: the folder for project files that ranks other than 0 write.
        since_ns: the start of the run, by the clock of the file system of the project or its copy.
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
    """The job description for the ranks of one run on one VM.

    The supervisor writes it; it is complete, and the same for all these ranks.

    Attributes:
        group_rank: the VM's number in the run, as in torchrun.
        store: the run's store; without a port, the agent of these ranks opens it.
        gpus: the run's GPUs on this VM, as named in CUDA_VISIBLE_DEVICES; empty if the run is
            rehearsed.
        restart_count: how often the run was restarted.
        delivery: how a rank reaches the run's data workers.
        host: this VM's address, at which the run's other VMs reach it.
        continues: whether these are the kept ranks of this VM.
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
        """Return the number of ranks on this VM."""
        return self.cell.spec.ranks_per_vm

    @property
    def first_rank(self) -> int:
        """Return the number of the first rank on this VM."""
        return self.group_rank * self.local_world_size

    @property
    def rehearsed(self) -> int:
        """Return the number of GPUs to simulate, or 0."""
        return 0 if self.gpus else self.cell.spec.gpus_per_vm


class RankStart(Message, frozen=True):
    """Become this rank, with these environment variables in addition to the notebook's.

    The store is open.
    """

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
        """Return the variables without :data:`VARIABLES_OF_A_RUN`."""
        of_all = self.environ.items()
        return {name: value for name, value in of_all if name not in VARIABLES_OF_A_RUN}


def preparation_of(order: RankOrder, staged: Staged) -> Preparation:
    """Return the preparation that a process needs to become one of these ranks."""
    cell, project = order.cell, staged.replica or staged.project
    return Preparation(staged.environ, project, cell.colors, cell.shell_class)


VARIABLES_OF_A_RUN = ("MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_ERROR_FILE")
"""Environment variables of a rank that are new for each run; similar runs share the others."""


class GetReady(Message, frozen=True):
    """Become the rank that is expected for the next job, and import ``modules``.

    ``start`` is that rank's message in the last job, without :data:`VARIABLES_OF_A_RUN`; its
    scratch is a folder for this purpose.
    """

    start: RankStart
    modules: tuple[str, ...]


RankHears = RankStart | GetReady | RankRequest | Answer


# ---------------------------------------------------------------- the socket pair

NOTICE = signal.SIGRTMIN + 12
"""Requests the main thread of a rank to report that it runs Python code. Glibc, CUDA and profilers
do not use this signal.
"""
_read_rank = MessageReader(RankSays)
_LONG = b"\xc1"  # the packet of a long message; in MessagePack, no message consists of this byte
_SHORT = 4096  # the maximum size of a packet in bytes
_READS = 1024  # more packets than a socket holds
_MOST_DESCRIPTORS = 4


def socket_pair() -> tuple[socket.socket, socket.socket]:
    """Return the two ends of a connection."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def send(end: socket.socket, message: bytes, *descriptors: int, flags: int = 0) -> None:
    """Send a message, and descriptors of this process with it.

    Any thread may call this, and so may a signal handler.
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
        OSError: no descriptor is left.
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
        file.seek(0)  # the sender shares the file position
        return file.read(WIRE_LIMIT), descriptors.tolist()


def tell(rank: socket.socket, message: bytes, *descriptors: int) -> None:
    """Send a rank a message without blocking; it is lost if hundreds of messages are unread.

    The connection stays open. Code that waits for the rank's reaction has a deadline.
    """
    # the rank was killed, which its sentinel shows
    with contextlib.suppress(BlockingIOError, ConnectionError):
        send(rank, message, *descriptors, flags=socket.MSG_DONTWAIT)


def hear(rank: socket.socket) -> tuple[list[RankSays], bool]:
    """Return the rank's waiting messages, and whether no more will come.

    No more will come if the rank has closed its end, or has sent data that are not a message of a
    rank.
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
