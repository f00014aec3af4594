"""Holds the objects that background runs of this kernel were given, until they are attached.

``%taas attach`` changes the very objects that a run was given. So they are held until then: models,
and memory of GPUs, even if the notebook itself no longer holds them. A run that is never attached
must not hold them for ever. Once it is over, they are released after an hour, or when all such runs
together hold more than 2 GB, in the order in which the runs ended. After that, attaching a run
rebinds its names, as in another kernel.
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
    """What a run was given: its names, and the registered loaders that it iterates."""

    record: RunRecord
    captured: Capture
    loaders: list[Registration]


_pending: dict[str, Pending] = {}
"""By the run's id."""


def hold(record: RunRecord, captured: Capture, loaders: list[Registration]) -> None:
    """Hold the objects that a background run was given."""
    shell = get_ipython()
    if not _pending and shell is not None:
        shell.events.register("post_run_cell", let_go_of_old)
    _pending[record.id] = Pending(record, captured, loaders)


def find(record: RunRecord) -> Pending | None:
    """Return what a run was given, if it is still held."""
    return _pending.get(record.id)


def let_go(record: RunRecord) -> None:
    """Release the objects of a run, which was attached."""
    _pending.pop(record.id, None)
    shell = get_ipython()
    if (
        not _pending
        and shell is not None
        and let_go_of_old in shell.events.callbacks["post_run_cell"]
    ):
        shell.events.unregister("post_run_cell", let_go_of_old)


def let_go_of_old(_result: object = None, now: float | None = None) -> None:
    """After a cell, release the objects of runs that ended long ago, or that hold much."""
    now = time.time() if now is None else now
    latest = list[RunRecord]()
    for pending in [*_pending.values()]:
        record = read_record(pending.record.folder)
        if record is None and not pending.record.folder.is_dir():
            let_go(pending.record)  # it was removed, so it cannot be attached
        else:
            latest.append(record or pending.record)
    over = sorted((record for record in latest if not record.live), key=lambda record: record.ended)
    held = sum(_pending[record.id].captured.held_bytes for record in over)
    for record in over:
        if held <= _BYTES and now - record.ended < _SECONDS:
            break
        held -= _pending[record.id].captured.held_bytes
        let_go(record)
