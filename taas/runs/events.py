"""The files with a rank's output and displays, and how they are read in order.

A rank appends records to its event file and never waits for a reader (rank/outlet.py). Each record
contains the sizes of the rank's C-level stdout and stderr files at the time when the record was
written, so that a reader can merge both kinds of output into one sequence. A record is written with
a single write(2) to a file opened for appending: records of forked children do not mix, and if a
rank is killed, at most its last record is incomplete.

A record consists of a header, ``<BIQQ`` (kind, size of the body, size of the stdout file, size of
the stderr file); the body, which is UTF-8 text of bounded size for streams (kinds 0 and 1), and
MessagePack otherwise; and ``<I``, the size of all three parts. With this trailing size, a reader of
the last lines can go back from the end of the file, record by record. A reader from the beginning
uses it as a check: if the size differs from the one that follows from the header, the file is
damaged, or was written by another version of taas.
"""

from __future__ import annotations

import codecs
import os
import struct
from enum import IntEnum
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from taas.base.wording import size_in_words

_HEADER = struct.Struct("<BIQQ")
_LENGTH = struct.Struct("<I")
_AROUND = _HEADER.size + _LENGTH.size  # size of a record without its body, in bytes
KINDS = ("stdout", "stderr", "display", "update", "clear", "result", "comm", "error")
EVENTS, STDOUT, STDERR = "events", "stdout", "stderr"
FILES = (EVENTS, STDOUT, STDERR)
COLLECTED = (
    "collected"  # a further file: values that the header requests (capture/moves/collected.py)
)
LARGEST_DISPLAY = 48 << 20  # in bytes; larger displays do not fit well into a notebook
LARGEST_TEXT = 1 << 16  # maximum size of stream text in one record, in bytes
_BLOCK = 1 << 18
_LAST_BYTES = 1 << 13, 1 << 20
"""Sizes of the blocks at the end of a rank's files in which the last lines are searched for; the
second, larger one is used if there is a large display.
"""


def pack_record(kind: int, body: bytes | bytearray, stdout: int, stderr: int) -> bytes:
    """Return a record; ``stdout`` and ``stderr`` are the sizes of the files of C code."""
    header = _HEADER.pack(kind, len(body), stdout, stderr)
    return header + body + _LENGTH.pack(_AROUND + len(body))


class Output(NamedTuple):
    """Consecutive output of one rank.

    Attributes:
        kind: one of :data:`KINDS`, or ``note`` for a message from taas about the run, between two
            outputs.
        text: the text of streams and notes.
        body: for the other kinds, the arguments of IPython's publisher, in MessagePack; for
            ``comm``, those of a widget's message to the front end
            (:mod:`taas.notebook.view.comms`).
    """

    rank: int
    kind: str
    text: str = ""
    body: bytes = b""


read_arguments = msgspec.msgpack.Decoder(dict[str, Any]).decode


