"""Changes made to a project: each file whole or not at all, and over nobody's work.

What stands at a path is known from when the project was packed, or from this run's last change.
Where something else stands there now, the notebook's user changed it meanwhile: it stays, and the
run's version is put aside, for ``%taas recover``, until a later one finds its place. (Between that
look and the change lie microseconds, in which an editor could save; it would lose.) What stands
there as it is to be is not replaced: who has it open goes on having it.

A file that did not travel is another case: the VM had none, so that whatever the run made there
began empty, be it a new checkpoint or a line added to a log. The run's takes its place, as it would
have here, and the old one stays beside it, since nothing of it may be in the new one.
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

from taas.project_sync.archive import PART, ArchiveEntry, FileState, entries, scan
from taas.wording import shown_path, size_in_words

_COMPARED = 1 << 20


class Applier:
    """Makes one run's changes to a project, or to another folder.

    Args:
        root: the folder.
        found: what stood there when it was packed, by path: nobody else's.
        stayed: files that stood there, too, and did not travel.
        run: name of the run, for the names of those.
        aside: a folder for what has no place in the project; None: that is said.

    ``notices`` has lines for the user, ``expected`` what stands there, as far as it travelled or
    was put there.
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
        """What the VMs may have: what stands there, and what was removed here, which not each of them did."""
        return {**self._found, **self.expected}

    @property
    def written(self) -> set[bytes]:
        """What was put there."""
        return {path for path, seen in self.expected.items() if seen != self._found.get(path)}

    def take(
        self, archive: int, allowed: Callable[[ArchiveEntry], bool] = lambda entry: True
    ) -> None:
        """Make the changes of an archive that are ``allowed``; what could not be made is said in :attr:`notices`.

        Raises:
            Unreadable: it is no archive.
            OSError: the folder is gone.
        """
        with _directory(self._root) as root:
            for entry, data in entries(archive):
                if not allowed(entry):
                    continue
                try:
                    self._take(root, entry, data)
                except (OSError, ValueError) as error:  # the latter for what is no path
                    why = getattr(error, "strerror", None) or error
                    if entry.state is not None:  # else it went with its folder
                        self.notices.append(f"{shown_path(entry.path)} did not come back: {why}")

    def _take(self, root: int, entry: ArchiveEntry, data: memoryview) -> None:
        comes = None if entry.bare else entry.state
        placed = comes is None or comes.kind == "directory"
        with (
            contextlib.suppress(NotADirectoryError, FileNotFoundError),  # in its folder's place
            _folder(root, entry.path, make=comes is not None) as folder,
        ):
            placed = self._place(entry, data, folder)
        if placed:
            self._take_back(entry.path)
        else:
            self._put_aside(entry, data)

    def _place(self, entry: ArchiveEntry, data: memoryview, folder: int) -> bool:
        """Make a change, unless a version of the user's is in its way: then returns False."""
        path, state, name = entry.path, entry.state, os.path.basename(entry.path)
        stands = _look(folder, name)
        if state is None or entry.bare:
            if stands is not None and (state is None or not state.is_version_of(stands)):
                self._remove(path, folder, stands)
            return True
        if state.kind == "directory":
            if stands is not None:
                return True  # where it is none, what is to be in it finds no place
            os.mkdir(name, state.mode & 0o777 | 0o700, dir_fd=folder)
        elif stands is not None and _is_same(entry, data, folder, stands):
            if state.kind == "file":  # its ctime says that the run wrote it
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
        """Remove what was put aside of a path: a later version has its place, or the run has none any more."""
        if self._aside is not None:
            with (
                contextlib.suppress(OSError),  # there is none
                _directory(self._aside) as aside,
                _folder(aside, path, make=False) as folder,
            ):
                _unlink(path, folder)

    def _is_free(self, path: bytes, folder: int, stands: FileState | None) -> bool:
        """Whether a path is the run's; a file that had not travelled gets another name."""
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
            # that is there, or it is another user's file, which may not have a second name
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
            with contextlib.suppress(OSError):  # somebody else has put something into a directory
                _unlink(path, folder)
        else:
            self.notices.append(
                f"{shown_path(path)} was changed here while the run removed it: it is as you"
                " left it"
            )


def unpack(
    archive: int, folder: str, allowed: Callable[[ArchiveEntry], bool] = lambda entry: True
) -> list[str]:
    """Unpack an archive into a folder that is taas' own, over what is there; returns what could not be, a line each."""
    applier = Applier(folder, dict(scan(os.fsencode(folder), lambda path, entry: False)))
    applier.take(archive, allowed)
    return applier.notices


@contextlib.contextmanager
def _directory(path: str | bytes | Path, within: int | None = None) -> Iterator[int]:
    """Open a directory, which no link leads to."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=within)
    try:
        yield fd
    finally:
        os.close(fd)


@contextlib.contextmanager
def _folder(root: int, path: bytes, *, make: bool) -> Iterator[int]:
    """Open the folder of a path beneath an open directory, through no link and no ``..``; ``make``: what is missing of it."""
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
    """What stands at a name; None where nothing does."""
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
    """Whether a file or a link stands there as it is to be."""
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
    """Put a file or a link at its name, in one step."""
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
