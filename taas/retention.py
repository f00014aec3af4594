"""Old runs make room for new ones, announced a day before."""

from __future__ import annotations

import contextlib
import shutil
import time
from pathlib import Path

from taas.records import RunRecord, read_records, write_record

__all__ = ["KEPT_BYTES", "KEPT_RUNS", "make_room"]

KEPT_RUNS = 200
KEPT_BYTES = 4 << 30
NOTICE_SECONDS = 24 * 3600.0


def make_room(
    runs: int = KEPT_RUNS,
    nbytes: int = KEPT_BYTES,
    *,
    now: float | None = None,
    notice: float = NOTICE_SECONDS,
) -> list[RunRecord]:
    """Keep the folders of ended runs within limits.

    Above a limit the oldest are announced, which ``%taas history`` shows; a run that was announced ``notice``
    seconds ago and is still in the way is removed. The newest run stays.

    Args:
        runs: how many ended runs are kept.
        nbytes: how much their folders may hold.
        now: the time, in seconds since the epoch.
        notice: seconds between announcement and removal.

    Returns:
        The runs that were removed.
    """
    now = time.time() if now is None else now
    ended = [record for record in read_records() if not record.live and not _may_go_on(record)]
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
            record.announced = now
            with contextlib.suppress(OSError):  # it stays, then
                write_record(record)
        elif now - record.announced >= notice:
            shutil.rmtree(record.folder, ignore_errors=True)
            removed.append(record)
    return removed


def _may_go_on(record: RunRecord) -> bool:
    """Whether it counts as lost only because its supervisor cannot be seen from this machine."""
    return record.outcome == "lost" and record.supervisor.elsewhere


def _size_of(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(FileNotFoundError):
            total += path.lstat().st_blocks * 512
    return total
