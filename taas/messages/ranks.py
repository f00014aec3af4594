"""What a rank and its agent say to each other."""

from __future__ import annotations

import msgspec

from taas.delivery.config import RankConfig
from taas.header import RunSpec
from taas.messages.wire import Endpoint, Memory, Message


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
