"""Whether memory is what it was, without a copy of it.

The kernel tells of most of it which pages were written to, and nobody has to read them; a page that was written to counts as
changed, whatever is in it now. Of the rest there are checksums, numbers that stand for its parts; memory of a device is
added up there.

A part's words of 64 bits are multiplied by random numbers and added, modulo 2⁶⁴; so are their upper halves, since of a
word that differs in its highest bits only (all numbers negated) the first sum knows little. Whatever differs, both sums stay
the same with a probability below 2⁻³². The random numbers are this process's, so that nobody can make memory to match.
torch's own counter of changes is no proof: ``x.data.add_(1)`` leaves it as it is.

A userfaultfd(2) of the asynchronous kind write-protects pages. The first write to one, by this process or by the system for
it, takes the protection away; nobody is told, and nobody waits. A scan of the page map finds the pages that have it still,
and only these count as unwritten: pages that were unmapped, given back, or mapped anew at the same address have none.

Some memory changes without such a write, and is not watched: what is shared, what is of a file that others may write to, and
what a device may write into (pinned memory). What a device is writing in the very moment in which a watch begins is not seen.

Sources: docs.kernel.org/admin-guide/mm/userfaultfd.html, docs.kernel.org/admin-guide/mm/pagemap.html,
userfaultfd(2), PAGEMAP_SCAN(2const). It takes Linux 6.7, on x86_64 or arm64.
"""

from __future__ import annotations

import bisect
import ctypes
import fcntl
import functools
import itertools
import mmap
import os
import platform
import re
import struct
import sys
from collections.abc import Container, Iterable, Iterator
from contextlib import suppress
from ctypes import string_at
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Any

from taas import _linux
from taas.capture.memory import Span, Stretch, view_of
from taas.capture.payload import NAME

_PART = 1 << 18
"""Bytes: it stays in a processor's cache while it is looked at twice."""
_ON_DEVICE = 16 << 20
"""Bytes that a device adds up at once; it needs room for three times as many."""
_KEPT_BELOW = 1 << 10
"""Bytes that are kept themselves, as that is quicker."""
_SHARED_FROM = 32
"""How many parts are worth a second thread."""
_WATCHED_FROM = 1 << 20
"""Bytes that are watched rather than read."""


class MemorySnapshot:
    """What memory holds now, by region; memory that is not where it was is left out.

    Args:
        stretches: the memory.
        before: an earlier one that is not asked again, of much the same memory.
    """

    def __init__(self, stretches: dict[int, Stretch], before: MemorySnapshot | None = None) -> None:
        self._stretches = {n: stretch for n, stretch in stretches.items() if stretch.is_there()}
        large = {
            (n, span): (stretch.address + span[0], stretch.address + span[1])
            for n, stretch in self._stretches.items()
            if stretch.is_in_host_memory()
            for span in stretch.spans
            if span[1] - span[0] >= _WATCHED_FROM
        }
        self._watch: Watch = Watch(large.values(), NAME, before._watch if before is not None else None)
        self._watched: dict[int, dict[Span, Span]] = {}
        for (n, span), outer in large.items():
            if (inner := self._watch.inner.get(outer)) is not None:
                address = self._stretches[n].address
                self._watched.setdefault(n, {})[span] = inner[0] - address, inner[1] - address
        self._read = self._read_rest(self._stretches)

    def changed(self, regions: Container[int]) -> dict[int, list[Span]]:
        """Return which parts of some regions differ; memory that is no longer where it was is left out."""
        there = {n: here for n, here in self._stretches.items() if n in regions and here.is_there()}
        unwritten, now = self._watch.unwritten(), self._read_rest(there)
        found: dict[int, list[Span]] = {}
        for n, stretch in there.items():
            found[n] = [part for part, what in now[n].items() if self._read[n][part] != what]
            for low, high in self._watched.get(n, {}).values():
                written = _without((stretch.address + low, stretch.address + high), unwritten)
                found[n] += [(start - stretch.address, end - stretch.address) for start, end in written]
        return found

    def _read_rest(self, stretches: dict[int, Stretch]) -> dict[int, dict[Span, Any]]:
        """Return what is in all that is not watched: checksums, and the bytes at the edges of watched pages."""
        found = _checksums_of(stretches, self._watched)
        for n in stretches.keys() & self._watched:
            for (start, end), (low, high) in self._watched[n].items():
                for edge, edge_end in ((start, low), (high, end)):
                    if edge < edge_end:
                        found[n][edge, edge_end] = string_at(stretches[n].address + edge, edge_end - edge)
        return found


