"""Reading what ranks write, in order, at the pace of the reader (rank/streams.py describes the files)."""

from __future__ import annotations

import codecs
import os
from pathlib import Path

from taas.messages.ranks import Output
from taas.rank.streams import EVENTS, KINDS, RECORD, STDERR, STDOUT

_CHUNK = 1 << 18
LARGEST_DISPLAY = 48 << 20
"""A display of more bytes does not fit into a message (messages/wire.py), nor well into a notebook."""


class _Growing:
    """A file that grows, read from where the last read ended."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._fd = -1
        self.offset = 0

    def _open(self) -> bool:
        if self._fd < 0 and self._path.exists():
            self._fd = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
        return self._fd >= 0

    def size(self) -> int:
        return os.fstat(self._fd).st_size if self._open() else 0

    def peek(self, count: int, ahead: int = 0) -> bytes:
        """Return up to ``count`` bytes, leaving them unread."""
        return os.pread(self._fd, count, self.offset + ahead) if self._open() else b""

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class RankTail:
    """The output of one rank as one sequence of :class:`~taas.messages.ranks.Output`."""

    def __init__(self, folder: Path) -> None:
        self._events = _Growing(folder / EVENTS)
        self._raw = _Growing(folder / STDOUT), _Growing(folder / STDERR)
        self._decoders = [codecs.getincrementaldecoder("utf-8")("replace") for _ in range(4)]
        self._found: list[Output] = []
        self._read_of_text = 0  # bytes of the text record at hand

    def read(self, limit: int) -> list[Output]:
        """Return what was written since the last call, about ``limit`` bytes at most.

        The raw files' sizes are taken before the events are read: what a rank printed before it wrote to them
        is then among the events already.
        """
        sizes = self._raw[0].size(), self._raw[1].size()
        self._found = []
        taken = 0
        while taken < limit:
            head = self._events.peek(RECORD.size)
            if len(head) < RECORD.size:
                taken += self._take_raw(sizes, limit - taken)
                break
            kind, length, stdout, stderr = RECORD.unpack(head)
            if self._events.size() < self._events.offset + RECORD.size + length:
                break  # being written just now
            taken += self._take_raw((stdout, stderr), limit - taken)
            if taken >= limit:
                break  # the record comes after what is left of these
            taken += self._take_text(kind, length) if kind < 2 else self._take_display(kind, length)
        return self._found

    def _take_text(self, kind: int, length: int) -> int:
        """Take a piece of a record, which may be of any size."""
        body = self._events.peek(min(_CHUNK, length - self._read_of_text), RECORD.size + self._read_of_text)
        self._add_text(KINDS[kind], self._decoders[kind].decode(body))
        self._read_of_text += len(body)
        if self._read_of_text == length:
            self._events.offset += RECORD.size + length
            self._read_of_text = 0
        return RECORD.size + len(body)

    def _take_display(self, kind: int, length: int) -> int:
        if length <= LARGEST_DISPLAY:
            self._found.append(Output(kind=KINDS[kind], body=self._events.peek(length, RECORD.size)))
        else:
            self._add_text(
                "stderr",
                f"taas: a display of {length >> 20} MiB is left out, a notebook takes up to "
                f"{LARGEST_DISPLAY >> 20}: let the cell save it to a file\n",
            )
        self._events.offset += RECORD.size + length
        return RECORD.size + length

    def _take_raw(self, sizes: tuple[int, int], limit: int) -> int:
        taken = 0
        for index, (file, size) in enumerate(zip(self._raw, sizes, strict=True)):
            while file.offset < size and taken < limit:
                data = file.peek(min(_CHUNK, size - file.offset))
                if not data:
                    break
                file.offset += len(data)
                taken += len(data)
                self._add_text(KINDS[index], self._decoders[2 + index].decode(data))
        return taken

    def _add_text(self, kind: str, text: str) -> None:
        last = self._found[-1] if self._found else None
        if last is not None and last.kind == kind and len(last.text) < _CHUNK:
            self._found[-1] = Output(kind=kind, text=last.text + text)
        elif text:
            self._found.append(Output(kind=kind, text=text))

    def close(self) -> None:
        """Close the files."""
        for file in (self._events, *self._raw):
            file.close()
