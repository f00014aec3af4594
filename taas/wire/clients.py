"""What a client (a kernel, a terminal) and the supervisor say to each other."""

from __future__ import annotations

from typing import Literal

import msgspec

from taas.engines import EngineChoice
from taas.runs.records import RunRecord
from taas.runs.stacks import StackGroup
from taas.wire.framing import Memory, Message
from taas.wire.ranks import Answer, Cell, Workspace


class SupervisorConfig(msgspec.Struct, frozen=True):
    """What a kernel writes to its supervisor's standard input, as one line of JSON.

    Attributes:
        life: the descriptor, in the supervisor, of the life pipe: its end-of-file is the end of the
            kernel.
        client_key: the kernel's public CURVE key in Z85.
        warm: a VM of this machine is about to be asked for; if ``idle``, nobody waits for it yet.
    """

    kernel: int
    life: int
    client_key: str
    warm: bool = True
    idle: bool = False


class DeliveryOrder(msgspec.Struct, frozen=True):
    """The registered loaders that data workers run for a run.

    Attributes:
        payload: names with the loaders among them, as for ranks that hold nothing yet.
        processes: data workers on each data VM.
        encrypt: CURVE also for elements.
        buffer: bytes of elements under way and ready, over all ranks.
    """

    payload: Memory
    processes: int
    encrypt: bool
    buffer: int = 0


class Gpu(msgspec.Struct, frozen=True):
    """A GPU of this machine.

    Attributes:
        name: as CUDA_VISIBLE_DEVICES names it, which differs between notebooks: a number, or a UUID
            or its beginning.
        device: which one it is, the same for all notebooks: its place on the PCI bus, or its name
            where that is not known.
    """

    name: str
    device: str


class Submit(Message, frozen=True):
    """Start a run.

    Attributes:
        payload: the packed names.
        gpus: GPUs that the notebook's machine has, and the notebook sees; none: rehearse.
        device: what the ranks run on, in words.
        notebook: its path; empty where the front end does not say it.
        left_to: the id of the run whose kept ranks have names that the payload lacks; empty: it
            lacks none.
        keep_idle: seconds that its ranks stay after it, if they do, and no other cell comes.
        queue: where other runs have the devices, it waits for them instead of being refused.
    """

    cell: Cell
    workspace: Workspace
    payload: Memory
    gpus: tuple[Gpu, ...]
    device: str
    delivery: DeliveryOrder | None = None
    engine: EngineChoice = EngineChoice()
    notebook: str = ""
    left_to: str = ""
    keep_idle: float = 0.0
    queue: bool = False


class Prepare(Message, frozen=True):
    """Runs will ask this engine for VMs: get as far as is possible without one. There is no answer."""

    engine: EngineChoice


class RunRequest(Message, frozen=True):
    """What a client asks of a run, or of no run.

    Attributes:
        what: ``interrupt``: to stop as a person at the keyboard does; a second time is final.
            ``stacks``: where each of its ranks stands; the answer is :class:`Stacks`. ``let go``:
            nothing more: the client has opened the answer, or shows it no more, and takes no names
            of it; a run that still goes on is stopped. ``release``: the VMs that no run uses are
            given back; the answer is :class:`Released`.
        place: where the person is, in words: another notebook, a terminal; empty: at the run's own
            cell.
    """

    what: Literal["interrupt", "stacks", "let go", "release"]
    run: str = ""
    place: str = ""


ClientSays = Submit | Prepare | RunRequest | Answer


class Refused(Message, frozen=True):
    """The supervisor will not or can not do what it was asked; ``error`` is the name of a class of :mod:`taas.errors`."""

    error: str
    message: str


class Stacks(Message, frozen=True):
    """Where the ranks of a run stand."""

    places: tuple[StackGroup, ...]


class Released(Message, frozen=True):
    """So many VMs were given back, and so many kept ranks ended."""

    count: int
    ranks: int = 0


class RunState(Message, frozen=True):
    """A run was accepted, and all that is to be known of it appears in its folder; or, for a client that waits, it is over.

    Attributes:
        record: at the end its last, and nobody writes to its folder any more; a full disk may have
            kept it out of there.
        answer: rank 0's names, as they stood where the run is not done.
        loaders: where the delivery left the registered loaders' generators
            (``delivery.registered.apply_final``).
    """

    record: RunRecord
    answer: Memory | None = None
    loaders: bytes = b""


ClientHears = Refused | RunState | Stacks | Released
