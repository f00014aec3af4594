"""What ranks other than 0 wrote: a scratch folder for each start of a run, sorted when it ends, also after a crash.

The scratch lies beside the folder of kept writes, so that keeping a file is a rename.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

import msgspec

from taas.config import load_catalog
from taas.errors import ConfigError
from taas.runs.places import ProcessMark, data_folder
from taas.storage.boundary import clock_of
from taas.storage.recovery import retention
from taas.storage.settlement import settle

_NOTE = "run.json"


class _ScratchNote(msgspec.Struct, frozen=True):
    """Whose scratch a folder is."""

    run: str
    project: str
    since_ns: int
    supervisor: ProcessMark


def kept_root() -> Path:
    """Return the folder of writes kept for ``%taas recover``."""
    return data_folder("kept")


def make_scratch(run: str, project: str, kept: Path | None = None) -> tuple[Path, int]:
    """Make the scratch folder of a run that begins, or begins again: something may be left of an earlier one.

    Returns:
        It, and the time by the clock of the project's file system: what changes there from now on, rank 0 changes.

    Args:
        run: its name.
        project: the notebook's folder.
        kept: the folder of the ranks that it has, if these have stayed.

    Raises:
        OSError: there is no room for it.
    """
    folder = kept or Path(tempfile.mkdtemp(prefix=f"{os.getpid()}-{run}-", dir=data_folder("scratch")))
    note = _ScratchNote(run, project, clock_of(project), ProcessMark.of(os.getpid()))
    try:
        (folder / _NOTE).write_bytes(msgspec.json.encode(note))
    except OSError:
        if kept is None:
            shutil.rmtree(folder, ignore_errors=True)
        raise
    return folder, note.since_ns


def settle_scratch(folder: Path, *, stay: bool = False) -> list[str]:
    """Sort what the ranks of an ended run diverted; returns what the cell says about it.

    Args:
        folder: from :func:`make_scratch`.
        stay: the ranks do, and need their folders.
    """
    try:
        note = msgspec.json.decode((folder / _NOTE).read_bytes(), type=_ScratchNote)
        settlement = settle(
            folder,
            Path(note.project),
            run=note.run,
            since_ns=note.since_ns,
            kept_root=kept_root(),
            stay=stay,
        )
    except (OSError, msgspec.DecodeError) as error:
        return [f"rank writes could not be sorted ({error}): take what you need from {folder}"]
    if not settlement.stuck and not stay:
        shutil.rmtree(folder, ignore_errors=True)
    try:
        limit = load_catalog(Path(note.project))["storage.kept_limit"]
        return settlement.lines() + retention(kept_root(), limit)
    except (ConfigError, OSError) as error:  # the file was changed while the run went on: nothing is removed
        return [*settlement.lines(), str(error)]


def settle_leftovers() -> None:
    """Settle the scratch of runs whose supervisor was killed: nothing that only a rank wrote is lost."""
    for note_file in data_folder("scratch").glob(f"*/{_NOTE}"):
        try:
            note = msgspec.json.decode(note_file.read_bytes(), type=_ScratchNote)
            left = note.supervisor.has_left(note_file)
        except (OSError, msgspec.DecodeError):  # another release's, or half written: it stays where it is
            continue
        if left:
            settle_scratch(note_file.parent)
