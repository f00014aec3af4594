"""Tells which pages of this process were written to; the kernel knows, nobody reads them.

An asynchronous userfaultfd(2) write-protects pages. The first write to a page, by this process or
by the system for it, removes the protection without a signal or a delay. A scan of the page map
finds the pages that still have it, and only these count as unwritten: pages that were unmapped,
given back, or mapped anew at the same address have none.

Some memory changes without such a write, and is not watched: shared memory, mappings of files that
other processes may write to, and pinned memory, into which devices write. A write of a device that
is under way when a watch begins is not seen.

Sources: docs.kernel.org/admin-guide/mm/userfaultfd.html,
docs.kernel.org/admin-guide/mm/pagemap.html, userfaultfd(2), PAGEMAP_SCAN(2const). It takes Linux
6.7, on x86_64 or arm64.
"""

from __future__ import annotations

import bisect
import ctypes
import fcntl
import mmap
import os
import platform
import re
import struct
import sys
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from taas import _linux
from taas.import_hooks import loaded

Span = tuple[int, int]

_PAGE = mmap.PAGESIZE
_MOST = 4096
"""So many pieces are watched, the largest ones: every piece may take two of the 65530 mappings of a
process.
"""

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

    ``inner`` has the whole pages of each span (address, end). What cannot be watched is left out,
    as are the pages at a span's edges, which hold other things, too. Private mappings of memfds
    with the name ``sealed`` are watched. ``before`` is closed; pages that both watch cost little.
    """

    def __init__(
        self, spans: Iterable[Span], sealed: str = "", before: Watch | None = None
    ) -> None:
        self._pid, self._fd = os.getpid(), -1
        self._pieces: list[Span] = []
        if before is not None and before._pid == self._pid:
            self._fd, before._fd = before._fd, -1
            self._pieces, before._pieces = before._pieces, []
        wanted = {span: inner for span in spans if (inner := _whole_pages(*span))}
        try:
            self._begin(_pieces(wanted.values(), sealed) if wanted else [])
        except OSError:  # an older kernel, or a container that refuses it
            self.close()
        self.inner = {
            span: inner for span, inner in wanted.items() if _is_within(self._pieces, inner)
        }

    def _begin(self, pieces: list[Span]) -> None:
        self._end({*self._pieces}.difference(pieces))
        self._pieces = []
        if pieces and self._fd < 0:
            self._fd = _userfaultfd()
        with Path("/proc/self/pagemap").open("rb", buffering=0) as pagemap:
            for start, end in sorted(pieces):
                with suppress(OSError):  # another one watches it, or there are too many mappings
                    fcntl.ioctl(
                        self._fd, _REGISTER, struct.pack("=4Q", start, end - start, _MODE_WP, 0)
                    )
                    _scan(pagemap.fileno(), _PROTECT | _ALL_WATCHED, start, end, _IS_WRITTEN)
                    self._pieces.append((start, end))
        # Pages that are pinned from now on count as written, so one look is enough.
        if _has_pinned_pages():
            self.close()

    def _end(self, pieces: Iterable[Span]) -> None:
        for start, end in pieces:
            with suppress(OSError):  # it is no longer mapped
                fcntl.ioctl(self._fd, _UNREGISTER, struct.pack("=2Q", start, end - start))

    def unwritten(self) -> list[Span]:
        """Return the pages that were not written to since, neighbours joined, in order.

        A closed watch has none.
        """
        found: list[Span] = []
        with suppress(OSError), Path("/proc/self/pagemap").open("rb", buffering=0) as pagemap:
            for start, end in self._pieces:
                found += _protected(pagemap.fileno(), start, end)
        return found

    def close(self) -> None:
        """Watch no longer.

        A forked child has the descriptor, too: unless it closes it, the system goes on in vain.
        """
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
            pagemap,
            0,
            start,
            end,
            _IS_ALLOWED | _IS_WRITTEN,
            _IS_WRITTEN,
            _IS_PRESENT | _IS_SWAPPED,
            512,
        )
        found += some
    return found


def _scan(
    pagemap: int,
    flags: int,
    start: int,
    end: int,
    all_of: int,
    but: int = 0,
    any_of: int = 0,
    room: int = 0,
) -> tuple[int, list[Span]]:
    """Scan for pages with all of some marks and any of others; return the next address, and them.

    Marks in ``but`` have to be absent.
    """
    found = (ctypes.c_uint64 * (3 * room))()
    at = ctypes.addressof(found) if room else 0
    fields = (
        _SCAN.size,
        flags,
        start,
        end,
        0,
        at,
        room,
        0,
        but,
        all_of,
        any_of,
        _IS_ALLOWED if room else 0,
    )
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
    """Return what of memory can be watched, the largest first."""
    own, has_devices = _own_memory(sealed)
    found = [
        span for span in wanted if _is_within(own, span) and not (has_devices and _is_pinned(*span))
    ]
    return sorted(found, key=lambda piece: piece[0] - piece[1])[:_MOST]


def _own_memory(sealed: str) -> tuple[list[Span], bool]:
    """Return private memory that no file changes, and whether devices may write to this process.

    Neighbours are joined. It is anonymous memory, or that of sealed files.
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
    """Tell whether memory may be pinned for a device.

    CUDA does not tell the system; torch knows, if it is in use.
    """
    cuda = loaded("torch.cuda")
    if cuda is None or not cuda.is_initialized():
        return True
    torch = sys.modules["torch"]
    memory = (ctypes.c_ubyte * (end - start)).from_address(start)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    return bool(whole.is_pinned() or whole[-1:].is_pinned())
