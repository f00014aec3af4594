"""Transfers project files that were not sent to a VM when a process there opens them.

The VM cannot access the notebook's disk. A process that does not find a file creates a pipe in a
folder that its agent watches, and waits at that pipe; the agent requests the file from the
supervisor. Each file is transferred to each VM once, into a folder of the agent, where later cells
find it if it is still the same version; the least recently used files are removed when space is
needed. Python's ``open``, ``os.open`` and ``os.stat`` request files, and so do ``Path``,
``os.path.exists``, NumPy and ``torch.load``. Directory listings do not contain files that have not
been transferred, and C code that opens files by name does not find them.
"""

# Plain strings and functions of os, because this module replaces these functions.
# ruff: noqa: PTH109, PTH118, PTH123, PTH208

from __future__ import annotations

import builtins
import contextlib
import errno
import hashlib
import json
import os
import posix
import select
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from taas.project.sync.archive import FileState
from taas.project.wall.diversion import replace
from taas.protocol import deadlines
from taas.protocol.agents import JobRequest
from taas.protocol.chunks import Chunk

_INDEX = "index"


def _asked_as(name: str) -> str:
    """Return the prefix of the names of the pipes at which processes wait for a file.

    It does not depend on the other files that a cell is missing.
    """
    return hashlib.blake2b(name.encode(), digest_size=8).hexdigest()


# ---------------------------------------------------------------- the agent's side


class FilesOnDemand:
    """The files that are missing in one copy of the project, and are transferred on request.

    Args:
        folder: the folder in which processes place their requests.
        cache: the folder for files that were transferred to this VM.
        say: tells the supervisor which files it has to send, and which it need not send.

    ``came`` contains the files that have arrived since the processes began, with their state on
    arrival.
    """

    def __init__(self, folder: Path, cache: Path, say: Callable[[JobRequest], None]) -> None:
        self.folder, self._cache, self._say = folder, cache, say
        self._copy, self._missing = Path(), dict[str, FileState]()
        self._names = dict[str, str]()
        self._asked: set[str] = set()
        self._coming: dict[str, Path] = {}
        self.came: dict[bytes, FileState] = {}
        for place in (folder, cache):
            place.mkdir(mode=0o700, exist_ok=True)

    def expect(self, copy: Path, files: Mapping[bytes, FileState]) -> None:
        """Set the files that a copy is missing, and add those that are in the cache."""
        self._copy, self._missing = copy, {}
        for path, state in files.items():
            with contextlib.suppress(UnicodeDecodeError):
                name = path.decode()
                if not (copy / name).exists() and not self._put(name, state):
                    self._missing[name] = state
        self._names = {_asked_as(name): name for name in self._missing}
        (self.folder / _INDEX).write_text(json.dumps([*self._missing]))

    def _put(self, name: str, state: FileState) -> bool:
        """Put a file into the copy, and report that, if the cache has this version of it."""
        cached = self._cached(state)
        try:
            seen = cached.stat()
            (self._copy / name).parent.mkdir(parents=True, exist_ok=True)
            if (seen.st_size, seen.st_mtime_ns) != (state.size, state.modified_ns):
                cached.unlink()  # a process has written into it
                return False
            os.link(cached, self._copy / name)
        except OSError:
            return False
        self._say(JobRequest(what="has", path=name))
        return True

    def _cached(self, state: FileState) -> Path:
        return self._cache / f"{state.inode:x}-{state.changed_ns:x}-{state.size:x}"

    def step(self) -> None:
        """Reply to the processes that wait, or request their files from the supervisor.

        A process of an earlier cell may request a file that is here by now, or is no longer
        missing.
        """
        for pipe in os.listdir(self.folder):
            if pipe == _INDEX or pipe.startswith("."):
                continue
            name = self._names.get(pipe.partition("-")[0])
            if name is None or os.path.lexists(self._copy / name):
                self._answer(pipe)
            elif name not in self._asked:
                self._asked.add(name)
                self._say(JobRequest(what="file", path=name))

    def take(self, chunk: Chunk) -> None:
        """Store a part of a file.

        If it cannot be stored, or is not available, the file stays missing.
        """
        # Files are transferred in turn, so a part of this one is progress for all processes that
        # wait.
        for pipe in self.folder.glob("*-*"):
            with contextlib.suppress(OSError):  # the process that waited was killed
                os.utime(pipe)
        name, state = chunk.file, self._missing.get(chunk.file)
        if state is None:
            return  # a file of an earlier cell
        try:
            if self._take(name, state, chunk):
                return
        except OSError:
            if (part := self._coming.pop(name, None)) is not None:
                part.unlink(missing_ok=True)
        self._asked.discard(name)
        self._answer(f"{_asked_as(name)}-*")

    def _take(self, name: str, state: FileState, chunk: Chunk) -> bool:
        """Write a part to the disk; return whether more parts have to come."""
        if not chunk.offset and chunk.size >= 0:
            self._make_room(chunk.size)
            self._coming[name] = self._cache / f"{self._cached(state).name}.part"
        part = self._coming.get(name)
        if part is None:
            return False  # its transfer was given up
        if chunk.size < 0:
            raise FileNotFoundError(name)
        with part.open("ab" if chunk.offset else "wb") as file:
            file.write(chunk.data)
        if chunk.offset + len(chunk.data) < chunk.size:
            return True
        del self._coming[name]
        part.chmod(state.mode)
        os.utime(part, ns=(state.modified_ns, state.modified_ns))
        part.rename(self._cached(state))
        if self._put(name, state):
            self.came[name.encode()] = FileState.of((self._copy / name).lstat())
        return False

    def _make_room(self, size: int) -> None:
        """Remove files until the cache, with this one, has at most half of the free space.

        The file that was put into a copy longest ago is removed first.
        """
        whole = (path for path in self._cache.iterdir() if path not in self._coming.values())
        cached = sorted(whole, key=lambda path: path.stat().st_ctime)
        used = sum(path.stat().st_size for path in cached)
        most = (shutil.disk_usage(self._cache).free + used) // 2
        while cached and used + size > most:
            used -= cached[0].stat().st_size
            cached.pop(0).unlink()

    def _answer(self, pipes: str) -> None:
        """Let the processes at these pipes continue; they check whether their file is there."""
        for pipe in self.folder.glob(pipes):
            if pipe.is_fifo():
                with contextlib.suppress(OSError):  # the process that waited was killed
                    fd = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
                    with open(fd, "wb") as waiting:
                        waiting.write(b".")
                pipe.unlink()


