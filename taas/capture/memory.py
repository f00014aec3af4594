"""The memory of tensors and arrays: found once, written once, mapped by whoever receives it.

Whoever pickles a tensor or an array registers the **block** of memory it lives in (a storage, or what the
root of a chain of array views owns) and which part of it is used. Blocks that overlap, as those of an array
and of the tensor made from it, form one **region** of the file, so whatever shared memory goes on sharing.
A region is as long as its memory, but only the used parts are written: the rest is a hole and costs
nothing. So a small view of a giant storage is cheap and keeps its offset and strides.
"""

from __future__ import annotations

import bisect
import ctypes
import mmap
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

__all__ = [
    "Block",
    "Piece",
    "Region",
    "Resident",
    "SentMemory",
    "address_of",
    "candidates",
    "differing",
    "read_at",
    "view_of",
    "write_at",
]

PAGE = mmap.PAGESIZE
_SMALL_ALIGNMENT = 64
_CHUNK = 1 << 18
_LOOKED_UP_FROM = 1 << 20

_libc = ctypes.CDLL(None)
_libc.memcmp.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_view_from_memory = ctypes.pythonapi.PyMemoryView_FromMemory
_view_from_memory.argtypes = (ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)
_view_from_memory.restype = ctypes.py_object
_WRITABLE = 0x200

Span = tuple[int, int]


class Region(msgspec.Struct, frozen=True, array_like=True):
    """Consecutive memory in a file.

    Attributes:
        offset: where it begins in the file, in bytes.
        nbytes: its length.
        device: ``cpu`` or ``cuda:N``, as the sender had it.
        spans: the parts (start, end) that were written, relative to the region.
    """

    offset: int
    nbytes: int
    device: str
    spans: tuple[Span, ...]


class Piece(msgspec.Struct, frozen=True, array_like=True):
    """A part of a region: what one storage, or the root of some arrays, covers."""

    region: int
    start: int
    nbytes: int


@dataclass(slots=True)
class Block:
    """Memory that tensors or arrays of the sender live in.

    Attributes:
        address: where it is; of a CUDA storage, where its copy in host memory is.
        owner: what keeps it alive.
        locate: tells where the owner's memory is now.
        spans: the used parts, relative to the block.
        tensors: the tensors on it, whose version counters have to learn of a change.
    """

    address: int
    nbytes: int
    device: str
    owner: Any
    locate: Callable[[], int]
    spans: list[Span] = field(default_factory=list)
    tensors: list[Any] = field(default_factory=list)
    staged: Any = None


def view_of(address: int, nbytes: int) -> memoryview:
    """Return a writable view of memory, which the caller keeps alive."""
    view: memoryview = _view_from_memory(address, nbytes, _WRITABLE) if nbytes else memoryview(bytearray())
    return view


def address_of(buffer: Any) -> int:
    """Return the address of a writable buffer."""
    return ctypes.addressof(ctypes.c_char.from_buffer(buffer))


def write_at(fd: int, data: memoryview, offset: int) -> None:
    """Write all of ``data`` at ``offset``."""
    while data.nbytes:
        done = os.pwrite(fd, data, offset)
        data, offset = data[done:], offset + done


def read_at(fd: int, target: memoryview, offset: int) -> None:
    """Fill ``target`` from ``offset`` on.

    Raises:
        EOFError: the file ends before.
    """
    while target.nbytes:
        done = os.preadv(fd, [target], offset)
        if not done:
            raise EOFError(f"the file of captured names ends at {offset} bytes, which is too early")
        target, offset = target[done:], offset + done


def differing(address: int, original: int, spans: tuple[Span, ...]) -> Iterator[Span]:
    """Yield the parts of ``spans`` in which the memory at two addresses differs, neighbours joined."""
    open_start, open_end = -1, -1
    for start, end in spans:
        for low in range(start, end, _CHUNK):
            high = min(low + _CHUNK, end)
            if _libc.memcmp(address + low, original + low, high - low) == 0:
                continue
            if low != open_end:
                if open_end > 0:
                    yield open_start, open_end
                open_start = low
            open_end = high
    if open_end > 0:
        yield open_start, open_end


def written_pages(address: int, nbytes: int) -> tuple[Span, ...] | None:
    """Return the pages of a private mapping that this process wrote to, relative to ``address``.

    The kernel copies a page of a private file mapping when it is written to; such a page is no longer a page
    of the file (bit 61 of its entry in the page map,
    https://docs.kernel.org/admin-guide/mm/pagemap.html).

    Returns:
        None where that can't be found out.
    """
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return None
    first, end = address // PAGE, -(-(address + nbytes) // PAGE)
    try:
        with Path("/proc/self/pagemap").open("rb", buffering=0) as pagemap:
            pagemap.seek(first * 8)
            entries = numpy.frombuffer(pagemap.read((end - first) * 8), "u8")
    except OSError:
        return None
    if len(entries) != end - first:
        return None
    there, of_file = entries >> 62 != 0, entries >> 61 & 1 != 0
    own = numpy.flatnonzero(numpy.diff(numpy.concatenate(([0], there & ~of_file, [0]))))
    return tuple(
        (
            max(0, int(low) * PAGE + first * PAGE - address),
            min(nbytes, int(high) * PAGE + first * PAGE - address),
        )
        for low, high in zip(own[::2], own[1::2], strict=True)
    )


