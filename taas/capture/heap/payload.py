"""The file that carries variables to the ranks and back: sealed, and mapped privately.

It contains a preface, a pickle, memory and a header::

    | magic | location of header | contents | region | region | ... | header (MessagePack) |

The header can be read without unpickling. The contents are a pickle of plain values only: flat
states (:mod:`heap`), and other data that the receiver needs. A region of a page or more begins at a
page boundary. The file is a memfd (memfd_create(2)); it is sealed, so that no process can change or
shorten it while others map it.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import importlib
import linecache
import mmap
import os
import pickle
import resource
import struct
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

import msgspec

from taas.base.memory_limits import memory_left
from taas.base.wording import first_line, size_in_words
from taas.capture.describe.memory import (
    NAME,
    MemoryTable,
    Patch,
    Region,
    RegionPlace,
    SentMemory,
    Stretch,
    new_memory,
    write_at,
)
from taas.errors import CaptureError, VersionMismatch
from taas.versions import COMPARED, differing_versions, versions

_MAGIC = b"taas\x00names"
_LEAD = struct.Struct("<QQ")
_CHECKED_FROM = 32 << 20
_SEALS = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_SEALED_SECONDS = 10.0
_BLOCK = 512
"""Bytes of a block of stat(2)."""


_NO_ROOM = frozenset({errno.EFBIG, errno.ENOSPC, errno.ENOMEM})
"""The errors for a file that is larger than allowed, or for which there is not enough memory."""


class NoRoom(CaptureError):
    """There is not enough space for a file of variables; ``fits`` bytes would fit."""

    fits = 0


class PayloadHeader(msgspec.Struct, frozen=True, kw_only=True):
    """What a receiver knows about a file before it unpickles anything."""

    versions: dict[str, str]  # of Python, and of libraries that the sender has imported
    names: tuple[str, ...]
    contents: int  # length of the pickle in bytes
    first_region: int
    regions: tuple[Region, ...]
    # where the sender has the regions, including those of the payload
    places: tuple[RegionPlace, ...]
    patches: tuple[Patch, ...] = ()  # in an answer, changes of the payload's memory


# ---------------------------------------------------------------- writing


def check_room(sizes: dict[str, int]) -> None:
    """Raise :class:`CaptureError` if variables need more memory than is left.

    ``sizes`` are in bytes, by variable. The memory limit of this process's control group is taken
    into account.
    """
    need = sum(sizes.values())
    if need < _CHECKED_FROM or need < (free := memory_left().free):
        return
    large = (name for name in sizes if sizes[name] > need / 100)
    largest = sorted(large, key=lambda name: -sizes[name])[:3]
    parts = ", ".join(f"{name} {size_in_words(sizes[name])}" for name in largest)
    raise CaptureError(
        f"the names of this cell need {size_in_words(need)} of shared memory and"
        f" {size_in_words(free)} is free ({parts}). Delete what isn't needed, load the data inside"
        " the cell, or use a machine with more memory."
    )


def write_file(
    sent: SentMemory,
    names: Iterable[str],
    contents: dict[str, Any],
    patches: Iterable[tuple[int, int, memoryview]] = (),
) -> tuple[int, int]:
    """Write states, memory and patches into a sealed memfd; return its descriptor and length.

    ``patches`` are (region, start, bytes).

    Raises :class:`NoRoom` if this process cannot write that much.
    """
    plain = memoryview(pickle.dumps(contents, protocol=5))
    fd = os.memfd_create(NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        begin = len(_MAGIC) + _LEAD.size
        end = sent.lay_out(begin + len(plain))
        placed = []
        for region, start, data in patches:
            end = -(-end // mmap.PAGESIZE) * mmap.PAGESIZE if data.nbytes >= mmap.PAGESIZE else end
            write_at(fd, data, end)
            placed.append(Patch(region, start, data.nbytes, end))
            end += data.nbytes
        header = PayloadHeader(
            versions=versions(name for name in COMPARED if name in sys.modules),
            names=tuple(names),
            contents=len(plain),
            first_region=sent.first,
            regions=tuple(sent.regions),
            places=tuple(sent.places()),
            patches=tuple(placed),
        )
        encoded = msgspec.msgpack.encode(header)
        sent.write(fd)
        write_at(fd, memoryview(_MAGIC + _LEAD.pack(end, len(encoded))), 0)
        write_at(fd, plain, begin)
        write_at(fd, memoryview(encoded), end)
        seal(fd)
    except OSError as error:
        room = _no_room(error, os.fstat(fd).st_blocks * _BLOCK)
        os.close(fd)
        if error.errno not in _NO_ROOM:
            raise
        raise room from error
    except BaseException:
        os.close(fd)
        raise
    return fd, end + len(encoded)


def _no_room(error: OSError, written: int) -> NoRoom:
    """Return the error for a file of which only ``written`` bytes could be written."""
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    if error.errno == errno.EFBIG and limit != resource.RLIM_INFINITY:
        found = NoRoom(
            f"it does not fit into a file of {size_in_words(limit)}, and this process may write no"
            " larger one (ulimit -f): raise that limit, or let the cell save it in parts"
        )
        found.fits = limit
    else:
        found = NoRoom(
            f"there was room for {size_in_words(written)} ({error.strerror}): free some memory, or"
            " let the cell save it"
        )
        found.fits = written
    return found


def seal(fd: int) -> None:
    """Seal a file; the system refuses this for a moment while it migrates the file's pages."""
    deadline = time.monotonic() + _SEALED_SECONDS
    while True:
        try:
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
            return
        except OSError as error:
            if error.errno != errno.EBUSY or time.monotonic() > deadline:
                raise
        time.sleep(0.01)


