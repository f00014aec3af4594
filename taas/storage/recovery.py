"""Kept writes: brought into the project, listed, and told about before they are removed."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path

from taas.errors import HeaderError
from taas.storage.settlement import Manifest, move, read_manifest, write_manifest
from taas.wording import counted, ranks_in_words, size_in_words

_NOTICE_NS = 24 * 3600 * 10**9


def kept_runs(kept_root: Path) -> list[Manifest]:
    """Runs with kept writes, oldest first."""
    folders = kept_root.iterdir() if kept_root.is_dir() else ()
    found = [manifest for folder in folders if (manifest := read_manifest(folder))]
    return sorted(found, key=lambda manifest: manifest.made_ns)


def recover(run: str, kept_root: Path, project: Path | None = None, overwrite: bool = False) -> list[Path]:
    """Bring a run's kept writes into the project and empty its kept folder.

    Where several ranks kept different versions of one path, the lowest rank's gets the path and the others
    stand beside it as ``<path>.rank<k>``. Interrupted, it can be called again.

    Args:
        run: as :func:`kept_runs` names it.
        kept_root: where kept writes of all runs are.
        project: where to bring them; None for the run's own project.
        overwrite: whether files of the project are replaced.

    Returns:
        The project paths written.

    Raises:
        HeaderError: no such run or project, a path exists in the project and ``overwrite`` is False, or a file
            and a folder are in each other's way; then nothing was written.
    """
    folder, manifest = kept_root / run, _manifest_of(run, kept_root)
    project = Path(manifest.project) if project is None else project
    if not project.is_dir():
        raise HeaderError(
            f"%taas recover {run}: its project {project} is not there any more; what was kept lies in {folder}."
        )
    moves = [
        (source, project / (file.path if number == 0 else f"{file.path}.rank{rank}"))
        for file in manifest.files
        for number, rank in enumerate(file.ranks)
        if os.path.lexists(source := folder / f"rank{rank}" / file.path)
    ]
    _check_room([target for _, target in moves], run, project, overwrite=overwrite)
    for source, target in moves:
        move(source, target)
    shutil.rmtree(folder)
    return [target for _, target in moves]


def _manifest_of(run: str, kept_root: Path) -> Manifest:
    manifests = {manifest.run: manifest for manifest in kept_runs(kept_root)}
    if run not in manifests:
        others = f"Runs that kept writes: {', '.join(manifests)}." if manifests else "No run has kept writes."
        raise HeaderError(f"%taas recover {run}: that run has no kept writes. {others}")
    return manifests[run]


def _check_room(targets: list[Path], run: str, project: Path, *, overwrite: bool) -> None:
    """Refuse before anything is written what has no place in the project, or would replace what is there."""
    for target in targets:
        if (obstacle := _obstacle(target, project)) is not None:
            raise HeaderError(
                f"%taas recover {run}: {target.relative_to(project)} has no place in the project, for "
                f"{obstacle.relative_to(project)} is a {'folder' if obstacle == target else 'file'} there; "
                f"nothing was written. Move it away."
            )
    taken = [str(target.relative_to(project)) for target in targets if os.path.lexists(target)]
    if taken and not overwrite:
        raise HeaderError(
            f"%taas recover {run}: {', '.join(taken[:3])}{' …' if len(taken) > 3 else ''} "
            f"exists in the project; nothing was written. Move it away, or add --overwrite."
        )


def _obstacle(target: Path, project: Path) -> Path | None:
    """Return the folder that stands where a file is to go, or the file where one of its folders is to be."""
    if target.is_dir() and not target.is_symlink():
        return target
    folders = list(target.relative_to(project).parents)[:-1]
    return next(
        (project / f for f in folders if os.path.lexists(project / f) and not (project / f).is_dir()), None
    )


def retention(kept_root: Path, limit_bytes: int, now_ns: int | None = None) -> list[str]:
    """Keep the kept writes of all runs within a limit; nothing goes unannounced.

    Above the limit the oldest runs are announced; a run announced at least a day ago, and still in the way,
    is removed. The newest run is never removed.

    Returns:
        Lines for the user: what will be removed, what was.
    """
    now = time.time_ns() if now_ns is None else now_ns
    manifests = kept_runs(kept_root)
    excess = sum(manifest.size for manifest in manifests) - limit_bytes
    said = []
    for manifest in manifests[:-1]:
        if excess <= 0:
            break
        excess -= manifest.size
        what = f"{size_in_words(manifest.size)} of run {manifest.run}, {_described(manifest)}"
        if not manifest.announced_ns:
            manifest.announced_ns = now
            write_manifest(kept_root / manifest.run, manifest)
            said.append(
                f"kept writes exceed {size_in_words(limit_bytes)}: {what} will be removed after a day; "
                f"%taas recover {manifest.run} saves them, kept_limit in taas.toml's [storage] raises the limit"
            )
        elif now - manifest.announced_ns >= _NOTICE_NS:
            shutil.rmtree(kept_root / manifest.run)
            said.append(f"kept writes removed, as announced: {what}")
    return said


def _described(manifest: Manifest) -> str:
    ranks = ranks_in_words({rank for file in manifest.files for rank in file.ranks})
    return f"{counted(len(manifest.files), 'file')} from {ranks}"
