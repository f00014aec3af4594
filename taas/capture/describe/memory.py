"""The memory of tensors and arrays, by address: written once, and mapped by each receiver.

Overlapping memory, such as an array's and that of the tensor made from it, forms one **region** of
the file, so that objects which shared memory still share it. A region is as long as its memory, but
only the used parts are written: the rest is a hole and costs nothing. So a small view of a huge
storage is cheap, and keeps its offset and strides.

A state refers to memory by its address in the sender; the file's header maps addresses to regions.
A :class:`Stretch` is the location of a region in a process: in the notebook's own memory, in the
mapped payload of a rank, or in memory that an answer brought. In an answer, the payload's regions
keep their numbers, and new regions follow.

Memory is read, and changed parts are written, by address. No lock stops the notebook's own threads
meanwhile. Data that a thread writes while a payload is being written may be sent in part, and data
that it writes while an answer is being applied may be overwritten. References to the owners are
held, so that the memory is not freed; but if a thread resizes a storage after its location was
checked (``Stretch.is_there``) and before the write, the data are written to the old location.
"""

from __future__ import annotations

import bisect
import contextlib
import ctypes
import functools
import mmap
import os
import queue
import sys
import threading
from array import array
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import xxhash

from taas.base.import_hooks import loaded
from taas.base.wording import first_line

NAME = "taas-names"
"""The name under which the system shows the memfds of captured variables; each is sealed before
another process sees it.
"""
_PAGE = mmap.PAGESIZE
_SMALL_ALIGNMENT = 64

Span = tuple[int, int]


class Region(NamedTuple):
    """Consecutive memory in a file; only its ``spans`` (start, end) are written.

    ``device`` is the sender's device for it.
    """

    offset: int
    nbytes: int
    device: str
    spans: tuple[Span, ...]


class Patch(NamedTuple):
    """Bytes of a payload's region that the rank changed, and their offset in the answer."""

    region: int
    start: int
    nbytes: int
    offset: int


class RegionPlace(NamedTuple):
    """Where the sender of a file has a region, or a part of it that begins at ``start``."""

    address: int
    nbytes: int
    region: int
    start: int


def find_place(places: list[RegionPlace], address: int, nbytes: int) -> tuple[int, int] | None:
    """Return the region of some memory and the offset in the region; None if no place contains it.

    ``places`` are sorted.
    """
    at = bisect.bisect(places, (address, sys.maxsize)) - 1
    if at < 0:
        return None
    place = places[at]
    inside = address - place.address
    return (place.region, place.start + inside) if inside + nbytes <= place.nbytes else None


def overlapping(places: list[RegionPlace], address: int, nbytes: int) -> Iterator[int]:
    """Yield the regions that overlap some memory; ``places`` are sorted."""
    at = max(bisect.bisect(places, (address, sys.maxsize)) - 1, 0)
    while at < len(places) and places[at].address < address + nbytes:
        if places[at].address + places[at].nbytes > address:
            yield places[at].region
        at += 1


@dataclass(slots=True, eq=False)
class MemoryRange:
    """Memory that tensors and arrays use: a storage's, or that of the root of array views."""

    address: int  # on its device; a unique negative number if the memory is empty
    nbytes: int
    # keeps the memory alive: the storage, the root of the array views, or the enclosing stretch
    owner: Any
    locate: Callable[[], int] | None = None  # returns the present address of the owner's memory
    device: str = "cpu"
    storage: Any = None  # over all of it
    buffer: memoryview | None = None
    spans: list[Span] = field(default_factory=list)  # the used parts
    # the tensors that use it: a change increments their version counters
    tensors: list[Any] = field(default_factory=list)

    def as_buffer(self) -> memoryview:
        """Return the buffer on which arrays are made; always the same, because it is their base."""
        if self.buffer is None:
            self.buffer = view_of(self.address, self.nbytes, self.owner)
        return self.buffer

    def as_storage(self) -> Any:
        """Return the storage on which tensors are made; always the same."""
        if self.storage is None and isinstance(self.owner, Stretch):
            self.storage = self.owner.storage(self.address - self.owner.address, self.nbytes)
        elif self.storage is None:
            self.storage = _storage_on(self.as_buffer())
        return self.storage


def view_of(address: int, nbytes: int, owner: Any = None) -> memoryview:
    """Return a writable view of memory; it keeps the memory's owner alive."""
    raw: Any = (ctypes.c_ubyte * nbytes).from_address(address) if nbytes else (ctypes.c_ubyte * 0)()
    raw.owner = owner
    return memoryview(raw).cast("B")


