"""The messages of a delivery.

The processes of a delivery communicate in MessagePack over zmq with each other, and in JSON lines
with the supervisor.

Opaque ``bytes`` fields hold pickles of user objects (an index, an exception): the coordinator
forwards them without unpickling them.
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
    number: int = 0  # the number of the rank, or of the data VM
    serial: int = 0  # for a data worker, its number in the order in which its pool has forked them

    @property
    def holder(self) -> str:
        """Return the name of the peer's key; data workers use their pool's."""
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
    """Return the names of all keys in a run with this many ranks and worker pools."""
    peers = [("rank", number) for number in range(ranks)] + [
        ("pool", number) for number in range(pools)
    ]
    return [PLANNER.holder, *(Peer(*peer).holder for peer in peers)]


class Hello(Message, frozen=True):
    """Announces a peer, which the name of its connection identifies.

    The coordinator forwards the planner's Hello to the ranks, and a rank's to the workers.

    The coordinator's own Hello tells the supervisor that peers can be started.
    """

    error: str = ""  # why a planner or worker pool cannot load the registered loaders
    loaders: tuple[LoaderFacts, ...] = ()  # the planner's facts about the loaders
    shared: bool = False  # a worker has mapped the slabs
    rank: int = -1  # filled in by the coordinator, for workers
    # the address at which a rank receives batches, or at which the coordinator listens
    address: str = ""
    key: bytes = b""  # the CURVE key at this address; empty on one host


class Cancel(Message, frozen=True):
    """No rank will request anything of this plan again.

    ``undone``: no rank has begun the plan, so the next iteration starts from the same state.
    """

    plan: int
    loader: int
    undone: bool = False


class Note(Message, frozen=True):
    """One line for the user."""

    text: str


class Failed(Message, frozen=True):
    """No more batches will come; ranks raise an error with this reason at their next request.

    The message is sent by the coordinator or by the supervisor, whichever detects the failure.
    """

    reason: str


# ── planner ───────────────────────────────────────────────────────────────────────────────────────


class LoaderFacts(NamedTuple):
    """Facts that only the unpickled loader can provide."""

    name: str  # the name under which it was registered
    length: int | None = None  # batches of one iteration over all ranks; None if it has no length
    # its dataset is iterable: one worker makes all its batches, in their order
    streamed: bool = False
    epoch: int | None = None  # the sampler's epoch at launch; None if it has no set_epoch
    per_rank: bool = False  # the sampler is distributed: each rank has its own stream of indices
    note: str = ""  # one line for the user
    error: str = ""  # why this loader cannot be delivered


class Draw(Message, frozen=True):
    """Requests about ``count`` more indices of a plan.

    The first request for a plan begins its iteration.
    """

    plan: int
    loader: int
    # the iteration of this loader; a repeated one starts again from the same generator states
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
    """Requests the states of the generators after these iterations; sent when the ranks have ended.

    Each item is (loader, number of the last iteration that has begun, epoch of that iteration).
    """

    begun: Sequence[tuple[int, int, int | None]] = ()  # empty in the supervisor's message


class Final(Message, frozen=True):
    """The final states of the loaders' generators, for ``registered.apply_final``."""

    # packed {loader name: {attribute path: a generator's state, or an epoch}}; empty if unknown
    states: bytes
    # why the state is not known, by the loader's name
    unknown: dict[str, str] = msgspec.field(default_factory=dict)


# ── workers and their pools ───────────────────────────────────────────────────────────────────────


class WorkerLost(Message, frozen=True):
    """A worker of this pool has ended.

    ``number`` is the number of the batch that it was making.
    """

    serial: int
    number: int
    cause: str


class Ticket(NamedTuple):
    """A job to make a batch, which other workers may be making as well."""

    number: int  # the number of the batch, unique in the run
    plan: int
    loader: int
    seq: int
    rank: int  # the rank that gets the batch
    seed: int  # all RNGs are seeded with it before the batch is made
    # what to make: a pickled index of the dataset; for an iterable dataset, position, iteration and
    # base seed
    which: bytes
    offset: int = 0  # offset of the slot in the slabs
    capacity: int = 0  # size of the slot in bytes; 0 requests frames on the socket
    # for an iterable dataset: no batch before this one will be requested again, except to fill up
    # the last row
    floor: int = 0
    poison: str = ""  # how the workers that made it died: send an error instead


class Result(NamedTuple):
    """A worker has made and sent a batch.

    ``nbytes`` is the memory that the batch takes, ``seconds`` the time that it took to make it.
    """

    number: int
    nbytes: int
    seconds: float
    leaked: bool = False  # user code still holds memory of the slot: never lease it again
    # number of batches of the iterable dataset, if it has ended before this one; -1: it has not
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
    """A plan has ``steps`` batches for the rank, which then raises ``failure`` or ``refusal``."""

    plan: int
    steps: int
    failure: bytes = b""  # packed exception of the user's sampler
    refusal: str = ""  # why the plan ends early
    disagree: bool = False  # refused because another rank requested something else


class PlanProgress(NamedTuple):
    """The progress of a rank in a plan.

    The rank has consumed ``consumed`` steps, and has requested the first ``asked`` steps and one
    more.
    """

    plan: int
    consumed: int
    asked: int
    closed: bool = False  # the rank will request no more of it


class Progress(Message, frozen=True):
    """A rank reports its use of its batches."""

    plans: list[PlanProgress]
    released: list[int]  # numbers of yielded batches whose memory is no longer used
    waited: float  # total time spent waiting, in seconds


# ── the data path (worker → rank), frame 0 after its MAC ──────────────────────────────────────────


class ElementArrival(NamedTuple):
    """The location of a batch in memory.

    Several batches may be sent in one message; then one frame has their pickles, in this order.
    """

    number: int  # the number of the batch; its rank drops second copies
    plan: int
    seq: int
    offset: int  # offset of the slot; -1: the batch's memory is the frame that follows
    capacity: int  # size of the slot in bytes
    used: int  # bytes of memory used
    failed: bool  # the pickle is a packed exception
    pickled: int  # size of the pickle in bytes


# ── the coordinator and the supervisor ────────────────────────────────────────────────────────────


class ProgressReport(Message, frozen=True):
    """The progress of the delivery; the coordinator's last message is one of these."""

    delivered: Delivered
    workers: int
    prebuffered: bool  # the first batches of every loader are ready, so that the ranks can start
    over: bool  # every unit was consumed, so the data side is no longer needed
    # the point from which each loader that has begun would continue, by name
    places: dict[str, ResumePoint]


class HostLost(Message, frozen=True):
    """A data VM is gone; other VMs make the batches that were leased to it.

    The supervisor sends this to the coordinator, or the coordinator to the supervisor. On this host
    the coordinator only notices that a worker pool is silent; the supervisor then kills the pool,
    and reports when it is gone.
    """

    vm: int  # -1 for the planner
    cause: str


FromPlanner = Hello | Planned | Final
ToPlanner = Draw | Cancel | FinishPlans | Leave
FromWorker = Hello | list[Result]
FromPool = Hello | Alive | WorkerLost
ToWorker = list[Ticket] | Hello | Cancel | Leave
"""A worker processes its tickets in order."""
FromRank = Hello | Begin | Progress
ToRank = Hello | Ended | Cancel | Failed
Command = FinishPlans | Failed | HostLost
Report = Hello | Note | ProgressReport | HostLost | Failed | Final
