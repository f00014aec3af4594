"""Keeps the objects that were sent to this kernel's background runs, until the runs are attached.

``%taas attach`` changes the very objects that were sent to a run. So references to them are kept
until then: to models and GPU memory, even if the notebook itself no longer refers to them. The
objects of a run that is never attached must not be kept forever. Once the run is over, they are
released after an hour, or when all such runs together hold more than 2 GB, in the order in which
the runs ended. After that, attaching the run rebinds its variables, as in another kernel.
"""

from __future__ import annotations

import time
from typing import NamedTuple

from IPython.core.getipython import get_ipython

from taas.capture import Capture
from taas.delivery.registered import Registration
from taas.protocol.records import RunRecord
from taas.runs.records import read_record

_SECONDS = 3600.0
_BYTES = 2 << 30


class Pending(NamedTuple):
    """What was sent to a run: its variables, and the registered loaders that it iterates over."""

    record: RunRecord
    captured: Capture
    loaders: list[Registration]


_pending: dict[str, Pending] = {}
"""By run id."""


def hold(record: RunRecord, captured: Capture, loaders: list[Registration]) -> None:
    """Keep the objects that were sent to a background run."""
    shell = get_ipython()
    if not _pending and shell is not None:
        shell.events.register("post_run_cell", let_go_of_old)
    _pending[record.id] = Pending(record, captured, loaders)


def find(record: RunRecord) -> Pending | None:
    """Return what was sent to a run, if it is still kept."""
    return _pending.get(record.id)


def let_go(record: RunRecord) -> None:
    """Release the objects of a run that was attached."""
    _pending.pop(record.id, None)
    shell = get_ipython()
    if (
        not _pending
        and shell is not None
        and let_go_of_old in shell.events.callbacks["post_run_cell"]
    ):
        shell.events.unregister("post_run_cell", let_go_of_old)


def let_go_of_old(_result: object = None, now: float | None = None) -> None:
    """After a cell, release the objects of runs that ended long ago, or that hold much memory."""
    now = time.time() if now is None else now
    latest = list[RunRecord]()
    for pending in [*_pending.values()]:
        record = read_record(pending.record.folder)
        if record is None and not pending.record.folder.is_dir():
            let_go(pending.record)  # the run was removed, so it cannot be attached
        else:
            latest.append(record or pending.record)
    over = sorted((record for record in latest if not record.live), key=lambda record: record.ended)
    held = sum(_pending[record.id].captured.held_bytes for record in over)
    for record in over:
        if held <= _BYTES and now - record.ended < _SECONDS:
            break
        held -= _pending[record.id].captured.held_bytes
        let_go(record)
