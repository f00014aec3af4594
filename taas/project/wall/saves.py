"""Adds files that only other ranks wrote to a save that rank 0 makes.

Libraries save in every rank: rank 0 creates ``checkpoint-10`` and writes the model, and each other
rank writes its ``rng_state_1.pth`` next to it. Those files are in the ranks' scratch folders
(``diversion``). At the end of the run they are placed next to rank 0's (``rescued.sort_writes``).
Until then rank 0 finds them there: a call with a path that is not in the project gets the other
rank's file.

This applies to files only, because a missing directory has to be created before anything is
written into it. When rank 0 moves or removes a directory, the other ranks' files in it are moved
or removed with it; rank 0 may also move or remove such a file itself.

A directory belongs to a save if rank 0 created it, or wrote into it, during the run. The project's
own folder never does: it contains the notebook, and users change other files in it during a run.
"""

# These are functions of posix, because the functions here replace those of os in rank 0.

from __future__ import annotations

import _io
import contextlib
import errno
import os
import posix
import shutil
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from taas.project.wall import diversion
from taas.project.wall.boundary import changed_since, resolve_beneath
from taas.project.wall.table import TREE, without_links

_Call = Callable[..., Any]
_NATIVE: dict[str, _Call] = {"rmtree": shutil.rmtree}
"""The original functions; the module's own references to them are replaced, too."""


def is_of_save(project: str, path: str, since_ns: int) -> bool:
    """Return whether a path of the project belongs to a directory that rank 0 created or wrote to.

    That is the nearest existing directory above it; other ranks have created those below. Only
    changes after ``since_ns`` count.
    """
    folder = path.rpartition("/")[0]
    while folder and not _is_directory(f"{project}/{folder}"):
        folder = folder.rpartition("/")[0]
    return folder != "" and _is_written(f"{project}/{folder}", since_ns)


def topmost_made(project: str, folder: str, since_ns: int) -> str:
    """Return the topmost directory above a folder that the run created or wrote to.

    If none is known, return the folder itself.
    """
    way = ""
    for part in folder.split("/"):
        way = f"{way}/{part}" if way else part
        live = f"{project}/{way}"
        if not _is_directory(live) or _is_written(live, since_ns):
            return way
    return folder


def _is_file(path: str) -> bool:
    with contextlib.suppress(OSError):
        return stat.S_ISREG(posix.lstat(path).st_mode)
    return False


def _is_directory(path: str) -> bool:
    with contextlib.suppress(OSError):
        return stat.S_ISDIR(posix.lstat(path).st_mode)
    return False


def _is_written(folder: str, since_ns: int) -> bool:
    """Return whether a directory, or an entry of it, was changed after ``since_ns``."""
    if changed_since(folder, since_ns):
        return True
    with contextlib.suppress(OSError):
        return any(changed_since(f"{folder}/{name}", since_ns) for name in posix.listdir(folder))
    return False


class OtherRanksFiles:
    """Finds, for rank 0, files that other ranks of this VM have written into its saves."""

    def __init__(self, project: str, run_scratch: Path, since_ns: int) -> None:
        self._project = os.path.realpath(project)
        self.begin_run(run_scratch, since_ns)

    def begin_run(self, run_scratch: Path, since_ns: int) -> None:
        """Set the scratch and the start time of the next run."""
        self._scratch, self._since_ns = str(run_scratch), since_ns

    def find(self, path: Any) -> str | None:
        """Return the file of another rank at a path of the project, or None."""
        inside = self._inside(path)
        if inside is None:
            return None
        for tree in self._trees():
            found = f"{tree}/{inside}"
            if _is_file(found):
                # This check comes last: it may examine each entry of a directory, and programs
                # look for missing files again and again (caches).
                return found if is_of_save(self._project, inside, self._since_ns) else None
        return None

    def remove_tree(self, path: Any) -> None:
        """Remove other ranks' files below a directory that rank 0 has removed."""
        inside = self._inside(path)
        for tree in self._trees() if inside else ():
            _NATIVE["rmtree"](f"{tree}/{inside}", ignore_errors=True)

    def move_tree(self, source: Any, target: Any) -> None:
        """Move other ranks' files below a directory that rank 0 has moved."""
        here, there = self._inside(source), self._inside(target)
        for tree in self._trees() if here and there else ():
            old, new = f"{tree}/{here}", f"{tree}/{there}"
            if _is_directory(old) and not _is_directory(new):
                Path(new).parent.mkdir(parents=True, exist_ok=True)
                posix.rename(old, new)

    def _inside(self, path: Any) -> str | None:
        """Return a path relative to the project; None if it is elsewhere, or not a path."""
        if isinstance(path, int) or path is None:
            return None
        text = os.fsdecode(path)
        if not text.startswith("/"):
            text = f"{posix.getcwd()}/{text}"
        inside = resolve_beneath(without_links(text, follow=True), self._project)
        return None if inside in (None, ".") else inside

    def _trees(self) -> Iterator[str]:
        with contextlib.suppress(OSError):
            for name in sorted(posix.listdir(self._scratch)):
                if name.startswith("rank") and name != "rank0":
                    yield f"{self._scratch}/{name}/{TREE}"


