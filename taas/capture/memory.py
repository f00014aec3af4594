"""The memory of tensors and arrays, by address: written once, and mapped by whoever receives it.

Whoever reads a tensor or an array says which :class:`MemoryRange` it looks into (a storage, or what the root of a chain of
array views owns), and which part of it. Overlapping memory, as that of an array and of the tensor made from it, forms one
**region** of the file, so whatever shared memory goes on sharing. A region is as long as its memory, but only the used
parts are written: the rest is a hole and costs nothing. So a small view of a giant storage is cheap and keeps its offset
and strides.

A state names memory by the address that its sender has it at; the file's header says which region that is.
Where a region lies in a process says its :class:`Stretch`: the notebook's own memory, the mapped payload of a rank, or
what an answer brought. In an answer the regions of the payload go on under their numbers, and new ones follow.

Memory is read, and changed parts are written, by address, and no lock keeps the notebook's own threads away meanwhile: what one
writes while a payload is written travels as it happens to be then, some of it before and some after, and what it writes while
an answer is applied may be overwritten. The owners are held, so that memory is not freed; but a storage that a thread resizes
between the look at where it is (``Stretch.is_there``) and the write is written to where it was.
"""

from __future__ import annotations

import bisect
import ctypes
import mmap
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, NamedTuple

from taas.wording import first_line

_PAGE = mmap.PAGESIZE
_SMALL_ALIGNMENT = 64

Span = tuple[int, int]


class Region(NamedTuple):
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


class Patch(NamedTuple):
    """Bytes of a payload's region that the rank changed, and where in the answer they are."""

    region: int
    start: int
    nbytes: int
    offset: int


class Place(NamedTuple):
    """Where the sender of a file has a region, or a part of it that begins at ``start``."""

    address: int
    nbytes: int
    region: int
    start: int


def find_place(places: list[Place], address: int, nbytes: int) -> tuple[int, int] | None:
    """Return the region that memory lies in, and where in it; None for memory that is in none of the sorted places."""
    at = bisect.bisect(places, (address, sys.maxsize)) - 1
    if at < 0:
        return None
    place = places[at]
    inside = address - place.address
    return (place.region, place.start + inside) if inside + nbytes <= place.nbytes else None


def overlapping(places: list[Place], address: int, nbytes: int) -> Iterator[int]:
    """Yield the regions that have some of a memory, of sorted places."""
    at = max(bisect.bisect(places, (address, sys.maxsize)) - 1, 0)
    while at < len(places) and places[at].address < address + nbytes:
        if places[at].address + places[at].nbytes > address:
            yield places[at].region
        at += 1


@dataclass(slots=True, eq=False)
class MemoryRange:
    """What tensors and arrays look into.

    Attributes:
        address: where it is, on its device; negative, and its storage's alone, where there is none of it.
        nbytes: its length.
        owner: what keeps it alive: the storage, the root of the array views, or the stretch that it is a part of.
        locate: tells where the owner's memory is now.
        device: ``cpu`` or ``cuda:N``.
        storage, buffer: what looks into all of it, if there is one.
        spans: the used parts, relative to it.
        tensors: those on it, whose version counters have to learn of a change.
    """

    address: int
    nbytes: int
    owner: Any
    locate: Callable[[], int] | None = None
    device: str = "cpu"
    storage: Any = None
    buffer: memoryview | None = None
    spans: list[Span] = field(default_factory=list)
    tensors: list[Any] = field(default_factory=list)

    def as_buffer(self) -> memoryview:
        """Return what arrays are made on, the same one each time: it is their base."""
        if self.buffer is None:
            self.buffer = view_of(self.address, self.nbytes, self.owner)
        return self.buffer

    def as_storage(self) -> Any:
        """Return what tensors are made on, the same one each time."""
        if self.storage is None and isinstance(self.owner, Stretch):
            self.storage = self.owner.storage(self.address - self.owner.address, self.nbytes)
        elif self.storage is None:
            self.storage = _storage_on(self.as_buffer())
        return self.storage

    def meet(self, other: MemoryRange) -> None:
        """Note what else is used of it, as ``other`` says."""
        self.storage = other.storage if self.storage is None else self.storage
        self.spans += other.spans
        self.tensors += other.tensors


def view_of(address: int, nbytes: int, owner: Any = None) -> memoryview:
    """Return a writable view of memory, which keeps its owner alive."""
    raw: Any = (ctypes.c_ubyte * nbytes).from_address(address) if nbytes else (ctypes.c_ubyte * 0)()
    raw.owner = owner
    return memoryview(raw).cast("B")


def _storage_on(buffer: memoryview) -> Any:
    torch = sys.modules["torch"]
    return torch.frombuffer(buffer, dtype=torch.uint8).untyped_storage()


