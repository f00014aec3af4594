"""The messages of a delivery.

Its processes talk MessagePack over zmq to each other, and JSON lines to the supervisor.

Opaque ``bytes`` fields hold pickles of user objects (an index, an exception): the coordinator
passes them on unread.
"""

from __future__ import annotations

import functools
import secrets
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from taas.protocol.delivery_orders import Delivered, ResumePoint
from taas.protocol.framing import Alive, Leave, Message


class Peer(NamedTuple):
    """A peer on the control channel."""

    role: str  # planner, pool (a data VM's worker pool), worker or rank
    number: int = 0  # of the rank, or of the data VM
    serial: int = 0  # of a data worker, in the order its pool has forked them

    @property
    def holder(self) -> str:
        """Return the name of the key that the peer uses; data workers use their pool's."""
        return f"{'pool' if self.role == 'worker' else self.role} {self.number}"

    @property
    def pool(self) -> Peer:
        """Return the worker pool of a data worker's VM."""
        return Peer("pool", self.number)


PLANNER = Peer("planner")


def new_identity(peer: Peer) -> bytes:
    """Return a name for a peer's connection that no other peer can take."""
    return f"{peer.role} {peer.number} {peer.serial} {secrets.token_hex(8)}".encode()


@functools.lru_cache(1 << 16)
def peer_named(identity: bytes) -> Peer:
    """Return the peer that a connection's name claims; raise ValueError for a malformed name."""
    role, number, serial, _ = identity.decode("ascii").split()
    return Peer(role, int(number), int(serial))


def holders(ranks: int, pools: int) -> list[str]:
    """Return the names of all keys in a run with so many ranks and worker pools."""
    peers = [("rank", number) for number in range(ranks)] + [
        ("pool", number) for number in range(pools)
    ]
    return [PLANNER.holder, *(Peer(*peer).holder for peer in peers)]


class Hello(Message, frozen=True):
    """Announces a peer; its connection's name says which one it is.

    The coordinator passes the planner's Hello on to the ranks, and a rank's on to the workers.

    The coordinator's own Hello tells the supervisor that peers can be started.
    """

    error: str = ""  # why a planner or worker pool cannot load the registered loaders
    loaders: tuple[LoaderFacts, ...] = ()  # what the planner knows of the loaders
    shared: bool = False  # a worker has mapped the slabs
    rank: int = -1  # filled in by the coordinator, for workers
    address: str = ""  # where a rank takes elements, or the coordinator listens
    key: bytes = b""  # its CURVE key there; empty on one host


class Cancel(Message, frozen=True):
    """No rank will ask for this plan again.

    ``undone``: no rank has begun it, so the next iteration starts from the same state.
    """

    plan: int
    loader: int
    undone: bool = False


class Note(Message, frozen=True):
    """One line for the user."""

    text: str


class Failed(Message, frozen=True):
    """No more elements will come; ranks raise this at their next request.

    The coordinator finds this out itself, or the supervisor tells it.
    """

    reason: str


# ── planner ───────────────────────────────────────────────────────────────────────────────────────


class LoaderFacts(NamedTuple):
    """Facts that only the unpickled loader can tell."""

    name: str  # as it was registered
    length: int | None = None  # elements of one iteration over all ranks; None: it has no length
    streamed: bool = False  # its dataset is iterable: one worker makes its elements, in their order
    epoch: int | None = None  # the sampler's at launch; None if it has no set_epoch
    per_rank: bool = False  # the sampler is distributed: each rank has a stream of its own
    note: str = ""  # one line for the user
    error: str = ""  # why this loader cannot be delivered


class Draw(Message, frozen=True):
    """Asks for about ``count`` more indices of a plan.

    The first request for a plan begins its iteration.
    """

    plan: int
    loader: int
    # of this loader; one that has begun before begins again from the same state of its generators
    iteration: int
    epoch: int | None
    count: int
    repeats: bool = False  # a restarted run continues here: run all earlier iterations first


class Planned(Message, frozen=True):
    """The next indices of a plan, in order.

    ``failure`` is a packed exception of the user's sampler.
    """

    plan: int
    base_seed: int
    indices: list[bytes]
    ended: bool
    failure: bytes = b""


class FinishPlans(Message, frozen=True):
    """Asks, after the ranks' end, where the generators stand after these iterations.

    Each is (loader, its last iteration that has begun, its epoch).
    """

    begun: Sequence[tuple[int, int, int | None]] = ()  # the supervisor leaves it empty


