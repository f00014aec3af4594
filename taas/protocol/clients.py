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
        kernel: the kernel's process id.
        life: the supervisor's descriptor of the life pipe, on which end-of-file means that the
            kernel has ended.
        client_key: the kernel's public CURVE key in Z85.
        warm: whether a VM of this machine will be requested soon.
        idle: with ``warm``: no run waits for that VM yet.
    """

    kernel: int
    life: int
    client_key: str
    warm: bool = True
    idle: bool = False


class DeliveryOrder(msgspec.Struct, frozen=True):
    """The registered loaders of a run whose batches are made by data workers.

    Attributes:
        payload: packed variables, including the loaders, complete as for new ranks.
        processes: the number of data workers on each data VM.
        encrypt: whether batches are encrypted, too.
        buffer: bytes of batches that are in transit or ready, over all ranks.
    """

    payload: Memory
    processes: int
    encrypt: bool
    buffer: int = 0


class Gpu(msgspec.Struct, frozen=True):
    """A GPU of this machine.

    Attributes:
        name: its name in CUDA_VISIBLE_DEVICES, which differs between notebooks: a number, or a UUID
            or the beginning of one.
        device: its PCI bus address, which is the same for all notebooks; its name if the address is
            not known.
    """

    name: str
    device: str


class Submit(Message, frozen=True):
    """Start a run.

    Attributes:
        payload: the packed variables.
        gpus: the GPUs of the notebook's machine that the notebook sees; if there are none, the run
            is rehearsed.
        device: the ranks' devices in words.
        notebook: the path of the notebook; empty if the front end does not provide it.
        left_to: the id of the run whose kept ranks have variables that the payload lacks; empty if
            it lacks none.
        keep_idle: seconds after the run for which kept ranks stay if no other cell comes.
        queue: whether to wait if other runs have the devices, instead of being refused.
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
    """Prepare an engine for runs, as far as possible without a run; there is no reply."""

    engine: EngineChoice


class RunRequest(Message, frozen=True):
    """A client's request, about a run or in general.

    Attributes:
        what: ``interrupt``: stop the run as a person at the keyboard does; a second request is
            final. ``stacks``: report where each of the run's ranks is; the reply is
            :class:`Stacks`. ``let go``: the client has opened the run's variables, or no longer
            wants them, and will request nothing else; a run under way is stopped. ``release``:
            release the VMs that no run uses; the reply is :class:`Released`.
        place: where the person is, in words: another notebook, or a terminal; empty at the run's
            own cell.
    """

    what: Literal["interrupt", "stacks", "let go", "release"]
    run: str = ""
    place: str = ""


ClientSays = Submit | Prepare | RunRequest | Answer


class Refused(Message, frozen=True):
    """The supervisor refuses a request.

    ``error`` is the name of a class in :mod:`taas.errors`.
    """

    error: str
    message: str


class Stacks(Message, frozen=True):
    """The positions of a run's ranks in their code."""

    places: tuple[StackGroup, ...]


class Released(Message, frozen=True):
    """The numbers of VMs that were released, and of kept ranks that ended."""

    count: int
    ranks: int = 0


class RunState(Message, frozen=True):
    """A run was accepted or, for a client that waits, has ended.

    After a run was accepted, all further information about it appears in its folder.

    Attributes:
        record: the record of the run. At the end it is the final version, and no process writes to
            the run's folder any more; if the disk was full, the folder may lack this version.
        answer: rank 0's variables; for a run that is not done, in their last state.
        loaders: the final states of the registered loaders' generators
            (``delivery.registered.apply_final``).
    """

    record: RunRecord
    answer: Memory | None = None
    loaders: bytes = b""


ClientHears = Refused | RunState | Stacks | Released
