"""Seeing processes of this host end, at once and however they do."""

from __future__ import annotations

import os
from typing import Any

import zmq

__all__ = ["Watch"]


class Watch:
    """pidfds of processes on this host: an end is seen within milliseconds, however it came."""

    def __init__(self, poller: zmq.Poller) -> None:
        self._poller = poller
        self._names: dict[int, str] = {}

    def add(self, name: str, pid: int) -> None:
        """Watch a process; one that is gone already is not watched, its host will say so."""
        try:
            fd = os.pidfd_open(pid)
        except OSError:
            return
        self._names[fd] = name
        self._poller.register(fd, zmq.POLLIN)

    def ended(self, fd: Any) -> str | None:
        """Return whose end this descriptor tells, None if it is no pidfd."""
        name = self._names.pop(fd, None)
        if name is not None:
            self._poller.unregister(fd)
            os.close(fd)
        return name

    def close(self) -> None:
        """Stop watching."""
        for fd in list(self._names):
            self.ended(fd)
