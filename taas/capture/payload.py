"""The file that carries names to the ranks and back: header, pickle, memory; sealed, mapped private.

::

    | magic | length | header (MessagePack) | preface | pickle | region | region | ...

The header says with which versions the rest was written and is read without unpickling anything. The
preface is a pickle of plain values only. Regions of a page or more begin on a page. The file is a memfd:
no name, no folder, gone with its last descriptor. It is sealed, so that nobody can change or shorten it
under those who have mapped it (https://man7.org/linux/man-pages/man2/memfd_create.2.html).
"""

from __future__ import annotations

import fcntl
import functools
import importlib.metadata
import importlib.util
import mmap
import os
import pickle
import struct
import sys
from collections.abc import Callable
from typing import Any

import cloudpickle
import msgspec

from taas.capture.memory import Piece, Region, Resident, SentMemory, address_of, read_at, write_at
from taas.capture.pickling import Pickler
from taas.capture.tensors import moved, new_memory, storage_over
from taas.errors import VersionMismatch
from taas.wording import first_line

__all__ = [
    "FileMemory",
    "Patch",
    "PayloadHeader",
    "ReturnedMemory",
    "check_versions",
    "peek",
    "read_pickle",
    "read_preface",
    "write_file",
]

_MAGIC = b"taas\x00names"
_LEAD = struct.Struct("<Q")
_SEALS = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_HEADER_LIMIT = 1 << 30


class Patch(msgspec.Struct, frozen=True, array_like=True):
    """Bytes of a payload's region that the rank changed, and where in the answer they are."""

    region: int
    start: int
    nbytes: int
    offset: int


class PayloadHeader(msgspec.Struct, frozen=True, kw_only=True):
    """What can be known of a file before anything in it is unpickled.

    Attributes:
        python: version of Python, e.g. ``3.12.4``.
        bytecode: magic number of its bytecode.
        versions: of cloudpickle, and of torch and numpy where the sender has them loaded.
        names: names in the order of the pickle's records.
        preface, stream: lengths in bytes.
        regions: memory in the file.
        pieces: the part of a region that each block of the pickle covers.
        buffers: blocks that are pickle's own out-of-band buffers.
        patches: in an answer, changes of the payload's memory.
        total: length of the file in bytes, holes included.
    """

    python: str
    bytecode: int
    versions: dict[str, str]
    names: tuple[str, ...]
    preface: int
    stream: int
    regions: tuple[Region, ...]
    pieces: tuple[Piece, ...]
    buffers: tuple[int, ...]
    patches: tuple[Patch, ...] = ()
    total: int = 0


def _versions() -> dict[str, str]:
    found = {"cloudpickle": cloudpickle.__version__}
    for name in ("torch", "numpy"):
        if (module := sys.modules.get(name)) is not None and hasattr(module, "__version__"):
            found[name] = str(module.__version__)
    return found


@functools.cache
def _installed(name: str) -> str | None:
    if (module := sys.modules.get(name)) is not None and hasattr(module, "__version__"):
        return str(module.__version__)
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _series(version: str, parts: int) -> tuple[str, ...]:
    return tuple(version.split("+")[0].split(".")[:parts])


def _bytecode() -> int:
    return int.from_bytes(importlib.util.MAGIC_NUMBER[:2], "little")


def check_versions(header: PayloadHeader) -> None:
    """Compare the notebook's versions with this process's; call it before anything is unpickled.

    Python has to agree in major and minor version and bytecode, torch in its release (``2.9.1+cu126`` and
    ``2.9.1`` agree), cloudpickle in major and minor, NumPy in major version.

    Raises:
        VersionMismatch: naming what differs, and what to install where.
    """
    here = ".".join(map(str, sys.version_info[:3]))
    if _series(header.python, 2) != _series(here, 2) or header.bytecode != _bytecode():
        raise VersionMismatch(
            f"the notebook runs Python {header.python}, this machine {here}: functions cannot travel between "
            f"them. Install Python {'.'.join(_series(header.python, 2))} on this machine, or run the notebook's "
            f"kernel on {'.'.join(_series(here, 2))}."
        )
    for name, parts in (("cloudpickle", 2), ("torch", 3), ("numpy", 1)):
        theirs, ours = header.versions.get(name), _installed(name)
        if theirs is not None and (ours is None or _series(theirs, parts) != _series(ours, parts)):
            raise VersionMismatch(
                f"the notebook has {name} {theirs}, this machine {ours or 'none'}: objects written by one may not "
                f'load in the other. Run `pip install "{name}=={theirs.split("+")[0]}"` on this machine.'
            )


