"""Coming back to a run: its output from the beginning, then live, then its names."""

from __future__ import annotations

import os
import select
import time
import types
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from taas.agent.inotify import BLIND_SECONDS, Inotify
from taas.agent.tails import RankTail
from taas.capture import NOTHING, Applied, Capture
from taas.capture.rebinding import rebind_answer
from taas.cell_output import CellOutput, Screen, say, say_lost
from taas.dataloader_registry import Registration, apply_final
from taas.endings import finish
from taas.live_view import LiveView
from taas.messages.clients import RunEnded
from taas.messages.ranks import Output
from taas.records import ANSWER, LOADERS, PAYLOAD, RunRecord, output_folder, read_record

__all__ = ["RunOutput", "attach", "follow", "keep_capture", "read_output"]

_LOOK_SECONDS = 0.25
_BY_REFERENCE = (types.ModuleType, types.FunctionType, type)  # imported and defined, not worth a mention
_CHUNK = 1 << 18
_kept: dict[str, Capture] = {}
"""What background runs of this kernel were given, by run id: their answers change these objects in place."""
_loaders: dict[str, list[Registration]] = {}
"""The registered loaders that background runs of this kernel iterate, by run id."""
_brought: set[str] = set()


def keep_capture(run_id: str, captured: Capture, loaders: list[Registration]) -> None:
    """Remember what a background run was given, for :func:`attach`."""
    _kept[run_id], _loaders[run_id] = captured, loaders


class RunOutput:
    """What ranks of one run have written, over all its starts, each item once."""

    def __init__(self, folder: Path, ranks: Iterable[int]) -> None:
        self._folder, self._ranks = folder, tuple(ranks)
        self._watch = Inotify()
        self._tails: dict[int, RankTail] = {}
        self._open(0)

    def _open(self, restarts: int) -> None:
        self.close_tails()
        self._restarts = restarts
        self._output = output_folder(self._folder, restarts)
        self._tails = {rank: RankTail(self._output / str(rank)) for rank in self._ranks}
        self._waiting = set(self._tails)

    def read(self, restarts: int) -> Iterator[tuple[int, list[Output]]]:
        """Read what was written since the last call; the run has been started again so many times."""
        while True:
            for rank in sorted(self._waiting):
                if (self._output / str(rank)).is_dir():
                    self._watch.add(self._output / str(rank))
                    self._waiting.discard(rank)
            for rank, tail in self._tails.items():
                while items := tail.read(_CHUNK):
                    yield rank, items
            if self._restarts >= restarts:
                return
            self._open(self._restarts + 1)

    def wait(self, seconds: float) -> bool:
        """Wait until something is written; returns whether it was, or may have been."""
        if self._watch.blind:
            select.select([], [], [], min(seconds, BLIND_SECONDS))
            return True
        grew = bool(select.select([self._watch.fileno()], [], [], seconds)[0])
        if grew:
            self._watch.changed()
        return grew

    def close_tails(self) -> None:
        """Close the ranks' files."""
        for tail in self._tails.values():
            tail.close()

    def close(self) -> None:
        """Close everything."""
        self._watch.close()
        self.close_tails()


def read_output(record: RunRecord, ranks: Iterable[int]) -> Iterator[tuple[int, list[Output]]]:
    """Read what ranks have written until now, a rank after the other."""
    for rank in ranks:
        output = RunOutput(record.folder, (rank,))
        try:
            yield from output.read(record.restarts)
        finally:
            output.close()


def follow(
    record: RunRecord,
    ranks: Iterable[int],
    screen: Screen,
    look: Callable[[RunRecord], None] = lambda _: None,
) -> RunRecord:
    """Show what ranks have written and go on writing, until the run is over.

    Args:
        record: the run.
        ranks: whose output.
        screen: where it is shown.
        look: called several times a second with the run's record as it is then.

    Returns:
        The run's last record.

    Raises:
        KeyboardInterrupt: the person at the keyboard has seen enough; the run goes on.
    """

    def show() -> None:
        for rank, items in output.read(record.restarts):
            screen.show(rank, items)

    output = RunOutput(record.folder, ranks)
    try:
        while True:
            now = read_record(record.folder)
            record = now if now is not None else record
            show()  # after the record was read: if that is over, this is all
            look(record)
            if now is None or not record.live:
                return record
            until = time.monotonic() + _LOOK_SECONDS
            while (left := until - time.monotonic()) > 0 and output.wait(left):
                show()
    finally:
        output.close()


def attach(record: RunRecord, shell: Any) -> None:
    """Show a run in this cell and bring its names into the notebook.

    In the kernel that started the run, what it was given changes in place; in another one names are rebound.
    An interrupt detaches, and the run goes on.

    Raises:
        CellFailed, RunLost, KeyboardInterrupt: as the run ended.
    """
    view = LiveView(record, shell)

    def look(now: RunRecord) -> None:
        view.replace(now)
        view.refresh()

    try:
        record = follow(record, record.shown_ranks(), CellOutput(shell), look)
    except KeyboardInterrupt:
        view.refresh(final=True)
        say(
            f"detached; {record.name} goes on. %taas attach {record.name} comes back to it, "
            f"%taas stop {record.name} ends it"
        )
        return
    view.refresh(final=True)
    say(*record.notices)
    _move_generators(record)
    if record.outcome == "done":
        _bring_names(record, shell)
        return
    _kept.pop(record.id, None)
    if record.outcome == "interrupted":
        say(f"{record.name} was stopped; no names came back")
        return
    finish(
        RunEnded(
            run=record.name,
            outcome=record.outcome,
            first=record.first,
            vm=record.vm,
            others=record.others,
            message=record.message,
        )
    )


def _bring_names(record: RunRecord, shell: Any) -> None:
    if not record.background:
        say(f"{record.name} gave its names to the notebook that started it; only background runs keep them")
        return
    if record.id in _brought:
        say(f"the names of {record.name} are in this notebook since it was attached before")
        return
    answer = record.folder / ANSWER
    if not answer.exists():
        say(f"the names of {record.name} are not there any more: {answer} was removed")
        return
    fd = os.open(answer, os.O_RDONLY | os.O_CLOEXEC)
    try:
        captured = _kept.pop(record.id, None)
        applied = captured.apply(fd) if captured is not None else _rebind(record, fd, shell.user_ns)
    finally:
        os.close(fd)
    _brought.add(record.id)
    if applied.value is not NOTHING:
        shell.displayhook.update_user_ns(applied.value)
    if captured is not None:
        shell.compile._filename_map.update(applied.cells)
    say_lost(applied.lost)
    made = [name for name in applied.rebound if not isinstance(shell.user_ns.get(name), _BY_REFERENCE)]
    names = ", ".join(made[:12]) + (" …" if len(made) > 12 else "")
    in_place = (
        f"{applied.changed} objects changed in place" if captured is not None and applied.changed else ""
    )
    said = "; ".join(part for part in (names and f"names here now: {names}", in_place) if part)
    say(said or "no name was new or changed")


def _move_generators(record: RunRecord) -> None:
    """Set registered loaders' generators to where the run left them; another kernel has none of them."""
    loaders, states = _loaders.pop(record.id, []), record.folder / LOADERS
    if loaders and states.exists():
        apply_final(states.read_bytes(), loaders)


def _rebind(record: RunRecord, answer: int, namespace: dict[str, Any]) -> Applied:
    payload = os.open(record.folder / PAYLOAD, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return rebind_answer(payload, answer, namespace)
    finally:
        os.close(payload)
