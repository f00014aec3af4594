"""A child of this process that is told things, and may report, in lines of JSON; it ends with its standard input."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from typing import Any

import msgspec

_AT_ONCE = 1 << 16
"""Bytes that are read at once: as many as a pipe holds."""


class Child:
    """One child.

    Args:
        arguments: of Python.
        reports: the union of what it may report.
        stdout: where its standard output goes, if not here, as its reports.
        options: other ones of :class:`subprocess.Popen`.

    Attributes:
        process: it.
    """

    def __init__(
        self, arguments: list[str], reports: Any = None, *, stdout: int = subprocess.PIPE, **options: Any
    ) -> None:
        self.process = subprocess.Popen(
            [sys.executable, *arguments], stdin=subprocess.PIPE, stdout=stdout, **options
        )
        self._decode = msgspec.json.Decoder(reports).decode
        self._unread = b""
        """While it lives, the part of a line that is there."""

    def fileno(self) -> int:
        """Return the descriptor on which it reports."""
        assert self.process.stdout is not None
        return self.process.stdout.fileno()

    def send(self, line: msgspec.Struct) -> None:
        """Tell it something; a child that is gone reads nothing."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # its end is seen elsewhere
            self.process.stdin.write(msgspec.json.encode(line) + b"\n")
            self.process.stdin.flush()

    def read(self) -> list[Any] | None:
        """Return all reports that are there, None when it has ended. Waits where it has said nothing."""
        data = os.read(self.fileno(), _AT_ONCE)
        *lines, self._unread = (self._unread + data).split(b"\n")
        return [self._decode(line) for line in lines] if data else None

    def hang_up(self) -> None:
        """Tell it nothing more: it is to end."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()

    def close(self, patience: float = 5.0) -> list[Any]:
        """End it, kill what does not end; safe to call at any time. Returns what it said last, whole lines of it."""
        assert self.process.stdout is not None
        self.hang_up()
        try:
            self.process.wait(patience)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        *lines, _ = (self._unread + self.process.stdout.read()).split(b"\n")
        self.process.stdout.close()
        return [self._decode(line) for line in lines]