class Final(Message, frozen=True):
    """The final states of the loaders' generators, for ``registered.apply_final``."""

    # packed {loader name: {attribute path: a generator's state, or an epoch}}; empty: unknown
    states: bytes
    # why the state is not known, by loader's name
    unknown: dict[str, str] = msgspec.field(default_factory=dict)


# ── workers and their pools ───────────────────────────────────────────────────────────────────────


class WorkerLost(Message, frozen=True):
    """A worker of this pool has ended.

    ``number`` is the element that it was making.
    """

    serial: int
    number: int
    cause: str


class Ticket(NamedTuple):
    """An order to make an element, which other workers may be making as well."""

    number: int  # of the element, unique over the run
    plan: int
    loader: int
    seq: int
    rank: int  # the rank that gets it
    seed: int  # all RNGs are set to it before the element is made
    # the element: a pickled index of the dataset; of an iterable one, position, iteration and base
    # seed
    which: bytes
    offset: int = 0  # of the slot in the slabs
    capacity: int = 0  # its bytes; 0 asks for frames on the socket
    # of an iterable dataset: no element before this one will be asked for again, except to fill up
    # the last row
    floor: int = 0
    poison: str = ""  # how its makers have died: send an error in its place


class Result(NamedTuple):
    """A worker has made and sent an element.

    ``nbytes`` is the memory that the element takes, ``seconds`` the time that making it took.
    """

    number: int
    nbytes: int
    seconds: float
    leaked: bool = False  # user code still holds memory of the slot: never lease it again
    # number of elements of the iterable dataset, which has ended before this one; -1: it exists
    end: int = -1


# ── ranks ─────────────────────────────────────────────────────────────────────────────────────────


class Begin(Message, frozen=True):
    """The rank calls ``iter()`` on a loader for the ``iteration``-th time."""

    loader: int
    iteration: int
    epoch: int | None
    start: int = 0  # its first step; above 0 only in a run that was started again
    taken: int = 0  # steps of earlier iterations that an earlier start of the run took


class Ended(Message, frozen=True):
    """A plan gives the rank ``steps`` elements; then the rank raises ``failure`` or ``refusal``."""

    plan: int
    steps: int
    failure: bytes = b""  # packed exception of the user's sampler
    refusal: str = ""  # why the plan ends early
    disagree: bool = False  # refused because another rank asked for something else


class PlanProgress(NamedTuple):
    """How far a rank is in a plan.

    It has consumed ``consumed`` steps, and asked for the one after the first ``asked``.
    """

    plan: int
    consumed: int
    asked: int
    closed: bool = False  # the rank asks for no more of it


class Progress(Message, frozen=True):
    """A rank reports what it has done with its elements."""

    plans: list[PlanProgress]
    released: list[int]  # numbers of yielded elements whose memory is no longer used
    waited: float  # total seconds spent waiting


# ── the data path (worker → rank), frame 0 after its MAC ──────────────────────────────────────────


class ElementArrival(NamedTuple):
    """Where an element lies in memory.

    Several may travel in one message; then one frame has their pickles, in this order.
    """

    number: int  # of the element; its rank drops second copies
    plan: int
    seq: int
    offset: int  # of its slot; -1: its memory is the frame that follows
    capacity: int  # bytes of the slot
    used: int  # bytes of memory
    failed: bool  # the pickle is a packed exception
    pickled: int  # bytes of its pickle


# ── the coordinator and the supervisor ────────────────────────────────────────────────────────────


class ProgressReport(Message, frozen=True):
    """The progress of the delivery; the coordinator's last message is one of these."""

    delivered: Delivered
    workers: int
    prebuffered: bool  # every loader's first elements are ready, so that the ranks can start
    over: bool  # every unit was consumed, so the data side is no longer needed
    places: dict[str, ResumePoint]  # by name, where each loader that has begun would continue


class HostLost(Message, frozen=True):
    """A data VM is gone; other VMs make the elements that it had leased.

    The supervisor tells the coordinator, or the coordinator tells the supervisor.
    On this host the coordinator only notices that a worker pool is silent; the supervisor kills
    the pool, and reports when it is gone.
    """

    vm: int  # -1 for the planner
    cause: str


FromPlanner = Hello | Planned | Final
ToPlanner = Draw | Cancel | FinishPlans | Leave
FromWorker = Hello | list[Result]
FromPool = Hello | Alive | WorkerLost
ToWorker = list[Ticket] | Hello | Cancel | Leave
"""A worker makes its tickets in their order."""
FromRank = Hello | Begin | Progress
ToRank = Hello | Ended | Cancel | Failed
Command = FinishPlans | Failed | HostLost
Report = Hello | Note | ProgressReport | HostLost | Failed | Final
