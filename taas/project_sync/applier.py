"""Changes made to a project: each file whole or not at all, and over nobody's work.

What stands at a path is known from when the project was packed, or from this run's last change. Where something else
stands there now, the notebook's user changed it meanwhile: it stays, and the run's version is put aside, for
``%taas recover``, until a later one finds its place. (Between that look and the change lie microseconds, in which an editor
could save; it would lose.)

A file that did not travel is another case: the VM had none, so that whatever the run made there began empty, be it
a new checkpoint or a line added to a log. The run's takes its place, as it would have here, and the old one stays
beside it, since nothing of it may be in the new one.
"""

# Paths are bytes.
# ruff: noqa: PTH101, PTH102, PTH103, PTH104, PTH106, PTH108, PTH114, PTH115, PTH118, PTH120, PTH122, PTH211

from __future__ import annotations

import contextlib
import errno
import functools
import os
import secrets
from collections.abc import Callable, Container, Mapping
from pathlib import Path

from taas.project_sync.archive import PART, ArchiveEntry, FileState, entries, scan
from taas.wording import shown_path, size_in_words


class Applier:
    """Makes one run's changes to a project, or to another folder.

    Args:
        root: the folder.
        found: what stood there when it was packed, by path: nobody else's.
        stayed: files that stood there, too, and did not travel.
        run: name of the run, for the names of those.
        aside: a folder for what has no place in the project; None: that is said.

    ``notices`` has lines for the user, ``expected`` what stands there, as far as it travelled or was put there.
    """

    def __init__(
        self,
        root: str,
        found: Mapping[bytes, FileState],
        stayed: Container[bytes] = (),
        run: str = "",
        aside: Path | None = None,
    ) -> None:
        self._root, self._run = os.path.realpath(os.fsencode(root)), os.fsencode(run)
        self._aside = None if aside is None else os.path.realpath(os.fsencode(aside))
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

    def take(self, archive: int, allowed: Callable[[ArchiveEntry], bool] = lambda entry: True) -> None:
        """Make the changes of an archive that are ``allowed``; what could not be made is said in :attr:`notices`.

        Raises:
            msgspec.DecodeError: it is no archive.
            OSError: the folder is gone.
        """
        os.close(os.open(self._root, os.O_RDONLY | os.O_DIRECTORY))
        for entry, data in entries(archive):
            if not allowed(entry):
                continue
            try:
                self._take(entry, data)
            except (OSError, ValueError) as error:  # the latter for what is no path
                why = getattr(error, "strerror", None) or error
                if entry.state is not None:  # else it went with its folder
                    self.notices.append(f"{shown_path(entry.path)} did not come back: {why}")

    def _take(self, entry: ArchiveEntry, data: memoryview) -> None:
        comes = None if entry.bare else entry.state
        try:
            placed = self._place(entry, data)
        except (FileExistsError, FileNotFoundError, NotADirectoryError):  # in its folder's place
            placed = comes is None or comes.kind == "directory"
        if placed:
            self._take_back(entry.path)
        else:
            self._put_aside(entry, data)

    def _place(self, entry: ArchiveEntry, data: memoryview) -> bool:
        """Make a change, unless a version of the user's is in its way: then returns False."""
        path, state = entry.path, entry.state
        place = _within(self._root, path, make=state is not None and not entry.bare)
        stands = _look(place)
        if state is None or entry.bare:
            if stands is not None and (state is None or not state.is_version_of(stands)):
                self._remove(path, place, stands)
            return True
        if state.kind == "directory":
            if stands is not None:
                return True  # where it is none, what is to be in it finds no place
            os.mkdir(place, state.mode & 0o777 | 0o700)
        elif self._is_free(path, place, stands):
            _put(entry, data, place)
        else:
            return False
        if stands := _look(place):
            self.expected[path] = stands
        return True

    def _put_aside(self, entry: ArchiveEntry, data: memoryview) -> None:
        if self._aside is None:
            raise FileExistsError(errno.EEXIST, "something else stands in its place")
        _put(entry, data, _within(self._aside, entry.path, make=True))

    def _take_back(self, path: bytes) -> None:
        """Remove what was put aside of a path: a later version has its place, or the run has none any more."""
        if self._aside is not None:
            with contextlib.suppress(OSError):  # there is none
                _unlink(_within(self._aside, path, make=False))

    def _is_free(self, path: bytes, place: bytes, stands: FileState | None) -> bool:
        """Whether a path is the run's; a file that had not travelled gets another name."""
        if stands is None or (stands == self.expected.get(path) and stands.kind != "directory"):
            return True
        if stands.kind != "file" or path in self.expected or path not in self._stayed:
            return False
        stem, suffix = os.path.splitext(path)
        kept = b"%s.before-%s%s" % (stem, self._run, suffix)
        try:
            os.link(place, os.path.join(self._root, kept), follow_symlinks=False)
        except OSError:  # that is there, or it is another user's file, which may not have a second name
            return False
        self.notices.append(
            f"{shown_path(path)} ({size_in_words(stands.size)}) had not travelled to the VM, where the run made one "
            f"anew: that one is here now, and yours is {shown_path(kept)}"
        )
        return True

    def _remove(self, path: bytes, place: bytes, stands: FileState) -> None:
        expected = self.expected.pop(path, None)
        if expected is None:
            return
        if stands == expected or stands.kind == expected.kind == "directory":
            with contextlib.suppress(OSError):  # somebody else has put something into a directory
                _unlink(place)
        else:
            self.notices.append(
                f"{shown_path(path)} was changed here while the run removed it: it is as you left it"
            )


def unpack(
    archive: int, folder: str, allowed: Callable[[ArchiveEntry], bool] = lambda entry: True
) -> list[str]:
    """Unpack an archive into a folder that is taas' own, over what is there; returns what could not be, a line each."""
    applier = Applier(folder, dict(scan(os.fsencode(folder), lambda path, entry: False)))
    applier.take(archive, allowed)
    return applier.notices


def _within(root: bytes, path: bytes, *, make: bool) -> bytes:
    """Return where a path is beneath a folder, through no link and no ``..``; ``make``: the folders that it is in are made."""
    place = os.path.join(root, path)
    folder = os.path.dirname(place)
    if os.path.normpath(place) != place or not place.startswith(os.path.join(root, b"")):
        raise OSError("it is no plain path")
    if os.path.realpath(folder) != folder:
        raise NotADirectoryError(errno.ENOTDIR, "a link stands in its folder's place")
    if make:
        os.makedirs(folder, exist_ok=True)
    return place


def _look(place: bytes) -> FileState | None:
    """What stands at a place; None where nothing does."""
    try:
        target = os.readlink(place) if os.path.islink(place) else b""
        return FileState.of(os.lstat(place), target)
    except FileNotFoundError:
        return None


def _unlink(place: bytes) -> None:
    try:
        os.unlink(place)
    except IsADirectoryError:
        os.rmdir(place)


def _put(entry: ArchiveEntry, data: memoryview, place: bytes) -> None:
    """Put a file or a link at its place, in one step."""
    assert entry.state is not None
    own = os.path.join(os.path.dirname(place), PART + secrets.token_hex(8).encode())
    try:
        if entry.state.kind == "link":
            os.symlink(entry.state.target, own)
        else:
            with open(own, "xb", opener=functools.partial(os.open, mode=0o600)) as file:
                file.write(data)
            os.chmod(own, entry.state.mode & 0o777)
            os.utime(own, ns=(entry.state.modified_ns, entry.state.modified_ns))
        os.rename(own, place)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(own)
        raise
