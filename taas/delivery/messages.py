"""Structs on the delivery's wires. Control messages are msgpack, never pickle.

Each process decodes only the union of what its sender may say; what does not decode is dropped by the
transport and counted. Opaque ``bytes`` fields hold pickles of user objects (an index, an exception): the
coordinator passes them on unread.
"""

from __future__ import annotations

from typing import Any

import msgspec

from taas.delivery.board import NOTHING_AHEAD

__all__ = ["Decoder", "encode"]


class _Message(msgspec.Struct, array_like=True, tag=True, frozen=True):
    """One control message."""


# ── planner ───────────────────────────────────────────────────────────────────────────────────────────


class LoaderFacts(msgspec.Struct, array_like=True, frozen=True):
    """What only the unpickled loader can tell.

    Attributes:
        name: the registered name.
        length: elements of one iteration, over all ranks; None if the loader has no length.
        streams: 0 for a map-style dataset; else how many workers an IterableDataset is spread over.
        epoch: the sampler's epoch at launch; None if it has no ``set_epoch``.
        per_rank: the sampler is distributed: each rank has a stream of its own.
        note: one line for the user, or "".
        error: why this loader cannot be delivered, or "".
    """

    name: str
    length: int | None = None
    streams: int = 0
    epoch: int | None = None
    per_rank: bool = False
    note: str = ""
    error: str = ""


class PlannerHello(_Message, frozen=True):
    """The planner has the loaders."""

    pid: int
    loaders: list[LoaderFacts]


class OpenPlan(_Message, frozen=True):
    """Begin iteration ``iteration`` of a loader; one begun before is begun again from the same RNG state.

    ``repeat``: the run was started again and goes on here; iterate all iterations before this one first.
    """

    plan: int
    loader: int
    iteration: int
    epoch: int | None
    repeat: bool = False


class Draw(_Message, frozen=True):
    """Send about ``count`` more tickets of a plan."""

    plan: int
    count: int


class Planned(_Message, frozen=True):
    """The next indices of a plan, in order; ``failure`` is a packed exception of the user's sampler."""

    plan: int
    base_seed: int
    indices: list[bytes]
    ended: bool
    failure: bytes = b""


class DropPlan(_Message, frozen=True):
    """Nobody will ask for this plan again."""

    plan: int


class FinishPlans(_Message, frozen=True):
    """Tell where generators stand after these iterations (loader, last iteration begun, its epoch)."""

    begun: list[tuple[int, int, int | None]]


class FinalStates(_Message, frozen=True):
    """Pickled ``{loader name: {attribute path: generator state or epoch}}``; why it is ``unknown`` of others, by name."""

    states: bytes
    unknown: dict[str, str] = {}


# ── workers and their hosts ───────────────────────────────────────────────────────────────────────────


class HostHello(_Message, frozen=True):
    """A data VM's keeper has the loaders and forks workers."""

    pid: int
    processes: int
    error: str = ""


class Beat(_Message, frozen=True):
    """A keeper lives; ``stopped`` are its workers that the system has stopped (SIGSTOP, debugger)."""

    stopped: list[str]


class WorkerLost(_Message, frozen=True):
    """A worker ended. ``attempt`` is what it worked on, ``ahead`` what of a stream it made ahead (``Board``)."""

    worker: str
    attempt: int
    cause: str
    ahead: tuple[int, int, int] = NOTHING_AHEAD


class WorkerHello(_Message, frozen=True):
    """A worker takes tickets. ``shared``: it has mapped the slabs."""

    pid: int
    shared: bool


class Ticket(msgspec.Struct, array_like=True, frozen=True):
    """One attempt at one element.

    Attributes:
        attempt: unique over the run.
        plan, loader, seq, rank: which element, for whom.
        seed: what all RNGs are set to before it is made.
        index: pickled index of the dataset, or ``(stream, position)`` packed, for iterable datasets.
        offset, capacity: the slot in the rank's slab; capacity 0 asks for frames on the socket.
    """

    attempt: int
    plan: int
    loader: int
    seq: int
    rank: int
    seed: int
    index: bytes
    offset: int = 0
    capacity: int = 0


class Lease(_Message, frozen=True):
    """Make these, in this order."""

    tickets: list[Ticket]


class RankAddress(_Message, frozen=True):
    """Where a rank takes elements."""

    rank: int
    address: str
    key: bytes


class Cancel(_Message, frozen=True):
    """Rank ``rank`` closed this plan: skip what is not yet made. Rank -1: all ranks did.

    ``undone``: none had begun it; it shall be as if it had never been.
    """

    plan: int
    rank: int
    undone: bool = False


class StreamState(msgspec.Struct, array_like=True, frozen=True):
    """Where a stream of an iterable dataset was when ``position`` was to be made next.

    Attributes:
        packed: a pickle, which only data workers open.
        seal: its MAC, also over the stream and the position; empty while it is in its worker.
    """

    position: int
    packed: bytes
    seal: bytes = b""


class Feed(_Message, frozen=True):
    """Own one stream of an iterable dataset, hold its positions from ``floor`` on, announce up to ``upto``.

    ``states``, for a worker that did not own it: begin at the last of them; without one, at the start.
    """

    plan: int
    loader: int
    iteration: int
    stream: int
    base_seed: int
    floor: int
    upto: int
    states: list[StreamState] = []


