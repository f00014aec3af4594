"""The messages between supervisor and agent.

A message is about a VM or, inside an :class:`OfJob`, about one of the VM's jobs.
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
        host: the address at which other VMs reach the agent's VM.
        node: the node's name for messages; empty for this machine.
        gpus: the GPUs that an engine assigned to the VM, as named in CUDA_VISIBLE_DEVICES; empty on
            this machine, whose GPUs the supervisor assigns itself.
    """

    host: str
    node: str = ""
    gpus: tuple[str, ...] = ()


class KeptGone(Message, frozen=True):
    """The kept ranks of this VM have ended while no run used them; ``how`` describes it."""

    how: str


class OfJob(Message, Generic[Said], frozen=True):
    """A message about one job (:class:`StartJob`)."""

    run: str
    job: int
    said: Said


# ---------------------------------------------------------------- about a job, by its agent


WITH_FORKSERVER = "killed with its forkserver"
"""How a job ended if its forkserver was killed before, or while, it forked the job's processes. A
data process may also end in this way later.
"""


class JobOver(Message, frozen=True):
    """A job has no process left, or never had one, and all its output was mirrored.

    Attributes:
        how: for data processes, how they ended, in words. For ranks, why they could not be started
            or could not continue; empty if the end of each rank was reported.
        notices: lines for the user.
        kept: the ranks that stay: all ranks of this VM, or none.
    """

    how: str = ""
    notices: tuple[str, ...] = ()
    kept: tuple[RankKept, ...] = ()


class RanksSeen(Message, frozen=True):
    """What an agent has seen of its ranks; ``look`` is the number of the request."""

    look: int
    ranks: tuple[RankSeen, ...]


class RanksUse(Message, frozen=True):
    """The resources that the ranks of a VM use at present; sent after a change."""

    ranks: tuple[RankUse, ...]


class JobRequest(Message, frozen=True):
    """A request about a job, from the supervisor to the agent or vice versa.

    Attributes:
        what: ``project``, by an agent whose VM does not share the notebook's disk: send the packed
            project (:mod:`taas.project.sync.archive`). ``file``, by an agent: send a file that was
            not sent with the project; ``has``: the file has arrived. ``forget``, by the supervisor:
            the job is over, and the agent may release what it holds for the job.
        path: the path of the file in the project.
    """

    what: Literal["project", "file", "has", "forget"]
    path: str = ""


OfRanks = StoreAddress | RankStage | Asking | RankEnded | RanksSeen | RanksUse
"""The supervisor forwards these to the run. A store's address comes from rank 0's agent, which has
opened the store. The other messages come from ranks, or from an agent about its ranks.
"""
JobSays = OfRanks | JobOver | JobRequest | Chunk | Taken
AgentSays = AgentUp | KeptGone | OfJob[JobSays]


# ---------------------------------------------------------------- about a job, by the supervisor


class StartJob(Message, frozen=True):
    """Start a job: a group of processes that an agent stages, forks, watches and ends together.

    All paths are those of the notebook's machine (:mod:`taas.agent.staging`).

    Attributes:
        job: the number of the job in the run. The ranks of the run's VM ``n`` are job ``n``; data
            processes have higher numbers.
        name: the name of the VM for users, such as ``VM g2.8-0``.
        payload: packed variables, or loaders; the data follow in chunks if the VM is on another
            host.
        output: for ranks, the folder for their output files; for a data process, the file for what
            it prints.
        scratch: the folder for project files that ranks other than 0 write.
        since_ns: the start of the run, by the clock of the project's file system.
        token_path, token: a file in the project, and its content: an agent that can read this
            content shares the notebook's disk. If the path is empty, no VM on another host shares
            the disk.
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
        how: for ranks. ``interrupt``: send SIGINT, and let each cell run to its end, however long
            it takes; ``failure``: send SIGINT, and end remaining ranks soon afterwards; ``now``:
            end remaining ranks. A later request is never more patient than an earlier one. Data
            processes are always ended at once.
        names: whether rank 0's variables are wanted in their present state.
    """

    how: How = "now"
    names: bool = True


class LookAtRanks(Message, frozen=True):
    """Look at all ranks of the run and, if requested, at their stacks.

    The reply is :class:`RanksSeen`.
    """

    look: int
    stacks: bool


JobHears = EndJob | JobRequest | LookAtRanks | Answer | Chunk | Taken
AgentHears = StartJob | Alive | Leave | OfJob[JobHears]
