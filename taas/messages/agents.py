"""What supervisor and agent say to each other."""

from __future__ import annotations

from taas.messages.hosts import (
    Beat,
    FileChange,
    FileChangeTaken,
    Piece,
    ProjectPacked,
    WantPiece,
    WantProject,
    Wrote,
    WroteTaken,
)
from taas.messages.ranks import Output, ProjectFiles, RankOrder, RankSays
from taas.messages.wire import Endpoint, Memory, Message
from taas.stacks import RankSeen


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


class Unwatch(Message, frozen=True):
    """Nobody shows the run's output any more: it stays in its files, and the end does not wait for it."""

    run: str


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
        config: its :class:`~taas.delivery.config.PlannerConfig` or ``WorkerConfig``, in JSON; what an agent knows
            better, payload and folders, is left out.
        payload: the packed loaders.
        project: absolute path of the project.
        environ: the notebook's environment.
        rehearsed: as the run's ranks on this VM will be; None where it gets none.
        log: file that takes what user code prints there.
        changed, files, replica: as in :class:`~taas.messages.ranks.RankOrder`.
    """

    run: str
    number: int
    role: str
    config: bytes
    payload: Memory
    project: str
    environ: dict[str, str]
    rehearsed: bool | None
    log: str
    changed: tuple[str, ...] = ()
    files: ProjectFiles | None = None
    replica: str = ""


class EndMakers(Message, frozen=True):
    """End all makers of the run; each is reported by :class:`MakerEnded`."""

    run: str


AgentHears = (
    StartRanks
    | EndRanks
    | Seen
    | Unwatch
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