class Announced(_Message, frozen=True):
    """A stream's owner holds all positions below ``made``; ``ended``: there are no more; ``states`` are new."""

    plan: int
    stream: int
    made: int
    ended: bool
    states: list[StreamState] = []


class Stateless(_Message, frozen=True):
    """A loader's dataset offers states, but for this reason they are of no use."""

    loader: int
    reason: str


class Quit(_Message, frozen=True):
    """End now."""


class Result(msgspec.Struct, array_like=True, frozen=True):
    """What became of one attempt.

    Attributes:
        nbytes: bytes of memory it takes.
        seconds: what it took to make.
        sent: False if it was cancelled.
    """

    attempt: int
    loader: int
    nbytes: int
    seconds: float
    sent: bool


class Made(_Message, frozen=True):
    """Attempts a worker is through with."""

    results: list[Result]


# ── ranks ─────────────────────────────────────────────────────────────────────────────────────────────


class RankHello(_Message, frozen=True):
    """A rank takes elements at ``address``; ``key`` is its CURVE key there (empty on one host)."""

    rank: int
    pid: int
    address: str
    key: bytes
    shared: bool


class Welcome(_Message, frozen=True):
    """What a rank needs to know: the loaders, and the bytes of its slab."""

    loaders: list[LoaderFacts]
    slab: int


class Begin(_Message, frozen=True):
    """The rank calls ``iter()`` on a loader for the ``iteration``-th time.

    Attributes:
        start: its first step; more than 0 only where a run goes on that was started again.
        taken: steps that an earlier start of the run took of the iterations before.
    """

    loader: int
    iteration: int
    epoch: int | None
    start: int = 0
    taken: int = 0


class Opened(_Message, frozen=True):
    """That iteration is this plan; a ``refusal`` that is not empty says why it is none.

    ``disagree``: because another rank asked for something else.
    """

    loader: int
    iteration: int
    plan: int
    refusal: str = ""
    disagree: bool = False


class Ended(_Message, frozen=True):
    """A plan gives the rank ``steps`` elements and no more; then ``failure`` is raised, if any."""

    plan: int
    steps: int
    failure: bytes = b""
    refusal: str = ""


class Forget(_Message, frozen=True):
    """This plan was made for nothing: give back what arrived of it."""

    plan: int


class Progress(_Message, frozen=True):
    """What a rank has done with its elements.

    Attributes:
        consumed: steps consumed per plan.
        released: attempts whose memory is free again.
        waited: seconds spent waiting in all.
        spoilt: attempts whose slot the data worker's user code still holds: nobody may be given it again. The
            rank says so, since only its own word is sure to come before its release.
    """

    consumed: list[tuple[int, int]]
    released: list[int]
    waited: float
    spoilt: list[int] = []


class Close(_Message, frozen=True):
    """The rank is through with a plan after ``consumed`` steps; it has asked for the one after the first ``asked``."""

    plan: int
    consumed: int
    asked: int


class Which(_Message, frozen=True):
    """A worker died, or is stopped: which of these attempts did not arrive?"""

    attempts: list[int]


class Lacking(_Message, frozen=True):
    """Of the attempts ``asked``, these never arrived and will be ignored if they do."""

    asked: list[int]
    lacking: list[int]


class Doomed(_Message, frozen=True):
    """Element ``seq`` killed several workers; raise it at its place."""

    plan: int
    seq: int
    index: bytes
    cause: str


class RunFailed(_Message, frozen=True):
    """No element will come any more; raise this at the next request."""

    reason: str


# ── the data path (worker → rank), frame 0 after its MAC ──────────────────────────────────────────────


class Arrival(msgspec.Struct, array_like=True, frozen=True):
    """Where an element lies. Several may travel in one message, their pickles in one frame, in this order.

    Attributes:
        attempt, plan, seq: which.
        offset, capacity: its slot; offset -1: its memory is the frame that follows.
        used: bytes of memory.
        failed: the pickle is a packed exception.
        buffers: extents of protocol-5 buffers in the memory.
        pickled: bytes of its pickle.
        spoilt: the data worker's user code still holds memory of the slot.
    """

    attempt: int
    plan: int
    seq: int
    offset: int
    capacity: int
    used: int
    failed: bool
    buffers: list[tuple[int, int]]
    pickled: int
    spoilt: bool = False


FromPlanner = PlannerHello | Planned | FinalStates
ToPlanner = OpenPlan | Draw | DropPlan | FinishPlans | Quit
FromWorker = WorkerHello | Made | Announced | Stateless | HostHello | Beat | WorkerLost
ToWorker = Lease | RankAddress | Cancel | Feed | Quit
FromRank = RankHello | Begin | Progress | Close | Lacking
ToRank = Welcome | Opened | Ended | Forget | Which | Doomed | RunFailed
ToCoordinator = FromPlanner | FromWorker | FromRank

_encoder = msgspec.msgpack.Encoder()
encode = _encoder.encode


class Decoder:
    """Decodes one union of messages."""

    def __init__(self, union: Any) -> None:
        self._decode = msgspec.msgpack.Decoder(union).decode

    def __call__(self, data: bytes | memoryview) -> Any:
        """Return the message.

        Raises:
            msgspec.DecodeError: the bytes are none of this union's messages.
        """
        return self._decode(data)
