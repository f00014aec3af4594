"""The project files that ranks other than 0 wrote: where they are, and what happens to them.

Each start of a run has its own folder for them, within the run's::

    writes/since            when the start began, by the clock of the project's file system;
                            it is removed once the start's files are sorted
    writes/rank<k>/tree/    the files of a rank (project/wall/table.py)

At the end, ``sort_writes`` adds files that belong to rank 0's saves to them (``saves``). It
removes the files that rank 0 also wrote, in this start or a later one: those that changed in the
project since then (by ``ctime``, which no program can set back, so that rank 0 need not be
observed). All other files are rescued, including those in doubt. Files of rank 0 in this folder
are those that could not be placed in the project (project/sync/applier.py); they are rescued as
well. ``recover`` copies rescued files; they are removed with the run's folder (runs/records.py).

A checkpoint that contains a file of each rank is completed earlier. In
``torch.distributed.checkpoint`` every rank writes its part; then rank 0 writes the list of the
parts (``finish``). Ranks of this VM have written theirs to their scratch folders, and rank 0,
which writes the project, moves them: the checkpoint is complete, and can be loaded in the same
cell. Rank 0 cannot access the parts of ranks on other VMs.
"""

from __future__ import annotations

import contextlib
import filecmp
import functools
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from taas.base.import_hooks import after_import
from taas.base.wording import counted, ranks_in_words, shown, shown_path, size_in_words
from taas.errors import HeaderError
from taas.project.wall.boundary import NEVER, changed_since, clock_of, resolve_beneath
from taas.project.wall.saves import is_of_save, topmost_made
from taas.project.wall.table import TREE

Versions = dict[str, dict[int, Path]]
"""The files that only ranks other than 0 wrote, by path in the project and by rank."""
_SHOWN = 3
_SINCE = "since"


def make_writes(folder: Path, project: str) -> int:
    """Create the folder of a start that begins now.

    Return the time by the clock of the project's file system. Every later change there is made by
    rank 0.

    Raises:
        OSError: there is no space for it.
    """
    folder.mkdir(mode=0o700, parents=True)
    since_ns = clock_of(project)
    (folder / _SINCE).write_text(str(since_ns))
    return since_ns


def rescued_versions(folders: Iterable[Path], project: str) -> Versions:
    """Find the files that only ranks other than 0 wrote.

    Files that rank 0 wrote elsewhere also count if the user has changed them here meanwhile.
    ``folders`` belong to the starts of a run, in order. Of two versions of one rank, that of the
    later start counts.
    """
    found: Versions = {}
    for folder in folders:
        since_ns = _begun(folder)
        for rank, path, file in _written(folder):
            if rank == 0 or not changed_since(f"{project}/{path}", since_ns):
                found.setdefault(path, {})[rank] = file
    return {path: {0: ranks[0]} if 0 in ranks else ranks for path, ranks in sorted(found.items())}


def sort_writes(folders: Sequence[Path], project: str, run: str, *, over: bool = True) -> list[str]:
    """Remove the ranks' files that rank 0 also wrote; return lines for the cell about the others.

    Calling it twice is harmless.

    Args:
        folders: those of the run's starts, from :func:`make_writes`, in order.
        project: the notebook's folder.
        run: the run's name.
        over: whether the run will not start again, so that the remaining files stay even if the
            project changes.
    """
    try:
        put = _put_into_saves(folders, project)
        rescued = rescued_versions(folders, project)
        said = [
            *_lines_about_saves(put),
            *_lines_about_kept(rescued, run, project, _begun(folders[0]) if folders else NEVER),
        ]
        wanted = {file for versions in rescued.values() for file in versions.values()}
        for folder in folders:
            for _, _, file in _written(folder):
                if file not in wanted:
                    file.unlink()
            if over:
                (folder / _SINCE).unlink(missing_ok=True)
    except OSError as error:
        return [
            f"rank writes could not be sorted ({error}): take what you need from"
            f" {shown_path(folders[0])}"
        ]
    return said


def _put_into_saves(folders: Sequence[Path], project: str) -> dict[str, int]:
    """Put files that only other ranks wrote into the saves of rank 0 that they belong to.

    Return the lowest rank that wrote each file, by path. If ranks wrote different versions of a
    path, it is unknown which one belongs to the save, and all of them are rescued.
    """
    put: dict[str, int] = {}
    begun = {folder: _begun(folder) for folder in folders}
    for path, versions in rescued_versions(folders, project).items():
        rank, *others = sorted(versions)
        source = versions[rank]
        since_ns = next(since for folder, since in begun.items() if source.is_relative_to(folder))
        if rank == 0 or not is_of_save(project, path, since_ns):
            continue
        if all(_are_same(source, versions[other]) for other in others):
            # If there is no space, or a folder is there, the file is rescued, and the cell says
            # so.
            with contextlib.suppress(OSError):
                _put(source, Path(project, path))
                put[path] = rank
    return put


def recover(run: str, versions: Versions, project: str, *, overwrite: bool) -> list[Path]:
    """Copy the rescued files into the run's project; return the paths written there.

    If several ranks have different versions of a path, the lowest rank's version gets the path,
    and the others are placed next to it as ``<path>.rank<k>``. Files that the project already has
    are left out, so this can be called again.

    Raises:
        HeaderError: nothing was written, because the project is gone, or a path exists in it and
            ``overwrite`` is False; or a file cannot be written, because the disk is full, or a
            folder is at its path.
    """
    root = Path(project)
    if not root.is_dir():
        [source, *_] = next(iter(versions.values())).values()
        raise HeaderError(
            f"%taas recover {run}: its project {project} is not there any more; what was kept lies"
            f" in {source.parent}"
        )
    missing = {
        root / path: source
        for path, source in _name_versions(versions)
        if not _are_same(source, root / path)
    }
    taken = [str(target.relative_to(root)) for target in missing if os.path.lexists(target)]
    if taken and not overwrite:
        raise HeaderError(
            f"%taas recover {run}: {_some(taken)} exists in the project; nothing was written. "
            "Move it away, or add --overwrite."
        )
    for target, source in missing.items():
        try:
            _put(source, target)
        except OSError as error:
            raise HeaderError(
                f"%taas recover {run}: {shown_path(target)} cannot be written ({error.strerror}):"
                " see to that, and type it again"
            ) from error
    return [*missing]


