"""Changes made to a project: each file whole or not at all, durable, and over nobody's work.

What stands at a path is known from when the project was packed, or from this run's last change. Where something
else stands there now, the notebook's user changed it meanwhile: it stays, and the run's version is put beside
it and named. Also between that look and the change nothing can slip through: names change places in one step,
and what came out is looked at again.

A file that did not travel is another case: the VM had none, so that whatever the run made there began empty, be it
a new checkpoint or a line added to a log. The run's takes its place, as it would have here, and the old one stays
beside it, since nothing of it may be in the new one.

A process that is killed leaves no half-written file under any name of the project's: contents are written to
files without a name, which vanish with it, or, where the file system has none, to names of taas' own.
"""

# Paths are bytes, relative to open directories.
# ruff: noqa: PTH119, PTH120, PTH122

from __future__ import annotations

import contextlib
import errno
import itertools
import os
from collections.abc import Callable, Collection, Iterator, Mapping

from taas import _linux
from taas.storage.settlement import human_size
from taas.travel.changes import Change, DirectoryMade, FileAbandoned, FilePiece, LinkMade, Removed
from taas.travel.own_files import new_name, sweep
from taas.travel.tree import Seen, look, open_directory

__all__ = ["Applier"]

_COMPARED = 1 << 20
_FLUSHED = 32 << 20
NameIt = Callable[[], bytes]
"""Gives something new a name of taas' own in the folder where it is to stand, and returns that name."""
_Key = tuple[int, bytes]
"""Whose file it is, and where it is to stand."""


