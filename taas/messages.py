"""What crosses a process boundary: structs, their framing, and the keys that guard them.

Everything on a taas wire is a :mod:`msgspec` struct in MessagePack, decoded into the one union that the
receiver expects; nothing here is ever a pickle. Values (the cell's names, rank 0's answer) travel beside the
messages as :class:`Memory`.

Between kernel, supervisor and agents the wire is zmq with CURVE: each peer has a key pair of its own and the
supervisor knows the allowed public keys and the role of each before a peer connects
(https://rfc.zeromq.org/spec/26/, https://rfc.zeromq.org/spec/27/).
"""

from __future__ import annotations

import os
from typing import Any

import msgspec

from taas.delivery.config import RankConfig
from taas.engines import EngineChoice
from taas.header import RunSpec
from taas.stacks import Place, RankSeen, Trouble

WIRE_LIMIT = 64 << 20
"""Largest message accepted from a peer, in bytes."""


class Message(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Base of all messages: immutable, tagged with their class's name."""


class Memory(msgspec.Struct, frozen=True):
    """A memory file of another process.

    Attributes:
        pid: the process of this host that holds it open; 0: it is on another host, and the peer that named it
            hands out its pieces (:mod:`taas.pieces`).
        fd: its number there.
        nbytes: its size in bytes.
    """

    pid: int
    fd: int
    nbytes: int

    @property
    def elsewhere(self) -> bool:
        """Whether it is on another host."""
        return self.pid == 0

    def open(self) -> int:
        """Return a descriptor of one's own for the same memory.

        Raises:
            OSError: the process is gone, or the file there belongs to somebody else.
        """
        fd = os.open(f"/proc/{self.pid}/fd/{self.fd}", os.O_RDONLY | os.O_CLOEXEC)
        status = os.fstat(fd)
        if status.st_uid != os.getuid() or status.st_size != self.nbytes:
            os.close(fd)
            raise OSError(f"/proc/{self.pid}/fd/{self.fd} is not the memory that was announced")
        return fd


class Endpoint(msgspec.Struct, frozen=True):
    """Where a TCPStore listens."""

    host: str
    port: int


# ---------------------------------------------------------------- what a rank says, and hears


class Output(Message, frozen=True):
    """Consecutive output of one rank.

    Attributes:
        kind: ``stdout``, ``stderr``, ``display``, ``update``, ``clear`` or ``result``.
        text: for the two streams.
        body: for the others, the arguments of IPython's publisher, in MessagePack.
    """

    kind: str
    text: str = ""
    body: bytes = b""


class RankReady(Message, frozen=True):
    """A spare process has done all that a rank does before its order, and waits for it."""


class CellStarted(Message, frozen=True):
    """A rank begins to run the cell."""

    rank: int


class RankEnded(Message, frozen=True):
    """How a cell ended in one rank.

    Attributes:
        rank: global rank.
        outcome: ``done``, ``raised``, ``exited`` (``sys.exit(n)``, n ≠ 0), ``interrupted``, or, said by the
            agent, ``died`` (by a signal, or without a word), ``orphaned`` (with its forkserver) and ``ended`` (by a
            signal of the agent's).
        at: wall-clock time in seconds since the epoch.
        etype: class name of the exception, or the signal's name.
        message: the exception's text, or what is known.
        traceback: formatted lines.
        answer: rank 0's names, where the cell is done.
        notices: lines for the user.
    """

    rank: int
    outcome: str
    at: float
    etype: str = ""
    message: str = ""
    traceback: tuple[str, ...] = ()
    answer: Memory | None = None
    notices: tuple[str, ...] = ()


class PagesCopied(Message, frozen=True):
    """The pages that a rank copied, address and length in bytes each: the next spares copy them ahead."""

    pages: tuple[tuple[int, int], ...]


RankSays = RankReady | PagesCopied | CellStarted | RankEnded


class Dismissed(Message, frozen=True):
    """The agent has all it needs from the rank, which may exit."""


class Preparation(msgspec.Struct, frozen=True):
    """What ranks of different runs have in common, so that a process can prepare for it before there is an order.

    Attributes:
        environ: the notebook's environment.
        project: absolute path of the project, or of this VM's copy of it.
        colors: name of the notebook's colour theme, for tracebacks.
    """

    environ: dict[str, str]
    project: str
    colors: str


class SpareStart(Message, frozen=True):
    """Prepare, then wait for an order.

    Attributes:
        preparation: what for.
        pages: memory to copy ahead (rank/copied_pages.py).
    """

    preparation: Preparation
    pages: tuple[tuple[int, int], ...]


class ProjectFiles(msgspec.Struct, frozen=True):
    """A file in the project that proves to who reads it that he sees the notebook's disk.

    Attributes:
        path: where it is; empty where there is none.
        token: what is in it.
    """

    path: str
    token: bytes


class RankOrder(Message, frozen=True):
    """Everything the ranks of one run on one VM are told at their start; the same for all of them.

    Attributes:
        run: name of the run.
        vm: name of the VM.
        cell: text of the cell.
        execution_count: the notebook's ``In[n]``.
        project: absolute path of the project.
        environ: the notebook's environment.
        payload: the captured names.
        first_rank, world_size, local_world_size, group_rank, group_world_size: as torchrun's.
        store: the run's TCPStore.
        gpus: the run's GPUs on this VM, as CUDA_VISIBLE_DEVICES names them; empty where it is rehearsed.
        rehearsed: how many GPUs to pretend, or 0.
        restart_count: how often the run was started again.
        control: name of the agent's socket in the abstract namespace.
        log_dir: folder of the ranks' output files.
        scratch: folder of the run for what ranks other than 0 write in the project's place.
        spec: the header.
        colors: name of the notebook's colour theme, for tracebacks.
        delivery: how a rank reaches the run's data workers; its rank is filled in there.
        host: this VM's own address, as the run's other VMs reach it.
        changed: variables of ``environ`` that the notebook set itself; the others it inherited on its machine.
        files: on a VM elsewhere, how it finds out whether it sees the project.
        replica: the copy of the project that is to stand in its place in the ranks; empty: the project itself is there.
    """

    run: str
    vm: str
    cell: str
    execution_count: int
    project: str
    environ: dict[str, str]
    payload: Memory
    first_rank: int
    world_size: int
    local_world_size: int
    group_rank: int
    group_world_size: int
    store: Endpoint
    gpus: tuple[str, ...]
    rehearsed: int
    control: str
    log_dir: str
    scratch: str
    spec: RunSpec
    colors: str
    delivery: RankConfig | None = None
    restart_count: int = 0
    host: str = "127.0.0.1"
    changed: tuple[str, ...] = ()
    files: ProjectFiles | None = None
    replica: str = ""

    @property
    def preparation(self) -> Preparation:
        """What a process has to have done before it can become one of these ranks."""
        return Preparation(environ=self.environ, project=self.replica or self.project, colors=self.colors)


class RankStart(Message, frozen=True):
    """Be this rank.

    Attributes:
        order: what all ranks of the run on this VM are told.
        local_rank: which of them this one is.
        environ: variables of this rank, over the notebook's.
        surveyed: whether to say at the end which pages it copied.
    """

    order: RankOrder
    local_rank: int
    environ: dict[str, str]
    surveyed: bool = False

    @property
    def rank(self) -> int:
        """Global rank."""
        return self.order.first_rank + self.local_rank


RankHears = RankStart | Dismissed


# ---------------------------------------------------------------- supervisor and agent


class WantPiece(Message, frozen=True):
    """Send a piece of a memory file that you named; the answer is :class:`Piece`."""

    run: str
    vm: int
    fd: int
    offset: int
    size: int


class Piece(Message, frozen=True):
    """Some bytes of a memory file."""

    run: str
    vm: int
    fd: int
    offset: int
    data: bytes


class Wrote(Message, frozen=True):
    """Bytes that a rank wrote to one of its output files on another host.

    Attributes:
        file: name of the file in the rank's folder.
    """

    run: str
    vm: int
    rank: int
    file: str
    offset: int
    data: bytes


class WroteTaken(Message, frozen=True):
    """``size`` bytes of :class:`Wrote` were taken: so many more may be sent."""

    run: str
    vm: int
    size: int


class WantProject(Message, frozen=True):
    """This VM does not see the project: pack it. The answer is :class:`ProjectPacked`."""

    run: str
    vm: int


class ProjectPacked(Message, frozen=True):
    """The project's files that travel (:mod:`taas.travel.parcel`), whose pieces may be asked for."""

    run: str
    parcel: Memory


class FileChange(Message, frozen=True):
    """A change to files on a VM, for the notebook's disk (:mod:`taas.travel.changes`).

    Attributes:
        rank: 0: it is a change of the project; else of what this rank has in its scratch.
    """

    run: str
    vm: int
    rank: int
    change: bytes


class FileChangeTaken(Message, frozen=True):
    """``size`` bytes of :class:`FileChange` were taken, and are on the disk."""

    run: str
    vm: int
    size: int


class Beat(Message, frozen=True):
    """Nothing: that it cannot be sent tells its sender that the peer is out of reach."""


class Leave(Message, frozen=True):
    """End all that was started, and yourself: the VM is given back."""


class AgentUp(Message, frozen=True):
    """An agent is ready to start ranks."""

    pid: int
    forkserver: int


class StoreUp(Message, frozen=True):
    """The agent of rank 0 opened the run's TCPStore."""

    run: str
    store: Endpoint


class Printed(Message, frozen=True):
    """Output of one rank on its way to the cell.

    Attributes:
        size: bytes to acknowledge with :class:`Seen`.
    """

    run: str
    vm: int
    rank: int
    size: int
    items: tuple[Output, ...]


class RankReport(Message, frozen=True):
    """Something a rank said, or its agent says of it."""

    run: str
    vm: int
    said: RankSays


class VmDone(Message, frozen=True):
    """No process of the run is left on this VM, and all its output was sent."""

    run: str
    vm: int
    notices: tuple[str, ...] = ()


class AgentTrouble(Message, frozen=True):
    """An agent could not do what it was told; nothing of the run is left there."""

    run: str
    vm: int
    message: str


class RanksSeen(Message, frozen=True):
    """An agent's look at its ranks.

    Attributes:
        look: the number of the question.
    """

    run: str
    vm: int
    look: int
    ranks: tuple[RankSeen, ...]


class MakerEnded(Message, frozen=True):
    """A process of the data side ended on an agent's VM: it was told to, or died.

    Attributes:
        number: as in :class:`StartMaker`.
        how: in words.
    """

    run: str
    number: int
    how: str


AgentSays = (
    AgentUp
    | StoreUp
    | Printed
    | RankReport
    | VmDone
    | AgentTrouble
    | RanksSeen
    | MakerEnded
    | WantPiece
    | Piece
    | Wrote
    | WantProject
    | FileChange
)


class StartRanks(Message, frozen=True):
    """Start the ranks of one VM.

    Attributes:
        vm: number of the VM in the run.
        store: None for the agent that has to open it (the one of rank 0).
        watched: the ranks whose output is wanted; None for all.
    """

    run: str
    vm: int
    order: RankOrder
    store: Endpoint | None
    watched: tuple[int, ...] | None


class EndRanks(Message, frozen=True):
    """End all ranks of the run: SIGINT, SIGTERM, SIGKILL.

    Attributes:
        at_once: go straight to SIGKILL.
    """

    run: str
    at_once: bool = False


class Seen(Message, frozen=True):
    """``size`` more bytes of a VM's output were shown: so many more may be sent."""

    run: str
    vm: int
    size: int


class LookAtRanks(Message, frozen=True):
    """Look at all ranks of the run; the answer is :class:`RanksSeen`.

    Attributes:
        look: a number, for the answer.
        stacks: ask the ranks for their stacks, too.
    """

    run: str
    look: int
    stacks: bool


class RunOver(Message, frozen=True):
    """The supervisor has what it needs of the run: the agent may forget it."""

    run: str


class StartMaker(Message, frozen=True):
    """Start a process of the data side: a planner, or a keeper with its data workers.

    Attributes:
        number: of the process in the run.
        role: ``planner`` or ``keeper``.
        config: its :class:`~taas.delivery.config.PlannerConfig` or ``WorkerConfig``, in JSON.
        environ: the notebook's environment.
        rehearsed: as the run's ranks on this VM will be; None where it gets none.
        log: file that takes what user code prints there.
    """

    run: str
    number: int
    role: str
    config: bytes
    environ: dict[str, str]
    rehearsed: bool | None
    log: str


class EndMakers(Message, frozen=True):
    """End all makers of the run; each is reported by :class:`MakerEnded`."""

    run: str


AgentHears = (
    StartRanks
    | EndRanks
    | Seen
    | LookAtRanks
    | RunOver
    | StartMaker
    | EndMakers
    | WantPiece
    | Piece
    | WroteTaken
    | Beat
    | Leave
    | ProjectPacked
    | FileChangeTaken
)


# ---------------------------------------------------------------- client (a kernel, a terminal) and supervisor


class DeliveryOrder(msgspec.Struct, frozen=True):
    """The registered loaders that data workers run for a run.

    Attributes:
        payload: the loaders, packed by ``dataloader_registry.pack_registered``.
        processes: data workers on each data VM.
        encrypt: CURVE also for elements, where they cross hosts.
        buffer: bytes of elements under way and ready, over all ranks; None for a share of the memory there is.
    """

    payload: Memory
    processes: int
    encrypt: bool
    buffer: int | None = None


class Submit(Message, frozen=True):
    """Start a run.

    Attributes:
        gpus: GPUs that the notebook's machine has, as CUDA_VISIBLE_DEVICES names them; none: rehearse.
        device: what the ranks run on, in words.
        waiting: a foreground run: the client waits, and the run ends with it.
        delivery: registered loaders that data workers run.
        changed: variables of ``environ`` that the notebook set itself.
        engine: where the VMs come from.
    """

    cell: str
    execution_count: int
    project: str
    environ: dict[str, str]
    payload: Memory
    spec: RunSpec
    gpus: tuple[str, ...]
    device: str
    colors: str
    waiting: bool
    delivery: DeliveryOrder | None = None
    changed: tuple[str, ...] = ()
    engine: EngineChoice = EngineChoice()


class Interrupt(Message, frozen=True):
    """Stop a run as a person at the keyboard does; a second time is final."""

    run: str


class AnswerTaken(Message, frozen=True):
    """The client has opened the answer."""

    run: str


class AskStacks(Message, frozen=True):
    """Where does each rank of the run stand? The answer is :class:`Stacks`."""

    run: str


class Release(Message, frozen=True):
    """Give back the VMs that no run uses; the answer is :class:`Released`."""


ClientSays = Submit | Interrupt | Seen | AnswerTaken | AskStacks | Release


class Accepted(Message, frozen=True):
    """The run exists.

    Attributes:
        folder: where its record and its output are kept.
    """

    run: str
    folder: str


class Refused(Message, frozen=True):
    """The supervisor will not or can not do what it was asked.

    Attributes:
        error: name of a class of :mod:`taas.errors`.
    """

    error: str
    message: str


class StateChanged(Message, frozen=True):
    """A run went on: ``acquiring``, ``starting``, ``running``, ``ending``.

    Attributes:
        detail: what it waits for, if it does.
        device: what the ranks run on, in words, where that is known only now.
    """

    run: str
    state: str
    detail: str = ""
    device: str = ""


class Troubled(Message, frozen=True):
    """Something is wrong with a run that goes on; None: no longer."""

    run: str
    trouble: Trouble | None


class StartedAgain(Message, frozen=True):
    """A run lost a rank or a VM, and starts again.

    Attributes:
        run: its name.
        restarts: how often it was started again, this time included.
        why: what was lost.
    """

    run: str
    restarts: int
    why: str


class Stacks(Message, frozen=True):
    """Where the ranks of a run stand."""

    run: str
    places: tuple[Place, ...]


class Released(Message, frozen=True):
    """So many VMs were given back."""

    count: int


class Delivered(msgspec.Struct, frozen=True, kw_only=True):
    """How far the registered loaders of a run are, all together.

    Attributes:
        ready: elements that are prepared and wait for their rank.
        delivered: elements that ranks have consumed.
        planned: elements that there will be: of all iterations begun, or as ``--units`` says.
        rate: delivered elements a second.
        waited: seconds that the ranks have waited, on average.
    """

    ready: int
    delivered: int
    planned: int
    rate: float
    waited: float


class Progressed(Message, frozen=True):
    """How far the delivery of a run's registered loaders is."""

    run: str
    delivered: Delivered


class RunEnded(Message, frozen=True):
    """The end of a run, after all its output.

    Attributes:
        outcome: ``done``, ``failed``, ``interrupted`` or ``lost``.
        first: what the first failing rank said.
        vm: where that was.
        others: how many ranks failed after it.
        message: for ``lost``: what was; for ``failed``: who had ended before.
        answer: rank 0's names.
        loaders: where the delivery left the registered loaders' generators (``dataloader_registry.apply_final``).
        notices: lines for the user.
        error: for ``lost``: the class of :mod:`taas.errors` to raise.
    """

    run: str
    outcome: str
    first: RankEnded | None = None
    vm: str = ""
    others: int = 0
    message: str = ""
    answer: Memory | None = None
    loaders: bytes = b""
    notices: tuple[str, ...] = ()
    error: str = "RunLost"


ClientHears = (
    Accepted
    | Refused
    | StateChanged
    | StartedAgain
    | Progressed
    | Troubled
    | Printed
    | Stacks
    | Released
    | RunEnded
)

pack = msgspec.msgpack.Encoder().encode


class Reader:
    """Decodes the messages one side expects; anything else is a :class:`msgspec.ValidationError`."""

    def __init__(self, kinds: Any) -> None:
        self._decoder = msgspec.msgpack.Decoder(kinds)

    def __call__(self, data: bytes | memoryview) -> Any:
        """Decode one message."""
        return self._decoder.decode(data)
