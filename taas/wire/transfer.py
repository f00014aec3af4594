"""Bytes that cross hosts: memory files, what processes write, archives of files. One way for all of it, in chunks.

On one host nothing of this happens: a memory is opened where it is held, and files lie where they
belong. Else each side of a job pushes what the other one needs, and is never more than a window
ahead of what was written down there.
"""

from __future__ import annotations

import os
import tempfile
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal

from taas.wire.framing import Memory, Message

CHUNK = 1 << 20
"""Bytes of a chunk, at most."""
WINDOW = 16 << 20
"""Bytes of a job that are on their way at once."""


class Chunk(Message, frozen=True):
    """Some bytes; what is of one kind comes in order.

    Attributes:
        of: ``payload``, ``answer``: of a memory file. ``project``, ``changes``, ``writes``: of an
            archive (:mod:`taas.project_sync.archive`) of the project, of what a VM changed in it,
            and of what ranks other than 0 wrote in its place. ``file``: of one of the project.
            ``output``: of a file that a process of the job writes.
        size: bytes of the whole file, but for output; below 0: it cannot be had.
        rank: whose output; of changes and writes the VM's first.
        file: name of the output file in the rank's folder; of a ``file`` of the project, its path
            there.
    """

    of: Literal["payload", "project", "file", "answer", "changes", "writes", "output"]
    data: bytes
    offset: int = 0
    size: int = 0
    rank: int = 0
    file: str = ""


class Taken(Message, frozen=True):
    """So many bytes of :class:`Chunk` were taken, and are where they belong: so many more may be sent."""

    nbytes: int


def chunks_of(
    of: Literal["payload", "project", "answer", "changes", "writes"], memory: Memory, rank: int = 0
) -> Iterator[Chunk]:
    """Read a file that this process holds, as a source for a :class:`Sender`; an empty one is one empty chunk."""
    size = memory.nbytes
    for offset in range(0, max(size, 1), CHUNK):
        data = os.pread(memory.fd, min(CHUNK, size - offset), offset)
        yield Chunk(of=of, data=data, offset=offset, size=size, rank=rank)


def chunks_of_file(path: str, fd: int) -> Iterator[Chunk]:
    """Read a file of the project, and close its descriptor; below 0, or where it changes meanwhile: it cannot be had."""
    if fd >= 0:
        with open(fd, "rb", buffering=0):
            seen = os.fstat(fd)
            for offset in range(0, max(seen.st_size, 1), CHUNK):
                data = os.pread(fd, CHUNK, offset)
                now = os.fstat(fd)
                if (now.st_size, now.st_ctime_ns) != (seen.st_size, seen.st_ctime_ns):
                    break
                yield Chunk(of="file", data=data, offset=offset, size=seen.st_size, file=path)
            else:
                return
    yield Chunk(of="file", data=b"", size=-1, file=path)


class Sender:
    """All that one side sends of one job: a chunk of each source in turn, as far as the window allows.

    A source is an iterator: None says that there is nothing more now, its end that there never will
    be.
    """

    def __init__(self, send: Callable[[Chunk | Taken], None]) -> None:
        self._send = send
        self._sources: deque[Iterator[Chunk | None]] = deque()
        self._window = WINDOW

    @property
    def done(self) -> bool:
        """Whether all was sent."""
        return not self._sources

    @property
    def waits(self) -> bool:
        """Whether the peer has to take something before more is sent."""
        return self._window <= 0

    def add(self, source: Iterator[Chunk | None]) -> None:
        """Send what a source has, from the next step on."""
        self._sources.append(source)

    def acknowledge(self, chunk: Chunk) -> None:
        """Let the peer send more."""
        self._send(Taken(len(chunk.data)))

    def taken(self, nbytes: int) -> None:
        """The peer has taken so many bytes."""
        self._window += nbytes

    def step(self) -> None:
        """Send what there is; an OSError: a source cannot be read, and is given up, the others are not."""
        idle = 0
        while idle < len(self._sources) and not self.waits:
            source = self._sources.popleft()
            try:
                chunk = next(source)
            except StopIteration:
                continue
            self._sources.append(source)
            idle = idle + 1 if chunk is None else 0
            if chunk is not None:
                self._window -= len(chunk.data)
                self._send(chunk)


class Incoming:
    """A memory file of a peer's, on its way into this process, or into a folder; one of this host is opened, and here.

    Raises:
        OSError: it is on this host, and its holder is gone; or there is no descriptor left.
    """

    def __init__(self, memory: Memory, folder: Path | None = None) -> None:
        self._size = memory.nbytes
        self._got = 0 if memory.elsewhere else self._size
        if folder is not None:
            with tempfile.TemporaryFile(dir=folder) as file:
                self.fd = os.dup(file.fileno())
        else:
            self.fd = (
                os.memfd_create("taas-incoming", os.MFD_CLOEXEC)
                if memory.elsewhere
                else memory.open()
            )

    def take(self, chunk: Chunk) -> None:
        """Write a chunk down; an OSError: there is no memory for it, or it is not what comes next."""
        rest = self._size - self._got
        if chunk.offset != self._got or not min(1, rest) <= len(chunk.data) <= rest:
            raise OSError(f"a memory of {self._size:,} bytes broke off at byte {self._got:,}")
        left = memoryview(chunk.data)
        while left:
            written = os.pwrite(self.fd, left, self._got)
            left, self._got = left[written:], self._got + written

    @property
    def complete(self) -> bool:
        """Whether all of it is here."""
        return self._got == self._size

    @property
    def memory(self) -> Memory:
        """It, for processes of this host."""
        return Memory(os.getpid(), self.fd, self._size)

    def close(self) -> None:
        """Give it back. Twice is harmless."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
