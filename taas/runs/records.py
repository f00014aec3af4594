"""The records of runs on disk: one folder for each run, which outlives kernel and supervisor.

::

    <jupyter runtime dir>/taas/runs/<name>-<id>/      0700
        record.json     RunRecord, replaced as a whole at each change
        curves          the numbers that the cell printed, replaced likewise (runs/curves.py)
        <rank>/         output of the rank (runs/events.py); in restart-<n>/ after a restart
        data.log        output of the data processes; in restart-<n>/ after a restart
        writes/         project files that ranks other than 0 wrote (project/wall/rescued.py)
        reserve         reserves disk space for the last record, until that is written
        payload         the variables sent to the ranks; of foreground runs, up to 64 MiB
        answer          rank 0's variables; only of background runs, for `attach`
        loaders         states of registered loaders; only of background runs, for `attach`

Each file has one writer: the run's supervisor writes the record and the curves, and each rank its
output. Output from other hosts is mirrored here. All other processes only read (runs/reader.py):
the launching cell, ``status``, ``history``, ``logs`` and ``attach`` need no supervisor. Old runs
are removed to make space for new ones.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import re
import time
from collections.abc import Callable, Iterable
from copy import copy
from functools import lru_cache
from pathlib import Path

import msgspec

from taas.base.linux import remove_tree
from taas.base.places import write_private
from taas.base.process_log import how_it_broke
from taas.base.wording import nearest, shown
from taas.errors import DamagedAnswer, HeaderError
from taas.protocol.framing import MessageReader, Unreadable
from taas.protocol.records import RunRecord, runs_root

ANSWER, PAYLOAD, LOADERS = "answer", "payload", "loaders"
_RECORD = "record.json"
_STAY_SECONDS = 24 * 3600.0
_MADE_NAME = re.compile(r"r(\d+)-[0-9a-f]{6}")


def new_folder(name: str | None) -> tuple[str, str]:
    """Make the folder of a new run; return its name and id.

    The default name is the next number after those of all remaining runs.
    """
    root = runs_root()
    if name is None:
        numbers = [
            int(match[1]) for entry in root.iterdir() if (match := _MADE_NAME.fullmatch(entry.name))
        ]
        name = f"r{max(numbers, default=0) + 1}"
    while True:
        mark = os.urandom(3).hex()
        with contextlib.suppress(FileExistsError):
            (root / f"{name}-{mark}").mkdir(mode=0o700)
            return name, mark


_read = MessageReader(RunRecord, msgspec.json)


def write_record(record: RunRecord) -> None:
    """Replace a run's record.

    Raises:
        OSError: for example, because the disk is full.
    """
    write_private(record.folder / _RECORD, msgspec.json.encode(record))


def read_record(folder: Path) -> RunRecord | None:
    """Read a run's record; return None if there is none, or if it cannot be read.

    A run whose supervisor has died counts as lost: the supervisor could not record this itself.
    """
    path = folder / _RECORD
    try:
        file = path.stat()
        record = copy(_decode(path, file.st_ino, file.st_mtime_ns, file.st_size))
        if record.live and not record.supervisor.lives:
            # it may have ended at this very moment
            record = _read(path.read_bytes())
    except (OSError, Unreadable):  # removed meanwhile, or written by another version of taas
        return None
    if record.kept_ranks is not None and not record.supervisor.lives:
        record.kept_ranks, record.ranks_gone = None, "their supervisor ended"
    if record.live and not record.supervisor.lives:
        record.state, record.outcome, record.ended = "over", "lost", file.st_mtime
        broke = how_it_broke(record.supervisor.pid)
        gone = f"supervisor broke down ({shown(broke, 200)})" if broke else "supervisor was killed"
        gone = gone if record.kernel.lives else "notebook's kernel ended"
        record.message = f"the {gone}, and all ranks with it"
        if record.supervisor.elsewhere:
            record.message = (
                f"its supervisor is, or was, on {record.supervisor.host}, and cannot be seen from"
                " this machine: look there whether it goes on"
            )
        record.questions = ()
    return record


@lru_cache(maxsize=1024)
def _decode(path: Path, *_: int) -> RunRecord:
    """Decode a record, once for each version of the file."""
    record: RunRecord = _read(path.read_bytes())
    return record


def read_records() -> list[RunRecord]:
    """Read all runs, oldest first."""
    found = [
        record for folder in runs_root().iterdir() if (record := read_record(folder)) is not None
    ]
    return sorted(found, key=lambda record: record.submitted)


def unique_name(record: RunRecord, records: Iterable[RunRecord]) -> str:
    """Return what to type for a run: its name, with its id if others have the same name."""
    alike = sum(other.name == record.name for other in records)
    return f"{record.name}-{record.id}" if alike > 1 else record.name


def of_notebook(
    records: Iterable[RunRecord], kernel: int, notebook: str = "", project: str = ""
) -> list[RunRecord]:
    """Return the runs of a notebook: those of its kernel, its path, or its earlier kernels.

    If front ends do not provide the paths of notebooks, and the notebook's kernel has no runs,
    return the runs of its project whose kernels are gone, as these may be its own.
    """
    mine, perhaps = list[RunRecord](), list[RunRecord]()
    for record in records:
        if (notebook and record.notebook == notebook) or (
            record.kernel.pid == kernel and record.kernel.lives
        ):
            mine.append(record)
        elif not (notebook or record.notebook or record.kernel.lives) and record.project == project:
            perhaps.append(record)
    return mine or perhaps


def find_run(
    name: str | None,
    records: list[RunRecord],
    own: Callable[[list[RunRecord]], list[RunRecord]],
    *,
    live: bool,
) -> RunRecord:
    """Find the run that a person means by a name.

    This notebook's runs (``own``) come before others; among these, a run that has not ended comes
    first, then the newest.

    ``name`` is the run's name, or its name and id, as typed; None for any run. ``live`` requires
    that the run has not ended.

    Raises:
        HeaderError: there is no such run, or it is over.
    """
    fitting = _find_named(name, records)
    best = max(own(fitting) or fitting, key=lambda record: (record.live, record.submitted))
    if live and not best.live:
        what = f"run {best.name}" if name else f"the last run, {best.name},"
        raise HeaderError(f"{what} is over ({best.outcome}); `%taas status` shows what goes on")
    return best


def _find_named(name: str | None, everything: list[RunRecord]) -> list[RunRecord]:
    fitting = [r for r in everything if name is None or name in (r.name, f"{r.name}-{r.id}")]
    if fitting:
        return fitting
    if name is None:
        raise HeaderError("there is no run yet: start one by a cell with #pragma taas on top")
    near = nearest(name, {record.name for record in everything}, 0.5)
    hint = f"; did you mean {near}?" if near else "; `%taas history` lists what there is"
    raise HeaderError(f"no run is called {shown(name)}{hint}")


# -------------------------------------------------- the files of runs, and when they are removed


def make_room(
    runs: int = 200, nbytes: int = 4 << 30, *, now: float | None = None
) -> list[RunRecord]:
    """Remove old runs until at most ``runs`` with ``nbytes`` are left; return the removed ones.

    Runs of the last day are kept, and so is the newest run.
    """
    now = time.time() if now is None else now
    ended = [record for record in read_records() if not record.live and not record.may_go_on]
    excess_runs = len(ended) - runs
    sizes = {record.id: _size_of(record.folder) for record in ended}
    excess_bytes = sum(sizes.values()) - nbytes
    removed = []
    for record in ended[:-1]:
        if excess_runs <= 0 and excess_bytes <= 0:
            break
        excess_runs -= 1
        excess_bytes -= sizes[record.id]
        if now - record.ended >= _STAY_SECONDS:
            remove_tree(record.folder)
            removed.append(record)
    return removed


def _size_of(folder: Path) -> int:
    """Return the disk usage of a folder in bytes; entries may disappear meanwhile."""
    total, waiting = 0, [str(folder)]
    while waiting:
        # The folders of a cell may be nested thousands of levels deep, so this is a loop, not a
        # recursion.
        with contextlib.suppress(OSError), os.scandir(waiting.pop()) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    waiting.append(entry.path)
                with contextlib.suppress(OSError):
                    total += entry.stat(follow_symlinks=False).st_blocks * 512
    return total


def keep(record: RunRecord, name: str, source: int | bytes) -> None:
    """Write a memory file, or bytes, into a run's folder, or raise OSError.

    The file appears only when it is complete.
    """
    content: bytes | mmap.mmap = b"" if isinstance(source, int) else source
    if isinstance(source, int) and os.fstat(source).st_size:
        content = mmap.mmap(source, 0, prot=mmap.PROT_READ)
    write_private(record.folder / name, content)
    record.files[name] = len(content)


def open_kept(record: RunRecord, name: str) -> int:
    """Return a descriptor of a file that a run left.

    Raises:
        DamagedAnswer: the file was truncated.
        FileNotFoundError: it was removed.
    """
    path = record.folder / name
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    wanted, nbytes = record.files.get(name), os.fstat(fd).st_size
    if wanted in (None, nbytes):  # None: an earlier version of taas left it
        return fd
    os.close(fd)
    raise DamagedAnswer(
        f"what {record.name} left cannot be read: {path} was cut off, {nbytes:,} of {wanted:,}"
        " bytes are there. A full or failing disk does that. Nothing in the notebook was changed"
        " by it: bring the file back from a copy, or run the cell again."
    )
