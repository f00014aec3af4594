"""What crosses hosts for the data VMs of a run: the loaders and the project to them, what they print from them."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from taas.messages.hosts import ProjectPacked, WantPiece, WantProject, Wrote, WroteTaken
from taas.messages.ranks import ProjectFiles
from taas.messages.wire import Memory, Message
from taas.pieces import piece_of
from taas.supervisor.homecoming import Homecoming

__all__ = ["DataCarriage"]


class DataCarriage:
    """The bytes of one run that cross hosts for its data.

    Args:
        run: its name.
        payload: the packed loaders, which this process holds.
        homecoming: the run's project.
        log: file that takes what data VMs print.
    """

    def __init__(self, run: str, payload: Memory, homecoming: Homecoming, log: str) -> None:
        self._run, self._payload, self._homecoming, self._log = run, payload, homecoming, log
        self._lost_bytes = 0

    @property
    def payload(self) -> Memory:
        """The packed loaders, as a VM elsewhere gets at them."""
        return Memory(0, self._payload.fd, self._payload.nbytes)

    def files(self) -> ProjectFiles:
        """What a VM is told, to find out whether it sees the project's disk."""
        return self._homecoming.files()

    @property
    def notices(self) -> list[str]:
        """Lines for the user."""
        if not self._lost_bytes:
            return []
        return [
            f"{self._lost_bytes:,} bytes of what data VMs printed could not be kept: the disk of {self._log} is full"
        ]

    def answer(self, message: WantPiece | WantProject | Wrote) -> Message | None:
        """Return what a data VM is to be told; None where it may not ask that.

        Raises:
            OSError: the project cannot be packed.
        """
        match message:
            case WantPiece():
                known = message.fd in (self._payload.fd, self._homecoming.parcel_fd)
                return piece_of(message, message.fd) if known else None
            case WantProject():
                return ProjectPacked(run=self._run, parcel=self._homecoming.packed())
            case Wrote():
                self._append(message.data)
                return WroteTaken(run=self._run, vm=message.vm, size=len(message.data))

    def _append(self, data: bytes) -> None:
        self._lost_bytes += len(data)
        with contextlib.suppress(OSError):  # the disk is full: the run goes on, and says so when it ends
            Path(self._log).parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            fd = os.open(self._log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
            try:
                self._lost_bytes -= os.write(fd, data)
            finally:
                os.close(fd)
