"""The project's way to a VM: the notebook's disk itself where this VM sees it, else a copy that is unpacked here."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from taas.agent.remote import Stay
from taas.messages.hosts import Piece, ProjectPacked, WantProject
from taas.messages.ranks import ProjectFiles
from taas.messages.wire import Message
from taas.pieces import Fetch
from taas.travel import parcel, replica
from taas.travel.same_disk import read_token

__all__ = ["ProjectArrival"]


class ProjectArrival:
    """The project of one run, as this VM gets at it.

    Args:
        stay: what the messages carry, and what they call this VM.
        project: its path on the notebook's machine.
        files: how to find out whether this VM sees it.
        root: a folder of this VM, which its owner removes.
        say: sends a message to the supervisor.

    Attributes:
        ready: whether it is here.
        copy: where it was unpacked; None where the notebook's disk is seen.
        project: where those who work with it find it.
        replica: what they have to see in that place (:func:`taas.travel.replica.enter`); empty: what is there.
        notices: lines for the user.
    """

    def __init__(
        self, stay: Stay, project: str, files: ProjectFiles, root: Path, say: Callable[[Message], None]
    ) -> None:
        self._stay, self._root, self._say = stay, root, say
        self._fetch: Fetch | None = None
        self._room: replica.Room | None = None
        self.project, self.replica = project, ""
        self.copy: Path | None = None
        self.notices: list[str] = []
        self.ready = bool(files.token) and read_token(files.path) == files.token
        if not self.ready:
            self._say(WantProject(run=stay.run, vm=stay.number))

    def wants(self, message: Message) -> bool:
        """Whether a message is of the project, which is not here yet."""
        if isinstance(message, ProjectPacked):
            return not self.ready and self._fetch is None and message.run == self._stay.run
        return isinstance(message, Piece) and self._fetch is not None and self._fetch.wants(message)

    def take(self, message: ProjectPacked | Piece) -> None:
        """The supervisor has packed the project, or sends a piece of it.

        Raises:
            OSError: there is no room for it.
            msgspec.DecodeError: it is no project.
        """
        if isinstance(message, ProjectPacked):
            self._fetch = Fetch(self._stay.run, self._stay.number, message.parcel, self._say)
        elif self._fetch is not None:
            self._fetch.take(message)
        if self._fetch is not None and self._fetch.complete:
            self._unpack(self._fetch.fd)
            self._drop_fetch()
            self.ready = True

    def _unpack(self, fd: int) -> None:
        self.copy = self._root / "project"
        self.copy.mkdir(mode=0o700)
        self.notices += parcel.unpack(fd, str(self.copy))
        replica.make_places(str(self.copy), self.project)
        try:
            self._room = replica.Room(self.project)
        except OSError as error:
            self.notices.append(
                f"absolute paths of the project do not hold on {self._stay.name}: {self.project} may not be made "
                f"there ({error.strerror}); relative paths do"
            )
            self.project = str(self.copy)
        else:
            self.replica = str(self.copy)

    def close(self) -> None:
        """Remove what was made for the project outside its folder. Twice is harmless."""
        self._drop_fetch()
        if self._room is not None:
            self._room.leave()

    def _drop_fetch(self) -> None:
        if self._fetch is not None:
            os.close(self._fetch.fd)
            self._fetch = None