class Applier:
    """Makes one run's changes to a project.

    Args:
        root: the project.
        found: what travelled of what stood there when it was packed, by path.
        run: name of the run, for names beside the user's.
        stayed: files that stood there, too, and did not travel.
        durable: a change is on the disk when :meth:`take` returns.

    Attributes:
        notices: what the user is to be told, a line each.
        replaced: files that had not travelled, and stand beside what the run made in their place.
        written: files that were put into the project.
    """

    def __init__(
        self,
        root: str,
        found: Mapping[bytes, Seen],
        run: str,
        stayed: Collection[bytes] = (),
        durable: bool = True,
    ) -> None:
        self._root = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self._expected: dict[bytes, Seen | None] = dict(found)
        self._stayed = set(stayed)
        self._run, self._durable = os.fsencode(run), durable
        self._beside: dict[bytes, bytes] = {}
        self._swept: set[bytes] = set()
        self._coming: dict[_Key, _Coming] = {}
        self.notices: list[str] = []
        self.replaced: set[bytes] = set()
        self.written: set[bytes] = set()

    def take(self, change: Change, sender: int = 0) -> None:
        """Make a change; what is in its way is said in :attr:`notices`.

        Args:
            change: the change.
            sender: whose it is. Where several change the same path, the last one wins, as on one machine.
        """
        key = (sender, change.path)
        coming = self._coming.get(key)
        if coming is not None and not (isinstance(change, FilePiece) and coming.continues(change)):
            self._give_up(key)
        path = self._place(change.path)
        try:
            match change:
                case FilePiece():
                    self._take_piece(path, key, change)
                case DirectoryMade():
                    self._make_directory(path, change)
                case LinkMade():
                    self._make_link(path, change)
                case Removed():
                    self._remove(path)
                case FileAbandoned():
                    pass
        except OSError as error:
            self._give_up(key)
            self.notices.append(f"{_shown(change.path)} did not come back: {error.strerror or error}")

    def lose(self, sender: int) -> None:
        """Drop what has not come as a whole: its sender is gone."""
        for key in [key for key in self._coming if key[0] == sender]:
            self._give_up(key)

    def close(self) -> None:
        """End, and drop what has not come as a whole."""
        for key in list(self._coming):
            self._give_up(key)
        if self._root >= 0:
            os.close(self._root)
            self._root = -1

    def _place(self, path: bytes) -> bytes:
        """Where a path's changes go: beside it, once it or a folder above it was found changed."""
        for taken, other in self._beside.items():
            if path == taken or path.startswith(taken + b"/"):
                return other + path[len(taken) :]
        return path

    # ------------------------------------------------------------ files

    def _take_piece(self, path: bytes, key: _Key, piece: FilePiece) -> None:
        if key not in self._coming:
            if piece.offset:
                return  # the rest of a file that was given up
            folder = self._folder(path)
            try:
                self._coming[key] = _Coming(piece, folder)
            except BaseException:
                os.close(folder)
                raise
        coming = self._coming[key]
        coming.write(piece.data, durable=self._durable)
        if coming.whole:
            if self._durable:
                os.fsync(coming.fd)
            self._put(path, coming.folder, coming.name_it, coming.seen(), coming)
            self._give_up(key)

    def _give_up(self, key: _Key) -> None:
        coming = self._coming.pop(key, None)
        if coming is not None:
            coming.close()

    def _make_link(self, path: bytes, link: LinkMade) -> None:
        folder = self._folder(path)
        try:

            def name_it() -> bytes:
                name = new_name("link")
                os.symlink(link.target, name, dir_fd=folder)
                return name

            self._put(path, folder, name_it, Seen("link", 0o777, (0, link.target)), None)
        finally:
            os.close(folder)

    def _put(self, path: bytes, folder: int, name_it: NameIt, new: Seen, coming: _Coming | None) -> None:
        """Put something new at a path, unless that is somebody else's by now."""
        name = os.path.basename(path)
        stands = look(folder, name)
        if stands is not None and _same(folder, name, stands, new, coming):
            self._expected[path] = stands
            return
        own = name_it()
        try:
            if stands is None:
                ended = self._put_anew(path, folder, own)
            elif stands == self._expected.get(path) and stands.kind != "directory":
                ended = self._put_over(path, folder, own, stands)
            elif path in self._stayed and stands.kind == "file":
                ended = self._put_instead(path, folder, own, stands)
            else:
                ended = self._put_beside(path, folder, own)
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(own, dir_fd=folder)
        self._expected[ended] = look(folder, os.path.basename(ended))
        self.written.add(ended)
        if self._durable:
            os.fsync(folder)

    def _put_anew(self, path: bytes, folder: int, own: bytes) -> bytes:
        """Put it where nothing stands; returns where it is now."""
        try:
            _link(folder, own, os.path.basename(path))
        except FileExistsError:  # the user has just made one
            return self._put_beside(path, folder, own)
        return path

    def _put_over(self, path: bytes, folder: int, own: bytes, stands: Seen) -> bytes:
        """Put it where something stands that may go; returns where it is now."""
        name = os.path.basename(path)
        try:
            _linux.exchange(folder, own, name)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.ENOSYS):
                raise
            os.rename(own, name, src_dir_fd=folder, dst_dir_fd=folder)  # a file system without it: NFS
        else:
            if not _is(look(folder, own), stands):  # the user changed it in between: back with it
                _linux.exchange(folder, own, name)
                return self._put_beside(path, folder, own)
        return path

    def _put_instead(self, path: bytes, folder: int, own: bytes, stands: Seen) -> bytes:
        """Put it in the place of a file that had not travelled, which stays beside it; returns where it is now."""
        try:  # the old one has its new name before it loses the other
            kept = self._link_beside(folder, os.path.basename(path), self._names_beside(path, b"before-"))
        except OSError:  # another user's file, perhaps: it may not have a second name
            return self._put_beside(path, folder, own)
        self._stayed.discard(path)
        self.replaced.add(path)
        self.notices.append(
            f"{_shown(path)} ({human_size(stands.size)}) had not travelled to the VM, where the run made one anew: "
            f"that one is here now, and yours is {_shown(kept)}"
        )
        return self._put_over(path, folder, own, stands)

    def _put_beside(self, path: bytes, folder: int, own: bytes) -> bytes:
        """Put it beside somebody's work; returns where it is now."""
        beside = self._link_beside(folder, own, self._names_beside(path))
        self._say_beside(path, beside)
        return beside

    @staticmethod
    def _link_beside(folder: int, name: bytes, paths: Iterator[bytes]) -> bytes:
        """Give a file the first name that is free; returns its path."""
        for beside in paths:
            with contextlib.suppress(FileExistsError):
                _link(folder, name, os.path.basename(beside))
                break
        return beside

    def _names_beside(self, path: bytes, mark: bytes = b"") -> Iterator[bytes]:
        stem, suffix = os.path.splitext(path)
        first = b"%s.%s%s" % (stem, mark, self._run)
        numbered = (b"%s-%d%s" % (first, number, suffix) for number in itertools.count(2))
        return itertools.chain([first + suffix], numbered)

    def _say_beside(self, path: bytes, beside: bytes) -> None:
        known = self._expected.get(path) is not None
        how = "was changed here while the run wrote it, too" if known else "is here, and the VM had none"
        self._beside[path] = beside
        self.notices.append(f"{_shown(path)} {how}: yours is as you left it, the run's is {_shown(beside)}")

    # ------------------------------------------------------------ directories, and what goes

    def _folder(self, path: bytes) -> int:
        """Open the folder of a path; it is made where the user has removed it."""
        parent = os.path.dirname(path)
        folder = open_directory(self._root, parent, make=True)
        if parent not in self._swept:
            self._swept.add(parent)
            sweep(folder)
        return folder

    def _make_directory(self, path: bytes, made: DirectoryMade) -> None:
        folder, name = self._folder(path), os.path.basename(path)
        try:
            try:
                os.mkdir(name, dir_fd=folder)
                os.chmod(name, made.mode | 0o700, dir_fd=folder)
            except FileExistsError:
                stands = look(folder, name)
                if stands is not None and stands.kind != "directory":
                    beside = next(
                        name
                        for name in self._names_beside(path)
                        if look(folder, os.path.basename(name)) is None
                    )
                    os.mkdir(os.path.basename(beside), dir_fd=folder)
                    self._say_beside(path, beside)
                    return
            self._expected[path] = look(folder, name)
            if self._durable:
                os.fsync(folder)
        finally:
            os.close(folder)

    def _remove(self, path: bytes) -> None:
        try:
            folder = open_directory(self._root, os.path.dirname(path))
        except OSError:
            return  # it went with its folder
        try:
            self._remove_from(folder, path)
            if self._durable:
                os.fsync(folder)
        finally:
            os.close(folder)

    def _remove_from(self, folder: int, path: bytes) -> None:
        name, expected = os.path.basename(path), self._expected.pop(path, None)
        stands = look(folder, name)
        if stands is None or expected is None:
            return
        if stands.kind == "directory":
            try:
                os.rmdir(name, dir_fd=folder)
            except OSError:  # somebody else has put something there: it stays
                self._expected[path] = expected
        elif stands == expected:
            self._take_away(folder, name, stands)
        else:
            self.notices.append(
                f"{_shown(path)} was changed here while the run removed it: it is as you left it"
            )

    def _take_away(self, folder: int, name: bytes, stands: Seen) -> None:
        """Remove a file, but not one that somebody has just put in its place."""
        own = new_name("gone")
        os.rename(name, own, src_dir_fd=folder, dst_dir_fd=folder)
        if not _is(look(folder, own), stands):
            _link(folder, own, name)
        os.unlink(own, dir_fd=folder)


