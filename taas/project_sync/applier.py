"""Changes made to a project: each file whole or not at all, durable, and over nobody's work.

What stands at a path is known from when the project was packed, or from this run's last change. Where something
else stands there now, the notebook's user changed it meanwhile: it stays, and the run's version is put beside
it and named. (Between that look and the change lie microseconds, in which an editor could save; it would lose.)

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
from collections.abc import Collection, Iterator, Mapping

from taas.project_sync.tree import FileState, PathChange, look, new_name, open_directory, sweep
from taas.wording import size_in_words

_COMPARED = 1 << 20
_FLUSHED = 32 << 20
_NO_NAMELESS = (errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT, errno.EINVAL)


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
        expected: what stands there, as far as it travelled or was put there.
    """

    def __init__(
        self,
        root: str,
        found: Mapping[bytes, FileState],
        run: str,
        stayed: Collection[bytes] = (),
        durable: bool = True,
    ) -> None:
        self._root = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self.expected: dict[bytes, FileState | None] = dict(found)
        self._stayed = set(stayed)
        self._run, self._durable = os.fsencode(run), durable
        self._beside: dict[bytes, bytes] = {}
        self._swept: set[bytes] = set()
        self._coming: dict[tuple[int, bytes], _Coming] = {}
        self.notices: list[str] = []
        self.replaced: set[bytes] = set()
        self.written: set[bytes] = set()

    def take(self, change: PathChange, sender: int = 0) -> None:
        """Make a change; what is in its way is said in :attr:`notices`. Of several senders' changes of a path the last wins."""
        coming = self._coming.get((sender, change.path))
        if coming is not None and not coming.continues(change):
            self._give_up(sender, change.path)
        path = self._place(change.path)
        try:
            with self._folder(path, make=change.state is not None) as folder:
                if change.state is None:
                    self._remove(path, folder)
                elif change.state.kind == "directory":
                    self._make_directory(path, folder, change.state.mode)
                elif change.state.kind == "link":
                    own = new_name("link")
                    os.symlink(change.state.target, own, dir_fd=folder)
                    self._put(path, folder, own)
                else:
                    self._take_piece(path, folder, change, sender)
        except OSError as error:
            self._give_up(sender, change.path)
            if change.state is not None:  # else it went with its folder
                self.notices.append(f"{_shown(change.path)} did not come back: {error.strerror or error}")

    def lose(self, sender: int) -> None:
        """Drop what has not come as a whole: its sender is gone."""
        for whose, path in list(self._coming):
            if whose == sender:
                self._give_up(whose, path)

    def close(self) -> None:
        """End, and drop what has not come as a whole."""
        for key in list(self._coming):
            self._give_up(*key)
        if self._root >= 0:
            os.close(self._root)
            self._root = -1

    def _place(self, path: bytes) -> bytes:
        """Where a path's changes go: beside it, once it or a folder above it was found changed."""
        for taken, other in self._beside.items():
            if path == taken or path.startswith(taken + b"/"):
                return other + path[len(taken) :]
        return path

    @contextlib.contextmanager
    def _folder(self, path: bytes, *, make: bool) -> Iterator[int]:
        """Open the folder of a path, made where the user has removed it; what is done in it is then on the disk."""
        parent = os.path.dirname(path)
        folder = open_directory(self._root, parent, make=make)
        try:
            if parent not in self._swept:
                self._swept.add(parent)
                sweep(folder)
            yield folder
        finally:
            os.close(folder)

    def _flush(self, fd: int) -> None:
        if self._durable:
            os.fsync(fd)

    # ------------------------------------------------------------ files and links

    def _take_piece(self, path: bytes, folder: int, piece: PathChange, sender: int) -> None:
        key = sender, piece.path
        if key not in self._coming:
            if piece.offset:
                return  # the rest of a file that was given up
            self._coming[key] = _Coming(piece, folder, durable=self._durable)
        coming = self._coming[key]
        coming.write(piece.data)
        if coming.whole:
            stands = look(folder, os.path.basename(path))
            if stands is not None and coming.is_same(os.path.basename(path), folder, stands):
                self.expected[path] = stands
            else:
                self._put(path, folder, coming.named(folder))
            self._give_up(*key)

    def _give_up(self, sender: int, path: bytes) -> None:
        coming = self._coming.pop((sender, path), None)
        if coming is not None:
            coming.close()

    def _put(self, path: bytes, folder: int, own: bytes) -> None:
        """Put what has a name of taas' own at a path, or beside it where that is somebody else's by now."""
        try:
            stands = look(folder, os.path.basename(path))
            ours = stands is None or (stands == self.expected.get(path) and stands.kind != "directory")
            target = path if ours or self._keep_old(path, folder, stands) else self._say_beside(path, folder)
            os.rename(own, os.path.basename(target), src_dir_fd=folder, dst_dir_fd=folder)
        except BaseException:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(own, dir_fd=folder)
            raise
        self.expected[target] = look(folder, os.path.basename(target))
        self.written.add(target)
        self._flush(folder)

    def _keep_old(self, path: bytes, folder: int, stands: FileState | None) -> bool:
        """Give a file that had not travelled another name; returns whether its own is free now."""
        if stands is None or stands.kind != "file" or path not in self._stayed:
            return False
        kept = self._free_beside(path, folder, b"before-")
        try:
            names = os.path.basename(path), os.path.basename(kept)
            os.link(*names, src_dir_fd=folder, dst_dir_fd=folder, follow_symlinks=False)
        except OSError:  # another user's file, perhaps: it may not have a second name
            return False
        self._stayed.discard(path)
        self.replaced.add(path)
        self.notices.append(
            f"{_shown(path)} ({size_in_words(stands.size)}) had not travelled to the VM, where the run made one "
            f"anew: that one is here now, and yours is {_shown(kept)}"
        )
        return True

    def _free_beside(self, path: bytes, folder: int, mark: bytes = b"") -> bytes:
        """The first name beside a path that nothing has."""
        stem, suffix = os.path.splitext(path)
        first = b"%s.%s%s" % (stem, mark, self._run)
        numbered = (b"%s-%d%s" % (first, number, suffix) for number in itertools.count(2))
        names = itertools.chain([first + suffix], numbered)
        return next(name for name in names if look(folder, os.path.basename(name)) is None)

    def _say_beside(self, path: bytes, folder: int) -> bytes:
        """From now on what becomes of a path stands beside it, since somebody else has it; returns where."""
        beside = self._beside[path] = self._free_beside(path, folder)
        known = self.expected.get(path) is not None
        how = "was changed here while the run wrote it, too" if known else "is here, and the VM had none"
        self.notices.append(f"{_shown(path)} {how}: yours is as you left it, the run's is {_shown(beside)}")
        return beside

    # ------------------------------------------------------------ directories, and what goes

    def _make_directory(self, path: bytes, folder: int, mode: int) -> None:
        name = os.path.basename(path)
        stands = look(folder, name)
        if stands is not None and stands.kind != "directory":
            path = self._say_beside(path, folder)
            name, stands = os.path.basename(path), None
        if stands is None:
            os.mkdir(name, dir_fd=folder)
            os.chmod(name, mode | 0o700, dir_fd=folder)
        self.expected[path] = look(folder, name)
        self._flush(folder)

    def _remove(self, path: bytes, folder: int) -> None:
        name, expected = os.path.basename(path), self.expected.pop(path, None)
        stands = look(folder, name)
        if stands is None or expected is None:
            return
        try:
            if stands.kind == "directory":
                os.rmdir(name, dir_fd=folder)
            elif stands == expected:
                os.unlink(name, dir_fd=folder)
            else:
                self.notices.append(
                    f"{_shown(path)} was changed here while the run removed it: it is as you left it"
                )
        except OSError as error:
            self.expected[path] = expected
            if stands.kind != "directory":  # else somebody else has put something there
                self.notices.append(f"{_shown(path)} was not removed: {error.strerror}")
        self._flush(folder)


