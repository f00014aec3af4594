"""What runs leave on disk, and for how long.

A background run leaves files for ``%taas attach``, written whole, and read only if they are. Old runs make room for new ones,
announced a day before.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import shutil
import time
from pathlib import Path

from taas.errors import DamagedAnswer
from taas.runs.places import write_private
from taas.runs.records import ANNOUNCED, RunRecord, read_records

KEPT_RUNS = 200
KEPT_BYTES = 4 << 30
NOTICE_SECONDS = 24 * 3600.0


def make_room(
    runs: int = KEPT_RUNS, nbytes: int = KEPT_BYTES, *, now: float | None = None
) -> list[RunRecord]:
    """Keep the folders of ended runs within limits.

    Above a limit the oldest are announced, which ``%taas history`` shows; a run that was announced a day ago and is
    still in the way is removed. The newest run stays.

    Args:
        runs: how many ended runs are kept.
        nbytes: how much their folders may hold.
        now: the time, in seconds since the epoch.

    Returns:
        The runs that were removed.
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
        if not record.announced:
            with contextlib.suppress(OSError):  # it stays, then
                mark = record.folder / ANNOUNCED
                mark.touch(0o600)
                os.utime(mark, (now, now))
        elif now - record.announced >= NOTICE_SECONDS:
            shutil.rmtree(record.folder, ignore_errors=True)
            removed.append(record)
    return removed


def _size_of(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(FileNotFoundError):
            total += path.lstat().st_blocks * 512
    return total


def keep(record: RunRecord, name: str, source: int | bytes) -> None:
    """Write a memory file, or bytes, into a run's folder, where it is complete once it is there; note its size.

    Raises:
        OSError: there is no room for it.
    """
    content: bytes | mmap.mmap = b"" if isinstance(source, int) else source
    if isinstance(source, int) and os.fstat(source).st_size:
        content = mmap.mmap(source, 0, prot=mmap.PROT_READ)
    write_private(record.folder / name, content)
    record.files[name] = len(content)


def open_kept(record: RunRecord, name: str) -> int:
    """Return a descriptor of a file that a run left.

    Raises:
        DamagedAnswer: it was cut off.
        FileNotFoundError: it was removed.
    """
    path = record.folder / name
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    wanted, nbytes = record.files.get(name), os.fstat(fd).st_size
    if wanted in (None, nbytes):  # None: of an earlier release
        return fd
    os.close(fd)
    raise DamagedAnswer(
        f"what {record.name} left cannot be read: {path} was cut off, {nbytes:,} of {wanted:,} bytes are there. A full or "
        "failing disk does that. Nothing in the notebook was changed by it: bring the file back from a copy, or run the "
        "cell again."
    )
