"""Which of the forkserver's pages a rank changes, so that the next spares copy them before anybody waits.

A fork shares its parent's memory until it writes; each page written is copied then, some microseconds each and
thousands of them until a cell runs. Forks of one forkserver have the same addresses, so what one rank copied the
others will, and a page can be copied without changing it (madvise(2), MADV_POPULATE_WRITE). Which pages a process
has to itself is in /proc/self/pagemap
(https://docs.kernel.org/admin-guide/mm/pagemap.html). Where the system does not tell, nothing is copied ahead.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from array import array
from collections.abc import Iterable
from pathlib import Path

Pages = tuple[tuple[int, int], ...]
"""Address and length in bytes of runs of pages, in ascending order."""

MOST_BYTES = 32 << 20
"""So much a spare copies at most."""
_MADV_POPULATE_WRITE = 23
_ENTRY_BYTES = 8
_PRESENT, _SHARED_OR_FILE, _EXCLUSIVE = 1 << 63, 1 << 61, 1 << 56
_libc = ctypes.CDLL(None, use_errno=True)
_forkservers: list[tuple[int, int]] = []


def note_memory() -> None:
    """In the forkserver: note which memory its forks will share."""
    _forkservers[:] = _private_memory()


def _private_memory() -> list[tuple[int, int]]:
    found = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        addresses, rights, *rest = line.split(maxsplit=5)
        if rights == "rw-p" and not rest[-1].startswith("[stack"):
            start, end = (int(address, 16) for address in addresses.split("-"))
            found.append((start, end - start))
    return found


def copied() -> Pages:
    """In a rank: return the pages that it no longer shares, as far as :data:`MOST_BYTES` reach.

    Takes some 20 ms: it looks at every page.
    """
    found: list[tuple[int, int]] = []
    left = MOST_BYTES
    try:
        pagemap = os.open("/proc/self/pagemap", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return ()
    try:
        for start, length in _forkservers:
            raw = os.pread(
                pagemap, length // mmap.PAGESIZE * _ENTRY_BYTES, start // mmap.PAGESIZE * _ENTRY_BYTES
            )
            for first, count in _runs(array("Q", raw[: len(raw) // _ENTRY_BYTES * _ENTRY_BYTES])):
                nbytes = min(count * mmap.PAGESIZE, left)
                if nbytes:
                    found.append((start + first * mmap.PAGESIZE, nbytes))
                    left -= nbytes
    finally:
        os.close(pagemap)
    return tuple(found)


def _runs(entries: Iterable[int]) -> Iterable[tuple[int, int]]:
    """First index and length of each run of pages that are there, anonymous, and this process's alone."""
    first = -1
    number = -1
    wanted = _PRESENT | _EXCLUSIVE
    for number, entry in enumerate(entries):
        own = entry & (wanted | _SHARED_OR_FILE) == wanted
        if own and first < 0:
            first = number
        elif not own and first >= 0:
            yield first, number - first
            first = -1
    if first >= 0:
        yield first, number + 1 - first


def copy_ahead(pages: Pages) -> None:
    """In a spare: copy pages now. One that is not there, or a system that does not know the call, costs nothing."""
    for start, length in pages:
        _libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(length), _MADV_POPULATE_WRITE)
