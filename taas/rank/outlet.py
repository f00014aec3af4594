"""The output and displays of a rank, as one sequence in one file (runs/events.py)."""

from __future__ import annotations

import ctypes
import io
import json
import numbers
import os
import sys
import threading
from pathlib import Path
from typing import Any

import msgspec

from taas.runs.events import EVENTS, KINDS, LARGEST_TEXT, STDERR, STDOUT, pack_record

_PARTIAL_LINE_SECONDS = 0.02


class _EventFile:
    """The rank's event file.

    A kept rank has one per cell, and threads of a cell may go on writing.

    Once the disk is full, records are dropped and counted, and the rank goes on.
    """

    def __init__(self) -> None:
        self._fd = -1
        self._raw = (-1, -1)
        self.lost_bytes = 0

    def open(self, path: Path) -> None:
        """Write to a file from now on.

        C-level stdout and stderr already go to the files next to it.
        """
        opened = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        if self._fd < 0:
            self._fd, self._raw = opened, (os.dup(1), os.dup(2))
        else:
            for source, target in ((opened, self._fd), (1, self._raw[0]), (2, self._raw[1])):
                os.dup2(source, target, inheritable=False)
            os.close(opened)
        self.lost_bytes = 0

    def append(self, kind: int, body: bytes | bytearray) -> None:
        stdout, stderr = (os.fstat(fd).st_size for fd in self._raw)
        record = pack_record(kind, body, stdout, stderr)
        try:
            written = os.write(self._fd, record)
        except OSError:
            self.lost_bytes += len(record)
            return
        if written < len(record):  # the disk filled up in the middle: remove the incomplete record
            os.ftruncate(self._fd, os.fstat(self._fd).st_size - written)
            self.lost_bytes += len(record)


class _Text(io.TextIOWrapper):
    """The text stream of a cell.

    Like a kernel's own stream, it cannot be detached from its bytes.
    """

    def detach(self) -> Any:
        raise io.UnsupportedOperation("detach")


class _RankStream(io.RawIOBase):
    """The bytes of a rank's ``sys.stdout`` or ``sys.stderr``, sent at line ends or after a moment.

    It is never closed, whatever a cell does, since other code prints to it.
    """

    def __init__(self, events: _EventFile, kind: int) -> None:
        self._events, self._kind = events, kind
        self._pending = bytearray()
        self._forget_thread()
        self.name = f"<{KINDS[kind]}>"  # as CPython names its own streams
        os.register_at_fork(before=self.flush, after_in_child=self._forget_thread)

    def as_text(self) -> io.TextIOWrapper:
        # the encoding is spelled as a kernel spells it
        return _Text(self, "UTF-8", "backslashreplace", line_buffering=True, write_through=True)

    def _forget_thread(self) -> None:
        self._lock = threading.RLock()
        self._unfinished = threading.Event()
        self._thread: threading.Thread | None = None

    def _flush_soon(self) -> None:
        """Send an unfinished line a moment after it was begun."""
        pause = threading.Event()
        while True:
            self._unfinished.wait()
            pause.wait(_PARTIAL_LINE_SECONDS)
            self._unfinished.clear()
            self.flush()

    def writable(self) -> bool:
        return True

    def close(self) -> None:
        self.flush()

    def fileno(self) -> int:
        return self._kind + 1  # the C-level descriptor, for children that are given this stream

    def write(self, data: Any) -> int:
        data = bytes(data)
        with self._lock:
            self._pending += data
            if b"\n" in data or b"\r" in data or len(self._pending) >= LARGEST_TEXT:
                self.flush()
            else:
                self._unfinished.set()
                if self._thread is None:
                    self._thread = threading.Thread(
                        target=self._flush_soon, name="taas-output", daemon=True
                    )
                    self._thread.start()
        return len(data)

    def flush(self) -> None:
        if not self._pending:  # a text stream flushes after each line
            return
        with self._lock:
            for at in range(0, len(self._pending), LARGEST_TEXT):
                self._events.append(self._kind, self._pending[at : at + LARGEST_TEXT])
            self._pending = bytearray()


class Outlet:
    """All output of a rank: streams and displays; open once the rank has its folder."""

    def __init__(self) -> None:
        self.events = _EventFile()
        self.streams: tuple[io.TextIOWrapper, ...] = ()
        self._libc = ctypes.CDLL(None)

    def open(self, folder: Path) -> None:
        """Write to a folder from now on, including what C code and children write to 1 and 2."""
        self._lead(folder / STDOUT, folder / STDERR, folder / EVENTS)

    def open_nowhere(self) -> None:
        """Become this process's output, which libraries may store a reference to.

        Write nothing until open.
        """
        nowhere = Path(os.devnull)
        self._lead(nowhere, nowhere, nowhere)

    def _lead(self, stdout: Path, stderr: Path, events: Path) -> None:
        for number, name, path in ((1, STDOUT, stdout), (2, STDERR, stderr)):
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
            os.dup2(fd, number)
            os.close(fd)
            # C's printf is flushed by line, as in a terminal, rather than every 4 KiB
            self._libc.setvbuf(ctypes.c_void_p.in_dll(self._libc, name), None, 1, 0)
        self.events.open(events)
        self.streams = self.streams or tuple(
            _RankStream(self.events, kind).as_text() for kind in (0, 1)
        )
        sys.__stdout__, sys.__stderr__ = self.streams  # type: ignore[misc]
        self.take_back()

    def take_back(self) -> None:
        """Become this process's output again, whatever a cell has assigned to the streams."""
        sys.stdout, sys.stderr = self.streams

    def publish(self, kind: str, **arguments: Any) -> None:
        """Send a display message after the output that was printed before it."""
        self.flush()
        self.events.append(KINDS.index(kind), pack_display(arguments))

    def flush(self) -> None:
        """Send the data that Python and C still buffer."""
        for stream in self.streams:
            stream.flush()
        self._libc.fflush(None)


def pack_display(arguments: dict[str, Any]) -> bytes:
    """Encode a display message.

    Values that MessagePack cannot encode are sent in the closest form.
    """
    try:
        return _encode(arguments)
    except (UnicodeEncodeError, OverflowError):
        # lone surrogates from file names that are not UTF-8, and huge integers
        text = json.dumps(arguments, ensure_ascii=False, default=repr).encode("utf-8", "replace")
        return _encode(
            json.loads(text, parse_int=lambda digits: int(digits) if len(digits) < 19 else digits)
        )


def _nearest(value: Any) -> Any:
    """Return an object as a plain number, text or container if it is one, or its ``repr``."""
    match value:
        case str():
            return str.__str__(value)
        case dict():
            return dict(value)
        case numbers.Integral():
            return int(value)
        case numbers.Real():
            return float(value)
    return repr(value)


_encode = msgspec.msgpack.Encoder(enc_hook=_nearest).encode
