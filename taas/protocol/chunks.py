"""Data that are sent between hosts in chunks: memory files, output of processes, archives of files.

Within one host nothing is transferred: a memory file is opened through the process that holds it,
and files are used where they are. Between hosts, each side of a job sends what the other side
needs. It never sends more than a window beyond the data that the other side has acknowledged.
"""

from __future__ import annotations

import os
import tempfile
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal

from taas.protocol.framing import Memory, Message

CHUNK = 1 << 20
"""Maximum size of a chunk in bytes."""
WINDOW = 16 << 20
"""Maximum number of bytes of a job that are in transit at once."""


class Chunk(Message, frozen=True):
    """Part of a file; the chunks of one file come in order.

    Attributes:
        of: ``payload``, ``answer``: a memory file. ``project``, ``changes``, ``writes``: an archive
            (:mod:`taas.project.sync.archive`) of the project, of the changes that a VM made to it,
            and of the project files that ranks other than 0 wrote. ``file``: one of the project's
            files. ``output``: a file that a process of the job writes.
        size: size of the whole file in bytes, except for output; negative if the file is not
            available.
        rank: for output, the rank that wrote it; for changes and writes, the VM's first rank.
        file: for output, the file's name in the rank's folder; for a ``file``, its path in the
            project.
    """

    of: Literal["payload", "project", "file", "answer", "changes", "writes", "output"]
    data: bytes
    offset: int = 0
    size: int = 0
    rank: int = 0
    file: str = ""


class Taken(Message, frozen=True):
    """Acknowledges ``nbytes`` of received :class:`Chunk` data: the peer may send as many more."""

    nbytes: int


def chunks_of(
    of: Literal["payload", "project", "answer", "changes", "writes"], memory: Memory, rank: int = 0
) -> Iterator[Chunk]:
    """Yield the chunks of a memory file of this process, as a source for a :class:`Sender`.

    An empty file is one empty chunk.
    """
    size = memory.nbytes
    for offset in range(0, max(size, 1), CHUNK):
        data = os.pread(memory.fd, min(CHUNK, size - offset), offset)
        yield Chunk(of=of, data=data, offset=offset, size=size, rank=rank)


def chunks_of_file(path: str, fd: int) -> Iterator[Chunk]:
    """Yield the chunks of a file of the project, and close its descriptor.

    If the descriptor is negative, or the file changes meanwhile, the last chunk reports that the
    file is not available.
    """
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
    """Sends the chunks of one side of a job, from each source in turn, within the window.

    A source is an iterator. If it yields None, it has no data at present; if it ends, it will have
    no more.
    """

    def __init__(self, send: Callable[[Chunk | Taken], None]) -> None:
        self._send = send
        self._sources: deque[Iterator[Chunk | None]] = deque()
        self._window = WINDOW

    @property
    def done(self) -> bool:
        """Return whether everything was sent."""
        return not self._sources

    @property
    def waits(self) -> bool:
        """Return whether the peer has to acknowledge some bytes before more are sent."""
        return self._window <= 0

    def add(self, source: Iterator[Chunk | None]) -> None:
        """Send the chunks of a source, from the next step on."""
        self._sources.append(source)

    def acknowledge(self, chunk: Chunk) -> None:
        """Acknowledge a chunk: the peer may send as many more bytes."""
        self._send(Taken(len(chunk.data)))

    def taken(self, nbytes: int) -> None:
        """Record that the peer has acknowledged bytes."""
        self._window += nbytes

    def step(self) -> None:
        """Send as much as possible now.

        Raises:
            OSError: a source cannot be read. That source is dropped; the others stay.
        """
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
    """A peer's file while it is received, into a memory file or into a file in a folder.

    A memory file of this host is opened instead, and is complete at once.

    Raises:
        OSError: the memory file is on this host, and the process that holds it is gone; or no
            descriptor is left.
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
        """Write the data of a chunk.

        Raises:
            OSError: there is no space for the data, or the chunk is not the next one.
        """
        rest = self._size - self._got
        if chunk.offset != self._got or not min(1, rest) <= len(chunk.data) <= rest:
            raise OSError(f"a memory of {self._size:,} bytes broke off at byte {self._got:,}")
        left = memoryview(chunk.data)
        while left:
            written = os.pwrite(self.fd, left, self._got)
            left, self._got = left[written:], self._got + written

    @property
    def complete(self) -> bool:
        """Return whether the whole file has been received."""
        return self._got == self._size

    @property
    def memory(self) -> Memory:
        """Return the form in which other processes of this host open the file."""
        return Memory(os.getpid(), self.fd, self._size)

    def close(self) -> None:
        """Close the file; may be called twice."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
