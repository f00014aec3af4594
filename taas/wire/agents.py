"""What supervisor and agent say to each other: of a VM, and, in an :class:`OfJob`, of one of its jobs."""

from __future__ import annotations

from typing import Generic, Literal, TypeVar

from taas.delivery.config import DataOrder
from taas.runs.stacks import RankSeen
from taas.wire.framing import Alive, Leave, Memory, Message, StoreAddress
from taas.wire.ranks import (
    Answer,
    Asking,
    RankEnded,
    RankKept,
    RankOrder,
    RankStage,
    RankUse,
    Workspace,
)
from taas.wire.transfer import Chunk, Taken

How = Literal["interrupt", "failure", "now"]
Said = TypeVar("Said")


class AgentUp(Message, frozen=True):
    """An agent is ready to start jobs.

    Attributes:
        host: the address under which other VMs reach its own.
        node: where that is, for messages; empty for this machine.
        gpus: those that an engine gave it, as CUDA_VISIBLE_DEVICES names them; this machine's the
            supervisor shares out.
    """

    host: str
    node: str = ""
    gpus: tuple[str, ...] = ()


class KeptGone(Message, frozen=True):
    """The ranks that this VM has kept are gone, ``how`` in words, while no run had them."""

    how: str


class OfJob(Message, Generic[Said], frozen=True):
    """Something that is said of a job (:class:`StartJob`)."""

    run: str
    job: int
    said: Said


# ---------------------------------------------------------------- of a job, by its agent


WITH_FORKSERVER = "killed with its forkserver"
"""How a job ended whose forkserver was killed before, or while, its processes were forked; of a
data process, later too.
"""


class JobOver(Message, frozen=True):
    """No process of a job is left, or was ever started, and all that they wrote was mirrored.

    Attributes:
        how: of data processes, how they ended, in words; of ranks, why they could not be started,
            or could not go on: empty where each was reported.
        notices: lines for the user.
        kept: the ranks that stay: all of this VM, or none.
    """

    how: str = ""
    notices: tuple[str, ...] = ()
    kept: tuple[RankKept, ...] = ()


class RanksSeen(Message, frozen=True):
    """An agent's look at its ranks, with the number of the question."""

    look: int
    ranks: tuple[RankSeen, ...]


class RanksUse(Message, frozen=True):
    """What the ranks of a VM use of it now; said when it has changed."""

    ranks: tuple[RankUse, ...]


class JobRequest(Message, frozen=True):
    """What one of the two asks of the other for a job.

    Attributes:
        what: ``project``, by an agent: this VM does not see the notebook's disk: send the project,
            packed (:mod:`taas.project_sync.archive`). ``file``, by an agent: send one that did not
            travel with it; ``has``: it is there now. ``forget``, by the supervisor: it has what it
            needs of a job that is over: forget it.
        path: of the file, in the project.
    """

    what: Literal["project", "file", "has", "forget"]
    path: str = ""


OfRanks = StoreAddress | RankStage | Asking | RankEnded | RanksSeen | RanksUse
"""A store's address: the agent of rank 0 opened it. What ranks said, or their agent says of them,
is passed on.
"""
JobSays = OfRanks | JobOver | JobRequest | Chunk | Taken
AgentSays = AgentUp | KeptGone | OfJob[JobSays]


# ---------------------------------------------------------------- of a job, by the supervisor


class StartJob(Message, frozen=True):
    """Start a job: a group of processes that is staged in, forked, watched, ended and reaped together.

    All paths are those of the notebook's machine (:mod:`taas.agent.staging`).

    Attributes:
        job: its number in the run. The ranks of the run's VM ``n`` are job ``n``; data processes
            have higher numbers.
        name: what the user calls the VM, such as ``VM g2.8-0``.
        payload: packed names, or loaders; its chunks follow where the VM is another host.
        output: of ranks, the folder with their output files; of a data process, the file that takes
            what it prints.
        scratch: folder for what ranks other than 0 write in the project's place.
        since_ns: when the run began, by the clock of the project's file system.
        token_path, token: a file in the project, and what is in it: who reads that there sees the
            notebook's disk. An empty path: nobody elsewhere does.
    """

    run: str
    job: int
    name: str
    payload: Memory
    workspace: Workspace
    output: str
    work: RankOrder | DataOrder
    scratch: str = ""
    since_ns: int = 0
    token_path: str = ""
    token: bytes = b""


class EndJob(Message, frozen=True):
    """End all processes of a job; the answer is :class:`JobOver`.

    Attributes:
        how: for ranks. ``interrupt``: SIGINT, and each cell runs to its end, however long;
            ``failure``: SIGINT, and what is left soon after is ended; ``now``: what is left is
            ended. A later one is never more patient than an earlier one. Data processes are ended
            now in any case.
        names: whether somebody takes rank 0's names as they stand.
    """

    how: How = "now"
    names: bool = True


class LookAtRanks(Message, frozen=True):
    """Look at all ranks of the run, and if asked at their stacks, too; the answer is :class:`RanksSeen`."""

    look: int
    stacks: bool


JobHears = EndJob | JobRequest | LookAtRanks | Answer | Chunk | Taken
AgentHears = StartJob | Alive | Leave | OfJob[JobHears]
