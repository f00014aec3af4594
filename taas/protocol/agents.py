"""The messages between supervisor and agent.

They are about a VM or, in an :class:`OfJob`, about one of its jobs.
"""

from __future__ import annotations

from typing import Generic, Literal, TypeVar

from taas.protocol.chunks import Chunk, Taken
from taas.protocol.delivery_orders import DataOrder
from taas.protocol.framing import Alive, Leave, Memory, Message, StoreAddress
from taas.protocol.ranks import (
    Answer,
    Asking,
    RankEnded,
    RankKept,
    RankOrder,
    RankStage,
    RankUse,
    Workspace,
)
from taas.protocol.stacks import RankSeen

How = Literal["interrupt", "failure", "now"]
Said = TypeVar("Said")


class AgentUp(Message, frozen=True):
    """An agent is ready to start jobs.

    Attributes:
        host: the address under which other VMs reach its own.
        node: the node's name for messages; empty for this machine.
        gpus: the GPUs that an engine gave it, as CUDA_VISIBLE_DEVICES names them. The supervisor
            itself distributes those of this machine.
    """

    host: str
    node: str = ""
    gpus: tuple[str, ...] = ()


class KeptGone(Message, frozen=True):
    """The kept ranks of this VM have ended, ``how`` in words, while no run used them."""

    how: str


class OfJob(Message, Generic[Said], frozen=True):
    """A message about one job (:class:`StartJob`)."""

    run: str
    job: int
    said: Said


# ---------------------------------------------------------------- about a job, by its agent


WITH_FORKSERVER = "killed with its forkserver"
"""How a job ended if its forkserver was killed before, or while, it forked the job's processes. A
data process may end like this later, too.
"""


class JobOver(Message, frozen=True):
    """A job has no process left, or never had one, and all its output was mirrored.

    Attributes:
        how: for data processes, how they ended, in words. For ranks, why they could not be started
            or could not continue; empty if each rank was reported.
        notices: lines for the user.
        kept: the ranks that stay: all ranks of this VM, or none.
    """

    how: str = ""
    notices: tuple[str, ...] = ()
    kept: tuple[RankKept, ...] = ()


class RanksSeen(Message, frozen=True):
    """An agent's findings on its ranks, with the number of the request."""

    look: int
    ranks: tuple[RankSeen, ...]


class RanksUse(Message, frozen=True):
    """What the ranks of a VM use of it now; sent when that has changed."""

    ranks: tuple[RankUse, ...]


class JobRequest(Message, frozen=True):
    """A request for a job, from the supervisor or the agent to the other.

    Attributes:
        what: ``project``, by an agent whose VM does not see the notebook's disk: send the project,
            packed (:mod:`taas.project.sync.archive`). ``file``, by an agent: send a file that did
            not travel with the project; ``has``: the file is there now. ``forget``, by the
            supervisor: it has all it needs of a job that is over, so forget the job.
        path: of the file, in the project.
    """

    what: Literal["project", "file", "has", "forget"]
    path: str = ""


OfRanks = StoreAddress | RankStage | Asking | RankEnded | RanksSeen | RanksUse
"""The supervisor passes these on to the run. A store's address comes from rank 0's agent, which has
opened the store. The others come from ranks, or from their agent about them.
"""
JobSays = OfRanks | JobOver | JobRequest | Chunk | Taken
AgentSays = AgentUp | KeptGone | OfJob[JobSays]


# ---------------------------------------------------------------- about a job, by the supervisor


class StartJob(Message, frozen=True):
    """Start a job: a group of processes that an agent stages, forks, watches and ends together.

    All paths are those of the notebook's machine (:mod:`taas.agent.staging`).

    Attributes:
        job: its number in the run. The ranks of the run's VM ``n`` are job ``n``; data processes
            have higher numbers.
        name: what the user calls the VM, such as ``VM g2.8-0``.
        payload: packed names, or loaders; its chunks follow where the VM is another host.
        output: for ranks, the folder with their output files; for a data process, the file for what
            it prints.
        scratch: folder for the project files that ranks other than 0 write.
        since_ns: when the run began, by the clock of the project's file system.
        token_path, token: a file in the project, and its content: an agent that can read it sees
            the notebook's disk. An empty path: no VM elsewhere sees the disk.
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
    """End all processes of a job; the reply is :class:`JobOver`.

    Attributes:
        how: for ranks. ``interrupt``: SIGINT, and each cell runs to its end, however long;
            ``failure``: SIGINT, and remaining ranks are ended soon after; ``now``: remaining ranks
            are ended. A later request is never more patient than an earlier one. Data processes
            are always ended now.
        names: whether rank 0's names are wanted as they are.
    """

    how: How = "now"
    names: bool = True


class LookAtRanks(Message, frozen=True):
    """Look at all ranks of the run, and at their stacks if asked.

    The reply is :class:`RanksSeen`.
    """

    look: int
    stacks: bool


JobHears = EndJob | JobRequest | LookAtRanks | Answer | Chunk | Taken
AgentHears = StartJob | Alive | Leave | OfJob[JobHears]
