"""A run's project files between the notebook's disk and VMs that do not see it."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from taas.messages.hosts import FileChange, FileChangeTaken, ProjectPacked, WantProject
from taas.messages.ranks import ProjectFiles
from taas.messages.wire import Memory, Message
from taas.rank_storage import scratch_of
from taas.storage.settlement import human_size
from taas.travel import parcel
from taas.travel.applier import Applier
from taas.travel.changes import decode_all
from taas.travel.same_disk import Token

__all__ = ["Homecoming"]

_NAMED = 3


class Homecoming:
    """What goes to the VMs of one run, and what comes back.

    Args:
        run: its name.
        project: the notebook's directory.
        scratch: the run's folder for what ranks other than 0 write in the project's place.
        ranks_per_vm: ranks on each VM.
        send: sends a message to a VM, by its number.
    """

    def __init__(
        self, run: str, project: str, scratch: Path, ranks_per_vm: int, send: Callable[[int, Message], None]
    ) -> None:
        self._run, self._project, self._scratch, self._width = run, project, scratch, ranks_per_vm
        self._send = send
        self._token: Token | None = None
        self._parcel: parcel.Parcel | None = None
        self._applier: Applier | None = None
        self._scratches: dict[int, Applier] = {}
        self._along: frozenset[bytes] = frozenset()

    @property
    def parcel_fd(self) -> int:
        """The packed project, which VMs may ask for; -1 while there is none."""
        return -1 if self._parcel is None else self._parcel.fd

    @property
    def written(self) -> frozenset[bytes]:
        """Files of the project that the run wrote: when it starts again, it goes on from them."""
        return self._along if self._applier is None else self._along | self._applier.written

    def take_along(self, written: frozenset[bytes]) -> None:
        """Let these files travel whatever their size."""
        self._along = written

    def files(self) -> ProjectFiles:
        """What a VM is told, to find out whether it sees the project's disk."""
        if self._token is None:
            self._token = Token(self._project)
        return ProjectFiles(path=self._token.path or "", token=self._token.content)

    def all_started(self) -> None:
        """No VM looks for the disk any more."""
        if self._token is not None:
            self._token.remove()

    def packed(self) -> Memory:
        """Return the packed project, for a VM that does not see it.

        Raises:
            OSError: it cannot be packed.
        """
        if self._parcel is None:
            self._parcel = parcel.pack(self._project, always=self._along)
        return Memory(0, self._parcel.fd, self._parcel.nbytes)

    def hear(self, message: WantProject | FileChange) -> None:
        """Take in what an agent asks for or brings.

        Raises:
            OSError: the project cannot be packed, or not be written at all.
        """
        match message:
            case WantProject():
                self._send(message.vm, ProjectPacked(run=self._run, parcel=self.packed()))
            case FileChange():
                try:
                    self._apply(message)
                finally:  # the agent waits for it, and the end of the run for the agent
                    size = len(message.change)
                    self._send(message.vm, FileChangeTaken(run=self._run, vm=message.vm, size=size))

    def _apply(self, message: FileChange) -> None:
        if message.rank == 0:  # or in a shared directory, where ranks of all VMs write the project
            applier = self._in_project()
        elif message.rank // self._width == message.vm:
            applier = self._in_scratch(message.rank)
        else:
            return  # this VM may not say such a thing
        for change in decode_all([message.change]):
            applier.take(change, message.vm)

    def _in_project(self) -> Applier:
        if self._applier is None:
            found, stayed = ({}, ()) if self._parcel is None else (self._parcel.found, self._parcel.stayed)
            self._applier = Applier(self._project, found, self._run, stayed)
        return self._applier

    def _in_scratch(self, rank: int) -> Applier:
        if rank not in self._scratches:
            folder = scratch_of(self._scratch, rank)
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._scratches[rank] = Applier(str(folder), {}, self._run)
        return self._scratches[rank]

    def _appliers(self) -> list[Applier]:
        project = [] if self._applier is None else [self._applier]
        return [*project, *(applier for _, applier in sorted(self._scratches.items()))]

    def lose(self, vm: int) -> None:
        """A VM is gone: what it was sending does not count."""
        for applier in self._appliers():
            applier.lose(vm)

    def notices(self, *, well: bool) -> list[str]:
        """Lines for the user.

        Args:
            well: the run succeeded.
        """
        said = [notice for applier in self._appliers() for notice in applier.notices]
        missed = not well or (self._applier is not None and self._applier.replaced)
        if missed and self._parcel is not None and (self._parcel.left_out or not self._parcel.whole):
            said.append(_left_out(self._parcel))
        return said

    def close(self) -> None:
        """Give back what it holds."""
        self.all_started()
        for applier in self._appliers():
            applier.close()
        if self._parcel is not None:
            os.close(self._parcel.fd)
            self._parcel = None


def _left_out(packed: parcel.Parcel) -> str:
    """What did not travel: a run that failed, or made it anew, may have missed it."""
    named = [f"{file.path} ({human_size(file.size)})" for file in packed.left_out[:_NAMED]]
    more = len(packed.left_out) - len(named)
    if more:
        named.append(f"{more} more")
    if not packed.whole:
        named.append(f"all beyond the first {parcel.ENTRIES:,} files")
    return (
        f"not on the VMs, which do not see this disk: {', '.join(named)}. Modules travel, and other files up to "
        f"{human_size(parcel.LARGE)}; put data on a disk that the VMs see, or let the cell download it"
    )
