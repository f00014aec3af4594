"""Views that a cell updates in place: its own run's line, and ``%taas status``.

This module also attaches a cell to a background run, or to any other run.
"""

from __future__ import annotations

import getpass
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, Self

from IPython.core.error import StdinNotImplementedError

from taas.base.places import ProcessMark
from taas.capture import NOTHING, Applied, Capture, rebind_answer
from taas.capture.cells import cell_numbers
from taas.capture.moves.collected import collect
from taas.delivery.registered import apply_final
from taas.notebook import pending
from taas.notebook.view.cell_output import CellOutput, follow, plain_among, say
from taas.notebook.view.shown import Shown
from taas.notebook.view.tables import (
    line,
    mendable,
    mending,
    notification,
    plain,
    status,
)
from taas.notebook.view.watched_run import render_run
from taas.protocol.ranks import Answer, Asking
from taas.protocol.records import RunRecord
from taas.runs.events import COLLECTED
from taas.runs.reader import LOOK_SECONDS, RunReader, finish
from taas.runs.records import ANSWER, LOADERS, PAYLOAD, of_notebook, open_kept, read_records
from taas.supervisor import connections

_DISPLAY_SECONDS = 1.0
"""Seconds between two updates of a view, unless there is news that a person waits for."""
_MOST_MENDED, _MEND_SECONDS = 20, 10.0
"""The most lines of earlier kernels that are updated; seconds until their foreground runs end."""
_GOES_ON = re.compile(rb'data-taas-run=\\"(\w+)\\"')
"""The mark of :func:`taas.notebook.view.tables.mendable`, as a notebook's file has it."""
_TURN_SECONDS = 0.3
"""For that long after a reply the next question is expected of the same rank: a debugger asks again
and again.
"""


class UpdatedView:
    """A view that a front end replaces in place when its text changes.

    The saved notebook has the last version.
    """

    def __init__(self, publisher: Any) -> None:
        self._publisher = publisher
        self._transient = {"display_id": f"taas-{time.monotonic_ns()}"}
        self._shown: Shown | None = None

    def show(self, view: Shown, *, below: bool = False) -> None:
        """Show a view in place of the previous one, or ``below`` the cell's present output."""
        if below or view != self._shown:
            update, self._shown = self._shown is not None and not below, view
            self._publisher.publish(
                view._repr_mimebundle_(), metadata={}, transient=self._transient, update=update
            )


def _to_be_told(record: RunRecord) -> tuple[Any, ...]:
    return record.trouble, record.waiting, record.state == "finishing"


