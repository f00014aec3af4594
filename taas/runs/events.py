"""The files with a rank's output and displays, and how they are read in order.

A rank appends records to its event file and never waits for a reader (rank/outlet.py). Each record
has the sizes of the rank's C-level stdout and stderr files at the time when it was written, so that
a reader can put both kinds of output into one order. A record is written with one write(2) to a
file opened for appending: records of forked children do not mix, and a killed rank leaves whole
records.

A record is a header, ``<BIQQ`` (kind, bytes of the body, size of stdout file, size of stderr file);
the body, which is UTF-8 text of bounded size for streams (kinds 0 and 1), else MessagePack; and
``<I``, the bytes of all three. A reader of the last lines uses it to go back from the end of the
file, record by record.
"""

from __future__ import annotations

import codecs
import os
import struct
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from taas.wording import size_in_words

_HEADER = struct.Struct("<BIQQ")
_LENGTH = struct.Struct("<I")
_AROUND = _HEADER.size + _LENGTH.size  # bytes of a record beside its body
KINDS = ("stdout", "stderr", "display", "update", "clear", "result", "comm", "error")
EVENTS, STDOUT, STDERR = "events", "stdout", "stderr"
FILES = (EVENTS, STDOUT, STDERR)
COLLECTED = "collected"  # beside these: values that the header asked for (capture/collected.py)
LARGEST_DISPLAY = 48 << 20  # bytes; larger ones do not fit well into a notebook
LARGEST_TEXT = 1 << 16  # bytes of a stream in one record, at most
_BLOCK = 1 << 18
_LAST_BYTES = 1 << 13, 1 << 20
"""The last lines of a rank are searched for in so many bytes at the end of its files, or, before a
large display, in so many.
"""


def pack_record(kind: int, body: bytes | bytearray, stdout: int, stderr: int) -> bytes:
    """Return a record; ``stdout`` and ``stderr`` are the sizes of the files of C code."""
    header = _HEADER.pack(kind, len(body), stdout, stderr)
    return header + body + _LENGTH.pack(_AROUND + len(body))


class Output(NamedTuple):
    """Consecutive output of one rank.

    Attributes:
        kind: one of :data:`KINDS`, or ``note`` for what taas says of the run between two outputs.
        text: for the streams and notes.
        body: for the others, the arguments of IPython's publisher, in MessagePack; for ``comm``,
            those of a widget's message to the front end (:mod:`taas.notebook.comms`).
    """

    rank: int
    kind: str
    text: str = ""
    body: bytes = b""


read_arguments = msgspec.msgpack.Decoder(dict[str, Any]).decode


def plain_form(kind: str, arguments: dict[str, Any]) -> str:
    """Return the lines that stand for a display or an error; empty if it has no text form.

    It is given with the arguments of IPython's publisher.
    """
    if kind == "error":
        return "\n".join(arguments["traceback"]) + "\n"
    return "" if kind in ("clear", "comm") else arguments["data"].get("text/plain", "") + "\n"


def size_of(file: Path) -> int:
    """Return the size of a file; 0 if there is none."""
    try:  # called for each rank again and again
        return os.stat(file).st_size  # noqa: PTH116
    except FileNotFoundError:
        return 0


