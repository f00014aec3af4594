"""The end of a run: what the ranks diverted is sorted, and nothing that only they wrote is lost.

A path that the project shows as written since the run began was rank 0's too: the other ranks' versions
are replicas and go. What rank 0 has in its own scratch found no place in the project (:mod:`taas.project_sync.applier`). Any other path is kept, with a manifest, until ``recover`` or retention. The clock of the
project's file system decides (``ctime``, which no program can set back, against one taken there when the run began), so
rank 0 runs unobserved and unslowed, and files that C code wrote count. In doubt, a write is kept.
"""

from __future__ import annotations

import contextlib
import errno
import filecmp
import itertools
import os
import re
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from taas.runs.places import write_private
from taas.storage.boundary import changed_since
from taas.storage.overlay import MARK
from taas.wording import counted, ranks_in_words, shown, size_in_words

_SHOWN = 3
_MANIFEST = "kept.json"


class SettledFile(msgspec.Struct, frozen=True):
    """A file that only ranks other than 0 wrote, or rank 0 elsewhere, while its user changed it here."""

    path: str  # relative to the project
    ranks: tuple[int, ...]  # who wrote it, each version that differs once; the first rank's gets the path
    size: int  # bytes of all versions together


class Manifest(msgspec.Struct):
    """What one run left in the kept folder; lies beside it as ``kept.json``."""

    run: str
    project: str
    made_ns: int
    files: list[SettledFile]
    announced_ns: int = 0

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(file.size for file in self.files)


@dataclass(frozen=True)
class Settlement:
    """What became of the writes of all ranks but 0."""

    run: str  # name to ``recover`` by
    kept: tuple[SettledFile, ...]  # what only other ranks wrote
    unremoved: dict[str, tuple[int, ...]]  # paths still there that others removed, and rank 0 did not
    stuck: tuple[str, ...] = ()  # files that could not be moved to the kept folder, where they lie, and why

    def lines(self) -> list[str]:
        """What the cell says about it; nothing of what rank 0 wrote too."""
        said = []
        if aside := [file for file in self.kept if 0 in file.ranks]:
            said.append(
                f"kept: {_described(aside)} as the run wrote it: changed here meanwhile, so yours is as you left it, "
                f"and %taas recover {self.run} --overwrite puts the run's in its place"
            )
        if others := [file for file in self.kept if 0 not in file.ranks]:
            ranks = ranks_in_words({rank for file in others for rank in file.ranks})
            said.append(
                f"kept: {_described(others)} from {ranks}, which rank 0 did not write: "
                f"%taas recover {self.run} brings them into the project{_how_to_share(others)}"
            )
        if self.unremoved:
            ranks = ranks_in_words({rank for removers in self.unremoved.values() for rank in removers})
            said.append(
                f"rank writes: {_some(list(self.unremoved))} removed by {ranks} but not by rank 0: still there"
            )
        said += [
            f"rank writes: not moved to the kept folder, take it from there yourself: {text}"
            for text in self.stuck
        ]
        return said


def settle(
    run_scratch: Path, project: Path, *, run: str, since_ns: int, kept_root: Path, stay: bool = False
) -> Settlement:
    """Sort what the ranks of an ended run diverted, and empty their scratch.

    Args:
        run_scratch: the folder with the ranks' scratch folders (``scratch_of``).
        project: the notebook's directory.
        run: name of the run; the kept files go to ``kept_root/<run>``, or ``<run>-2`` where an earlier run of
            the same name left some.
        since_ns: when the run began, before its first rank was started, by the clock of the project's file system.
        kept_root: where kept writes of all runs are.
        stay: the ranks do, and need their folders.

    Returns:
        What became of each write. A file that cannot be moved stays where it is, and is named.
    """
    scratches = dict(sorted(_scratches(run_scratch)))
    for scratch in scratches.values():
        _open_up(scratch)
    writers: dict[str, list[int]] = {}
    for rank, scratch in scratches.items():
        for path in _files(scratch / "tree"):
            writers.setdefault(path, []).append(rank)
    only_others = {
        path: ranks[:1] if ranks[0] == 0 else ranks
        for path, ranks in sorted(writers.items())
        if ranks[0] == 0 or not changed_since(str(project / path), since_ns)
    }
    run = _free_name(kept_root, run)
    kept, stuck = _keep(only_others, scratches, kept_root / run)
    if kept:
        write_manifest(kept_root / run, Manifest(run, str(project), time.time_ns(), kept))
    unremoved = _unremoved(scratches, project, set(writers), since_ns)
    for scratch in scratches.values():
        if not any(f"{scratch}/" in text for text in stuck):
            for folder in (scratch / "tree", scratch / "gone") if stay else (scratch,):
                shutil.rmtree(folder, ignore_errors=True)
    if not stay:
        with contextlib.suppress(OSError):  # other things may lie there
            run_scratch.rmdir()
    return Settlement(run, tuple(kept), unremoved, tuple(stuck))


