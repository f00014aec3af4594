"""What the ledger knows of attempts, workers and ranks, and the numbers it goes by."""

from __future__ import annotations

from dataclasses import dataclass, field

from taas.delivery.plan import Work
from taas.delivery.slots import SlotTable, slot_size

__all__ = ["Attempt", "LeaseRules", "Pace", "RankState", "Usage", "WorkerState"]


@dataclass(frozen=True, slots=True)
class LeaseRules:
    """Numbers the ledger goes by.

    Attributes:
        window: seconds of work leased to a worker ahead of what it is on.
        leases: most attempts leased to one worker.
        ahead: most elements under way or held for one rank and loader.
        begin: bytes to begin working ahead with, before it shows that more is of use.
        deaths: an element that killed so many workers is given up.
        patience: seconds after which a lease that is also twenty times as old as usual is given out again.
    """

    window: float = 0.03
    leases: int = 128
    ahead: int = 1024
    begin: int = 4 << 20
    deaths: int = 3
    patience: float = 60.0


@dataclass(slots=True)
class Attempt:
    """One lease of one element to one worker.

    Attributes:
        charge: bytes it counts for as work ahead, while ``charged``.
        offset, capacity: its slot; capacity 0: it has none.
        since: when it was leased. expected: seconds it should take.
        made: its worker is through with it.
        orphan: its worker is dead; its rank is asked whether it arrived.
        hedged: its worker is stopped or late; another attempt may be made.
    """

    ident: int
    work: Work
    worker: str
    charge: int
    offset: int
    capacity: int
    since: float
    expected: float
    made: bool = False
    orphan: bool = False
    hedged: bool = False
    charged: bool = True


@dataclass(slots=True)
class WorkerState:
    """A data worker: what was leased to it, and how long that will take it."""

    name: str
    host: str
    shared: bool
    attempts: set[int] = field(default_factory=set)
    backlog: int = 0
    backlog_seconds: float = 0.0
    suspect: bool = False


@dataclass(slots=True)
class Usage:
    """Work ahead of one rank in one plan."""

    nbytes: int = 0
    count: int = 0


@dataclass(slots=True)
class RankState:
    """A rank: its slab, and how far ahead of it is worked.

    Attributes:
        usage: work ahead of it, by plan. nbytes: of all plans.
        targets: elements under way or held, by loader, that have been enough so far.
        blocked: plans whose target kept an idle worker from working ahead for this rank.
    """

    slots: SlotTable
    shared: bool
    joined: bool = False
    usage: dict[int, Usage] = field(default_factory=dict)
    nbytes: int = 0
    mail: list[object] = field(default_factory=list)
    waited: float = 0.0
    targets: dict[int, int] = field(default_factory=dict)
    blocked: set[int] = field(default_factory=set)

    def charge(self, plan: int, nbytes: int, count: int = 0) -> None:
        """Count so much more, or less, as work ahead."""
        usage = self.usage.setdefault(plan, Usage())
        usage.nbytes += nbytes
        usage.count += count
        self.nbytes += nbytes
        if not usage.count:
            del self.usage[plan]

    def work_ahead(self, plan: int) -> tuple[int, int]:
        """Return bytes and number of a plan's elements that count as work ahead."""
        usage = self.usage.get(plan)
        return (0, 0) if usage is None else (usage.nbytes, usage.count)


class Pace:
    """Bytes and seconds of one loader's elements, as seen lately."""

    __slots__ = ("_count", "_previous", "_recent", "seconds", "size")

    def __init__(self) -> None:
        self.size = 0
        self.seconds = 0.0
        self._count = self._recent = self._previous = 0

    def see(self, nbytes: int, seconds: float) -> None:
        """Take in one element."""
        self._recent = max(self._recent, nbytes)
        self._count += 1
        if self._count % 256 == 0:
            self._previous, self._recent = self._recent, 0
        self.size = slot_size(max(self._recent, self._previous, nbytes))
        self.seconds = seconds if self._count == 1 else 0.9 * self.seconds + 0.1 * seconds