def _common(first: tuple[Span, ...], second: tuple[Span, ...]) -> tuple[Span, ...]:
    """Return what two ordered lists of spans have in common."""
    found, i, j = [], 0, 0
    while i < len(first) and j < len(second):
        low, high = max(first[i][0], second[j][0]), min(first[i][1], second[j][1])
        if low < high:
            found.append((low, high))
        if first[i][1] < second[j][1]:
            i += 1
        else:
            j += 1
    return tuple(found)


def candidates(address: int, nbytes: int, spans: tuple[Span, ...]) -> tuple[Span, ...]:
    """Return the parts of ``spans`` in a private mapping that may have changed."""
    if nbytes < _LOOKED_UP_FROM:
        return spans
    written = written_pages(address, nbytes)
    return spans if written is None else _common(spans, written)


def _merged(spans: list[Span]) -> tuple[Span, ...]:
    merged: list[Span] = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return tuple(merged)


class SentMemory:
    """The blocks a sender has met, and how they lie in the file."""

    def __init__(self) -> None:
        self.blocks: list[Block] = []
        self.regions: list[Region] = []
        self.pieces: list[Piece] = []
        self._base: list[int] = []
        self._members: list[list[Block]] = []

    def add(self, block: Block) -> int:
        """Register a block and return its number."""
        self.blocks.append(block)
        return len(self.blocks) - 1

    @property
    def nbytes(self) -> int:
        """Bytes that have to be written."""
        return sum(end - start for region in self.regions for start, end in region.spans)

    def lay_out(self, start: int) -> int:
        """Give every block its place in a file whose first ``start`` bytes are taken; return the file's size."""
        self.pieces = [Piece(0, 0, 0)] * len(self.blocks)
        order = sorted(
            range(len(self.blocks)), key=lambda i: (self.blocks[i].address, -self.blocks[i].nbytes)
        )
        group: list[int] = []
        end = -1
        for number in order:
            block = self.blocks[number]
            if group and block.address >= end:
                start = self._close(group, end, start)
                group = []
            end = max(end, block.address + block.nbytes) if group else block.address + block.nbytes
            group.append(number)
        return self._close(group, end, start) if group else start

    def _close(self, group: list[int], end: int, start: int) -> int:
        first = self.blocks[group[0]]
        nbytes = end - first.address
        alignment = PAGE if nbytes >= PAGE else _SMALL_ALIGNMENT
        offset = -(-start // alignment) * alignment
        spans: list[Span] = []
        for number in group:
            block = self.blocks[number]
            shift = block.address - first.address
            self.pieces[number] = Piece(len(self.regions), shift, block.nbytes)
            spans += [(low + shift, high + shift) for low, high in block.spans]
        self.regions.append(Region(offset, nbytes, first.device, _merged(spans)))
        self._base.append(first.address)
        self._members.append([self.blocks[number] for number in group])
        return offset + nbytes

    def write(self, fd: int) -> None:
        """Write the used parts of all blocks."""
        for region, base in zip(self.regions, self._base, strict=True):
            for start, end in region.spans:
                write_at(fd, view_of(base + start, end - start), region.offset + start)

    def drop_staged(self) -> None:
        """Forget the host copies of CUDA storages, once they are written."""
        for block in self.blocks:
            block.staged = None

    def members(self, region: int) -> list[Block]:
        """Return the blocks of a region."""
        return self._members[region]

    def address(self, region: int) -> int:
        """Return where a region was when it was written."""
        return self._base[region]


class Resident:
    """Which received memory lies at an address, so that what points into it is recognised."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._found: list[tuple[int, int, int]] = []

    def add(self, address: int, nbytes: int, region: int, start: int = 0) -> None:
        """Say that ``nbytes`` of a region, from ``start`` on, are at ``address``."""
        place = bisect.bisect(self._starts, address)
        self._starts.insert(place, address)
        self._found.insert(place, (nbytes, region, start))

    def find(self, address: int, nbytes: int) -> Piece | None:
        """Return the piece that lies at ``address``, or None where that isn't received memory."""
        place = bisect.bisect(self._starts, address) - 1
        if place < 0 or not nbytes:
            return None
        length, region, start = self._found[place]
        inside = address - self._starts[place]
        return Piece(region, start + inside, nbytes) if inside + nbytes <= length else None