def install(others: OtherRanksFiles) -> None:
    """Let this process, rank 0, find other ranks' files from now on."""
    looking = {
        name: _finding(getattr(os, name), others)
        for name in ("stat", "lstat", "open", "unlink", "remove")
    }
    looking["access"] = _accessible(os.access, others)
    moving = {name: _moving(getattr(os, name), others) for name in ("rename", "replace")}
    removing = {"shutil.rmtree": _removing(shutil.rmtree, others)}
    new = {**looking, **moving, **removing, "builtins.open": _opener(others)}
    known = [os.supports_dir_fd, os.supports_fd]
    known += [os.supports_follow_symlinks, os.supports_effective_ids]
    diversion.replace(new, known)


def _finding(native: _Call, others: OtherRanksFiles) -> _Call:
    """Return a call that uses another rank's file if the project lacks the path."""

    def call(path: Any, *rest: Any, **options: Any) -> Any:
        try:
            return native(path, *rest, **options)
        except FileNotFoundError:
            found = None if options.get("dir_fd") is not None else others.find(path)
            if found is None:
                raise
        return native(found, *rest, **options)

    return call


def _accessible(native: _Call, others: OtherRanksFiles) -> _Call:
    def access(path: Any, mode: int, **options: Any) -> bool:
        if native(path, mode, **options):
            return True
        found = None if options.get("dir_fd") is not None else others.find(path)
        return found is not None and bool(native(found, mode, **options))

    return access


def _opener(others: OtherRanksFiles) -> _Call:
    """Return an ``open`` that finds other ranks' files; they keep the requested name."""
    native: _Call = _io.open

    def open(file: Any, *options: Any, **named: Any) -> Any:  # noqa: A001 in place of the built-in
        try:
            return native(file, *options, **named)
        except FileNotFoundError:
            found = None if len(options) >= 7 or named.get("opener") else others.find(file)
            if found is None:
                raise
        named["opener"] = lambda _, flags: posix.open(found, flags)
        return native(file, *options, **named)

    return open


def _removing(native: _Call, others: OtherRanksFiles) -> _Call:
    def rmtree(path: Any, *rest: Any, **options: Any) -> None:
        native(path, *rest, **options)
        # With ignore_errors the directory may still exist.
        if options.get("dir_fd") is None and not _is_there(path):
            others.remove_tree(path)

    return rmtree


def _is_there(path: Any) -> bool:
    """Return whether the project itself has an entry at a path."""
    try:
        posix.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def _move_file(source: str, target: Any) -> None:
    """Move a file out of a scratch, which may be on another file system."""
    try:
        posix.replace(source, target)
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
        shutil.copy2(source, target)
        posix.unlink(source)


def _moving(native: _Call, others: OtherRanksFiles) -> _Call:
    def rename(src: Any, dst: Any, **options: Any) -> None:
        try:
            native(src, dst, **options)
        except FileNotFoundError:
            found = None if options or _is_there(src) else others.find(src)
            if found is None:
                raise
            _move_file(found, dst)
        else:
            if not options:
                others.move_tree(src, dst)

    return rename
