"""What a rank prints and displays, in one sequence, in one file.

A rank appends records to its event file and never waits for a reader. Each record carries the sizes that the
rank's C-level stdout and stderr files had when it was written, so that a reader can put both kinds of output
into one order. A record is written with one write(2) to a file opened for appending: records of forked children
do not mix, and a rank that is killed leaves whole ones.

Record: ``<BIQQ`` (kind, bytes of the body, size of stdout file, size of stderr file), then the body: UTF-8 text
for streams (kinds 0 and 1), else MessagePack.
"""

from __future__ import annotations

import ctypes
import io
import os
import struct
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from taas.messages.wire import pack

RECORD = struct.Struct("<BIQQ")
KINDS = ("stdout", "stderr", "display", "update", "clear", "result")
EVENTS, STDOUT, STDERR = "events", "stdout", "stderr"
_LINE_LIMIT = 1 << 16
_PARTIAL_LINE_SECONDS = 0.02


class EventFile:
    """The event file of this rank.

    Once the disk is full, records are dropped and counted: the rank goes on.
    """

    def __init__(self, folder: Path) -> None:
        self._fd = os.open(folder / EVENTS, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        self._raw = (os.dup(1), os.dup(2))
        self.lost_bytes = 0

    def append(self, kind: int, body: bytes | bytearray) -> None:
        """Write one record."""
        stdout, stderr = (os.fstat(fd).st_size for fd in self._raw)
        record = RECORD.pack(kind, len(body), stdout, stderr) + body
        try:
            written = os.write(self._fd, record)
        except OSError:
            self.lost_bytes += len(record)
            return
        if written < len(record):  # the disk filled up in the middle: take the torn record back
            os.ftruncate(self._fd, os.fstat(self._fd).st_size - written)
            self.lost_bytes += len(record)


class RankStream(io.TextIOBase):
    """``sys.stdout`` or ``sys.stderr`` of a rank: line-buffered, with an unfinished line sent a moment later."""

    def __init__(self, events: EventFile, kind: int) -> None:
        self._events, self._kind = events, kind
        self._pending = bytearray()
        self._lock = threading.RLock()
        self._unfinished = threading.Event()
        self._flusher: threading.Thread | None = None
        self.buffer = _Bytes(self)
        os.register_at_fork(before=self.flush, after_in_child=self._forget_threads)

    encoding = "utf-8"
    errors = "backslashreplace"
    line_buffering = True

    @property
    def name(self) -> str:
        """As CPython names its own streams."""
        return f"<{KINDS[self._kind]}>"

    def _forget_threads(self) -> None:
        self._lock, self._flusher, self._unfinished = threading.RLock(), None, threading.Event()

    def writable(self) -> bool:
        """Return True."""
        return True

    def isatty(self) -> bool:
        """Return False: a rank has no terminal."""
        return False

    def fileno(self) -> int:
        """Return the C-level descriptor, for children that are given this stream."""
        return self._kind + 1

    def write(self, text: str) -> int:
        """Append text; it is sent at the end of each line."""
        self.write_bytes(text.encode("utf-8", self.errors))
        return len(text)

    def write_bytes(self, data: bytes) -> None:
        """Append bytes; what is not UTF-8 is shown as the replacement character."""
        with self._lock:
            self._pending += data
            if b"\n" in data or b"\r" in data or len(self._pending) >= _LINE_LIMIT:
                self._send()
            else:
                self._unfinished.set()
                if self._flusher is None:
                    self._flusher = threading.Thread(
                        target=self._flush_later, name="taas-output", daemon=True
                    )
                    self._flusher.start()

    def flush(self) -> None:
        """Send what is pending."""
        with self._lock:
            if self._pending:
                self._send()

    def _send(self) -> None:
        self._events.append(self._kind, self._pending)
        self._pending = bytearray()
        self._unfinished.clear()

    def _flush_later(self) -> None:
        pause = threading.Event()
        while True:
            self._unfinished.wait()
            pause.wait(_PARTIAL_LINE_SECONDS)
            self.flush()
            self._unfinished.clear()


class _Bytes(io.RawIOBase):
    """``sys.stdout.buffer`` of a rank."""

    def __init__(self, stream: RankStream) -> None:
        self._stream = stream

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._stream.fileno()

    def write(self, data: Any) -> int:
        view = bytes(data)
        self._stream.write_bytes(view)
        return len(view)

    def flush(self) -> None:
        self._stream.flush()


class Outlet:
    """All ways out of a rank: the two streams, and IPython's display messages; open once the rank has its folder."""

    events: EventFile
    streams: tuple[RankStream, RankStream]

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None)

    def open(self, folder: Path) -> None:
        """Write to a folder from now on, what C code and child processes write to descriptors 1 and 2 included."""
        for number, name in ((1, STDOUT), (2, STDERR)):
            fd = os.open(folder / name, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
            os.dup2(fd, number)
            os.close(fd)
            # C's printf by lines, as a terminal has it, rather than by 4 KiB
            self._libc.setvbuf(ctypes.c_void_p.in_dll(self._libc, name), None, 1, 0)
        self.events = EventFile(folder)
        self.streams = RankStream(self.events, 0), RankStream(self.events, 1)
        sys.stdout, sys.stderr = self.streams
        sys.__stdout__, sys.__stderr__ = self.streams  # type: ignore[misc,assignment]

    def publish(self, kind: str, **arguments: Any) -> None:
        """Send a display message, after what was printed before it."""
        self.flush()
        self.events.append(KINDS.index(kind), pack_display(arguments))

    def flush(self) -> None:
        """Send what Python and C hold back."""
        for stream in self.streams:
            stream.flush()
        self._libc.fflush(None)


def pack_display(arguments: dict[str, Any], *, fallback: Callable[[Any], Any] = repr) -> bytes:
    """Encode a display message; what MessagePack has no form for is sent as its ``repr``."""
    try:
        return pack(arguments)
    except (TypeError, OverflowError):
        import msgspec

        return msgspec.msgpack.encode(arguments, enc_hook=fallback)
    except UnicodeEncodeError:
        return pack_display(_as_utf8(arguments), fallback=fallback)


def _as_utf8(value: Any) -> Any:
    """Return a display message with the lone surrogates of file names that are not UTF-8 written out."""
    match value:
        case str():
            return value.encode("utf-8", "backslashreplace").decode()
        case dict():
            return {_as_utf8(key): _as_utf8(item) for key, item in value.items()}
        case list() | tuple():
            return [_as_utf8(item) for item in value]
    return value
