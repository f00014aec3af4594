"""What a rank and its agent say to each other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import msgspec

from taas.delivery.config import DeliveryConfig
from taas.header.options import RunSpec
from taas.wire.framing import Memory, Message, StoreAddress


class RankStage(Message, frozen=True):
    """How far a rank is.

    Attributes:
        stage: ``ready``: a process has done all that a rank does before its order, and waits for one. ``begun``: the
            cell begins to run. ``at work``: the main thread of a rank that is interrupted runs Python code: what the
            cell makes of it takes its time. ``packing``: it packs its names, and its :class:`RankEnded` follows.
        rank: which; -1 before its order.
        at: of ``begun``: wall-clock time of its machine in seconds since the epoch.
    """

    stage: Literal["ready", "begun", "at work", "packing"]
    rank: int = -1
    at: float = 0.0


class RankEnded(Message, frozen=True):
    """How a cell ended in one rank.

    Attributes:
        rank: global rank.
        outcome: ``done``, ``raised``, ``exited`` (``sys.exit(n)``, n ≠ 0), ``interrupted``, or, said by the
            agent, ``died`` (by a signal, or without a word), ``orphaned`` (with its forkserver) and ``ended`` (by a
            signal of the agent's). ``stood``: it has not ended; these are its names if it says no more.
        at: wall-clock time of its machine in seconds since the epoch.
        etype: class name of the exception, or the signal's name.
        message: the exception's text, or what is known.
        traceback: formatted lines.
        answer: rank 0's names: at the end of the cell, or as they stood when it failed or was ended.
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


class Asking(Message, frozen=True):
    """What a rank asks the person at the keyboard, and waits for.

    Attributes:
        rank: its number.
        number: of its question, counted from 1; 0: it asks nothing any more.
        prompt: what it asks.
        hidden: whether the answer is not to be seen.
    """

    rank: int
    number: int = 0
    prompt: str = ""
    hidden: bool = False


class RankKept(Message, frozen=True):
    """A rank has done all that its order asked, keeps its names, and waits for the next one.

    Attributes:
        host_bytes: memory of its own.
        gpu_bytes: of its GPU, as torch has it reserved.
    """

    rank: int
    host_bytes: int = 0
    gpu_bytes: int = 0


class RankUse(msgspec.Struct, frozen=True):
    """What a rank uses of its VM, as its agent sees it from outside.

    Attributes:
        state: ``starting``, ``running``, ``stopped`` (by SIGSTOP), or how it ended (:class:`RankEnded`).
        cpu: percent of one processor.
        nbytes: memory that it shares with no file.
        gpu: percent of its GPUs, on average; None: it has none, or nobody can tell.
        gpu_nbytes: memory used of them, by whomever.
    """

    rank: int
    state: str
    cpu: int = 0
    nbytes: int = 0
    gpu: int | None = None
    gpu_nbytes: int = 0


RankSays = RankStage | Asking | RankEnded | RankKept


class Answer(Message, frozen=True):
    """What the person at the keyboard answers; from a client by the supervisor and an agent to the rank.

    Attributes:
        number: of the rank's question.
        refused: why nobody can answer; empty: somebody did.
    """

    run: str
    rank: int
    number: int
    text: str
    refused: str = ""


class RankRequest(Message, frozen=True):
    """What an agent asks of a process that is, or was prepared to be, a rank.

    Attributes:
        what: ``notice``: a SIGINT was sent to the rank: say when it is noticed, and break off a wait that keeps it from
            that. ``names``: pack the names as they stand, by another thread while the main one waits, and leave.
            ``taken``: the agent has rank 0's names: forget them. ``leave``: there is no other order, and the agent has
            all it needs: exit. ``collective``: write down which one it waits in (runs/stacks.py).
    """

    what: Literal["notice", "names", "taken", "leave", "collective"]


@dataclass(frozen=True)
class Preparation:
    """What ranks of different runs have in common, so that a process can prepare for it before there is an order.

    Attributes:
        environ: the notebook's environment.
        project: absolute path of the project, or of this VM's copy of it.
        colors: name of the notebook's colour theme, for tracebacks.
        shell_class: name of the class of the notebook's shell, which libraries ask for.
    """

    environ: dict[str, str]
    project: str
    colors: str
    shell_class: str


class Cell(msgspec.Struct, frozen=True):
    """A headed cell, from the notebook to its ranks.

    Attributes:
        text: all of it.
        execution_count: the notebook's ``In[n]``.
        spec: the header.
        colors: name of the notebook's colour theme, for tracebacks.
        shell_class: name of the class of the notebook's shell, which libraries ask for.
        directory: where the notebook is now; kept ranks go there, others begin in the project.
    """

    text: str
    execution_count: int
    spec: RunSpec
    colors: str
    shell_class: str = "ZMQInteractiveShell"
    directory: str = ""


class Workspace(msgspec.Struct, frozen=True):
    """What a notebook finds on its machine; on another VM it is staged (:mod:`taas.agent.staging`).

    Attributes:
        project: absolute path of the project.
        environ: the notebook's environment.
        changed: variables of ``environ`` that the notebook set itself; the others it inherited on its machine.
    """

    project: str
    environ: dict[str, str]
    changed: tuple[str, ...] = ()


class Staged(msgspec.Struct, frozen=True):
    """What a job needs, where its processes find it on their VM.

    Attributes:
        payload: the packed names, or loaders.
        project: absolute path of the project.
        replica: the copy of the project that is to stand there; empty: the project itself is there.
        late: folder in which files are asked for that the copy lacks (:mod:`taas.project_sync.late_files`).
        environ: the environment to have.
        output: folder of the ranks' output files, or a data process's log.
        scratch: folder for what ranks other than 0 write in the project's place.
        since_ns: when the run began, by the clock of the file system that the project, or its copy, is on.
    """

    payload: Memory
    project: str
    replica: str
    late: str
    environ: dict[str, str]
    output: str
    scratch: str
    since_ns: int


class RankOrder(Message, frozen=True):
    """What the ranks of one run on one VM are to do: complete when the supervisor writes it, the same for all of them.

    Attributes:
        run: name of the run.
        vm: name of the VM.
        cell: what to run.
        group_rank: the VM's number in the run, as torchrun's.
        store: the run's store; without a port, the agent of these ranks opens it.
        gpus: the run's GPUs on this VM, as CUDA_VISIBLE_DEVICES names them; empty where it is rehearsed.
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
        """Ranks on this VM."""
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
    """Be this rank.

    Attributes:
        order: what all ranks of the run on this VM are told; its store is open.
        staged: where all that they need is on this VM.
        local_rank: which of them this one is.
        environ: variables of this rank, over the notebook's.
    """

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
    return Preparation(
        environ=staged.environ,
        project=staged.replica or staged.project,
        colors=order.cell.colors,
        shell_class=order.cell.shell_class,
    )


RankHears = RankStart | RankRequest | Answer