class _Coming:
    """A file whose pieces are coming, without a name, or with one of taas' own where the file system has no such files."""

    def __init__(self, first: PathChange, folder: int, *, durable: bool) -> None:
        self._path, self._state, self._durable = first.path, first.state, durable
        self._got = self._dirty = 0
        self._name, self._folder = b"", -1
        try:
            self._fd = os.open(b".", os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600, dir_fd=folder)
        except OSError as error:
            if error.errno not in _NO_NAMELESS:
                raise
            name, flags = new_name("part"), os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
            self._fd = os.open(name, flags, 0o600, dir_fd=folder)
            self._name, self._folder = name, os.dup(folder)

    def continues(self, piece: PathChange) -> bool:
        """Whether a piece is this file's next."""
        return (piece.path, piece.state, piece.offset) == (self._path, self._state, self._got)

    def write(self, data: bytes) -> None:
        """Add a piece."""
        left = memoryview(data)
        while left:
            left = left[os.write(self._fd, left) :]
        self._got += len(data)
        self._dirty += len(data)
        # Bit by bit: at the end it would take long.
        if self._durable and (self.whole or self._dirty >= _FLUSHED):
            os.fdatasync(self._fd)
            self._dirty = 0

    @property
    def whole(self) -> bool:
        """Whether all of it is here."""
        assert self._state is not None
        return self._got >= self._state.size

    def is_same(self, name: bytes, folder: int, stands: FileState) -> bool:
        """Whether what stands at a name is just this."""
        if self._state is None or stands[:3] != self._state[:3]:
            return False
        fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
        try:
            offsets = range(0, stands.size, _COMPARED)
            return all(os.pread(fd, _COMPARED, at) == os.pread(self._fd, _COMPARED, at) for at in offsets)
        finally:
            os.close(fd)

    def named(self, folder: int) -> bytes:
        """Give it a name of taas' own in its folder; who calls this sees to it that the name goes."""
        assert self._state is not None
        os.fchmod(self._fd, self._state.mode)
        if name := self._name:
            self._name = b""
            return name
        name = new_name("part")
        os.link(f"/proc/self/fd/{self._fd}", name, dst_dir_fd=folder, follow_symlinks=True)
        return name

    def close(self) -> None:
        """Forget it; without a name in the project it is gone."""
        os.close(self._fd)
        if self._folder >= 0:
            if self._name:
                with contextlib.suppress(OSError):
                    os.unlink(self._name, dir_fd=self._folder)
            os.close(self._folder)


def _shown(path: bytes) -> str:
    return os.fsdecode(path).encode("utf-8", "backslashreplace").decode()
