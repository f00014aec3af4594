"""Runs that go on by themselves: what their cells give back at once, and coming back to them, or to any other run."""

from __future__ import annotations

import html
import os
import types
from functools import partial
from typing import Any

from IPython.core.getipython import get_ipython

from taas.capture import Applied, Capture, rebind_answer
from taas.delivery.registered import Registration, apply_final
from taas.notebook.cell_output import say
from taas.notebook.live_view import LiveDisplay, RunView
from taas.notebook.tables import Shown, plain
from taas.notebook.watched_run import WatchedRun
from taas.runs.places import ProcessMark
from taas.runs.reader import finish
from taas.runs.records import ANSWER, LOADERS, PAYLOAD, RunRecord, read_record
from taas.runs.retention import open_kept
from taas.supervisor import connections
from taas.wire.ranks import Answer

_BY_REFERENCE = (types.ModuleType, types.FunctionType, type)  # imported and defined, not worth a mention
_kept: dict[str, tuple[Capture, list[Registration]]] = {}
"""What background runs of this kernel were given, by run id, for their answers change these objects in place; and the
registered loaders that they iterate."""
_brought: set[str] = set()


class RunHandle:
    """A run that goes on by itself; shown, it says how it is doing, and in a notebook goes on saying so.

    Attributes:
        name: what ``%taas attach``, ``logs``, ``stop`` take.
        id: what makes it unique among all that have its name.
        folder: where its record, its output and its names are kept.
    """

    def __init__(self, record: RunRecord) -> None:
        self.name, self.id, self.folder = record.name, record.id, record.folder
        self._view = WatchedRun()

    @property
    def record(self) -> RunRecord | None:
        """What is known of the run now; None once it was removed."""
        return read_record(self.folder)

    @property
    def state(self) -> str:
        """``acquiring``, ``starting``, ``running``, ``finishing``, ``ending``; then ``done``, ``failed``, ``interrupted``, ``lost``."""
        record = self.record
        return "removed" if record is None else record.state if record.live else record.outcome

    def _look(self) -> tuple[Shown, bool]:
        """Return what there is to be shown now, and whether the run goes on."""
        record, name = self.record, self.name
        if record is None:
            return plain(f"{name} was removed"), False
        hints = f"%taas attach {name} brings its output and its names"
        if record.live:
            hints += f"; %taas logs {name} its output alone; %taas stop {name} ends it"
        below = Shown(hints, f'<div style="opacity:.75">{html.escape(hints)}</div>')
        return self._view.of(record, kept=True) + below, record.live

    def __repr__(self) -> str:
        return self._look()[0].text

    def _repr_html_(self) -> str:
        return self._look()[0].html

    def _ipython_display_(self) -> None:
        shell = get_ipython()
        if not hasattr(shell, "kernel"):
            raise NotImplementedError  # then IPython shows its text
        LiveDisplay(shell.display_pub, self._look)


def keep_capture(run_id: str, captured: Capture, loaders: list[Registration]) -> None:
    """Remember what a background run was given, for :func:`attach`."""
    _kept[run_id] = captured, loaders


def attach(record: RunRecord, shell: Any) -> None:
    """Show a run in this cell and bring its names into the notebook.

    In the kernel that started the run, what it was given changes in place; in another one names are rebound.
    An interrupt detaches, and the run goes on.

    Raises:
        CellFailed, RunLost, KeyboardInterrupt: as the run ended.
    """
    with RunView(record, shell, partial(_answer, record)) as view:
        try:
            record = view.follow()
        except KeyboardInterrupt:
            say(
                f"detached; {record.name} goes on. %taas attach {record.name} comes back to it, "
                f"%taas stop {record.name} ends it"
            )
            return
        view.output.settle()
        view.end()
        captured, loaders = _kept.get(record.id, (None, []))
        if loaders and (record.folder / LOADERS).exists():  # their generators stand where the run left them
            with os.fdopen(open_kept(record, LOADERS), "rb") as file:
                apply_final(file.read(), loaders)
        needed = {ANSWER} if captured is not None else {ANSWER, PAYLOAD}
        if needed <= record.files.keys() or not record.background:  # else its notices say why there are none
            _bring_names(record, shell, captured, view)
        if record.background:
            view.collect()
    _kept.pop(record.id, None)
    if record.outcome == "interrupted":
        say(f"{record.name} was {record.message or 'stopped'}; {record.names}")
    elif record.outcome != "done":
        finish(record)


def _answer(record: RunRecord, answer: Answer) -> None:
    """Send an answer to the supervisor of a run, whoever's it is."""
    with connections.Visit(connections.connection_of(record)) as visit:
        visit.say(answer)


def _no_names_because(record: RunRecord) -> str:
    """Say why a run has no names for this notebook; nothing where it has."""
    names, answer = f"the names of {record.name} are", record.folder / ANSWER
    if not record.background and record.kernel == ProcessMark.of(os.getpid()):
        return f"{names} in this notebook since it ended"
    if not record.background:
        return f"{record.name} gave its names to the notebook that started it; only background runs keep them"
    if record.id in _brought:
        return f"{names} in this notebook since it was attached before"
    return "" if answer.exists() else f"{names} not there any more: {answer} was removed"


def _bring_names(record: RunRecord, shell: Any, captured: Capture | None, view: RunView) -> None:
    if why := _no_names_because(record):
        say(why)
        return
    fd = open_kept(record, ANSWER)
    try:
        applied = captured.apply(fd) if captured is not None else _rebind(record, fd, shell.user_ns)
    finally:
        os.close(fd)
    _brought.add(record.id)
    view.take(applied, numbered=captured is not None)
    made = [name for name in applied.rebound if not isinstance(shell.user_ns.get(name), _BY_REFERENCE)]
    said = [f"names here now: {', '.join(made[:12])}{' …' if len(made) > 12 else ''}"] if made else []
    if captured is not None and applied.changed:
        said.append(f"{applied.changed} objects changed in place")
    say("; ".join(said) or "no name was new or changed")


def _rebind(record: RunRecord, answer: int, namespace: dict[str, Any]) -> Applied:
    payload = open_kept(record, PAYLOAD)
    try:
        return rebind_answer(payload, answer, namespace)
    finally:
        os.close(payload)
