"""Applies changes to a project: each file completely or not at all, and never over a user's work.

The earlier content of a path is known from when the project was packed, or from this run's last
change. If the path has different content now, the notebook's user has changed it meanwhile: it
stays, and the run's version is put aside for ``%taas recover``, until a later version can be
written to the path. (A change that an editor saves in the microseconds between this check and the
change would be lost.) A file that already has the right content is not replaced, so that programs
that have it open keep it.

A file that was not sent to the VM is a different case: the VM had no such file, so the run's file
began empty there, even if it is a log to which the run adds a line. The run's file replaces it, as
it would have here. The old file is renamed and stays in the same folder, because the new one may
contain nothing of it.
"""

# Paths are bytes, relative to open directories.
# ruff: noqa: PTH119, PTH122

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
from collections.abc import Callable, Container, Iterator, Mapping
from pathlib import Path

from taas.base.wording import shown_path, size_in_words
from taas.project.sync.archive import PART, ArchiveEntry, FileState, entries, scan

_COMPARED = 1 << 20


class Applier:
    """Applies one run's changes to a project, or to another folder.

    Args:
        root: the folder.
        found: the entries that were there when it was packed, by path.
        stayed: files that were also there, but were not sent.
        run: the name of the run, for the new names of such files.
        aside: a folder for files that cannot be placed in the project; if None, a notice reports
            them.

    ``notices`` contains lines for the user; ``expected`` contains the files that should be there:
    those that were sent, or were written there.
    """

    def __init__(
        self,
        root: str,
        found: Mapping[bytes, FileState],
        stayed: Container[bytes] = (),
        run: str = "",
        aside: Path | None = None,
    ) -> None:
        self._root, self._aside, self._run = root, aside, os.fsencode(run)
        self._found, self.expected = found, dict(found)
        self._stayed = stayed
        self.notices: list[str] = []

    @property
    def known(self) -> dict[bytes, FileState]:
        """Return the files that VMs may have: those that are there, and those removed meanwhile."""
        return {**self._found, **self.expected}

    @property
    def written(self) -> set[bytes]:
        """Return the paths of the files that were written."""
        return {path for path, seen in self.expected.items() if seen != self._found.get(path)}

    def take(
        self, archive: int, allowed: Callable[[ArchiveEntry], bool] = lambda entry: True
    ) -> None:
        """Apply those changes of an archive that are ``allowed``; add failures to :attr:`notices`.

        Raises:
            Unreadable: it is not an archive.
            OSError: the folder is gone.
        """
        with _directory(self._root) as root:
            for entry, data in entries(archive):
                if not allowed(entry):
                    continue
                try:
                    self._take(root, entry, data)
                except (OSError, ValueError) as error:  # ValueError: it is not a path
                    why = getattr(error, "strerror", None) or error
                    if entry.state is not None:  # otherwise it was removed with its folder
                        self.notices.append(f"{shown_path(entry.path)} did not come back: {why}")

    def _take(self, root: int, entry: ArchiveEntry, data: memoryview) -> None:
        comes = None if entry.bare else entry.state
        placed = comes is None or comes.kind == "directory"
        with (
            # another entry is at the path of its folder
            contextlib.suppress(NotADirectoryError, FileNotFoundError),
            _folder(root, entry.path, make=comes is not None) as folder,
        ):
            placed = self._place(entry, data, folder)
        if placed:
            self._take_back(entry.path)
        else:
            self._put_aside(entry, data)

    def _place(self, entry: ArchiveEntry, data: memoryview, folder: int) -> bool:
        """Apply a change; return False if a version of the user's is in its way."""
        path, state, name = entry.path, entry.state, os.path.basename(entry.path)
        stands = _look(folder, name)
        if state is None or entry.bare:
            if stands is not None and (state is None or not state.is_version_of(stands)):
                self._remove(path, folder, stands)
            return True
        if state.kind == "directory":
            if stands is not None:
                return True  # if it is not a directory, its files cannot be placed
            os.mkdir(name, state.mode & 0o777 | 0o700, dir_fd=folder)
        elif stands is not None and _is_same(entry, data, folder, stands):
            if state.kind == "file":  # its new ctime shows that the run wrote it
                os.utime(name, ns=(state.modified_ns, state.modified_ns), dir_fd=folder)
        elif self._is_free(path, folder, stands):
            _put(entry, data, folder)
        else:
            return False
        if stands := _look(folder, name):
            self.expected[path] = stands
        return True

    def _put_aside(self, entry: ArchiveEntry, data: memoryview) -> None:
        if self._aside is None:
            raise FileExistsError(errno.EEXIST, "something else stands in its place")
        self._aside.mkdir(parents=True, exist_ok=True)
        with _directory(self._aside) as aside, _folder(aside, entry.path, make=True) as folder:
            _put(entry, data, folder)

    def _take_back(self, path: bytes) -> None:
        """Remove the file that was put aside for a path.

        A later version has been written to the path, or the run no longer has the file.
        """
        if self._aside is not None:
            with (
                contextlib.suppress(OSError),  # none was put aside
                _directory(self._aside) as aside,
                _folder(aside, path, make=False) as folder,
            ):
                _unlink(path, folder)

    def _is_free(self, path: bytes, folder: int, stands: FileState | None) -> bool:
        """Return whether the run may write to a path.

        A file of the user's that had not been sent is renamed first.
        """
        if stands is None or (stands == self.expected.get(path) and stands.kind != "directory"):
            return True
        if stands.kind != "file" or path in self.expected or path not in self._stayed:
            return False
        stem, suffix = os.path.splitext(path)
        kept = b"%s.before-%s%s" % (stem, self._run, suffix)
        try:
            names = os.path.basename(path), os.path.basename(kept)
            os.link(*names, src_dir_fd=folder, dst_dir_fd=folder, follow_symlinks=False)
        except OSError:
            # The new name is taken, or the file belongs to another user and may not get a second
            # name.
            return False
        self.notices.append(
            f"{shown_path(path)} ({size_in_words(stands.size)}) had not travelled to the VM, where"
            f" the run made one anew: that one is here now, and yours is {shown_path(kept)}"
        )
        return True

    def _remove(self, path: bytes, folder: int, stands: FileState | None) -> None:
        expected = self.expected.pop(path, None)
        if stands is None or expected is None:
            return
        if stands == expected or stands.kind == expected.kind == "directory":
            with contextlib.suppress(OSError):  # the directory has other entries by now
                _unlink(path, folder)
        else:
            self.notices.append(
                f"{shown_path(path)} was changed here while the run removed it: it is as you"
                " left it"
            )