def _without(span: Span, taken: list[Span]) -> list[Span]:
    """Return what is left of a span without others, which are in order; in parts of a size worth sending."""
    found: list[Span] = []
    start, end = span
    for at in range(max(bisect.bisect(taken, (start, start)) - 1, 0), len(taken) + 1):
        low, high = taken[at] if at < len(taken) and taken[at][0] < end else (end, end)
        if start < low and found and start - found[-1][1] < _PART:
            found[-1] = (found[-1][0], low)
        elif start < low:
            found.append((start, low))
        if high >= end:
            break
        start = max(start, high)
    return found


# ---------------------------------------------------------------- memory that is read


def _checksums_of(
    stretches: dict[int, Stretch], but: dict[int, dict[Span, Span]]
) -> dict[int, dict[Span, Any]]:
    found: dict[int, dict[Span, Any]] = {n: {} for n in stretches}
    jobs: list[tuple[int, Span, int]] = []
    for number, stretch in stretches.items():
        if not stretch.is_in_host_memory():
            found[number] = dict(_sums_on_device(stretch))
            continue
        spans = [span for span in stretch.spans if span not in but.get(number, ())]
        jobs += ((number, part, stretch.address) for span in spans for part in _parts(*span))
    _weights()
    threads = min(len(os.sched_getaffinity(0)), 8, len(jobs) // _SHARED_FROM)
    if threads > 1:
        with ThreadPool(threads) as pool:  # that of concurrent.futures ends when the cell's threads do
            shares = [jobs[at : at + _SHARED_FROM] for at in range(0, len(jobs), _SHARED_FROM)]
            done = [*itertools.chain.from_iterable(pool.map(_sums, shares))]
    else:
        done = _sums(jobs)
    for (number, part, _), checksum in zip(jobs, done, strict=True):
        found[number][part] = checksum
    return found


def _sums_on_device(stretch: Stretch) -> Iterator[tuple[Span, Any]]:
    """Yield the checksums of what a device has of memory, by parts; some of it at a time, and nothing is copied but they."""
    import torch

    for (start, nbytes), storage in stretch.storages.items():
        memory = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
        for low, high in stretch.spans:
            for at in range(max(low, start), end := min(high, start + nbytes), _ON_DEVICE):
                some = memory[at - start : min(at + _ON_DEVICE, end) - start]
                try:
                    sums = _sums_of_parts(some)
                except (
                    torch.OutOfMemoryError
                ):  # sums of other weights: it counts as changed where they were on the device
                    sums = _sums_of_parts(some.cpu())
                yield from zip(_parts(at, at + some.nbytes), map(tuple, sums.tolist()), strict=True)


def _sums_of_parts(memory: Any) -> Any:
    """Return both sums of each part of a flat tensor of bytes, computed where it is."""
    import torch

    weights = _weights_on(memory.device)
    padded = memory.new_zeros(-(-memory.nbytes // _PART) * _PART)
    padded[: memory.nbytes] = memory
    words = padded.view(torch.int64).view(-1, _PART // 8)
    return torch.stack([(words * weights[0]).sum(1), ((words >> 32) * weights[1]).sum(1)], 1)


@functools.cache
def _weights_on(device: Any) -> Any:
    """Return the random numbers on a device: its own, so that no library is needed for them."""
    import torch

    drawn = torch.frombuffer(bytearray(os.urandom(2 * _PART)), dtype=torch.int64)
    return drawn.view(2, -1).to(device)


def _parts(start: int, end: int) -> Iterator[Span]:
    return ((low, min(low + _PART, end)) for low in range(start, end, _PART))


def _sums(jobs: list[tuple[int, Span, int]]) -> list[Any]:
    return [_sum(view_of(address + start, end - start)) for _, (start, end), address in jobs]


def _sum(memory: memoryview) -> Any:
    if memory.nbytes < _KEPT_BELOW:
        return bytes(memory)
    import numpy as np

    whole = memory.nbytes // 8 * 8
    words = np.frombuffer(memory[:whole], np.int64)
    first, second = _weights()
    return (
        int(np.einsum("i,i", words, first[: len(words)])),
        int(np.einsum("i,i", words >> 32, second[: len(words)])),
        bytes(memory[whole:]),
    )


@functools.cache
def _weights() -> Any:
    """Return the random numbers. Asked for before there are threads: two of them cannot import some releases of NumPy at once."""
    import numpy as np

    return np.frombuffer(os.urandom(2 * _PART), np.int64).reshape(2, -1)


# ---------------------------------------------------------------- pages that are watched

_PAGE = mmap.PAGESIZE
_JOINED = 16 * _PAGE
"""Pieces that are nearer to each other are watched as one: every piece may take two of the 65530 mappings of a process."""
_MOST = 4096
"""So many pieces are watched, the largest ones."""

_NR_USERFAULTFD = {"x86_64": 323, "aarch64": 282}
_USER_MODE_ONLY = 1
_API, _REGISTER, _UNREGISTER = 0xC018AA3F, 0xC020AA00, 0x8010AA01
_WP_UNPOPULATED, _WP_ASYNC = 1 << 13, 1 << 15
_MODE_WP = 2
_PAGEMAP_SCAN = 0xC0606610
_IS_ALLOWED, _IS_WRITTEN, _IS_PRESENT, _IS_SWAPPED = 1, 2, 8, 16
_PROTECT, _ALL_WATCHED = 1, 2
_SCAN = struct.Struct("=12Q")


class Watch:
    """Pages that are watched from now on.

    Args:
        spans: memory (address, end) of this process. What cannot be watched is left out, as are the pages at its edges, which
            it may share with something else.
        sealed: what the system calls a file that nobody can write to (memfd_create(2)), private mappings of which are watched.
        before: a watch that this one takes the place of: what both have costs little. It is closed.

    Attributes:
        inner: what is watched of each span, in whole pages.
    """

    def __init__(self, spans: Iterable[Span], sealed: str = "", before: Watch | None = None) -> None:
        self._pid, self._fd = os.getpid(), -1
        self._pieces: list[Span] = []
        if before is not None and before._pid == self._pid:
            self._fd, before._fd = before._fd, -1
            self._pieces, before._pieces = before._pieces, []
        wanted = {span: inner for span in spans if (inner := _whole_pages(*span))}
        try:
            self._begin(_pieces(wanted.values(), sealed) if wanted else [])
        except OSError:  # another kernel, or a container that refuses it
            self.close()
        self.inner = {span: inner for span, inner in wanted.items() if _is_within(self._pieces, inner)}

    def _begin(self, pieces: list[Span]) -> None:
        self._end({*self._pieces}.difference(pieces))
        self._pieces = []
        if pieces and self._fd < 0:
            self._fd = _userfaultfd()
        with Path("/proc/self/pagemap").open("rb", buffering=0) as pagemap:
            for start, end in sorted(pieces):
                with suppress(OSError):  # another one watches it, or there are too many mappings
                    fcntl.ioctl(self._fd, _REGISTER, struct.pack("=4Q", start, end - start, _MODE_WP, 0))
                    _scan(pagemap.fileno(), _PROTECT | _ALL_WATCHED, start, end, _IS_WRITTEN)
                    self._pieces.append((start, end))
        if _has_pinned_pages():  # what is pinned from now on is written to, as far as the system knows
            self.close()

    def _end(self, pieces: Iterable[Span]) -> None:
        for start, end in pieces:
            with suppress(OSError):  # it is no longer mapped
                fcntl.ioctl(self._fd, _UNREGISTER, struct.pack("=2Q", start, end - start))

    def unwritten(self) -> list[Span]:
        """Return the pages that nobody has written to since, neighbours joined, in order; none once it is closed."""
        found: list[Span] = []
        with suppress(OSError), Path("/proc/self/pagemap").open("rb", buffering=0) as pagemap:
            for start, end in self._pieces:
                found += _protected(pagemap.fileno(), start, end)
        return found

    def close(self) -> None:
        """Watch no longer. A forked child has the descriptor, too: without this the system would go on, and in vain."""
        if os.getpid() == self._pid:
            self._end(self._pieces)
        fd, self._fd, self._pieces = self._fd, -1, []
        if fd >= 0:
            os.close(fd)

    __del__ = close


def _userfaultfd() -> int:
    number = _NR_USERFAULTFD.get(platform.machine(), -1)
    flags = os.O_CLOEXEC | os.O_NONBLOCK | _USER_MODE_ONLY
    fd = _linux.check(_linux.libc.syscall(number, flags), "userfaultfd", f"{flags:#x}")
    try:
        fcntl.ioctl(fd, _API, struct.pack("=3Q", 0xAA, _WP_UNPOPULATED | _WP_ASYNC, 0))
    except OSError:
        os.close(fd)
        raise
    return fd


def _protected(pagemap: int, start: int, end: int) -> list[Span]:
    """Return the pages that are there, or swapped, and protected still."""
    found: list[Span] = []
    while start < end:
        start, some = _scan(
            pagemap, 0, start, end, _IS_ALLOWED | _IS_WRITTEN, _IS_WRITTEN, _IS_PRESENT | _IS_SWAPPED, 512
        )
        found += some
    return found


def _scan(
    pagemap: int, flags: int, start: int, end: int, all_of: int, but: int = 0, any_of: int = 0, room: int = 0
) -> tuple[int, list[Span]]:
    """Look at pages with all of some marks (but for those: without them) and any of others; return the next page, and them."""
    found = (ctypes.c_uint64 * (3 * room))()
    at = ctypes.addressof(found) if room else 0
    fields = (_SCAN.size, flags, start, end, 0, at, room, 0, but, all_of, any_of, _IS_ALLOWED if room else 0)
    argument = bytearray(_SCAN.pack(*fields))
    count = fcntl.ioctl(pagemap, _PAGEMAP_SCAN, argument)
    return _SCAN.unpack(argument)[4], [(found[n], found[n + 1]) for n in range(0, 3 * count, 3)]


# ---------------------------------------------------------------- what can be watched

_MAPPING = re.compile(r"([0-9a-f]+)-([0-9a-f]+) (\S+) \S+ \S+ \d+ *(.*)")
_OWN = re.compile(r"|\[heap]|\[anon:.*")
_DEVICE = re.compile(r"/dev/(?!shm/|zero\b).*")


def _whole_pages(start: int, end: int) -> Span | None:
    low, high = -(-start // _PAGE) * _PAGE, end // _PAGE * _PAGE
    return (low, high) if low < high else None


def _is_within(spans: list[Span], span: Span) -> bool:
    """Tell whether a span is in one of those, which are in order."""
    at = bisect.bisect(spans, (span[0], sys.maxsize)) - 1
    return at >= 0 and span[1] <= spans[at][1]


def _pieces(wanted: Iterable[Span], sealed: str) -> list[Span]:
    """Return what of memory can be watched, near neighbours joined, the largest first."""
    own, has_devices = _own_memory(sealed)
    found: list[Span] = []
    for start, end in sorted(wanted):
        if not _is_within(own, (start, end)) or (has_devices and _is_pinned(start, end)):
            continue
        if found and start - found[-1][1] < _JOINED and _is_within(own, (found[-1][0], end)):
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        else:
            found.append((start, end))
    return sorted(found, key=lambda piece: piece[0] - piece[1])[:_MOST]


def _own_memory(sealed: str) -> tuple[list[Span], bool]:
    """Return this process's private memory, neighbours joined, and whether it has devices that may write into it.

    That is memory of no file, and of sealed ones of a name.
    """
    found: list[Span] = []
    lines = Path("/proc/self/maps").read_text(errors="replace").splitlines()
    mappings = [mapping.groups() for line in lines if (mapping := _MAPPING.fullmatch(line))]
    for low, high, access, path in mappings:
        start, end = int(low, 16), int(high, 16)
        own = _OWN.fullmatch(path) or (sealed and path == f"/memfd:{sealed} (deleted)")
        if not own or not access.startswith("rw") or not access.endswith("p"):
            continue
        if found and found[-1][1] == start:
            start = found.pop()[0]
        found.append((start, end))
    return found, any(_DEVICE.match(path) for *_, path in mappings)


def _has_pinned_pages() -> bool:
    """Tell whether the system knows of pinned memory of this process, as for RDMA or io_uring."""
    found = re.search(r"^VmPin:\s+(\d+)", Path("/proc/self/status").read_text(), re.MULTILINE)
    return found is None or found[1] != "0"


def _is_pinned(start: int, end: int) -> bool:
    """Tell whether memory may be pinned for a device: CUDA does not tell the system, and torch knows if it is in use."""
    cuda = sys.modules.get("torch.cuda")
    if cuda is None or not cuda.is_initialized():
        return True
    torch = sys.modules["torch"]
    memory = (ctypes.c_ubyte * (end - start)).from_address(start)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    return bool(whole.is_pinned() or whole[-1:].is_pinned())