# ---------------------------------------------------------------- reading


def peek(fd: int) -> PayloadHeader:
    """Read a file's header without unpickling; raise :class:`VersionMismatch` for other formats."""
    lead = os.pread(fd, len(_MAGIC) + _LEAD.size, 0)
    if not lead.startswith(_MAGIC) or len(lead) < len(_MAGIC) + _LEAD.size:
        raise VersionMismatch(
            "this memory was not written by this version of taas: update taas on both machines."
        )
    start, length = _LEAD.unpack_from(lead, len(_MAGIC))
    if start + length != os.fstat(fd).st_size:
        raise VersionMismatch("the file of the captured names is damaged; run the cell again.")
    return msgspec.msgpack.decode(os.pread(fd, length, start), type=PayloadHeader)


def check_versions(header: PayloadHeader) -> None:
    """Compare the notebook's versions with this process's; call this before unpickling anything.

    Raises :class:`VersionMismatch`, which says what to install where.
    """
    if differing := differing_versions(versions(header.versions), header.versions):
        raise VersionMismatch(differing)


class Payload:
    """A received file. It is unpickled, so its sender has to be trusted.

    Raises :class:`VersionMismatch` before anything is unpickled.
    """

    def __init__(self, fd: int) -> None:
        self.header = peek(fd)
        check_versions(self.header)
        self._fd = fd
        begin = len(_MAGIC) + _LEAD.size
        end = begin + self.header.contents
        try:  # the contents only: an error in mapping one region must not lose the others
            with (
                mmap.mmap(fd, end, mmap.MAP_PRIVATE, mmap.PROT_READ) as file,
                memoryview(file) as whole,
            ):
                self.contents: dict[str, Any] = pickle.loads(whole[begin:end])
        except (MemoryError, OSError) as error:
            raise _mapping_error(end) from error

    def take_sources(self) -> None:
        """Register the source of cells for tracebacks; import modules that variables rely on."""
        for name, (size, lines) in self.contents["sources"].items():
            linecache.cache.setdefault(name, (size, None, lines, name))
        for name in self.contents["imports"]:
            with suppress(Exception):  # the use of the module raises the error again
                importlib.import_module(name)

    def map_memory(
        self, device: str | None, known: dict[int, Stretch] | None = None
    ) -> MemoryTable:
        """Return the file's memory as one private mapping, with the ``known`` memory by region.

        Memory from a CUDA device is mapped to ``device``; if that is ``cuda``, to the device with
        the same number; if it is None, to host memory.
        """
        size = os.fstat(self._fd).st_size
        try:
            mapping = mmap.mmap(self._fd, size, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE)
        except OSError as error:
            raise _mapping_error(size) from error
        base = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
        stretches = {**(known or {})}
        for number, r in self.numbered_regions():
            where = "cpu" if r.device == "cpu" or not device else _device_for(r.device, device)
            stretches[number] = Stretch(
                base + r.offset, r.nbytes, mapping, where, spans=r.spans, is_mapped=True
            )
        return MemoryTable(stretches, self.header.places)

    def numbered_regions(self) -> Iterable[tuple[int, Region]]:
        """Return the file's regions with their numbers."""
        return enumerate(self.header.regions, self.header.first_region)

    @property
    def next_region(self) -> int:
        """The number of the next region."""
        return self.header.first_region + len(self.header.regions)

    def copy_memory(self, known: dict[int, Stretch]) -> MemoryTable:
        """Return the file's memory as new host memory, with the payload's ``known`` memory.

        If there is not enough memory, regions are missing, the largest first.
        """
        new, missing = dict[int, Stretch](), dict[int, str]()
        for n, region in sorted(self.numbered_regions(), key=lambda one: one[1].nbytes):
            try:
                new[n] = new_memory(region, self._fd)
            except (MemoryError, RuntimeError) as error:  # torch's
                missing[n] = f"{_mapping_error(region.nbytes)} [{first_line(error)}]"
        return MemoryTable({**known, **dict(sorted(new.items()))}, self.header.places, missing)


def _mapping_error(nbytes: int) -> CaptureError:
    """Return the error for memory that the system does not give to this process."""
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    cause = (
        "the machine has too little memory"
        if limit == resource.RLIM_INFINITY
        else f"it may have {size_in_words(limit)} of address space (ulimit -v)"
    )
    return CaptureError(
        f"this process has no room for {size_in_words(nbytes)}: {cause}. Delete what isn't needed,"
        " or raise the limit."
    )


def _device_for(sent: str, device: str) -> str:
    """Return the device for memory from a CUDA device ``sent``; ``cuda`` keeps the device."""
    if device != "cuda":
        return device
    number = int(sent.partition(":")[2] or 0)
    return sent if number < sys.modules["torch"].cuda.device_count() else "cuda:0"
