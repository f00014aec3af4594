"""The messages between a client (a kernel, a terminal) and the supervisor."""

from __future__ import annotations

from typing import Literal

import msgspec

from taas.protocol.engines import EngineChoice
from taas.protocol.framing import Memory, Message
from taas.protocol.ranks import Answer, Cell, Workspace
from taas.protocol.records import RunRecord
from taas.protocol.stacks import StackGroup


class SupervisorConfig(msgspec.Struct, frozen=True):
    """The configuration of a supervisor; its kernel writes it as a line of JSON.

    Attributes:
        life: the supervisor's descriptor of the life pipe, whose end-of-file is the kernel's end.
        client_key: the kernel's public CURVE key in Z85.
        warm: a VM of this machine will be requested soon; with ``idle``, no run waits for it yet.
    """

    kernel: int
    life: int
    client_key: str
    warm: bool = True
    idle: bool = False


class DeliveryOrder(msgspec.Struct, frozen=True):
    """The registered loaders that data workers run for a run.

    Attributes:
        payload: packed names with the loaders among them, complete as for new ranks.
        processes: data workers on each data VM.
        encrypt: whether elements are encrypted, too.
        buffer: bytes of elements under way and ready, over all ranks.
    """

    payload: Memory
    processes: int
    encrypt: bool
    buffer: int = 0


class Gpu(msgspec.Struct, frozen=True):
    """A GPU of this machine.

    Attributes:
        name: its name in CUDA_VISIBLE_DEVICES, which differs between notebooks: a number, or a UUID
            or its beginning.
        device: its address on the PCI bus, which is the same for all notebooks, or its name if the
            address is not known.
    """

    name: str
    device: str


class Submit(Message, frozen=True):
    """Start a run.

    Attributes:
        payload: the packed names.
        gpus: GPUs of the notebook's machine that the notebook sees; none: rehearse.
        device: the ranks' devices in words.
        notebook: its path; empty if the front end does not give it.
        left_to: the id of the run whose kept ranks have names that the payload lacks; empty if it
            lacks none.
        keep_idle: seconds that kept ranks stay after it if no other cell comes.
        queue: wait for the devices if other runs have them, instead of being refused.
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
    """Prepare an engine for runs, as far as that is possible without one; there is no reply."""

    engine: EngineChoice


class RunRequest(Message, frozen=True):
    """A client's request about a run, or about none.

    Attributes:
        what: ``interrupt``: stop as a person at the keyboard does; a second one is final.
            ``stacks``: say where each of its ranks is; the reply is :class:`Stacks`. ``let go``:
            the client has opened the answer, or no longer wants it, and asks for nothing else; a
            run that still goes on is stopped. ``release``: give back the VMs that no run uses; the
            reply is :class:`Released`.
        place: where the person is, in words: another notebook, or a terminal; empty at the run's
            own cell.
    """

    what: Literal["interrupt", "stacks", "let go", "release"]
    run: str = ""
    place: str = ""


ClientSays = Submit | Prepare | RunRequest | Answer


class Refused(Message, frozen=True):
    """The supervisor refuses a request.

    ``error`` is the name of a class of :mod:`taas.errors`.
    """

    error: str
    message: str


class Stacks(Message, frozen=True):
    """Where the ranks of a run are in their code."""

    places: tuple[StackGroup, ...]


class Released(Message, frozen=True):
    """The numbers of VMs that were given back, and of kept ranks that ended."""

    count: int
    ranks: int = 0


class RunState(Message, frozen=True):
    """A run was accepted or, for a client that waits, has ended.

    After it was accepted, everything about it appears in its folder.

    Attributes:
        record: its record. At the end it is the last one, and no process writes to the run's folder
            any more; after a full disk the folder may lack it.
        answer: rank 0's names; of a run that is not done, as they were.
        loaders: where the delivery left the registered loaders' generators
            (``delivery.registered.apply_final``).
    """

    record: RunRecord
    answer: Memory | None = None
    loaders: bytes = b""


ClientHears = Refused | RunState | Stacks | Released
