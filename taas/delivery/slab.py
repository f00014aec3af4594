"""Slabs: shared memory in which batches are made and read without a copy.

The coordinator creates one memfd with a slab for each rank; offsets are those of the file. Its
size is only address space. Memory is reserved with ``posix_fallocate``, because a write to a page
for which there is no memory raises SIGBUS, not an exception. Slots are allocated first fit, lowest
offset first, so that a rank that keeps up touches few pages.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import mmap
import os
from bisect import bisect_left
from collections.abc import Callable
from typing import Any

_PAGE = 4096
_RESERVE = 8 << 20
_POPULATE_WRITE = 23


class SlabFile:
    """The coordinator's side: the file, and how much of each rank's slab is reserved."""

    def __init__(self, size: int, ranks: int) -> None:
        self._size = size
        self._reserved = [rank * size for rank in range(ranks)]
        self.fd = os.memfd_create("taas-slabs", os.MFD_CLOEXEC)
        try:
            os.ftruncate(self.fd, size * ranks)
        except OSError:
            self._size = 0  # the process has a limit on file sizes: batches are sent as frames

    def reserve(self, rank: int, upto: int) -> int:
        """Reserve memory of a rank's slab up to an offset; return the offset that was reached.

        It is lower than requested if the system has no more memory.
        """
        reserved = self._reserved[rank]
        goal = min((rank + 1) * self._size, max(upto, reserved + _RESERVE))
        if reserved < upto and reserved < goal:
            with contextlib.suppress(OSError):
                os.posix_fallocate(self.fd, reserved, goal - reserved)
                self._reserved[rank] = goal
        return self._reserved[rank]


class Slabs:
    """A worker's or rank's mapping of all slabs."""

    def __init__(self, fd: int) -> None:
        self.size = os.fstat(fd).st_size
        self.map = mmap.mmap(fd, self.size, mmap.MAP_SHARED)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.map))
        self._faulted: set[tuple[int, int]] = set()

    def fault_in(self, offset: int, nbytes: int) -> None:
        """Map the pages of a slot in one call, once per slot, instead of one fault per page."""
        if (offset, nbytes) not in self._faulted:
            self._faulted.add((offset, nbytes))
            with contextlib.suppress(OSError):  # before Linux 5.14
                self.map.madvise(_POPULATE_WRITE, offset, nbytes)


class SlotLease(ctypes.Array[ctypes.c_char]):
    """The buffer of a slot, as Python objects see it.

    ``lease_slot`` makes subclasses, which have a length.
    """

    _type_ = ctypes.c_char
    _length_ = 0
    on_free: Callable[[], None]

    def __del__(self) -> None:
        self.on_free()


@functools.cache
def _lease_type(capacity: int) -> Any:
    """Return the type for slots of one size; there are few sizes (``slot_size``)."""
    return type("Lease", (SlotLease,), {"_length_": capacity, "_type_": ctypes.c_char})


def lease_slot(slabs: Slabs, offset: int, capacity: int, on_free: Callable[[], None]) -> SlotLease:
    """Return the buffer of one slot.

    ``on_free`` is called, in any thread, when no object uses the buffer any more.
    """
    lease: SlotLease = _lease_type(capacity).from_buffer(slabs.map, offset)
    lease.on_free = on_free
    return lease


def slot_size(nbytes: int) -> int:
    """Round up to whole pages, by at most an eighth.

    As a result, there are few different sizes, and freed slots can be reused.
    """
    step = max(_PAGE, (1 << max(nbytes - 1, 1).bit_length()) // 16)
    return max(_PAGE, -(-nbytes // step) * step)


class SlotTable:
    """The free extents of one slab, sorted by offset and merged with their neighbours.

    Memory is reserved when it is first needed; ``reserve(upto)`` returns the offset up to which it
    is safe to touch.
    """

    def __init__(self, size: int, reserve: Callable[[int], int], start: int = 0) -> None:
        self.size, self._start = size, start
        self._reserve, self._reserved = reserve, start
        self._extents = [(start, size)] if size else []  # start and length of each

    def take(self, nbytes: int) -> int | None:
        """Return the offset of ``nbytes`` free bytes, or None."""
        for at, (start, length) in enumerate(self._extents):
            if length < nbytes:
                continue
            if start + nbytes > self._reserved and not self._grow(start + nbytes):
                return None
            self._extents[at : at + 1] = (
                [(start + nbytes, length - nbytes)] if length > nbytes else []
            )
            return start
        return None

    def give(self, offset: int, nbytes: int) -> None:
        """Take back a slot that ``take`` returned."""
        extents, end = self._extents, offset + nbytes
        first = last = bisect_left(extents, (offset, 0))
        if last < len(extents) and extents[last][0] == end:
            end += extents[last][1]
            last += 1
        if first > 0 and sum(extents[first - 1]) == offset:
            first -= 1
            offset = extents[first][0]
        extents[first:last] = [(offset, end - offset)]

    def _grow(self, upto: int) -> bool:
        """Reserve up to an offset; return whether that worked.

        If it did not, forget the free extents beyond the reserved memory.
        """
        self._reserved = self._reserve(upto)
        if self._reserved >= upto:
            return True
        end = self._reserved
        self.size = max(0, end - self._start)
        self._extents = [(at, min(length, end - at)) for at, length in self._extents if at < end]
        return False


def slab_size(buffer: int, ranks: int) -> int:
    """Return the bytes of a rank's slab: its share of ``buffer``, at least 4 MiB."""
    return max(4 << 20, buffer // ranks // (1 << 20) * (1 << 20))
