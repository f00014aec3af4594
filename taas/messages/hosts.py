"""What stands in for shared memory and a shared disk where an agent is on another host than the supervisor.

Of a data VM, ``vm`` is the number of the maker that it is for.
"""

from __future__ import annotations

from taas.messages.wire import Memory, Message


class WantPiece(Message, frozen=True):
    """Send a piece of a memory file that you named; the answer is :class:`Piece`."""

    run: str
    vm: int
    fd: int
    offset: int
    size: int


class Piece(Message, frozen=True):
    """Some bytes of a memory file."""

    run: str
    vm: int
    fd: int
    offset: int
    data: bytes


class Wrote(Message, frozen=True):
    """Bytes that a rank, or a maker, wrote to one of its output files on another host.

    Attributes:
        rank: -1 for a maker.
        file: name of the file in the rank's folder.
    """

    run: str
    vm: int
    rank: int
    file: str
    offset: int
    data: bytes


class WroteTaken(Message, frozen=True):
    """``size`` bytes of :class:`Wrote` were taken: so many more may be sent."""

    run: str
    vm: int
    size: int


class WantProject(Message, frozen=True):
    """This VM does not see the project: pack it. The answer is :class:`ProjectPacked`."""

    run: str
    vm: int


class ProjectPacked(Message, frozen=True):
    """The project's files that travel (:mod:`taas.travel.parcel`), whose pieces may be asked for."""

    run: str
    parcel: Memory


class FileChange(Message, frozen=True):
    """A change to files on a VM, for the notebook's disk (:mod:`taas.travel.changes`).

    Attributes:
        rank: 0: it is a change of the project; else of what this rank has in its scratch.
    """

    run: str
    vm: int
    rank: int
    change: bytes


class FileChangeTaken(Message, frozen=True):
    """``size`` bytes of :class:`FileChange` were taken, and are on the disk."""

    run: str
    vm: int
    size: int


class Beat(Message, frozen=True):
    """Nothing: that it cannot be sent tells its sender that the peer is out of reach."""