def moved(storage: Any, device: str) -> Any:
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


# ---------------------------------------------------------------- what is sent


class SentMemory:
    """The memory that a sender has met and the receiver lacks.

    Args:
        known: where this process has what the receiver has, too.
        regions: the number of the first region of what it lacks.

    Attributes:
        first: that number.
        regions: its places in a file, once it is laid out.
        stretches: this process' own memory that they are written from, by the numbers of the regions.
    """

    def __init__(self, known: Iterable[Place] = (), regions: int = 0) -> None:
        self._known, self.first = sorted(known), regions
        self._met: dict[tuple[int, int], MemoryRange] = {}
        self.regions: list[Region] = []
        self.stretches: dict[int, Stretch] = {}

    def __len__(self) -> int:
        return len(self._met)

    def add(self, memory: MemoryRange) -> None:
        """Note memory that a state names, and what is used of it."""
        if memory.nbytes and find_place(self._known, memory.address, memory.nbytes) is not None:
            return
        met = self._met.setdefault((memory.address, memory.nbytes), memory)
        if met is not memory:
            met.meet(memory)

    def forget(self, count: int) -> None:
        """Forget the memory from the ``count``-th on."""
        while len(self._met) > count:
            self._met.popitem()

    def keep(self, memories: Iterable[MemoryRange]) -> None:
        """Forget all memory but some."""
        kept = {(memory.address, memory.nbytes) for memory in memories}
        self._met = {key: met for key, met in self._met.items() if key in kept}

    def tensors_on_devices(self) -> list[Any]:
        """Return the tensors on memory that is not the host's."""
        return [
            tensor for memory in self._met.values() if memory.device != "cpu" for tensor in memory.tensors
        ]

    def is_detached(self, since: int = 0) -> bool:
        """Tell whether tensors on the memory from a number on leave a graph behind."""
        later = islice(self._met.values(), since, None)
        return any(not tensor.is_leaf for met in later for tensor in met.tensors)

    def lay_out(self, start: int) -> int:
        """Give all memory its place in a file whose first ``start`` bytes are taken; return the file's size."""
        groups: list[list[MemoryRange]] = []
        end = -1
        for memory in sorted(self._met.values(), key=lambda memory: (memory.address, -memory.nbytes)):
            if memory.nbytes and memory.address >= end:
                groups.append([])
            if memory.nbytes:
                groups[-1].append(memory)
                end = max(end, memory.address + memory.nbytes)
        for number, group in enumerate(groups, self.first):
            base, device = group[0].address, group[0].device
            nbytes = max(memory.address + memory.nbytes for memory in group) - base
            alignment = _PAGE if nbytes >= _PAGE else _SMALL_ALIGNMENT
            offset = -(-start // alignment) * alignment
            placed = [(memory, memory.address - base) for memory in group]
            spans = merged([(at + low, at + high) for memory, at in placed for low, high in memory.spans])
            storages = {(at, m.nbytes): m.storage for m, at in placed if m.storage is not None}
            self.regions.append(Region(offset, nbytes, device, spans))
            self.stretches[number] = Stretch(base, nbytes, group, device, storages, group, spans)
            start = offset + nbytes
        return start

    def places(self) -> list[Place]:
        """Return where this process has the regions: those that the receiver knows, and those of the file."""
        return sorted([*self._known, *(Place(s.address, s.nbytes, n, 0) for n, s in self.stretches.items())])

    def write(self, fd: int) -> None:
        """Write what is used of all memory; that of CUDA devices by way of host memory, one after the other."""
        for region, stretch in zip(self.regions, self.stretches.values(), strict=True):
            address, host = stretch.in_host_memory()
            for start, end in region.spans:
                write_at(fd, view_of(address + start, end - start, host), region.offset + start)


def merged(spans: list[Span]) -> tuple[Span, ...]:
    """Return spans in order, those joined that touch each other."""
    found: list[Span] = []
    for start, end in sorted(spans):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        elif end > start:
            found.append((start, end))
    return tuple(found)


# ---------------------------------------------------------------- what is there


@dataclass(slots=True)
class Stretch:
    """A region's memory in this process.

    Attributes:
        address: where it is.
        nbytes: its length.
        owner: what keeps it alive.
        device: where storages on it are: ``cpu``, or a CUDA device.
        storages: those over parts of it, by (start, length).
        met: what the notebook has there.
        spans: the parts of it that are used.
    """

    address: int
    nbytes: int
    owner: Any
    device: str = "cpu"
    storages: dict[Span, Any] = field(default_factory=dict)
    met: list[MemoryRange] = field(default_factory=list)
    spans: tuple[Span, ...] = ()

    def is_there(self) -> bool:
        """Tell whether it is where it was; a storage can be resized, and an array."""
        return all(memory.locate is None or memory.locate() == memory.address for memory in self.met) and all(
            storage.data_ptr() == self.address + start
            for (start, nbytes), storage in self.storages.items()
            if nbytes and storage.device.type == "cpu"
        )

    def is_in_host_memory(self) -> bool:
        """Tell whether nothing of it is on a device."""
        return self.device == "cpu" and all(s.device.type == "cpu" for s in self.storages.values())

    def storage(self, start: int, nbytes: int) -> Any:
        """Return a torch storage over a part of it, the same one for the same part."""
        known = self.storages.get((start, nbytes))
        if known is None:
            known = _storage_on(view_of(self.address + start, nbytes, self.owner))
            if self.device != "cpu":
                known = moved(known, self.device)
            self.storages[start, nbytes] = known
        return known

    def in_host_memory(self) -> tuple[int, Any]:
        """Return where its bytes are in host memory, and what keeps them there; a copy of what is on a device."""
        copies = [storage.cpu() for storage in self.storages.values() if storage.device.type != "cpu"]
        return (copies[-1].data_ptr() if copies else self.address), copies

    def places(self, region: int) -> Iterator[Place]:
        """Yield where it is; storages on a device have places of their own."""
        yield Place(self.address, self.nbytes, region, 0)
        for (start, nbytes), storage in self.storages.items():
            if storage.device.type != "cpu" and nbytes:
                yield Place(storage.data_ptr(), nbytes, region, start)

    def patch(self, patch: Patch, fd: int) -> str | None:
        """Write changed bytes into it; return why not, or None."""
        if not self.is_there():
            return "memory of the notebook was replaced while the run went on"
        if self.device != "cpu":
            try:
                self._write_to_device(patch, fd)
            except RuntimeError as error:  # its CUDA context is broken, or it has no room
                return f"new values of tensors that the notebook has on {self.device} ({first_line(error)})"
        else:
            read_at(fd, view_of(self.address + patch.start, patch.nbytes), patch.offset)
        for memory in self.met:
            for tensor in memory.tensors:  # as an operation would have
                sys.modules["torch"].autograd.graph.increment_version(tensor)
        return None

    def _write_to_device(self, patch: Patch, fd: int) -> None:
        import torch

        data = bytearray(patch.nbytes)
        read_at(fd, memoryview(data), patch.offset)
        storage = self.met[0].storage
        whole = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
        whole[patch.start : patch.start + patch.nbytes].copy_(torch.frombuffer(data, dtype=torch.uint8))


class MemoryTable:
    """The memory that states name.

    Args:
        stretches: by the number of their region.
        places: where the states' sender had the regions.
    """

    def __init__(self, stretches: dict[int, Stretch], places: Iterable[Place]) -> None:
        self.stretches, self._places = stretches, sorted(places)

    def open(self, address: int, nbytes: int) -> MemoryRange:
        """Return the memory that the sender had at an address.

        Raises:
            LookupError: it is in none of the regions.
        """
        if not nbytes:  # of a tensor: arrays without memory say so
            return memory_of_storage(sys.modules["torch"].UntypedStorage(0))
        found = find_place(self._places, address, nbytes)
        if found is None:
            raise LookupError("it looks into memory that did not come")
        stretch, start = self.stretches[found[0]], found[1]
        if stretch.device != "cpu":
            return memory_of_storage(stretch.storage(start, nbytes))
        return MemoryRange(stretch.address + start, nbytes, stretch)

    def regions_of(self, memories: Iterable[Span]) -> set[int]:
        """Return the regions that have any of some memory: addresses and lengths."""
        places = self.places()
        return {n for memory in memories for n in overlapping(places, *memory)}

    def places(self) -> list[Place]:
        """Return where all of it is in this process."""
        there = [(n, stretch) for n, stretch in self.stretches.items() if stretch.is_there()]
        return sorted(place for n, stretch in there for place in stretch.places(n))


def new_memory(region: Region, fd: int) -> Stretch:
    """Return ordinary host memory with what a region of a file has, as if it had been made here.

    A mapping would stay as long as anything in it, and twice where the notebook writes to it.
    """
    torch = sys.modules.get("torch")
    storages = {}
    if torch is not None and hasattr(torch, "UntypedStorage"):
        owner = torch.empty(region.nbytes, dtype=torch.uint8, device="cpu")
        address = owner.data_ptr()
        storages = {(0, region.nbytes): owner.untyped_storage()}  # it can be resized
    else:
        owner = (ctypes.c_ubyte * region.nbytes)()
        address = ctypes.addressof(owner)
    for start, end in region.spans:
        read_at(fd, view_of(address + start, end - start), region.offset + start)
    return Stretch(address, region.nbytes, owner, storages=storages, spans=region.spans)