def write_file(
    pickler: Pickler,
    names: tuple[str, ...],
    preface: dict[str, Any],
    patches: tuple[tuple[int, int, memoryview], ...] = (),
) -> tuple[int, int]:
    """Write a pickler's stream and memory into a sealed memfd.

    Args:
        pickler: what to write; its memory is read here, so nobody may change it meanwhile.
        names: see :class:`PayloadHeader`.
        preface: plain values for the receiver to read first.
        patches: (region, start, bytes) of changed memory.

    Returns:
        The descriptor, and the file's length in bytes.
    """
    stream = pickler.stream.getbuffer()
    ahead = pickle.dumps(preface, protocol=5)
    header = PayloadHeader(
        python=".".join(map(str, sys.version_info[:3])),
        bytecode=_bytecode(),
        versions=_versions(),
        names=names,
        preface=len(ahead),
        stream=len(stream),
        regions=(),
        pieces=(),
        buffers=tuple(pickler.buffers),
        patches=tuple(Patch(region, start, data.nbytes, 0) for region, start, data in patches),
    )
    header, patch_at = _laid_out(header, pickler.sent)
    encoded = msgspec.msgpack.encode(header)
    fd = os.memfd_create("taas-names", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, header.total)
        lead = _MAGIC + _LEAD.pack(len(encoded)) + encoded + ahead
        write_at(fd, memoryview(lead), 0)
        write_at(fd, memoryview(stream), len(lead))
        pickler.sent.write(fd)
        for (_, _, data), offset in zip(patches, patch_at, strict=True):
            write_at(fd, data, offset)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
    except BaseException:
        os.close(fd)
        raise
    finally:
        stream.release()
    return fd, header.total