class RunView:
    """A run as a cell shows it: the launching cell (``live``), or one that attached to the run.

    Its line, with its ranks folded below it, is updated once a second, and when there is news for a
    person. Without a kernel (IPython in a terminal) an update would be one more line; there only
    the run's beginning, trouble, and its end are printed.

    Attributes:
        reader: reads the run.
        output: shows what its ranks write.
    """

    def __init__(self, record: RunRecord, shell: Any, *, live: bool = False) -> None:
        self._shell, self.reader = shell, RunReader(record)
        self.output = CellOutput(shell, plain_among(record), live=live)
        self.output.above = lambda: self.show_line(self.reader.record, below=True)
        self._display = UpdatedView(shell.display_pub) if hasattr(shell, "kernel") else None
        self._printed, self._told, self._line_at = "", _to_be_told(record), 0.0
        self._answered: set[tuple[int, int, int]] = set()
        """By start of the run, rank and number: the questions that were answered here."""
        self._turn, self._turn_until = -1, 0.0
        self._saw_live = record.live
        if record.cell.spec.notify and self._display is not None and record.live:
            shell.display_pub.publish(notification(record))
        self.show_line(record, at_once=True)

    def show_line(self, record: RunRecord, *, at_once: bool = False, below: bool = False) -> None:
        """Show the run's line; ``below``: after the cell's output, which a rank has cleared."""
        told, self._told = self._told, _to_be_told(record)
        at_once |= told != self._told
        if self._display is not None and (at_once or below or time.monotonic() >= self._line_at):
            self._line_at = time.monotonic() + _DISPLAY_SECONDS
            self._display.show(render_run(record), below=below)
        elif self._display is None and at_once and (text := line(record).text) != self._printed:
            self._printed = text
            say(*text.splitlines())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        # an interrupt may leave the cell before the run is over, or the run may be lost
        self.show_line(self.reader.look(at_once=True), at_once=True)

    def follow(self) -> RunRecord:
        """Show the run's output until the run is over; return its last record."""
        return follow(self.reader, self.output, self.look, self.wait, self.ask)

    def look(self, record: RunRecord) -> None:
        """Show the run's line, and the questions of ranks."""
        if record.live:  # its end is shown later, below all its output
            self.show_line(record)
            for question in record.questions:
                self.output.show(self.reader.include(question.rank))

    def wait(self, seconds: float) -> None:
        """Wait at most that many seconds, until there may be new output."""
        self.reader.wait(seconds)

    def send(self, answer: Answer) -> None:
        """Send a person's reply to the run's supervisor, which may be another kernel's."""
        with connections.Visit(connections.connection_of(self.reader.record)) as visit:
            visit.say(answer)

    def ask(self, record: RunRecord) -> bool:
        """Ask the person a rank's next question; return whether there was one.

        A rank keeps its turn as long as it keeps asking. A KeyboardInterrupt is not a reply.
        """
        start = record.restarts
        found = [
            one for one in record.questions if (start, one.rank, one.number) not in self._answered
        ]
        asked = next((one for one in found if one.rank == self._turn), None)
        if asked is None and time.monotonic() >= self._turn_until:
            asked = next(iter(found), None)
        if asked is None:
            return False
        self.output.send()
        self.show_line(record, at_once=True)  # it is not updated until the person replies
        text, refused = self._read(asked, record)
        self._answered.add((start, asked.rank, asked.number))
        self._turn, self._turn_until = asked.rank, time.monotonic() + _TURN_SECONDS
        self.send(
            Answer(
                run=record.name, rank=asked.rank, number=asked.number, text=text, refused=refused
            )
        )
        return True

    def _read(self, asked: Asking, record: RunRecord) -> tuple[str, str]:
        prompt = (
            asked.prompt
            if record.cell.spec.world_size == 1
            else f"[rank {asked.rank}] {asked.prompt}"
        )
        kernel = getattr(self._shell, "kernel", None)
        secretly, openly = (
            (kernel.getpass, kernel.raw_input) if kernel else (getpass.getpass, input)
        )
        try:
            return (secretly if asked.hidden else openly)(prompt), ""
        except EOFError:
            return "", "the person at the keyboard closed the input"
        except StdinNotImplementedError as error:
            return "", str(error)

    def take(self, applied: Applied, *, numbered: bool = True) -> None:
        """Show what came with the names: ``Out[n]`` and ``_``, widgets, and what could not come.

        ``numbered``: the cells of functions that came have this notebook's numbers, so tracebacks
        may name them.
        """
        if applied.value is not NOTHING:
            self._shell.displayhook.update_user_ns(applied.value)
        self.output.names_came()
        if numbered:
            cell_numbers(self._shell).update(applied.cells)
        if applied.lost:
            say(f"did not come back: {'; '.join(applied.lost)}")
        if shares := applied.shares:
            are, yields = ("is", "it yields") if len(shares) == 1 else ("are", "they yield")
            say(
                f"{', '.join(shares)} {are} rank 0's share of {applied.ranks}: in the notebook"
                f" {yields} 1/{applied.ranks} of the data."
            )

    def collect(self) -> None:
        """Fill :data:`taas.collected` with the values that the header asks each rank for.

        Call it after the names have come.
        """
        record = self.reader.record
        if record.cell.spec.collect:
            say(*collect(record.cell.spec.collect, record.rank_folders()))
            for folder in record.rank_folders() if not record.background else ():
                # a foreground run's values come once, as its names do
                (folder / COLLECTED).unlink(missing_ok=True)

    def end(self) -> None:
        """Show how the run ended."""
        record = self.reader.record
        if self._saw_live:
            notify(record, self._shell)
        if record.notices or record.outcome != "done":
            self.output.settle()  # the notices are the next output
        self.show_line(record, at_once=True)
        say(*record.notices)

    def mend(self) -> None:
        """Have the page replace the run's line in the cell that started it.

        A page that was loaded again in the middle of the run does not update that line.
        """
        if self._display is not None:
            record = self.reader.record
            self._shell.display_pub.publish(mending({record.id: _mended_view(record)}))


