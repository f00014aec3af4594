"""What of memory has changed: nothing is missed, and what nobody changed does not count."""

from __future__ import annotations

import ctypes
import mmap
import os
import re
import struct
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from taas.capture.describe.memory import MemorySnapshot, Stretch

PAGE = mmap.PAGESIZE
PART = 64 * PAGE
SIZE = 1024 * PAGE
DONTNEED = 4
SHARED, PRIVATE, ANONYMOUS = 1, 2, 0x20

libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p


def map_anew(size: int, flags: int, fd: int = -1) -> int:
    """Call mmap(2)."""
    found = libc.mmap(None, ctypes.c_size_t(size), 3, flags, fd, ctypes.c_long(0))
    assert found != ctypes.c_void_p(-1).value, os.strerror(ctypes.get_errno())
    return int(found)


class Memory:
    """A process's own memory: 1024 pages of threes."""

    is_mapped = False

    def __init__(self) -> None:
        self.start = self.map()
        self.array: Any = np.frombuffer((ctypes.c_ubyte * SIZE).from_address(self.start), np.uint8)
        self.fill()
        self.before = self.array.copy()
        self.stretch = Stretch(
            self.start, SIZE, None, spans=((100, SIZE - 100),), is_mapped=self.is_mapped
        )
        self.snapshot = MemorySnapshot({0: self.stretch})

    def __del__(self) -> None:
        libc.munmap(ctypes.c_void_p(self.start), ctypes.c_size_t(SIZE))

    def map(self) -> int:
        """Map it."""
        return map_anew(SIZE, PRIVATE | ANONYMOUS)

    def fill(self) -> None:
        """Write to it what is there before the snapshot."""
        self.array[:] = 3

    def changed(self) -> set[int]:
        """Return the pages of parts that differ from the snapshot."""
        [spans] = MemorySnapshot({0: self.stretch}).changed_since(self.snapshot).values()
        return {page for start, end in spans for page in range(start // PAGE, -(-end // PAGE))}

    def view(self, page: int, pages: int = 1) -> memoryview:
        """Return pages as a buffer."""
        return memoryview(self.array)[page * PAGE : (page + pages) * PAGE]


class OfPayload(Memory):
    """A payload in a rank: a file of threes; pages 100 to 700 were written before the snapshot."""

    is_mapped = True

    def map(self) -> int:
        """Map it."""
        fd = os.memfd_create("payload")
        os.write(fd, b"\3" * SIZE)
        start = map_anew(SIZE, PRIVATE, fd)
        os.close(fd)
        return start

    def fill(self) -> None:
        """Write to it what is there before the snapshot."""
        self.array[100 * PAGE : 700 * PAGE] = 5


KINDS = pytest.mark.parametrize("kind", [Memory, OfPayload])


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


def in_every_part(memory: Memory, _: Path) -> None:
    memory.array[100::PART] += 1


def at_the_edges(memory: Memory, _: Path) -> None:
    memory.array[100] = memory.array[SIZE - 101] = 4


def by_read(memory: Memory, file: Path) -> None:
    with file.open("rb", buffering=0) as source:
        source.readinto(memory.view(7))


def given_back_and_read(memory: Memory, _: Path) -> None:
    """Own pages are zeros then, and a payload's are its file's."""
    start, size = ctypes.c_void_p(memory.start + 5 * PAGE), ctypes.c_size_t(600 * PAGE)
    assert libc.madvise(start, size, DONTNEED) == 0
    assert memory.array[5 * PAGE : 605 * PAGE].max() in (0, 3)


def after_a_fork(memory: Memory, _: Path) -> None:
    """The child has the old page; this process writes to a copy."""
    wait_in, wait_out = os.pipe()
    if (pid := os.fork()) == 0:
        os.read(wait_in, 1)
        os._exit(0)
    memory.array[5 * PAGE] = 4
    os.write(wait_out, b"x")
    os.waitpid(pid, 0)
    os.close(wait_in)
    os.close(wait_out)


def after_a_child_wrote(memory: Memory, _: Path) -> None:
    if (pid := os.fork()) == 0:
        memory.array[:] = 9
        os._exit(0)
    os.waitpid(pid, 0)
    memory.array[5 * PAGE] = 4


CHANGES: list[Change] = [
    by_numpy,
    by_torch_in_place_past_its_counter,
    in_every_part,
    at_the_edges,
    by_read,
    given_back_and_read,
    after_a_fork,
    after_a_child_wrote,
]


@KINDS
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_no_change_is_missed(change: Change, kind: type[Memory], file: Path) -> None:
    """Also where an earlier look is what a later one begins with, as it is in ranks that stay."""
    for again in (False, True):
        memory = kind()
        if again:
            memory.array[5 * PAGE : 700 * PAGE] = 6
            memory.before = memory.array.copy()
            answered = MemorySnapshot({0: memory.stretch})
            assert answered.changed_since(memory.snapshot)[0]
            memory.snapshot = MemorySnapshot({0: memory.stretch}, answered)
        change(memory, file)
        differ = set(np.flatnonzero(memory.array != memory.before) // PAGE)
        assert differ
        assert differ <= memory.changed()


@pytest.mark.parametrize(
    ("layout", "was", "now"),
    [
        ("<Q", 0x7FF8000000000000, 0x7FF8000000000001),  # two NaNs: no number equals either
        ("<d", 0.0, -0.0),  # equal numbers
        ("<Q", 1, 1 << 63),
        ("<8s", b"\0" * 8, b"\0" * 7 + b"\1"),
    ],
)
def test_bytes_are_compared_and_not_what_they_mean(layout: str, was: object, now: object) -> None:
    """One word of 64 bits differs."""
    memory = Memory()
    struct.pack_into(layout, memory.view(5), 0, was)
    memory.snapshot = MemorySnapshot({0: memory.stretch})
    struct.pack_into(layout, memory.view(5), 0, now)
    assert 5 in memory.changed()


def reading(memory: Memory) -> None:
    """Look at all of it."""
    assert memory.array.sum() == memory.before.sum()


def a_child_that_writes(memory: Memory) -> None:
    """Fork, and write in the child."""
    if (pid := os.fork()) == 0:
        memory.array[:] = 9
        os._exit(0)
    os.waitpid(pid, 0)


def neighbours(memory: Memory) -> None:
    """Write into the same pages, beside what is compared."""
    memory.array[:100] = memory.array[-100:] = 9


@KINDS
@pytest.mark.parametrize("what", [reading, a_child_that_writes, neighbours])
def test_what_nobody_changed_is_unchanged(
    what: Callable[[Memory], None], kind: type[Memory]
) -> None:
    """Reading, children, and neighbours on the same page change nothing; one write is one part."""
    memory = kind()
    what(memory)
    assert memory.changed() == set()
    memory.array[5 * PAGE] = 4
    assert memory.changed() == set(range(64))
    memory.snapshot = MemorySnapshot({0: memory.stretch})
    assert memory.changed() == set()


def test_a_payload_that_nobody_wrote_to_is_not_read() -> None:
    """None of its pages is there afterwards."""

    def there() -> str:
        smaps = Path("/proc/self/smaps").read_text()
        [found] = re.findall(rf"^{memory.start:x}-.*?^Rss: +(\d+) kB", smaps, re.DOTALL | re.M)
        return str(found)

    class Untouched(OfPayload):
        def fill(self) -> None:
            pass

    memory = Untouched()
    assert libc.madvise(ctypes.c_void_p(memory.start), ctypes.c_size_t(SIZE), DONTNEED) == 0
    inner = Stretch(memory.start, SIZE, None, spans=((0, SIZE),), is_mapped=True)
    assert there() == "0"
    snapshot = MemorySnapshot({0: inner})
    assert MemorySnapshot({0: inner}).changed_since(snapshot) == {0: []}
    assert there() == "0"
    memory.array[5 * PAGE] = 4
    assert MemorySnapshot({0: inner}).changed_since(snapshot) == {0: [(0, PART)]}


def shared(file: Path) -> int:
    return map_anew(SIZE, SHARED | ANONYMOUS)


def of_a_file(file: Path) -> int:
    with file.open("r+b") as source:
        return map_anew(SIZE, PRIVATE, source.fileno())


@pytest.mark.parametrize("made", [shared, of_a_file], ids=lambda made: made.__name__)
def test_what_others_write_to_memory_is_seen(made: Callable[[Path], int], file: Path) -> None:
    """Another process writes to memory that is shared, or to a file that is mapped."""
    start = made(file)
    stretch = Stretch(start, SIZE, None, spans=((0, SIZE),))
    snapshot = MemorySnapshot({0: stretch})
    if (pid := os.fork()) == 0:
        if made is of_a_file:
            with file.open("r+b") as target:
                target.seek(70 * PAGE)
                target.write(b"xyz")
        else:
            (ctypes.c_ubyte * SIZE).from_address(start)[70 * PAGE] = 9
        os._exit(0)
    os.waitpid(pid, 0)
    assert MemorySnapshot({0: stretch}).changed_since(snapshot) == {0: [(PART, 2 * PART)]}


@pytest.fixture(params=["threads", "no more threads"])
def limit_of_threads(request: pytest.FixtureRequest) -> Iterator[None]:
    """This process may start threads, or cannot: there is no room for the stack of one."""
    before = threading.stack_size(1 << 46 if request.param == "no more threads" else 0)
    yield
    threading.stack_size(before)


@pytest.mark.usefixtures("limit_of_threads")
@pytest.mark.parametrize("megabytes", [1, 16, 100])
def test_memory_of_any_size_is_compared_in_parts(megabytes: int) -> None:
    """Also where several threads read it: each part has the checksum that is its own."""
    array = np.arange(megabytes << 17, dtype=np.uint64)
    stretch = Stretch(array.ctypes.data, array.nbytes, array, spans=((0, array.nbytes),))
    snapshot = MemorySnapshot({0: stretch})
    parts = array.nbytes // PART
    some = sorted({0, 1, parts // 2, parts - 1})
    for n in some:
        array[n * PART // 8] += 1
    [found] = MemorySnapshot({0: stretch}).changed_since(snapshot).values()
    assert found == [(n * PART, (n + 1) * PART) for n in some]


def test_what_an_earlier_snapshot_has_is_not_read_again() -> None:
    """But for memory that was written to; memory of another region, or elsewhere, is read."""
    one, two = Memory(), Memory()
    before = MemorySnapshot({0: one.stretch, 1: two.stretch})
    one.array[5 * PAGE] = two.array[5 * PAGE] = 4
    held = MemorySnapshot({0: one.stretch, 1: two.stretch}, before, {1})
    assert held.changed_since(before) == {0: [], 1: [(100, PART)]}
    now = MemorySnapshot({0: one.stretch, 1: two.stretch})
    assert now.changed_since(held) == {0: [(100, PART)], 1: []}
    swapped = MemorySnapshot({0: two.stretch, 1: one.stretch}, before)
    assert swapped.changed_since(now) == {0: [], 1: []}