def _free_name(kept_root: Path, run: str) -> str:
    names = (run if number == 1 else f"{run}-{number}" for number in itertools.count(1))
    return next(name for name in names if not (kept_root / name).exists())


def _scratches(run_scratch: Path) -> Iterator[tuple[int, Path]]:
    for folder in run_scratch.glob("rank*"):
        name = re.fullmatch(r"rank(\d+)", folder.name)
        if name and folder.is_dir():
            yield int(name[1]), folder


def _open_up(scratch: Path) -> None:
    """Let an ordinary user empty directories that a rank left read-only, as copies of such are."""
    for folder, names, _ in os.walk(scratch):  # each before what is in it
        for name in names:
            inner = Path(folder, name)
            if not inner.is_symlink():
                with contextlib.suppress(OSError):  # another user's: what is in it is stuck, and named
                    inner.chmod(0o700)


def _files(tree: Path) -> list[str]:
    found = (path for path in tree.rglob("*") if path.is_symlink() or path.is_file())
    return sorted(str(path.relative_to(tree)) for path in found)


def _keep(
    writers: dict[str, list[int]], scratches: dict[int, Path], folder: Path
) -> tuple[list[SettledFile], list[str]]:
    kept, stuck = [], []
    for path, ranks in writers.items():
        moved: list[int] = []
        size = 0
        for rank in ranks:
            source = scratches[rank] / "tree" / path
            try:
                if any(_same(source, folder / f"rank{other}" / path) for other in moved):
                    continue
                size += source.lstat().st_size
                move(source, folder / f"rank{rank}" / path)
                moved.append(rank)
            except OSError as error:
                stuck.append(f"{source} ({error.strerror or error})")
        if moved:
            kept.append(SettledFile(path, tuple(moved), size))
    return kept, stuck


def _same(one: Path, other: Path) -> bool:
    if one.is_symlink() or other.is_symlink():
        return one.is_symlink() and other.is_symlink() and one.readlink() == other.readlink()
    return filecmp.cmp(one, other, shallow=False)


def move(source: Path, target: Path) -> None:
    """Move a file, complete or not at all."""
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        source.rename(target)
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
        partial = target.with_name(f".{target.name[:200]}.partial")
        try:
            shutil.copy2(source, partial, follow_symlinks=False)
            partial.rename(target)
        finally:
            partial.unlink(missing_ok=True)
        source.unlink()


def _unremoved(
    scratches: dict[int, Path], project: Path, written: set[str], since_ns: int
) -> dict[str, tuple[int, ...]]:
    removers: dict[str, list[int]] = {}
    for rank, scratch in scratches.items():
        for mark in (scratch / "gone").rglob(MARK):
            place = str(mark.parent.relative_to(scratch / "gone"))
            live = project / place
            # Written again by the same rank, or by rank 0: then its removal is of no interest.
            if place not in written and os.path.lexists(live) and not changed_since(str(live), since_ns):
                removers.setdefault(place, []).append(rank)
    return {place: tuple(ranks) for place, ranks in sorted(removers.items())}


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write a kept folder's manifest, complete or not at all."""
    write_private(folder / _MANIFEST, msgspec.json.encode(manifest))


def read_manifest(folder: Path) -> Manifest | None:
    """A kept folder's manifest; None where there is none that can be read."""
    try:
        return msgspec.json.decode((folder / _MANIFEST).read_bytes(), type=Manifest)
    except (OSError, msgspec.DecodeError):
        return None


def _described(files: list[SettledFile]) -> str:
    named, size = _some([file.path for file in files]), size_in_words(sum(file.size for file in files))
    return f"{named} ({counted(len(files), 'file')}, {size})"


def _how_to_share(files: list[SettledFile]) -> str:
    folder = os.path.commonpath([Path(file.path).parent for file in files])
    return f", and with --shared {shown(folder)} every rank writes there itself" if folder else ""


def _some(names: list[str]) -> str:
    rest = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {rest} more" if rest > 0 else "")