_notified: set[str] = set()


def notify(record: RunRecord, shell: Any) -> None:
    """Notify the person once that a run has ended, if its header asks for it.

    A browser shows a notification; a terminal rings its bell.
    """
    if not record.cell.spec.notify or record.id in _notified:
        return
    _notified.add(record.id)
    if hasattr(shell, "kernel"):
        shell.display_pub.publish(notification(record))
    else:
        sys.stdout.write("\a")
        sys.stdout.flush()


def notify_at_end(record: RunRecord, shell: Any) -> None:
    """Notify the person when a background run ends, if its header asks for it.

    A browser asks for the permission now.
    """
    if not record.cell.spec.notify:
        return
    if hasattr(shell, "kernel"):
        shell.display_pub.publish(notification(record))

    def wait() -> None:
        reader = RunReader(record, ())
        while not reader.over:
            reader.wait(LOOK_SECONDS)
            reader.look()
        notify(reader.record, shell)

    threading.Thread(target=wait, name="taas-notifies", daemon=True).start()


_mended = False


def mend_lines(shell: Any, notebook: str, project: str) -> None:
    """Update, once, the lines of runs that earlier kernels of this notebook have left.

    The lines are as the kernels left them. If the front end runs scripts, it shows the updated
    lines; the notebook's file keeps the old ones.
    """
    global _mended
    if _mended or not hasattr(shell, "kernel"):
        return
    _mended = True
    threading.Thread(
        target=_mend, args=(shell, notebook, project), name="taas-mends", daemon=True
    ).start()


def _mend(shell: Any, notebook: str, project: str) -> None:
    me = ProcessMark.of(os.getpid())
    going_on = _going_on_in(notebook)
    found = [
        record
        for record in of_notebook(read_records(), me.pid, notebook, project)
        if record.kernel != me and _may_have_been_left(record, going_on)
    ]
    readers = [RunReader(record, ()) for record in found[-_MOST_MENDED:]]
    until = time.monotonic() + _MEND_SECONDS
    for reader in readers:  # a foreground run ends soon after its kernel
        while reader.record.live and not reader.record.background and time.monotonic() < until:
            reader.wait(LOOK_SECONDS)
            reader.look()
    if readers:
        found = [reader.record for reader in readers]
        shell.display_pub.publish(mending({record.id: _mended_view(record) for record in found}))


def _going_on_in(notebook: str) -> Collection[str]:
    """Return the ids of runs that the notebook's file shows as going on.

    A page that was closed or loaded again in the middle of a run has saved them so, however well
    the run ended.
    """
    try:
        content = Path(notebook).read_bytes()
    except OSError:  # the front end does not say its path, or it was never saved
        return ()
    return {found.decode() for found in _GOES_ON.findall(content)}


def _may_have_been_left(record: RunRecord, going_on: Collection[str]) -> bool:
    """Tell whether the page may show an earlier kernel's run as it was in the middle of it.

    A front end that restarts a kernel interrupts its run first. It shows nothing of the run's end,
    however that was, because it has let go of the cell already.
    """
    goes_on = record.background or record.live
    cut_off = record.interrupted or record.outcome == "lost"
    return goes_on or cut_off or record.id in going_on


def _mended_view(record: RunRecord) -> Shown:
    """Return the view of an earlier kernel's run, without its ranks, which may be thousands."""
    view = line(record)
    if record.background:
        view += plain(what_next(record))
    return mendable(record, view)


class LiveDisplay:
    """A view that a thread of the kernel updates once a second until what it shows is over.

    ``look`` returns the present view, and whether it goes on.
    """

    def __init__(self, publisher: Any, look: Callable[[], tuple[Shown, bool]]) -> None:
        self._display, self._look = UpdatedView(publisher), look
        self.superseded = threading.Event()
        if self._show():
            threading.Thread(target=self._follow, name="taas-display", daemon=True).start()

    def _show(self) -> bool:
        shown, goes_on = self._look()
        self._display.show(shown)
        return goes_on

    def _follow(self) -> None:
        while not self.superseded.wait(_DISPLAY_SECONDS) and self._show():
            pass


