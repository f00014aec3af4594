"""Which pages were written to: no change is missed, and what did not change is not read."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from taas.capture.memory import MemorySnapshot, Stretch
from taas.page_watch import Watch

PAGE = mmap.PAGESIZE
SIZE = 1024 * PAGE
HUGE, NO_HUGE, DONTNEED = 14, 15, 4
SHARED, PRIVATE, ANONYMOUS, FIXED = 1, 2, 0x20, 0x10

libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p


def watches() -> bool:
    """Tell whether this machine's kernel can watch, as it does for private memory of no file."""
    memory = mmap.mmap(-1, 4 * PAGE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    watch = Watch([(address, address + 4 * PAGE)])
    return bool(watch.inner)


WATCHES = watches()
watching = pytest.mark.skipif(
    not WATCHES, reason="the kernel is older than 6.7, or refuses userfaultfd"
)


class Memory:
    """Private memory of no file: 1024 pages of threes, watched, between two pages that are not."""

    def __init__(self, advice: int = NO_HUGE) -> None:
        self.base = map_anew(None, SIZE + (4 << 20), PRIVATE | ANONYMOUS)
        self.start = -(-self.base // (2 << 20)) * (2 << 20)
        self.advise(advice)
        self.array: Any = np.frombuffer((ctypes.c_ubyte * SIZE).from_address(self.start), np.uint8)
        self.array[:] = 3
        self.before = self.array.copy()
        self.snapshot = self.take()
        assert bool(self.snapshot._watch.inner) == WATCHES

    def __del__(self) -> None:
        libc.munmap(ctypes.c_void_p(self.base), ctypes.c_size_t(SIZE + (4 << 20)))

    def take(self, before: MemorySnapshot | None = None) -> MemorySnapshot:
        """Note what is there now."""
        stretch = Stretch(self.start, SIZE, None, spans=((100, SIZE - 100),))
        return MemorySnapshot({0: stretch}, before)

    def advise(self, advice: int, first: int = 0, pages: int = SIZE // PAGE) -> None:
        """Call madvise(2)."""
        done = libc.madvise(
            ctypes.c_void_p(self.start + first * PAGE), ctypes.c_size_t(pages * PAGE), advice
        )
        if done < 0:
            pytest.skip(f"madvise {advice}: {os.strerror(ctypes.get_errno())}")

    def changed(self) -> set[int]:
        """Return the pages in which something differs, as the snapshot has it."""
        [spans] = self.snapshot.changed([0]).values()
        return {page for start, end in spans for page in range(start // PAGE, -(-end // PAGE))}

    def view(self, page: int, pages: int = 1) -> memoryview:
        """Return pages as a buffer."""
        return memoryview(self.array)[page * PAGE : (page + pages) * PAGE]


def map_anew(address: int | None, size: int, flags: int, fd: int = -1) -> int:
    """Call mmap(2)."""
    found = libc.mmap(
        ctypes.c_void_p(address), ctypes.c_size_t(size), 3, flags, fd, ctypes.c_long(0)
    )
    assert found != ctypes.c_void_p(-1).value, os.strerror(ctypes.get_errno())
    return int(found)


@pytest.fixture
def file(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "file"
    path.write_bytes(bytes(range(256)) * (SIZE // 256))
    yield path


# ---------------------------------------------------------------- ways to change memory

Change = Callable[[Memory, Path], None]


def by_numpy(memory: Memory, _: Path) -> None:
    memory.array[5 * PAGE] = 4


def by_torch_in_place_past_its_counter(memory: Memory, _: Path) -> None:
    torch.from_numpy(memory.array).data[5 * PAGE : 9 * PAGE].mul_(2)


def at_the_edges(memory: Memory, _: Path) -> None:
    memory.array[100] = memory.array[SIZE - 101] = 4


def by_read(memory: Memory, file: Path) -> None:
    with file.open("rb", buffering=0) as source:
        source.readinto(memory.view(7))


def given_back_and_read(memory: Memory, _: Path) -> None:
    memory.advise(DONTNEED, 5, 600)
    assert not memory.array[5 * PAGE : 605 * PAGE].any()


def after_a_fork(memory: Memory, _: Path) -> None:
    wait_in, wait_out = os.pipe()
    if (pid := os.fork()) == 0:
        os.read(wait_in, 1)
        os._exit(0)
    memory.array[5 * PAGE] = 4  # copied: the child has the old page
    os.write(wait_out, b"x")
    os.waitpid(pid, 0)
    os.close(wait_in)
    os.close(wait_out)


def after_a_child_had_the_watch(memory: Memory, _: Path) -> None:
    if (pid := os.fork()) == 0:
        memory.snapshot.changed([0])
        memory.take(memory.snapshot)
        memory.array[:] = 9
        memory.take()
        del memory.snapshot
        os._exit(0)
    os.waitpid(pid, 0)
    memory.array[5 * PAGE] = 4


CHANGES: list[Change] = [
    by_numpy,
    by_torch_in_place_past_its_counter,
    at_the_edges,
    by_read,
    given_back_and_read,
    after_a_fork,
    after_a_child_had_the_watch,
]


@pytest.mark.parametrize("advice", [NO_HUGE, HUGE], ids=["pages", "huge pages"])
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_no_change_is_missed(change: Change, advice: int, file: Path) -> None:
    """Also where the same memory was watched before, by whoever hands its watch on."""
    for again in (False, True):
        memory = Memory(advice)
        if again:
            memory.array[5 * PAGE : 700 * PAGE] = 3
            memory.snapshot = memory.take(memory.snapshot)
        change(memory, file)
        differ = set(np.flatnonzero(memory.array != memory.before) // PAGE)
        assert differ
        assert differ <= memory.changed()


def reading(memory: Memory) -> None:
    """Look at all of it."""
    assert memory.array.sum() == 3 * SIZE


def a_child_that_writes(memory: Memory) -> None:
    """Fork, and write in the child."""
    if (pid := os.fork()) == 0:
        memory.array[:] = 9
        os._exit(0)
    os.waitpid(pid, 0)


def neighbours(memory: Memory) -> None:
    """Write into the same pages, beside what is watched."""
    memory.array[:100] = memory.array[-100:] = 9


@watching
@pytest.mark.parametrize("advice", [NO_HUGE, HUGE], ids=["pages", "huge pages"])
@pytest.mark.parametrize("what", [reading, a_child_that_writes, neighbours])
def test_what_nobody_changed_is_unchanged(what: Callable[[Memory], None], advice: int) -> None:
    """Reading, children, and neighbours on the same page change nothing; one write is one page."""
    memory = Memory(advice)
    what(memory)
    assert memory.changed() == set()
    memory.array[5 * PAGE] = 4
    assert memory.changed() == {5}
    memory.snapshot = memory.take(memory.snapshot)
    assert memory.changed() == set()


def shared(file: Path) -> int:
    return map_anew(None, SIZE, SHARED | ANONYMOUS)


def of_a_file(file: Path) -> int:
    with file.open("r+b") as source:
        return map_anew(None, SIZE, PRIVATE, source.fileno())


@pytest.mark.parametrize("made", [shared, of_a_file], ids=lambda made: made.__name__)
def test_memory_that_others_may_change_is_read(made: Callable[[Path], int], file: Path) -> None:
    """It is compared by checksums."""
    start = made(file)
    assert not Watch([(start, start + SIZE)]).inner
    snapshot = MemorySnapshot({0: Stretch(start, SIZE, None, spans=((0, SIZE),))})
    if made is of_a_file:
        with file.open("r+b") as target:
            target.seek(5 * PAGE)
            target.write(b"xyz")
    else:
        (ctypes.c_ubyte * SIZE).from_address(start)[5 * PAGE] = 9
    assert snapshot.changed([0])[0]
