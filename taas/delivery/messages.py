"""What the processes of a delivery say: to each other in MessagePack over zmq, and to the supervisor in JSON lines.

Opaque ``bytes`` fields hold pickles of user objects (an index, an exception): the coordinator
passes them on unread.
"""

from __future__ import annotations

import functools
import secrets
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from taas.delivery.config import Delivered, ResumePoint
from taas.wire.framing import Alive, Leave, Message


class Peer(NamedTuple):
    """Who somebody is on the control channel."""

    role: str  # planner, pool (a data VM's worker pool), worker or rank
    number: int = 0  # of the rank, or of the data VM
    serial: int = 0  # of a data worker, in the order its pool has forked them

    @property
    def holder(self) -> str:
        """Under whose name it has its key: a data worker has its pool's."""
        return f"{'pool' if self.role == 'worker' else self.role} {self.number}"

    @property
    def pool(self) -> Peer:
        """The worker pool of a data worker's VM."""
        return Peer("pool", self.number)


PLANNER = Peer("planner")


def new_identity(peer: Peer) -> bytes:
    """Return a name for a peer's connection, which nobody else can take."""
    return f"{peer.role} {peer.number} {peer.serial} {secrets.token_hex(8)}".encode()


@functools.lru_cache(1 << 16)
def peer_named(identity: bytes) -> Peer:
    """Return whose connection's name it says it is; a ValueError where it is nobody's."""
    role, number, serial, _ = identity.decode("ascii").split()
    return Peer(role, int(number), int(serial))


def holders(ranks: int, pools: int) -> list[str]:
    """Return who has a key in a run with so many ranks and worker pools."""
    peers = [("rank", number) for number in range(ranks)] + [
        ("pool", number) for number in range(pools)
    ]
    return [PLANNER.holder, *(Peer(*peer).holder for peer in peers)]


class Hello(Message, frozen=True):
    """A peer is there: its name says what it is. The planner's is passed on to the ranks, a rank's to the workers.

    The coordinator says it to the supervisor: peers can be started.
    """

    error: str = (
        ""  # why it is of no use: a planner or a worker pool cannot load the registered loaders
    )
    loaders: tuple[LoaderFacts, ...] = ()  # what the planner knows of them
    shared: bool = False  # a worker has mapped the slabs
    rank: int = -1  # which one it is, as the coordinator tells workers
    address: str = ""  # where a rank takes elements, or the coordinator listens
    key: bytes = b""  # its CURVE key there; empty on one host


class Cancel(Message, frozen=True):
    """Nobody will ask for this plan again. ``undone``: no rank had begun it; what comes next begins afresh."""

    plan: int
    loader: int
    undone: bool = False


class Note(Message, frozen=True):
    """One line for the user."""

    text: str


class Failed(Message, frozen=True):
    """No element will come any more, as the coordinator finds or is told; ranks raise this at the next request."""

    reason: str


# ── planner
# ───────────────────────────────────────────────────────────────────────────────────────────


class LoaderFacts(NamedTuple):
    """What only the unpickled loader can tell."""

    name: str  # as it was registered
    length: int | None = (
        None  # elements of one iteration, over all ranks; None if the loader has no length
    )
    streamed: bool = False  # its dataset is iterable: one worker makes its elements, in their order
    epoch: int | None = None  # the sampler's at launch; None if it has no set_epoch
    per_rank: bool = False  # the sampler is distributed: each rank has a stream of its own
    note: str = ""  # one line for the user
    error: str = ""  # why this loader cannot be delivered


class Draw(Message, frozen=True):
    """Send about ``count`` more indices of a plan; at the first of these for a plan its iteration is begun."""

    plan: int
    loader: int
    iteration: (
        int  # of this loader; one begun before is begun again from the same state of its generators
    )
    epoch: int | None
    count: int
    repeats: bool = (
        False  # a restarted run goes on here: iterate all iterations before this one first
    )


class Planned(Message, frozen=True):
    """The next indices of a plan, in order; ``failure`` is a packed exception of the user's sampler."""

    plan: int
    base_seed: int
    indices: list[bytes]
    ended: bool
    failure: bytes = b""


class FinishPlans(Message, frozen=True):
    """The ranks have ended: tell where generators stand after these iterations (loader, last one begun, its epoch)."""

    begun: Sequence[tuple[int, int, int | None]] = ()  # which the supervisor does not know