class _Growing:
    """A growing file that is read from where the last read ended."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.offset = 0

    def size(self) -> int:
        return size_of(self._path)

    def peek(self, count: int, ahead: int = 0) -> bytes:
        """Return up to ``count`` bytes, leaving them unread."""
        if self.size() <= self.offset:
            return b""
        with self._path.open("rb", buffering=0) as file:
            return os.pread(file.fileno(), count, self.offset + ahead)


class RankEvents:
    """The output of one rank as one sequence."""

    def __init__(self, folder: Path, rank: int = 0) -> None:
        self._rank = rank
        self._events = _Growing(folder / EVENTS)
        self._raw = _Growing(folder / STDOUT), _Growing(folder / STDERR)
        self._decoders = [codecs.getincrementaldecoder("utf-8")("replace") for _ in range(4)]
        self._found: list[Output] = []
        self._texts: list[str] = []  # of one stream, for the next Output
        self._bodies: list[bytes] = []  # of one source, for the next of these texts
        self._kind, self._source = "", -1

    def read(self) -> list[Output]:
        """Return what was written since the last call, at most a block or a display.

        Neighbouring texts are joined.
        """
        while True:
            before = self._position
            self._read()
            self._end_text()
            found, self._found = self._found, []
            if found or self._position == before:
                return found  # else it was only a part of a character

    @property
    def _position(self) -> tuple[int, ...]:
        return self._events.offset, *(file.offset for file in self._raw)

    def _read(self) -> None:
        """Read a block of the event file, and the raw files as far as its records had seen them.

        The raw files' sizes are taken before the events are read, so that the events include all
        that the rank printed before it wrote to the raw files.
        """
        sizes = self._raw[0].size(), self._raw[1].size()
        block, at, left = self._events.peek(_BLOCK), 0, _BLOCK
        while left > 0:
            if len(block) - at < _HEADER.size:
                if len(block) < _BLOCK:  # all records are read
                    self._take_raw(sizes, left)
                break
            kind, length, stdout, stderr = _HEADER.unpack_from(block, at)
            left -= self._take_raw((stdout, stderr), left)
            if left <= 0:
                break  # the record comes after what is left of these
            end = at + _AROUND + length
            if end > len(block):  # it is large, or being written just now
                if not at:
                    self._take_large(kind, length)
                break
            self._take(kind, block[at + _HEADER.size : end - _LENGTH.size])
            left -= end - at
            at = end
        self._events.offset += at

    def _take(self, kind: int, body: bytes) -> None:
        if kind < 2:
            self._take_text(kind, body)
        else:
            self._end_text()
            self._found.append(Output(self._rank, KINDS[kind], body=body))

    def _take_large(self, kind: int, length: int) -> None:
        """Take the record at the current offset, once it is complete."""
        if self._events.size() < self._events.offset + _AROUND + length:
            return
        if length <= LARGEST_DISPLAY:
            self._take(kind, self._events.peek(length, _HEADER.size))
        else:
            left_out = (
                f"taas: a display of {size_in_words(length)} is left out, a notebook takes up to "
                f"{size_in_words(LARGEST_DISPLAY)}: let the cell save it to a file\n"
            )
            self._take_text(1, left_out.encode())
        self._events.offset += _AROUND + length

    def _take_raw(self, sizes: tuple[int, int], limit: int) -> int:
        taken = 0
        for index, (file, size) in enumerate(zip(self._raw, sizes, strict=True)):
            while file.offset < size and taken < limit:
                data = file.peek(min(_BLOCK, size - file.offset))
                if not data:
                    break
                file.offset += len(data)
                taken += len(data)
                self._take_text(2 + index, data)
        return taken

    def _take_text(self, source: int, body: bytes) -> None:
        """Take bytes of Python's streams (0, 1) or C's (2, 3); they may end within a character."""
        if source != self._source:
            self._decode()
            if KINDS[source % 2] != self._kind:
                self._end_text()
            self._source, self._kind = source, KINDS[source % 2]
        self._bodies.append(body)

    def _decode(self) -> None:
        if self._bodies:
            self._texts.append(self._decoders[self._source].decode(b"".join(self._bodies)))
            self._bodies.clear()

    def _end_text(self) -> None:
        self._decode()
        text = "".join(self._texts)
        self._texts.clear()
        if text:
            self._found.append(Output(self._rank, self._kind, text))

    def skip(self) -> bool:
        """Skip everything except the last output; return whether that was found.

        It is not found if the file does not end with a whole record: the record is just being
        written, or sent from another host, or the rank was killed while it wrote.
        """
        whole = self._events.size()
        raw_sizes = [file.size() for file in self._raw]
        for near in _LAST_BYTES:
            begin = max(0, whole - near)
            block = self._events.peek(whole - begin, begin - self._events.offset)
            first = _first_record(block)
            if first is not None:
                break
        else:
            return False
        self._events.offset = begin + first
        seen = _HEADER.unpack_from(block, first)[2:] if block else (0, 0)
        for file, size, known in zip(self._raw, raw_sizes, seen, strict=True):
            file.offset = max(known, size - _LAST_BYTES[0])
        return True


def _first_record(block: bytes) -> int | None:
    """Return where the first whole record of a file's last block begins.

    That is 0 in an empty block; None means that there is none.
    """
    at = len(block)
    while at >= _AROUND:
        (length,) = _LENGTH.unpack_from(block, at - _LENGTH.size)
        begin = at - length
        if length < _AROUND or begin < 0:
            break  # it begins before the block, or these bytes are no length
        kind, nbytes, _, _ = _HEADER.unpack_from(block, begin)
        if kind >= len(KINDS) or nbytes != length - _AROUND:
            break
        at = begin
    return at if at < len(block) or not block else None


def last_written(folder: Path, count: int) -> tuple[list[str], dict[str, Any]] | None:
    """Return the last lines in a rank's folder, and the last display among them.

    The lines are as a terminal shows them; the display is keyed by MIME type.

    Returns None while they cannot be found.
    """
    events, text, drawn = RankEvents(folder), "", dict[str, Any]()
    if not events.skip():
        return None
    while found := events.read():
        for item in found:
            arguments = read_arguments(item.body) if item.body else {}
            text += plain_form(item.kind, arguments) if item.body else item.text
            drawn = arguments.get("data", drawn)
    lines = [line.rstrip("\r").rpartition("\r")[2].rstrip() for line in text.split("\n")]
    return [line for line in lines if line][-count:], drawn
