"""Slabs: shared memory that elements are made in and read from, without a copy between.

The coordinator makes one memfd per rank. Its size is address space; memory is reserved page by page with
``posix_fallocate``, because a page that cannot be had when it is first written is a SIGBUS and no exception.
Ready elements outlive the worker that made them. A rank's tensors hang on a lease, a ctypes object that
exports the slot's buffer: when nothing refers to the buffer any more, the lease says so.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Callable
from typing import Any

__all__ = ["Lease", "Slab", "SlabFile", "lease_slot"]

_RESERVE = 8 << 20
_POPULATE_WRITE = 23
_libc = ctypes.CDLL(None, use_errno=True)


class SlabFile:
    """The coordinator's side: the file and how much of it is reserved."""

    def __init__(self, size: int, name: str) -> None:
        self.size = size
        self.fd = os.memfd_create(f"taas-{name}", os.MFD_CLOEXEC)
        try:
            os.ftruncate(self.fd, size)
        except OSError:
            self.size = 0  # a limit on file sizes: elements travel as frames
        self._reserved = 0

    def reserve(self, upto: int) -> int:
        """Reserve memory up to a byte; return up to which it is reserved, less when memory is short."""
        if upto > self._reserved:
            goal = min(self.size, max(upto, self._reserved + _RESERVE))
            if goal <= self._reserved:
                return self._reserved
            try:
                os.posix_fallocate(self.fd, self._reserved, goal - self._reserved)
            except OSError:
                return self._reserved
            self._reserved = goal
        return self._reserved

    def close(self) -> None:
        """Close the file; mappings elsewhere keep the memory until they end."""
        os.close(self.fd)


class Slab:
    """A worker's or rank's mapping of one slab."""

    def __init__(self, fd: int) -> None:
        self.size = os.fstat(fd).st_size
        self.map = mmap.mmap(fd, self.size, mmap.MAP_SHARED) if self.size else mmap.mmap(-1, mmap.PAGESIZE)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.map))
        self._faulted: set[tuple[int, int]] = set()

    def fault_in(self, offset: int, nbytes: int) -> None:
        """Map the pages of a slot in one call instead of one fault a page; once per slot."""
        if (offset, nbytes) not in self._faulted:
            self._faulted.add((offset, nbytes))
            length = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
            _libc.madvise(
                ctypes.c_void_p(self.address + offset),
                ctypes.c_size_t(length),
                ctypes.c_int(_POPULATE_WRITE),
            )


class Lease(ctypes.Array[ctypes.c_char]):
    """A slot's buffer as Python objects see it. Subclasses have a length; see ``lease_slot``."""

    _type_ = ctypes.c_char
    _length_ = 0
    on_free: Callable[[], None] | None

    def __del__(self) -> None:
        on_free = getattr(self, "on_free", None)
        if on_free is not None:
            on_free()


_lease_types: dict[int, Any] = {}


def lease_slot(slab: Slab, offset: int, capacity: int, on_free: Callable[[], None]) -> Lease:
    """Return the buffer of one slot; ``on_free`` is called, in any thread, when nobody uses it any more.

    Slots come in few sizes (``slots.slot_size``), so the types made here stay few.
    """
    kind: Any = _lease_types.get(capacity)
    if kind is None:
        kind = _lease_types[capacity] = type(
            "Lease", (Lease,), {"_length_": capacity, "_type_": ctypes.c_char}
        )
    lease: Lease = kind.from_buffer(slab.map, offset)
    lease.on_free = on_free
    return lease