class Final(Message, frozen=True):
    """Where the loaders' generators stand, for ``registered.apply_final``."""

    # packed {loader name: {attribute path: a generator's state, or an epoch}}; empty: unknown
    states: bytes
    unknown: dict[str, str] = msgspec.field(
        default_factory=dict
    )  # why it is not known of others, by name


# ── workers and their pools
# ───────────────────────────────────────────────────────────────────────────


class WorkerLost(Message, frozen=True):
    """A worker of this pool ended. ``number`` is the element it worked on."""

    serial: int
    number: int
    cause: str


class Ticket(NamedTuple):
    """An element to be made; others may be making it, too."""

    number: int  # of the element, unique over the run
    plan: int
    loader: int
    seq: int
    rank: int  # for whom
    seed: int  # what all RNGs are set to before it is made
    # element: a pickled index of the dataset, or, of an iterable one, position, iteration and base
    # seed
    which: bytes
    offset: int = 0  # of the slot in the slabs
    capacity: int = 0  # its bytes; 0 asks for frames on the socket
    # of an iterable dataset: no element before this one will be asked for again, unless it fills up
    # the last row
    floor: int = 0
    poison: str = ""  # how its makers have died: send an error in its place


class Result(NamedTuple):
    """An element was made and sent: the bytes of memory it takes, and the seconds it took to make."""

    number: int
    nbytes: int
    seconds: float
    leaked: bool = False  # user code still holds memory of the slot: it is never given out again
    end: int = (
        -1
    )  # its dataset is iterable, and has no more than so many elements: this is none of them


# ── ranks
# ─────────────────────────────────────────────────────────────────────────────────────────────


class Begin(Message, frozen=True):
    """The rank calls ``iter()`` on a loader for the ``iteration``-th time."""

    loader: int
    iteration: int
    epoch: int | None
    start: int = 0  # its first step; more than 0 only where a run goes on that was started again
    taken: int = 0  # steps that an earlier start of the run took of the iterations before


class Ended(Message, frozen=True):
    """A plan gives the rank ``steps`` elements and no more; then it raises what there is to raise."""

    plan: int
    steps: int
    failure: bytes = b""  # packed exception of the user's sampler
    refusal: str = ""  # why there is no more, though there should be
    disagree: bool = False  # it was refused because another rank asked for something else


class PlanProgress(NamedTuple):
    """The rank has consumed so many steps of a plan, has asked for the one after the first ``asked``, or is through."""

    plan: int
    consumed: int
    asked: int
    closed: bool = False


class Progress(Message, frozen=True):
    """What a rank has done with its elements."""

    plans: list[PlanProgress]
    released: list[
        int
    ]  # numbers of elements that were yielded and whose memory nobody uses any more
    waited: float  # seconds spent waiting in all


# ── the data path (worker → rank), frame 0 after its MAC
# ──────────────────────────────────────────────


class ElementArrival(NamedTuple):
    """Where an element lies. Several may travel in one message, their pickles in one frame, in this order."""

    number: int  # of the element; its rank drops what it has already
    plan: int
    seq: int
    offset: int  # of its slot; -1: its memory is the frame that follows
    capacity: int  # bytes of the slot
    used: int  # bytes of memory
    failed: bool  # the pickle is a packed exception
    pickled: int  # bytes of its pickle


# ── the coordinator and the supervisor
# ────────────────────────────────────────────────────────────────


class ProgressReport(Message, frozen=True):
    """How far the delivery is; the last one is the coordinator's last word."""

    delivered: Delivered
    workers: int
    prebuffered: bool  # every loader's first elements are ready: the ranks can be asked for
    over: bool  # every unit was consumed: whoever makes elements is needed no more
    places: dict[str, ResumePoint]  # where each loader that ranks have begun would go on, by name


class HostLost(Message, frozen=True):
    """A data VM is gone; what it had leased is made elsewhere. Who sees it tells the other.

    On this host the coordinator only finds that a worker pool is silent: the supervisor ends it,
    and says when it is gone.
    """

    vm: int  # the planner has -1
    cause: str


FromPlanner = Hello | Planned | Final
ToPlanner = Draw | Cancel | FinishPlans | Leave
FromWorker = Hello | list[Result]
FromPool = Hello | Alive | WorkerLost
ToWorker = list[Ticket] | Hello | Cancel | Leave
"""Tickets are to be made in their order."""
FromRank = Hello | Begin | Progress
ToRank = Hello | Ended | Cancel | Failed
Command = FinishPlans | Failed | HostLost
Report = Hello | Note | ProgressReport | HostLost | Failed | Final