def _laid_out(header: PayloadHeader, sent: SentMemory) -> tuple[PayloadHeader, list[int]]:
    """Place everything in the file; the header's own length is bounded first, as offsets are part of it."""
    room = 9 * (
        4 * len(sent.blocks) + 8 * sum(len(b.spans) + 4 for b in sent.blocks) + 4 * len(header.patches) + 16
    )
    start = (
        len(_MAGIC) + _LEAD.size + len(msgspec.msgpack.encode(header)) + room + header.preface + header.stream
    )
    end = sent.lay_out(start)
    offsets: list[int] = []
    for patch in header.patches:
        end = -(-end // mmap.PAGESIZE) * mmap.PAGESIZE if patch.nbytes >= mmap.PAGESIZE else end
        offsets.append(end)
        end += patch.nbytes
    placed = tuple(
        Patch(p.region, p.start, p.nbytes, at) for p, at in zip(header.patches, offsets, strict=True)
    )
    laid_out = msgspec.structs.replace(
        header, regions=tuple(sent.regions), pieces=tuple(sent.pieces), patches=placed, total=max(end, start)
    )
    return laid_out, offsets


def _header_of(fd: int) -> tuple[PayloadHeader, int]:
    lead = os.pread(fd, len(_MAGIC) + _LEAD.size, 0)
    if not lead.startswith(_MAGIC) or len(lead) < len(_MAGIC) + _LEAD.size:
        raise VersionMismatch(
            "this memory was not written by this version of taas: update taas on both machines."
        )
    (length,) = _LEAD.unpack_from(lead, len(_MAGIC))
    if length > min(_HEADER_LIMIT, os.fstat(fd).st_size):
        raise VersionMismatch("the header of the captured names is damaged; run the cell again.")
    header = msgspec.msgpack.decode(os.pread(fd, length, len(lead)), type=PayloadHeader)
    return header, len(lead) + length


def peek(fd: int) -> PayloadHeader:
    """Read a file's header; nothing is unpickled.

    Raises:
        VersionMismatch: it isn't such a file.
    """
    return _header_of(fd)[0]


def read_preface(fd: int) -> dict[str, Any]:
    """Read the plain values ahead of the pickle. The sender has to be trusted."""
    header, start = _header_of(fd)
    preface: dict[str, Any] = pickle.loads(os.pread(fd, header.preface, start))
    return preface


def read_pickle(fd: int) -> bytes:
    """Read the pickle's bytes."""
    header, start = _header_of(fd)
    stream = bytearray(header.stream)
    read_at(fd, memoryview(stream), start + header.preface)
    return bytes(stream)


class FileMemory:
    """Memory of a received file, for its unpickler: one private mapping, written to by nobody else.

    Args:
        fd: the file; may be closed afterwards.
        device: where storages that come from a CUDA device go; None for host memory.
    """

    def __init__(self, fd: int, *, device: str | None) -> None:
        self.header = peek(fd)
        self.device = device
        self._storages: dict[Piece, Any] = {}
        self._mapping = mmap.mmap(fd, self.header.total, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE)
        self.address = address_of(self._mapping)

    def _piece(self, *where: int) -> Piece:
        return self.header.pieces[where[0]] if len(where) == 1 else Piece(*where)

    def storage(self, *where: int) -> Any:
        """Return a torch storage, the same one for the same piece."""
        piece = self._piece(*where)
        known = self._storages.get(piece)
        if known is None:
            known = storage_over(self.buffer(*where))
            if self.header.regions[piece.region].device != "cpu" and self.device is not None:
                known = moved(known, self.device)
            self._storages[piece] = known
        return known

    def buffer(self, *where: int) -> memoryview:
        """Return writable memory."""
        piece = self._piece(*where)
        start = self.header.regions[piece.region].offset + piece.start
        return memoryview(self._mapping)[start : start + piece.nbytes]

    def buffers(self) -> list[memoryview]:
        """Return pickle's own out-of-band buffers."""
        return [self.buffer(number) for number in self.header.buffers]

    def resident(self) -> Resident:
        """Return where the memory is now, to recognise what points into it."""
        found = Resident()
        for number, region in enumerate(self.header.regions):
            if region.nbytes:
                found.add(self.address + region.offset, region.nbytes, number)
        for piece, storage in self._storages.items():
            if storage.device.type != "cpu":
                found.add(storage.data_ptr(), storage.nbytes(), piece.region, piece.start)
        return found

    def on_device(self) -> dict[int, Any]:
        """Return the storages that were moved to a CUDA device, by region."""
        return {piece.region: s for piece, s in self._storages.items() if s.device.type != "cpu"}


class ReturnedMemory:
    """New memory of an answer, for the notebook: ordinary memory, as if it had been made there.

    A mapping would stay as long as anything in it, and twice where the notebook writes to it. A storage that a CUDA
    device refuses, since it is full or its context is broken, stays in host memory.

    Args:
        fd: the answer; has to stay open while it is unpickled.
        device: where storages that come from CUDA devices go, by number; None for host memory.
    """

    def __init__(self, fd: int, device: Callable[[str], str] | None) -> None:
        self.header = peek(fd)
        self._fd, self._device = fd, device
        self._regions: dict[int, tuple[memoryview, Any]] = {}
        self._storages: dict[Piece, Any] = {}
        self._refused: dict[str, tuple[int, str]] = {}

    def _region(self, number: int) -> tuple[memoryview, Any]:
        """Return a region's memory, and the torch storage it is, if torch is loaded."""
        known = self._regions.get(number)
        if known is None:
            region = self.header.regions[number]
            known = new_memory(region.nbytes)
            for start, end in region.spans:
                read_at(self._fd, known[0][start:end], region.offset + start)
            self._regions[number] = known
        return known

    def storage(self, number: int) -> Any:
        """Return a torch storage, the same one for the same piece."""
        piece = self.header.pieces[number]
        known = self._storages.get(piece)
        if known is None:
            region = self.header.regions[piece.region]
            memory, whole = self._region(piece.region)
            if piece.nbytes == region.nbytes and whole is not None:
                known = whole
            else:
                known = storage_over(memory[piece.start : piece.start + piece.nbytes])
            if region.device != "cpu" and self._device is not None:
                known = self._moved(known, self._device(region.device))
            self._storages[piece] = known
        return known

    def _moved(self, storage: Any, device: str) -> Any:
        try:
            return moved(storage, device)
        except RuntimeError as error:
            nbytes, _ = self._refused.get(device, (0, ""))
            self._refused[device] = nbytes + storage.nbytes(), first_line(error)
            return storage

    def refused(self) -> list[str]:
        """Return a line for each device that did not take what the answer has for it."""
        return [
            f"to {device}: {nbytes:,} bytes of new tensors, which are in host memory now ({why}); "
            f'make room on the GPU and move them there with .to("{device}")'
            for device, (nbytes, why) in self._refused.items()
        ]

    def buffer(self, number: int) -> memoryview:
        """Return writable memory."""
        piece = self.header.pieces[number]
        return self._region(piece.region)[0][piece.start : piece.start + piece.nbytes]

    def buffers(self) -> list[memoryview]:
        """Return pickle's own out-of-band buffers."""
        return [self.buffer(number) for number in self.header.buffers]