def unpack(
    archive: int, folder: str, allowed: Callable[[ArchiveEntry], bool] = lambda entry: True
) -> list[str]:
    """Unpack an archive into a folder of taas, over its content; return a line for each failure."""
    applier = Applier(folder, dict(scan(os.fsencode(folder), lambda path, entry: False)))
    applier.take(archive, allowed)
    return applier.notices


@contextlib.contextmanager
def _directory(path: str | bytes | Path, within: int | None = None) -> Iterator[int]:
    """Open a directory, but not through a link."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=within)
    try:
        yield fd
    finally:
        os.close(fd)


@contextlib.contextmanager
def _folder(root: int, path: bytes, *, make: bool) -> Iterator[int]:
    """Open the folder of a path beneath an open directory, through no link and no ``..``.

    ``make``: create missing folders.
    """
    parts = path.split(b"/")
    if any(part in (b"", b".", b"..") for part in parts):
        raise OSError("it is no plain path")
    with contextlib.ExitStack() as opened:
        folder = root
        for part in parts[:-1]:
            if make:
                with contextlib.suppress(FileExistsError):
                    os.mkdir(part, dir_fd=folder)
            folder = opened.enter_context(_directory(part, folder))
        yield folder


def _look(folder: int, name: bytes) -> FileState | None:
    """Return the state of the entry with a name, or None if there is none."""
    try:
        status = os.stat(name, dir_fd=folder, follow_symlinks=False)
        target = os.readlink(name, dir_fd=folder) if stat.S_ISLNK(status.st_mode) else b""
    except FileNotFoundError:
        return None
    return FileState.of(status, target)


def _unlink(path: bytes, folder: int) -> None:
    name = os.path.basename(path)
    try:
        os.unlink(name, dir_fd=folder)
    except IsADirectoryError:
        os.rmdir(name, dir_fd=folder)


def _is_same(entry: ArchiveEntry, data: memoryview, folder: int, stands: FileState) -> bool:
    """Return whether the file or link is already what it should be."""
    assert entry.state is not None
    if stands[:4] != entry.state[:4] or stands.kind != "file":
        return stands[:4] == entry.state[:4]
    try:
        fd = os.open(
            os.path.basename(entry.path), os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder
        )
    except OSError:
        return False
    with os.fdopen(fd, "rb") as file:
        pieces = range(0, stands.size, _COMPARED)
        return all(file.read(_COMPARED) == bytes(data[at : at + _COMPARED]) for at in pieces)


def _put(entry: ArchiveEntry, data: memoryview, folder: int) -> None:
    """Place a file or a link at its name atomically."""
    assert entry.state is not None
    own = PART + secrets.token_hex(8).encode()
    try:
        if entry.state.kind == "link":
            os.symlink(entry.state.target, own, dir_fd=folder)
        else:
            fd = os.open(
                own, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=folder
            )
            with os.fdopen(fd, "wb", buffering=0) as file:
                while data:
                    data = data[file.write(data) :]
                os.fchmod(fd, entry.state.mode & 0o777)
                os.utime(fd, ns=(entry.state.modified_ns, entry.state.modified_ns))
        os.rename(own, os.path.basename(entry.path), src_dir_fd=folder, dst_dir_fd=folder)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(own, dir_fd=folder)
        raise