def widget_state(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the state that a comm's message gives to a widget; empty if it gives none.

    The data of a program's own comm may be any JSON value.
    """
    data = arguments.get("data")
    state = data.get("state") if isinstance(data, dict) else None
    return state if isinstance(state, dict) else {}


def plain_form(kind: str, arguments: dict[str, Any]) -> str:
    """Return the text form of a display or an error; empty if it has none.

    ``arguments`` are the arguments of IPython's publisher.
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


class _Header(NamedTuple):
    """The header of a record."""

    kind: int
    length: int  # size of the body in bytes
    stdout: int  # size of the rank's C-level stdout when the record was written
    stderr: int  # the same for its C-level stderr

    @property
    def size(self) -> int:
        """Return the size of the whole record in bytes."""
        return _AROUND + self.length

    def fits(self, length: int) -> bool:
        """Return whether this is a valid header, and matches the size at the end of its record."""
        return length == self.size and self.kind < len(KINDS)


def _header_at(block: bytes, at: int) -> _Header:
    return _Header(*_HEADER.unpack_from(block, at))


def _length_before(block: bytes, end: int) -> int:
    """Return the size at the end of the record that ends at ``end``."""
    length: int = _LENGTH.unpack_from(block, end - _LENGTH.size)[0]
    return length


class _TextSource(IntEnum):
    """The writer of a text; each source may end its latest text in the middle of a character."""

    PYTHON_STDOUT = 0
    PYTHON_STDERR = 1
    C_STDOUT = 2
    C_STDERR = 3

    @property
    def kind(self) -> str:
        """Return the kind of output that this source writes."""
        return KINDS[self % 2]


_OF_RECORDS = (
    _TextSource.PYTHON_STDOUT,
    _TextSource.PYTHON_STDERR,
)  # records of these kinds are their texts


class _Outputs:
    """Outputs in order; adjacent texts of one kind are joined."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._decoders = [codecs.getincrementaldecoder("utf-8")("replace") for _ in _TextSource]
        self._source = _TextSource.PYTHON_STDOUT
        self._bodies: list[bytes] = []  # texts of this source that are not decoded yet
        self._texts: list[str] = []  # earlier texts of the same kind
        self._found: list[Output] = []

    def add_text(self, source: _TextSource, body: bytes) -> None:
        """Add bytes of a stream."""
        if source is not self._source:
            self._decode()
            if source.kind != self._source.kind:
                self._end_text()
            self._source = source
        self._bodies.append(body)

    def add_display(self, kind: int, body: bytes) -> None:
        """Add a display, or another message of IPython's publisher."""
        self._end_text()
        self._found.append(Output(self._rank, KINDS[kind], body=body))

    def take(self) -> list[Output]:
        """Return the outputs since the last call, except an incomplete character at the end."""
        self._end_text()
        found, self._found = self._found, []
        return found

    def _decode(self) -> None:
        if self._bodies:
            self._texts.append(self._decoders[self._source].decode(b"".join(self._bodies)))
            self._bodies.clear()

    def _end_text(self) -> None:
        self._decode()
        text = "".join(self._texts)
        self._texts.clear()
        if text:
            self._found.append(Output(self._rank, self._source.kind, text))


class _Growing:
    """A growing file that is read from the position at which the last read ended."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.offset = 0

    def size(self) -> int:
        return size_of(self.path)

    def peek(self, count: int, ahead: int = 0) -> bytes:
        """Return up to ``count`` bytes without consuming them."""
        if self.size() <= self.offset:
            return b""
        with self.path.open("rb", buffering=0) as file:
            return os.pread(file.fileno(), count, self.offset + ahead)


class RankEvents:
    """The output of one rank as one sequence.

    Three files are merged: each record is preceded by the output of C code up to the sizes in the
    record's header, and the last record is followed by the output of C code since then.
    """

    def __init__(self, folder: Path, rank: int = 0) -> None:
        self._events = _Growing(folder / EVENTS)
        self._c_files = _Growing(folder / STDOUT), _Growing(folder / STDERR)
        self._outputs = _Outputs(rank)
        self._damaged = False  # the event file cannot be read beyond its offset

    def read(self) -> list[Output]:
        """Return what was written since the last call, at most one block or one display.

        Adjacent texts are joined.
        """
        while True:
            before = self._position
            self._read_block()
            found = self._outputs.take()
            if found or self._position == before:
                return found  # otherwise it was only a part of a character

    @property
    def unread(self) -> int:
        """Return how many bytes of the files were not read yet."""
        return sum(file.size() - file.offset for file in (self._events, *self._c_files))

    @property
    def _position(self) -> tuple[int, ...]:
        return self._events.offset, *(file.offset for file in self._c_files)

    def _read_block(self) -> None:
        """Process the next records, each after the C code's output before it; about 256 KiB."""
        # The order matters: since these sizes are determined first, the events that are read
        # afterwards include everything that the rank printed before it wrote that output to the C
        # files.
        of_stdout, of_stderr = self._c_files
        c_sizes = of_stdout.size(), of_stderr.size()
        block = b"" if self._damaged else self._events.peek(_BLOCK)
        at = 0  # the offset of the next record in the block
        left = _BLOCK  # remaining number of bytes to read, for all three files together
        while left > 0 and len(block) - at >= _HEADER.size:
            header = _header_at(block, at)
            if header.stdout > of_stdout.offset or header.stderr > of_stderr.offset:
                left -= self._take_c_output((header.stdout, header.stderr), left)
                if left <= 0:
                    break  # the rest precedes the record, and comes with the next block
            end = at + header.size
            if end > len(block):
                # The record is larger than a block, or incomplete: it is being written, or is being
                # sent from another host, or the rank was killed while it wrote the record.
                if at == 0:
                    self._take_large(header)
                break
            if not header.fits(_length_before(block, end)):
                self._give_up(self._events.offset + at)
                break
            self._take(header.kind, block[at + _HEADER.size : end - _LENGTH.size])
            left -= header.size
            at = end
        self._events.offset += at
        all_records_are_read = len(block) - at < _HEADER.size and len(block) < _BLOCK
        if all_records_are_read:
            self._take_c_output(c_sizes, left)

    def _take(self, kind: int, body: bytes) -> None:
        if kind < len(_OF_RECORDS):
            self._outputs.add_text(_OF_RECORDS[kind], body)
        else:
            self._outputs.add_display(kind, body)

    def _take_large(self, header: _Header) -> None:
        """Process the record at the offset, which is larger than a block, once it is complete."""
        if self._events.size() < self._events.offset + header.size:
            return
        length = self._events.peek(_LENGTH.size, header.size - _LENGTH.size)
        if not header.fits(_length_before(length, _LENGTH.size)):
            self._give_up(self._events.offset)
            return
        if header.length <= LARGEST_DISPLAY:
            self._take(header.kind, self._events.peek(header.length, _HEADER.size))
        else:
            self._say(
                f"a display of {size_in_words(header.length)} is left out, a notebook takes up to"
                f" {size_in_words(LARGEST_DISPLAY)}: let the cell save it to a file"
            )
        self._events.offset += header.size

    def _take_c_output(self, sizes: tuple[int, int], limit: int) -> int:
        """Process output of C code, until its files have been read up to these sizes.

        Return the number of bytes that were read, at most about ``limit``.
        """
        taken = 0
        sources = _TextSource.C_STDOUT, _TextSource.C_STDERR
        for source, file, size in zip(sources, self._c_files, sizes, strict=True):
            while file.offset < size and taken < limit:
                data = file.peek(min(_BLOCK, size - file.offset))
                if not data:
                    break
                file.offset += len(data)
                taken += len(data)
                self._outputs.add_text(source, data)
        return taken

    def _give_up(self, offset: int) -> None:
        """Stop reading events, as no record begins at this offset; read only output of C code."""
        self._damaged = True
        self._say(
            f"the rest of what this rank printed cannot be read: {self._events.path} has no record"
            f" at byte {offset:,}. Another version of taas wrote it, or a full disk or a killed"
            " process has damaged it: look into the file itself"
        )

    def _say(self, fact: str) -> None:
        self._outputs.add_text(_TextSource.PYTHON_STDERR, f"taas: {fact}\n".encode())

    def skip(self) -> bool:
        """Skip everything except the last output; return whether that was found.

        It is not found if the file does not end with a complete record: the record is just being
        written, or is being sent from another host, or the rank was killed while it wrote the
        record.
        """
        whole = self._events.size()
        c_sizes = [file.size() for file in self._c_files]
        for near in _LAST_BYTES:
            begin = max(0, whole - near)
            block = self._events.peek(whole - begin, begin - self._events.offset)
            first = _first_record(block)
            if first is not None:
                break
        else:
            return False
        self._events.offset = begin + first
        seen = (0, 0)
        if block:
            header = _header_at(block, first)
            seen = header.stdout, header.stderr
        for file, size, known in zip(self._c_files, c_sizes, seen, strict=True):
            file.offset = max(known, size - _LAST_BYTES[0])
        return True


def _first_record(block: bytes) -> int | None:
    """Return the offset of the first complete record in the last block of a file.

    Return 0 for an empty block, and None if there is no complete record.
    """
    at = len(block)
    while at >= _AROUND:
        length = _length_before(block, at)
        if not _AROUND <= length <= at:
            break  # the record begins before the block, or these bytes are not a size
        if not _header_at(block, at - length).fits(length):
            break
        at -= length
    return at if at < len(block) or not block else None


def last_written(folder: Path, count: int) -> tuple[list[str], dict[str, Any]] | None:
    """Return the last lines in a rank's folder, and the last display among them.

    The lines look as in a terminal; the display is a dictionary by MIME type.

    Return None while they cannot be found.
    """
    events, text, drawn = RankEvents(folder), "", dict[str, Any]()
    if not events.skip():
        return None
    while found := events.read():
        for item in found:
            arguments = read_arguments(item.body) if item.body else {}
            text += plain_form(item.kind, arguments) if item.body else item.text
            if item.kind != "comm":  # its data are the program's own
                drawn = arguments.get("data", drawn)
    lines = [line.rstrip("\r").rpartition("\r")[2].rstrip() for line in text.split("\n")]
    return [line for line in lines if line][-count:], drawn
