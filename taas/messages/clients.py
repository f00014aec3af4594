"""What a client (a kernel, a terminal) and the supervisor say to each other."""

from __future__ import annotations

import msgspec

from taas.engines import EngineChoice
from taas.header import RunSpec
from taas.messages.agents import Printed, Seen
from taas.messages.ranks import RankEnded
from taas.messages.wire import Memory, Message
from taas.stacks import Place, Trouble


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


class Prepare(Message, frozen=True):
    """Runs will ask this engine for VMs: get as far as is possible without one. There is no answer."""

    engine: EngineChoice


class Interrupt(Message, frozen=True):
    """Stop a run as a person at the keyboard does; a second time is final."""

    run: str


class Abandon(Message, frozen=True):
    """The client shows the run no more, and takes no names of it: stop it."""

    run: str


class AnswerTaken(Message, frozen=True):
    """The client has opened the answer."""

    run: str


class AskStacks(Message, frozen=True):
    """Where does each rank of the run stand? The answer is :class:`Stacks`."""

    run: str


class Release(Message, frozen=True):
    """Give back the VMs that no run uses; the answer is :class:`Released`."""


ClientSays = Submit | Prepare | Interrupt | Abandon | Seen | AnswerTaken | AskStacks | Release


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