def _put(source: Path, target: Path) -> None:
    """Copy a file or a link into the project, completely or not at all; create missing folders."""
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f".taas-part-{target.name[:200]}")
    try:
        partial.unlink(missing_ok=True)  # a killed process may have left one
        shutil.copy2(source, partial, follow_symlinks=False)
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)


def _name_versions(versions: Versions) -> Iterator[tuple[str, Path]]:
    for path, of_ranks in versions.items():
        first, *others = sorted(of_ranks)
        yield path, of_ranks[first]
        for rank in others:
            if not _are_same(of_ranks[first], of_ranks[rank]):
                yield f"{path}.rank{rank}", of_ranks[rank]


def _are_same(one: Path, other: Path) -> bool:
    """Return whether these are links to the same target, or files with the same content."""
    if one.is_symlink() or other.is_symlink():
        return one.is_symlink() and other.is_symlink() and one.readlink() == other.readlink()
    return one.exists() and other.exists() and filecmp.cmp(one, other, shallow=False)


def _begun(folder: Path) -> int:
    with contextlib.suppress(OSError, ValueError):
        return int((folder / _SINCE).read_text())
    return NEVER  # it was sorted, so all files there are rescued


def _written(folder: Path) -> list[tuple[int, str, Path]]:
    """Return the files that ranks wrote in a start: rank, path in the project, and file or link."""
    return [
        (int(tree.parent.name.removeprefix("rank")), str(path.relative_to(tree)), path)
        for tree in folder.glob(f"rank*/{TREE}")
        for path in tree.rglob("*")
        if path.is_symlink() or not path.is_dir()
    ]


def _lines_about_saves(put: dict[str, int]) -> Iterator[str]:
    if put:
        yield (
            f"put into the project: {_some(list(put))} ({counted(len(put), 'file')}) from"
            f" {ranks_in_words({*put.values()})}, beside what rank 0 saved there"
        )


def _lines_about_kept(rescued: Versions, run: str, project: str, since_ns: int) -> Iterator[str]:
    if aside := {path: ranks for path, ranks in rescued.items() if 0 in ranks}:
        yield (
            f"kept: {_describe(aside)} as the run wrote it: changed here meanwhile, so yours is as"
            f" you left it, and %taas recover {run} --overwrite puts the run's in its place"
        )
    if others := {path: ranks for path, ranks in rescued.items() if 0 not in ranks}:
        folder = os.path.commonpath([Path(path).parent for path in others])
        folder = topmost_made(project, folder, since_ns)
        share = (
            f", and with --shared {shown(folder)} every rank writes there itself" if folder else ""
        )
        yield (
            f"kept: {_describe(others)} from"
            f" {ranks_in_words({rank for ranks in others.values() for rank in ranks})}, which rank"
            f" 0 did not write: %taas recover {run} brings them into the project{share}"
        )


def _describe(rescued: Versions) -> str:
    size = sum(file.lstat().st_size for ranks in rescued.values() for file in ranks.values())
    return f"{_some(list(rescued))} ({counted(len(rescued), 'file')}, {size_in_words(size)})"


def _some(names: Sequence[str]) -> str:
    rest = len(names) - _SHOWN
    return ", ".join(map(shown_path, names[:_SHOWN])) + (f" and {rest} more" if rest > 0 else "")


# ---------------------------------------------------------------- checkpoints of all ranks


def complete_checkpoints(project: str, run_scratch: Callable[[], Path]) -> None:
    """Let this process, rank 0, complete checkpoints that ranks write together.

    ``run_scratch`` returns the folder that contains the scratch folders of this VM's ranks in the
    current run.
    """
    root = os.path.realpath(project)

    def change(module: ModuleType) -> None:
        writer: Any = module.FileSystemWriter
        native = writer.finish

        @functools.wraps(native)
        def finish(self: Any, metadata: Any, results: Any) -> None:
            files = isinstance(self.fs, module.FileSystem)  # other writers do not write to folders
            place = resolve_beneath(os.path.realpath(self.path), root) if files else None
            if place is not None:
                names = {
                    str(result.storage_data.relative_path)
                    for of_rank in results
                    for result in of_rank
                }
                _gather(Path(root, place), place, names, run_scratch())
            native(self, metadata, results)

        writer.finish = finish

    after_import("torch.distributed.checkpoint.filesystem", change)


def _gather(folder: Path, place: str, names: Iterable[str], run_scratch: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        for tree in run_scratch.glob(f"rank*/{TREE}"):
            if (written := tree / place / name).is_file():
                shutil.move(written, folder / name)
    missing = [name for name in sorted(names) if not (folder / name).exists()]
    if missing:
        more = f" and {len(missing) - 1} more" if missing[1:] else ""
        print(  # noqa: T201  the cell shows it
            f"taas: the checkpoint {shown(place)} lacks {shown(missing[0])}{more} until the end of"
            " the run: only rank 0 writes the project, and it reaches no rank of another VM"
            " before. To load it in this cell, give the directory to all ranks: --shared"
            f" {shown(place)}"
        )