# --------------------------------------------------------- in a process that works with the project

_folder, _roots, _missing = "", tuple[str, ...](), frozenset[str]()
_installed = False


def use(folder: str, project: str, replica: str) -> None:
    """Let this process, and its forks, request missing files of the project.

    An empty ``folder`` means that no file is missing.
    """
    global _folder, _roots, _missing, _installed
    names = json.loads(Path(folder, _INDEX).read_bytes()) if folder else []
    _folder, _roots, _missing = folder, (project, replica), frozenset(names)
    if _missing and not _installed:
        _installed = True
        natives = (("builtins.open", builtins.open), ("open", os.open), ("stat", os.stat))
        replace({name: _asking(call) for name, call in natives})


def _asking(native: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that requests a file if it does not find it, and tries again."""

    def call(path: Any, *arguments: Any, **options: Any) -> Any:
        try:
            return native(path, *arguments, **options)
        except FileNotFoundError:
            if not _come(path):
                raise
        return native(path, *arguments, **options)

    return call


def _come(path: Any) -> bool:
    """Request a file that was not sent, and wait until it is here, or will not come."""
    whole = os.path.normpath(os.path.join(os.getcwd(), os.fsdecode(path)))
    names = (
        os.path.relpath(whole, root) for root in _roots if root and whole.startswith(root + "/")
    )
    name = next((name for name in names if name in _missing), None)
    if name is None:
        return False
    own = f"{os.getpid()}-{threading.get_native_id()}"
    asking, pipe = f"{_folder}/.{own}", f"{_folder}/{_asked_as(name)}-{own}"
    posix.mkfifo(asking, 0o600)
    fd = posix.open(asking, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        posix.rename(asking, pipe)  # now the agent sees the pipe, and that it has a reader
        waiting = select.poll()
        waiting.register(fd, select.POLLIN)
        while not waiting.poll(deadlines.FILE_ON_DEMAND * 1000):
            # The agent touches the pipe when a part of any file has arrived, and removes it to
            # reply.
            try:
                silent = time.time() - posix.stat(pipe).st_mtime
            except FileNotFoundError:
                break
            if silent >= deadlines.FILE_ON_DEMAND:
                posix.unlink(pipe)
                raise TimeoutError(
                    errno.ETIMEDOUT,
                    "it is on the notebook's machine, and nothing has come from there for"
                    f" {deadlines.FILE_ON_DEMAND:.0f} s: see that the way to it is up, and run the"
                    " cell again",
                    name,
                )
    finally:
        posix.close(fd)
    return True