def _storage_on(buffer: memoryview) -> Any:
    torch = sys.modules["torch"]
    return torch.frombuffer(buffer, dtype=torch.uint8).untyped_storage()


def copy_storage(storage: Any, device: str) -> Any:
    """Return a copy of a torch storage on a device."""
    return type(storage)(storage.nbytes(), device=device).copy_(storage)


def memory_of_storage(storage: Any) -> MemoryRange:
    """Return the memory of a torch storage."""
    address, device = storage.data_ptr() or -storage._cdata, str(storage.device)
    return MemoryRange(address, storage.nbytes(), storage, storage.data_ptr, device, storage)


def write_at(fd: int, data: memoryview, offset: int) -> None:
    """Write all of ``data`` at ``offset``."""
    while data.nbytes:
        done = os.pwrite(fd, data, offset)
        data, offset = data[done:], offset + done


def _read_at(fd: int, target: memoryview, offset: int) -> None:
    while target.nbytes:
        done = os.preadv(fd, [target], offset)
        if not done:
            raise EOFError(f"the file of captured names ends at {offset} bytes, which is too early")
        target, offset = target[done:], offset + done


# -------------------------------------------------------------- memory to send


class SentMemory:
    """The memory that a sender refers to and the receiver lacks; ``known`` is what both have.

    ``first`` is the number of its first region. After :meth:`lay_out`, ``regions`` has their
    locations in the file, and ``stretches`` their locations in this process.
    """

    def __init__(
        self, memories: Iterable[MemoryRange], known: Iterable[RegionPlace] = (), first: int = 0
    ) -> None:
        self._known, self.first = sorted(known), first
        missing = (m for m in memories if find_place(self._known, m.address, m.nbytes) is None)
        self._memories = [memory for memory in missing if memory.nbytes]
        self.regions: list[Region] = []
        self.stretches: dict[int, Stretch] = {}

    def lay_out(self, start: int) -> int:
        """Assign file locations, from ``start`` bytes on, to all memory; return the file's size."""
        groups: list[list[MemoryRange]] = []
        end = -1
        for memory in sorted(self._memories, key=lambda memory: (memory.address, -memory.nbytes)):
            if memory.address >= end:
                groups.append([])
            groups[-1].append(memory)
            end = max(end, memory.address + memory.nbytes)
        for number, group in enumerate(groups, self.first):
            base, device = group[0].address, group[0].device
            nbytes = max(memory.address + memory.nbytes for memory in group) - base
            alignment = _PAGE if nbytes >= _PAGE else _SMALL_ALIGNMENT
            offset = -(-start // alignment) * alignment
            placed = [(memory, memory.address - base) for memory in group]
            spans = merge_spans(
                [(at + low, at + high) for memory, at in placed for low, high in memory.spans]
            )
            storages = {(at, m.nbytes): m.storage for m, at in placed if m.storage is not None}
            self.regions.append(Region(offset, nbytes, device, spans))
            self.stretches[number] = Stretch(base, nbytes, group, device, storages, group, spans)
            start = offset + nbytes
        return start

    def places(self) -> list[RegionPlace]:
        """Return the locations in this process of all regions that the receiver will have."""
        new = (RegionPlace(s.address, s.nbytes, n, 0) for n, s in self.stretches.items())
        return sorted([*self._known, *new])

    def write(self, fd: int) -> None:
        """Write the used parts of all memory; a device's memory is copied through host memory."""
        for region, stretch in zip(self.regions, self.stretches.values(), strict=True):
            address, host = stretch.in_host_memory()
            for start, end in region.spans:
                write_at(fd, view_of(address + start, end - start, host), region.offset + start)


def merge_spans(spans: list[Span]) -> tuple[Span, ...]:
    """Return spans in order; adjacent and overlapping ones are merged."""
    found: list[Span] = []
    for start, end in sorted(spans):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        elif end > start:
            found.append((start, end))
    return tuple(found)


# ------------------------------------------------------- memory of this process


@dataclass(slots=True)
class Stretch:
    """A region's memory in this process."""

    address: int
    nbytes: int
    owner: Any
    device: str = "cpu"  # of the storages on it
    storages: dict[Span, Any] = field(default_factory=dict)  # over parts of it, by (start, length)
    met: list[MemoryRange] = field(default_factory=list)  # the notebook's memory in it
    spans: tuple[Span, ...] = ()  # the used parts
    is_mapped: bool = False  # a private mapping of a sealed file: unwritten pages are the file's

    def is_there(self) -> bool:
        """Tell whether it is still at its address; a storage or an array can be resized."""
        return all(
            memory.locate is None or memory.locate() == memory.address for memory in self.met
        ) and all(
            storage.data_ptr() == self.address + start
            for (start, nbytes), storage in self.storages.items()
            if nbytes and storage.device.type == "cpu"
        )

    def is_in_host_memory(self) -> bool:
        """Tell whether all of it is in host memory."""
        return self.device == "cpu" and all(s.device.type == "cpu" for s in self.storages.values())

    def storage(self, start: int, nbytes: int) -> Any:
        """Return a torch storage over a part of it; the same storage for the same part."""
        known = self.storages.get((start, nbytes))
        if known is None:
            known = _storage_on(view_of(self.address + start, nbytes, self.owner))
            if self.device != "cpu":
                known = copy_storage(known, self.device)
            self.storages[start, nbytes] = known
        return known

    def in_host_memory(self) -> tuple[int, Any]:
        """Return the address of its bytes in host memory, and the object that keeps them alive.

        Memory of a device is copied.
        """
        copies = [
            storage.cpu() for storage in self.storages.values() if storage.device.type != "cpu"
        ]
        return (copies[-1].data_ptr() if copies else self.address), copies

    def places(self, region: int) -> Iterator[RegionPlace]:
        """Yield its locations; each storage on a device has its own."""
        yield RegionPlace(self.address, self.nbytes, region, 0)
        for (start, nbytes), storage in self.storages.items():
            if storage.device.type != "cpu" and nbytes:
                yield RegionPlace(storage.data_ptr(), nbytes, region, start)

    def patch(self, patch: Patch, fd: int) -> str | None:
        """Write changed bytes into it; return the reason if that fails, else None."""
        if not self.is_there():
            return "memory of the notebook was replaced while the run went on"
        if self.device != "cpu":
            try:
                self._write_to_device(patch, fd)
            except RuntimeError as error:  # its CUDA context is broken, or the device is full
                return (
                    f"new values of tensors that the notebook has on {self.device}"
                    f" ({first_line(error)})"
                )
        else:
            _read_at(fd, view_of(self.address + patch.start, patch.nbytes), patch.offset)
        for memory in self.met:
            for tensor in memory.tensors:  # an in-place operation would do the same
                sys.modules["torch"].autograd.graph.increment_version(tensor)
        return None

    def _write_to_device(self, patch: Patch, fd: int) -> None:
        import torch

        data = bytearray(patch.nbytes)
        _read_at(fd, memoryview(data), patch.offset)
        storage = self.met[0].storage
        whole = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
        whole[patch.start : patch.start + patch.nbytes].copy_(
            torch.frombuffer(data, dtype=torch.uint8)
        )


class MemoryTable:
    """The memory that states refer to, by region; ``places`` are its locations in the sender.

    ``missing``: for each region that is not here, the reason.
    """

    def __init__(
        self,
        stretches: dict[int, Stretch],
        places: Iterable[RegionPlace],
        missing: Mapping[int, str] | None = None,
    ) -> None:
        self.stretches, self._places = stretches, sorted(places)
        self._missing = missing or {}

    def open(self, address: int, nbytes: int) -> MemoryRange:
        """Return the memory that the sender had at an address."""
        if not nbytes:  # an empty tensor's; the state of an empty array itself has no memory
            return memory_of_storage(sys.modules["torch"].UntypedStorage(0))
        found = find_place(self._places, address, nbytes)
        if found is None:
            raise LookupError("it looks into memory that did not come")
        if found[0] in self._missing:
            raise LookupError(self._missing[found[0]])
        stretch, start = self.stretches[found[0]], found[1]
        if stretch.device != "cpu":
            return memory_of_storage(stretch.storage(start, nbytes))
        return MemoryRange(stretch.address + start, nbytes, stretch)

    def regions_of(self, memories: Iterable[Span]) -> set[int]:
        """Return the regions that overlap some memory, given as (address, length)."""
        places = self.places()
        return {n for memory in memories for n in overlapping(places, *memory)}

    def places(self) -> list[RegionPlace]:
        """Return the locations of all of it in this process."""
        there = [(n, stretch) for n, stretch in self.stretches.items() if stretch.is_there()]
        return sorted(place for n, stretch in there for place in stretch.places(n))


def new_memory(region: Region, fd: int) -> Stretch:
    """Return a region as ordinary memory of this process.

    A mapping would stay as long as anything in it is used, and each write would copy a page.
    """
    torch = loaded("torch")
    storages = {}
    if torch is not None and hasattr(torch, "UntypedStorage"):
        owner = torch.empty(region.nbytes, dtype=torch.uint8, device="cpu")
        address = owner.data_ptr()
        storages = {(0, region.nbytes): owner.untyped_storage()}  # a torch storage can be resized
    else:
        owner = (ctypes.c_ubyte * region.nbytes)()
        address = ctypes.addressof(owner)
    for start, end in region.spans:
        _read_at(fd, view_of(address + start, end - start), region.offset + start)
    return Stretch(address, region.nbytes, owner, storages=storages, spans=region.spans)


# ---------------------------------------------------------------------------------- changes
#
# Memory is compared by checksums of its parts, which are only used in the process that computed
# them.
#
# In host memory, they are 128-bit XXH3 checksums. They detect a write no matter what wrote to the
# memory, and how: a thread, the system, another process, a device, or ``x.data.add_(1)``, which
# torch's own version counter does not register.
#
# A rank maps its payload privately. A page to which nothing was written is still the file's page,
# and the file is sealed, so such pages are not read. The first write gives this process its own
# copy of the page, and the system distinguishes the two kinds
# (docs.kernel.org/admin-guide/mm/pagemap.html). So for a cell that only reads a large array, the
# only cost is a check of its pages.
#
# Memory of a device is summed on the device. The 64-bit words of a part are multiplied by random
# numbers and added, modulo 2⁶⁴; so are their upper halves, because the first sum depends little on
# a change of only the highest bits of words (all numbers negated). Whatever differs, the
# probability that both sums stay the same is below 2⁻³².

_PART = 1 << 18
"""Bytes of a part: a part that was written to is sent as a whole."""
_ON_DEVICE = 16 << 20
"""Bytes that a device sums at once; it needs space for three times as many."""
_GROUP = 64
"""Parts that a thread reads at a time; if there are more, several threads are used."""
_THREADS = 4
"""The maximum number of threads that read memory: a few are as fast as the memory."""

Checksum = bytes | tuple[int, ...]
_AS_SENT = b""
"""The checksum of pages that are still the payload's."""


class MemorySnapshot:
    """The checksums of memory in its present state, by region and part.

    The checksums of regions that ``known`` contains for the same memory are taken from there,
    without reading the memory, except for regions that were ``written``. Memory that is no longer
    at its address is left out.
    """

    def __init__(
        self,
        stretches: dict[int, Stretch],
        known: MemorySnapshot | None = None,
        written: Container[int] = (),
    ) -> None:
        self._stretches = {n: stretch for n, stretch in stretches.items() if stretch.is_there()}
        self._sums: dict[int, dict[Span, Checksum]] = {}
        if known is not None:
            for n, stretch in self._stretches.items():
                if known._stretches.get(n) is stretch and n not in written:
                    self._sums[n] = known._sums[n]
        unread = {n: here for n, here in self._stretches.items() if n not in self._sums}
        self._sums |= _checksums_of(unread)

    def changed_since(self, before: MemorySnapshot) -> dict[int, list[Span]]:
        """Return the parts that differ, for each region that both snapshots contain."""
        found: dict[int, list[Span]] = {}
        for n, now in self._sums.items():
            if n in before._sums:
                was = before._sums[n]
                found[n] = [part for part, what in now.items() if was.get(part) != what]
        return found


def _checksums_of(stretches: dict[int, Stretch]) -> dict[int, dict[Span, Checksum]]:
    """Return the checksums of the used parts of some memory."""
    found: dict[int, dict[Span, Checksum]] = {}
    asked: list[tuple[int, Span]] = []
    memory: list[memoryview] = []
    with _PageMap() as pages:
        for n, stretch in stretches.items():
            if not stretch.is_in_host_memory():
                found[n] = dict(_sums_on_device(stretch))
                continue
            found[n] = {}
            whole = view_of(stretch.address, stretch.nbytes)
            for start, end in (part for span in stretch.spans for part in _parts(*span)):
                at = stretch.address + start
                if stretch.is_mapped and pages.are_of_file(at, at + end - start):
                    found[n][start, end] = _AS_SENT
                else:
                    asked.append((n, (start, end)))
                    memory.append(whole[start:end])
    for (n, part), checksum in zip(asked, _read_in_threads(memory), strict=True):
        found[n][part] = checksum
    return found


def _read_in_threads(memory: list[memoryview]) -> list[bytes]:
    """Return the checksums of parts of memory; if there are many, several threads read them.

    The threads do not belong to an executor: at the end of a cell, a rank shuts all executors down,
    as Python does at exit, and packs its variables after that
    (:func:`taas.rank.cell.wait_for_threads`).
    """
    groups = [memory[at : at + _GROUP] for at in range(0, len(memory), _GROUP)]
    found: list[list[bytes]] = [[] for _ in groups]
    due: queue.SimpleQueue[int] = queue.SimpleQueue()
    for number in range(len(groups)):
        due.put(number)

    def read_groups() -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                number = due.get_nowait()
                # not xxh3_128_digest, which holds the GIL before xxhash 4
                found[number] = [xxhash.xxh3_128(part).digest() for part in groups[number]]

    others = min(len(groups), _THREADS, len(os.sched_getaffinity(0))) - 1
    threads: list[threading.Thread] = []
    try:
        for _ in range(others):
            thread = threading.Thread(target=read_groups, daemon=True)
            try:
                thread.start()
            except RuntimeError:  # no more threads can start here: fewer of them read it all
                break
            threads.append(thread)
        read_groups()
    finally:
        # After an interrupt, the caller releases memory, which no thread may be reading then.
        with contextlib.suppress(queue.Empty):
            while True:
                due.get_nowait()
        for thread in threads:
            thread.join()
    return [checksum for group in found for checksum in group]


class _PageMap:
    """The system's information about this process's pages; empty if there is none."""

    def __enter__(self) -> _PageMap:
        try:
            self._fd = os.open("/proc/self/pagemap", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            self._fd = -1
        written = mmap.mmap(-1, _PAGE, mmap.MAP_PRIVATE)
        written[0] = 1
        address = ctypes.addressof(ctypes.c_char.from_buffer(written))
        if self.are_of_file(address, address + _PAGE):  # in a sandbox that does not track pages
            self.__exit__()
        return self

    def __exit__(self, *_: object) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def are_of_file(self, start: int, end: int) -> bool:
        """Tell whether these are whole pages of a private mapping to which nothing was written.

        The three highest of the 64 bits for each page say whether it is present, whether it is
        swapped, and whether it is a page of a file.
        """
        if self._fd < 0 or start % _PAGE or end % _PAGE:
            return False
        count = (end - start) // _PAGE
        entries = array("Q", os.pread(self._fd, 8 * count, start // _PAGE * 8))
        untouched = (entry >> 62 == 0 or entry >> 61 & 1 for entry in entries)
        return len(entries) == count and all(untouched)


def _sums_on_device(stretch: Stretch) -> Iterator[tuple[Span, Checksum]]:
    """Yield the checksums of a device's memory, by parts.

    The device sums a limited amount of memory at a time; only the sums are copied to the host.
    """
    import torch

    for (start, nbytes), storage in stretch.storages.items():
        memory = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
        for low, high in stretch.spans:
            for at in range(max(low, start), end := min(high, start + nbytes), _ON_DEVICE):
                some = memory[at - start : min(at + _ON_DEVICE, end) - start]
                try:
                    sums = _sums_of_parts(some)
                except torch.OutOfMemoryError:  # with other weights, the part counts as changed
                    sums = _sums_of_parts(some.cpu())
                for (first, last), both in zip(_parts(0, some.nbytes), sums.tolist(), strict=True):
                    yield (at + first, at + last), tuple(both)


def _sums_of_parts(memory: Any) -> Any:
    """Return both sums of each part of a flat tensor of bytes, computed on its device."""
    import torch

    weights = _weights_on(memory.device)
    padded = memory.new_zeros(-(-memory.nbytes // _PART) * _PART)
    padded[: memory.nbytes] = memory
    words = padded.view(torch.int64).view(-1, _PART // 8)
    return torch.stack([(words * weights[0]).sum(1), ((words >> 32) * weights[1]).sum(1)], 1)


@functools.cache
def _weights_on(device: Any) -> Any:
    """Return random numbers on a device; the host draws them, so that no CUDA library is needed."""
    import torch

    drawn = torch.frombuffer(bytearray(os.urandom(2 * _PART)), dtype=torch.int64)
    return drawn.view(2, -1).to(device)


def _parts(start: int, end: int) -> Iterator[Span]:
    """Yield the parts of a span of a region, cut at the region's part boundaries."""
    for low in range(start - start % _PART, end, _PART):
        yield max(low, start), min(low + _PART, end)
