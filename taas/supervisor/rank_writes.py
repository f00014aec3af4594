"""What ranks other than 0 wrote: a scratch folder for each run, sorted when it ends, also after a crash.

The scratch lies beside the folder of kept writes, so that keeping a file is a rename.
"""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path

import msgspec

from taas.catalog import load_catalog
from taas.errors import ConfigError
from taas.places import data_folder
from taas.records import ProcessMark
from taas.storage.recovery import retention
from taas.storage.settlement import settle

_NOTE = "run.json"


class _Note(msgspec.Struct, frozen=True):
    """Whose scratch a folder is."""

    run: str
    project: str
    since_ns: int
    supervisor: ProcessMark


def kept_root() -> Path:
    """Return the folder of writes kept for ``%taas recover``."""
    return data_folder("kept")


def make_scratch(run: str, project: str) -> Path:
    """Make the scratch folder of a run that begins."""
    folder = data_folder("scratch") / f"{os.getpid()}-{run}"
    folder.mkdir(mode=0o700)
    note = _Note(run, project, time.time_ns(), ProcessMark.of(os.getpid()))
    (folder / _NOTE).write_bytes(msgspec.json.encode(note))
    return folder


def settle_scratch(folder: Path) -> list[str]:
    """Sort what the ranks of an ended run diverted; returns what the cell says about it."""
    note = msgspec.json.decode((folder / _NOTE).read_bytes(), type=_Note)
    settlement = settle(
        folder, Path(note.project), run=note.run, since_ns=note.since_ns, kept_root=kept_root()
    )
    if not settlement.stuck:
        shutil.rmtree(folder, ignore_errors=True)
    try:
        limit = load_catalog(Path(note.project)).storage.kept_limit
    except ConfigError as error:  # changed while the run went on: nothing is removed
        return [*settlement.lines(), str(error)]
    return settlement.lines() + retention(kept_root(), limit)


def settle_leftovers() -> None:
    """Settle the scratch of runs whose supervisor was killed: nothing that only a rank wrote is lost."""
    for note_file in data_folder("scratch").glob(f"*/{_NOTE}"):
        try:
            note = msgspec.json.decode(note_file.read_bytes(), type=_Note)
        except (OSError, msgspec.DecodeError):  # another release's, or half written: it stays where it is
            continue
        if not note.supervisor.lives:
            settle_scratch(note_file.parent)