_newest_table: LiveDisplay | None = None


def show_live_table(publisher: Any) -> None:
    """Show the table of runs, and update it in place; only the newest table is updated."""
    global _newest_table

    def look() -> tuple[Shown, bool]:
        records = read_records()
        return status(records), any(record.live for record in records)

    if _newest_table is not None:
        _newest_table.superseded.set()
    _newest_table = LiveDisplay(publisher, look)


# -------------------------------------------------------- background runs, and attaching to any run

_brought: set[str] = set()


def what_next(record: RunRecord) -> str:
    """Say what a person can type about a background run that goes on, or has ended."""
    name = record.name
    if record.live:
        return f"%taas attach {name} brings its output and its names; %taas stop {name} ends it"
    if _no_names_because(record):
        return f"%taas logs {name} shows its output"
    return f"%taas attach {name} brings its output and its names"


def attach(record: RunRecord, shell: Any) -> None:
    """Show a run in this cell, bring its names into the notebook, and raise its error.

    In the kernel that started the run, the objects that it was given change in place, as long as
    they are pending; otherwise names are rebound. An interrupt detaches, and the run goes on.
    """
    name = record.name
    with RunView(record, shell) as view:
        try:
            record = view.follow()
        except KeyboardInterrupt:
            say(
                f"detached; {name} goes on. %taas attach {name} comes back to it, %taas stop {name}"
                " ends it"
            )
            return
        view.output.settle()
        view.end()
        view.mend()
        given = pending.find(record)
        captured, loaders = (None, []) if given is None else (given.captured, given.loaders)
        # the loaders' generators continue from where the run left them
        if loaders and (record.folder / LOADERS).exists():
            with os.fdopen(open_kept(record, LOADERS), "rb") as file:
                apply_final(file.read(), loaders)
        needed = {ANSWER} if captured is not None else {ANSWER, PAYLOAD}
        # if a background run lacks these files, its notices say why
        if needed <= record.files.keys() or not record.background:
            _bring_names(record, shell, captured, view)
        if record.background:
            view.collect()
    pending.let_go(record)
    if record.outcome == "interrupted":
        say(f"{name} was {record.message or 'stopped'}; {record.names}")
    elif record.outcome != "done":
        finish(record)


def _no_names_because(record: RunRecord) -> str:
    """Say why a run has no names for this notebook; empty if it has some."""
    if not record.background and record.kernel == ProcessMark.of(os.getpid()):
        return f"the names of {record.name} are in this notebook since it ended"
    if not record.background:
        return (
            f"{record.name} gave its names to the notebook that started it; only background runs"
            " keep them"
        )
    if record.id in _brought:
        return f"the names of {record.name} are in this notebook since it was attached before"
    return "" if (record.folder / ANSWER).exists() else f"the names of {record.name} were removed"


def _bring_names(record: RunRecord, shell: Any, captured: Capture | None, view: RunView) -> None:
    if why := _no_names_because(record):
        say(why)
        return
    with os.fdopen(open_kept(record, ANSWER), "rb") as answer:
        applied = _apply_answer(record, answer.fileno(), captured, shell.user_ns)
    _brought.add(record.id)
    if captured is None and record.kernel == ProcessMark.of(os.getpid()):
        say(
            f"the objects that {record.name} was given are not held any more (an hour after its"
            " end, or beyond 2 GB): its names are bound to new ones"
        )
    view.take(applied, numbered=captured is not None)
    new = ", ".join(applied.rebound[:12]) + (" …" if len(applied.rebound) > 12 else "")
    say(f"names here now: {new}" if new else "no name is new")


def _apply_answer(
    record: RunRecord, fd: int, captured: Capture | None, namespace: dict[str, Any]
) -> Applied:
    if captured is not None:
        return captured.apply(fd)
    with os.fdopen(open_kept(record, PAYLOAD), "rb") as payload:
        return rebind_answer(payload.fileno(), fd, namespace)