class _Coming:
    """A file whose pieces are coming, without a name yet.

    Attributes:
        fd: the file.
        folder: where it is to stand, open.
    """

    def __init__(self, first: FilePiece, folder: int) -> None:
        self._path, self._size, self._mode, self._got = first.path, first.size, first.mode, 0
        self._dirty = 0
        self._name: bytes | None = None
        self.folder = folder
        try:
            self.fd = os.open(b".", os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600, dir_fd=folder)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT, errno.EINVAL):
                raise
            self._name = new_name("part")
            flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
            self.fd = os.open(self._name, flags, 0o600, dir_fd=folder)

    def continues(self, piece: FilePiece) -> bool:
        """Whether a piece is this file's next."""
        return (piece.path, piece.size, piece.offset) == (self._path, self._size, self._got)

    def write(self, data: bytes, *, durable: bool) -> None:
        """Add a piece."""
        left = memoryview(data)
        while left:
            written = os.write(self.fd, left)
            left, self._got = left[written:], self._got + written
            self._dirty += written
        if durable and self._dirty >= _FLUSHED:  # bit by bit: at the end it would take long
            os.fdatasync(self.fd)
            self._dirty = 0
        if self.whole:
            os.fchmod(self.fd, self._mode)

    @property
    def whole(self) -> bool:
        """Whether all of it is here."""
        return self._got >= self._size

    def seen(self) -> Seen:
        """What it would be seen as."""
        return Seen.of(os.fstat(self.fd))

    def name_it(self) -> bytes:
        """Give it a name of taas' own."""
        if self._name is None:
            self._name = new_name("part")
            os.link(f"/proc/self/fd/{self.fd}", self._name, dst_dir_fd=self.folder, follow_symlinks=True)
        return self._name

    def close(self) -> None:
        """Forget it; without a name in the project it is gone."""
        os.close(self.fd)
        if self._name is not None:
            with contextlib.suppress(OSError):
                os.unlink(self._name, dir_fd=self.folder)
        os.close(self.folder)


def _link(folder: int, name: bytes, other: bytes) -> None:
    """Give a file of an open directory a second name; FileExistsError where something has it."""
    os.link(name, other, src_dir_fd=folder, dst_dir_fd=folder, follow_symlinks=False)


def _is(one: Seen | None, other: Seen) -> bool:
    """Whether what was renamed is what was seen before: a name's change changes ``ctime``, too."""
    if one is None or (one.kind, one.mode) != (other.kind, other.mode):
        return False
    return one.identity[:3] == other.identity[:3] if one.kind == "file" else one.identity == other.identity


def _same(folder: int, name: bytes, stands: Seen, new: Seen, coming: _Coming | None) -> bool:
    """Whether what stands at a name is just what is to stand there."""
    if (stands.kind, stands.mode, stands.size) != (new.kind, new.mode, new.size):
        return False
    if coming is None:
        return stands.identity[1:] == new.identity[1:]
    fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
    try:
        return all(
            os.pread(fd, _COMPARED, offset) == os.pread(coming.fd, _COMPARED, offset)
            for offset in range(0, new.size, _COMPARED)
        )
    finally:
        os.close(fd)


def _shown(path: bytes) -> str:
    return os.fsdecode(path).encode("utf-8", "backslashreplace").decode()
