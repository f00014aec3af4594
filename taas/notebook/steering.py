"""The actions of the verbs in :mod:`taas.notebook.verbs`, and the front ends for them."""

from __future__ import annotations

import contextlib
import html
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import msgspec

from taas.base.linux import process
from taas.base.wording import counted, nearest, shown, shown_path
from taas.capture.settings import setup_cells
from taas.config import load_catalog, project_folder
from taas.engines import choice
from taas.engines.slurm import settings_of
from taas.errors import EngineError, HeaderError
from taas.header.arguments import Line, check_ranks, split_words
from taas.header.catalog import Catalog
from taas.notebook import doctor
from taas.notebook.bug_report import write_report
from taas.notebook.doctor import Finding
from taas.notebook.export import export
from taas.notebook.supervisor_client import get_supervisor
from taas.notebook.verbs import VERBS, help_text
from taas.notebook.view import tables
from taas.notebook.view.cell_output import Screen, TerminalOutput, follow, plain_among, say
from taas.notebook.view.shown import Shown
from taas.notebook.view.watched_run import in_full
from taas.project.wall.rescued import recover, rescued_versions, sort_writes
from taas.protocol.clients import Prepare, Released, RunRequest, Stacks
from taas.protocol.records import RunRecord
from taas.runs.reader import LOOK_SECONDS, RunReader
from taas.runs.records import find_run, of_notebook, read_records, unique_name
from taas.supervisor import connections

_STOP_SECONDS = 12.0
_TOP_SECONDS = 1.0
_CLEAR = "\x1b[H\x1b[J"


class Frontend:
    """The front end in which a verb is typed: a terminal, unless a subclass overrides this.

    Attributes:
        kernel: the process id of the notebook's kernel; 0 in a terminal.
        notebook, project: the notebook's path, if its front end provides it, and its folder; empty
            in a terminal.
        place: a description of this notebook or terminal, shown to users as the origin of an
            action.
    """

    kernel = 0
    notebook = project = ""
    place = "a terminal"

    def own(self, records: Iterable[RunRecord]) -> list[RunRecord]:
        """Return the runs that belong to this notebook; in a terminal, none."""
        return of_notebook(records, self.kernel, self.notebook, self.project)

    def show(self, what: Shown) -> None:
        """Show a view."""
        sys.stdout.write(as_in_terminal(what.text) + "\n")

    def show_status(self) -> None:
        """Show the active runs; keep the view up to date if it can be updated in place."""
        self.show(tables.status(read_records()))

    def show_ranks(self, record: RunRecord) -> None:
        """Show a run's ranks, one per row.

        A terminal refreshes them every second, until the run is over or the user interrupts.
        """
        terminal = sys.__stdout__ if sys.__stdout__ and sys.__stdout__.isatty() else None
        reader = RunReader(record, ())
        with contextlib.suppress(KeyboardInterrupt):
            while True:
                shown = in_full(reader.look(at_once=True))
                if terminal is not None:
                    # not through `show`, which escapes control characters
                    terminal.write(_CLEAR)
                self.show(shown)
                if reader.over or terminal is None:
                    return
                time.sleep(_TOP_SECONDS)

    def show_findings(self, findings: Iterable[Finding]) -> None:
        """Show findings one by one, because one of them may take a minute."""
        for text in doctor.as_text(findings):
            sys.stdout.write(as_in_terminal(text) + "\n")
            sys.stdout.flush()

    def screen(self, plain: int | None) -> Screen:
        """Return the screen for the ranks' output; lines of the rank ``plain`` have no number."""
        return TerminalOutput(plain)

    def attach(self, record: RunRecord) -> None:
        """Follow a run, and restore its variables if there is a notebook."""
        record = _until_seen(
            record, record.cell.spec.shown_ranks(), TerminalOutput(plain_among(record))
        )
        say(tables.line(record).text)
        if record.background:
            say(f"%taas attach {record.name} in a notebook brings its names")


def as_in_terminal(text: str) -> str:
    """Return a message with its commands as a user in a terminal would type them."""
    return re.sub(r"(?<!%)%taas(?! \w+ in a notebook)", "taas", text)


def _find_named(frontend: Frontend, line: Line, *, live: bool) -> RunRecord:
    return find_run(line.words[0] if line.words else None, read_records(), frontend.own, live=live)


def _until_seen(record: RunRecord, ranks: Iterable[int], screen: Screen) -> RunRecord:
    """Show what ranks write until the run is over or the user interrupts; return its record."""
    reader = RunReader(record, ranks)
    try:
        return follow(reader, screen)
    except KeyboardInterrupt:
        return reader.record


def _logs(frontend: Frontend, line: Line) -> None:
    record = _find_named(frontend, line, live=False)
    asked, size = line.options.get("rank", "all"), record.cell.spec.world_size
    ranks = tuple(range(size)) if asked == "all" else asked
    check_ranks(ranks, size, "rank")
    screen = frontend.screen(ranks[0] if len(ranks) == 1 else None)
    if "follow" in line.options:
        _until_seen(record, ranks, screen)
    else:
        for rank in ranks:
            reader = RunReader(record, (rank,))
            while items := reader.read():
                screen.show(items)
        screen.send()


def _only_run(frontend: Frontend) -> RunRecord:
    """Return the run that ``stop`` means without a name.

    This is the notebook's only active run; in a terminal, the only active run.

    Raises:
        HeaderError: there is no such run, or there are several. Other notebooks' runs can only be
            stopped by name.
    """
    live = [record for record in read_records() if record.live]
    mine = frontend.own(live) if frontend.kernel else live
    if len(mine) == 1:
        return mine[0]
    if not live:
        raise HeaderError("%taas stop: no run goes on; %taas history says how the last ones ended")
    meant = mine or live
    names = ", ".join(
        f"%taas stop {unique_name(record, live)} ({record.owner})" for record in meant
    )
    one_of = "one of " if len(meant) > 1 else ""
    fact = (
        f"{len(mine)} runs go on here" if mine else "no run of this notebook goes on, but others do"
    )
    raise HeaderError(f"%taas stop: {fact}; type {one_of}{names}")


def _stop(frontend: Frontend, line: Line) -> None:
    record = _find_named(frontend, line, live=True) if line.words else _only_run(frontend)
    name = record.name
    reader = RunReader(record, ())
    with connections.Visit(connections.connection_of(record)) as visit:
        for _ in range(2 if "now" in line.options else 1):
            visit.say(RunRequest(run=name, what="interrupt", place=frontend.place))
        deadline = time.monotonic() + _STOP_SECONDS
        while (
            reader.look().live and not reader.removed and (left := deadline - time.monotonic()) > 0
        ):
            reader.wait(min(left, LOOK_SECONDS))
    hints = (
        f"`%taas stacks {name}` shows where its ranks stand; `%taas stop {name} --now` ends them at"
        " once"
    )
    if reader.over:
        say(f"{name} stopped after {tables.span(time.time() - record.submitted)}")
    elif reader.record.state == "finishing":
        say(f"{name} was interrupted, and its cell is finishing. {hints}")
    else:
        raise EngineError(f"{name} has not ended within {_STOP_SECONDS:.0f} s. {hints}.")


def _stacks(frontend: Frontend, line: Line) -> None:
    record = _find_named(frontend, line, live=True)
    with connections.Visit(connections.connection_of(record)) as visit:
        answer = visit.ask(RunRequest(run=record.name, what="stacks"), Stacks)
    shown = (
        tables.stacks(answer.places)
        if answer.places
        else tables.plain(f"{record.name} has no rank now")
    )
    frontend.show(shown)


def _recover(frontend: Frontend, line: Line) -> None:
    records = read_records()
    asked = (
        [_find_named(frontend, line, live=False)]
        if line.words
        else [run for run in records if not run.live]
    )
    if line.words and asked[0].live:
        raise HeaderError(
            f"%taas recover: {asked[0].name} goes on; type it when that run has ended"
        )
    for run in reversed(asked):
        name = unique_name(run, records)
        if not run.may_go_on:  # a run that was killed has not sorted the files that its ranks wrote
            sort_writes(run.writes, run.project, name)
        versions = rescued_versions(run.writes, run.project)
        if not versions:
            continue
        paths = recover(name, versions, run.project, overwrite="overwrite" in line.options)
        if paths or line.words:
            say(f"{counted(len(paths), 'file')} of {name} recovered", *map(shown_path, paths[:20]))
            return
    none = f"{line.words[0]} has no" if line.words else "no run has"
    raise HeaderError(f"%taas recover: {none} writes of ranks other than 0 that its project lacks")


def _engine(frontend: Frontend, line: Line) -> None:
    options = [f"--{name}={value}" for name, value in line.options.items() if name != "check"]
    words = [*line.words, *options]
    if "check" in line.options:
        slurm = choice.read_choice(
            ["slurm", *options], "%taas engine", load_catalog(project_folder())
        )
        frontend.show_findings(doctor.examine_slurm(settings_of(slurm.address)))
        return
    if not words:
        engine = choice.current_engine(project_folder())
    elif frontend.kernel == 0:
        choice.read_choice(words, "taas engine", Catalog())
        raise HeaderError(
            "taas engine in a terminal changes nothing: type %taas engine in a notebook, or write"
            f' [engine] default = "{line.words[0]}" into taas.toml'
        )
    else:
        engine = choice.choose(words)
        if engine.kind != "local":
            # in advance, because joining a cluster takes seconds
            get_supervisor(warm=False).say(Prepare(engine=engine))
    say(f"engine: {engine.kind} {engine.address}".rstrip())


# ------------------------------------------------------ install: a file in IPython's startup folder

_STARTUP_FILE = ("profile_default", "startup", "50-taas.py")
# IPython runs it in the user's namespace, so it leaves no variables behind.
_LINES = """\
# Written by `taas install`; `taas install --undo` removes it.
# It loads taas into each notebook and each IPython.
try:
    get_ipython().extension_manager.load_extension("taas")
except Exception as error:
    if getattr(error, "name", "") != "taas":  # it is no fault that an environment lacks taas
        print(
            "taas was not loaded, so that #pragma taas is a comment here:"
            f" {type(error).__name__}: {error}"
        )
"""


def _install(frontend: Frontend, line: Line) -> None:
    """Write the file that makes IPython load taas at every start, or remove it.

    Without the file, a header is just a comment in a notebook that does not load taas.
    """
    path = Path(os.environ.get("IPYTHONDIR") or "~/.ipython", *_STARTUP_FILE).expanduser()
    try:
        if "undo" in line.options:
            path.unlink(missing_ok=True)
            say(f"{path} is removed: notebooks load taas by %load_ext taas")
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(_LINES)
    except OSError as error:
        raise EngineError(
            f"{error}. Make it writable, or set IPYTHONDIR to a folder of yours."
        ) from None
    say(
        f"{path} is written: notebooks that are started from now on know #pragma taas without"
        " %load_ext taas. `taas install --undo` removes it."
    )


def _release(frontend: Frontend, line: Line) -> None:
    mine = [c for c in connections.all_connections() if frontend.kernel in (0, c.kernel.pid)]
    released = [_release_vms(connection) for connection in mine]
    count, ranks = sum(one.count for one in released), sum(one.ranks for one in released)
    given = f"{counted(ranks, 'kept rank')} ended, {counted(count, 'idle VM')} given back"
    say(f"{given}; the next run starts new ones")


def _release_vms(connection: connections.Connection) -> Released:
    """Let a supervisor release what it has; kill it if it is stopped."""
    pid = connection.supervisor.pid
    try:
        with connections.Visit(connection) as visit:
            released: Released = visit.ask(RunRequest(what="release"), Released)
            return released
    except EngineError as error:
        found = process(pid) if connection.supervisor.lives else None
        if found is not None and found.state == "T":
            os.kill(pid, signal.SIGKILL)
            say(f"the supervisor (process {pid}) was stopped, and was killed with all its runs")
        elif found is not None:
            say(f"nothing of process {pid} was given back: {error}")
    return Released(count=0)


def _config(frontend: Frontend, line: Line) -> None:
    shown_settings = tables.config(load_catalog(project_folder()))
    cells = setup_cells.setup_cells()
    frontend.show(shown_settings + tables.setup(cells) if cells else shown_settings)


def _setup(frontend: Frontend, line: Line) -> None:
    if frontend.kernel == 0:
        raise HeaderError(
            "taas setup in a terminal: setup cells are a notebook's; type %taas setup there"
        )
    if "clear" in line.options:
        count = setup_cells.forget_all()
        say(
            f"{counted(count, 'setup cell')} forgotten: processes that start from now on run none;"
            " ranks that stay keep what they ran until %taas release"
        )
        return
    frontend.show(tables.setup(setup_cells.setup_cells()))


def _run(frontend: Frontend, line: Line) -> None:
    raise HeaderError(
        "%taas run is for a terminal: type taas run SCRIPT --gpus 8 there, or %load SCRIPT here"
    )


def _doctor(frontend: Frontend, line: Line) -> None:
    findings = doctor.examine()
    if "report" not in line.options:
        frontend.show_findings(findings)
        return
    record = find_run(line.options["report"], read_records(), frontend.own, live=False)
    say(*write_report(record, findings, Path.cwd()))


# ---------------------------------------------------------------- a line


_FACTS: dict[str, Callable[[], object]] = {
    "status": lambda: [tables.facts(record) for record in read_records() if record.live],
    "history": lambda: [tables.facts(record) for record in read_records()],
    "config": lambda: tables.settings(load_catalog(project_folder())),
    "types": lambda: [*load_catalog(project_folder()).instances.values()],
}
"""For each verb: what its ``--json`` prints."""
_HANDLERS: dict[str, Callable[[Frontend, Line], None]] = {
    "status": lambda frontend, _: frontend.show_status(),
    "logs": _logs,
    "stop": _stop,
    "stacks": _stacks,
    "attach": lambda frontend, line: frontend.attach(_find_named(frontend, line, live=False)),
    "top": lambda frontend, line: frontend.show_ranks(_find_named(frontend, line, live=False)),
    "history": lambda frontend, _: frontend.show(tables.history(read_records())),
    "recover": _recover,
    "export": lambda frontend, line: say(
        *export(_find_named(frontend, line, live=False), line.options.get("to", ""))
    ),
    "engine": _engine,
    "config": _config,
    "setup": _setup,
    "types": lambda frontend, _: frontend.show(tables.types(load_catalog(project_folder()))),
    "run": _run,
    "install": _install,
    "release": _release,
    "doctor": _doctor,
}


def do(text: str, frontend: Frontend) -> None:
    """Execute a line; an empty line means ``status``.

    Raises:
        HeaderError: one line that says what to type instead.
    """
    name, *rest = split_words(text) or ["status"]
    if {"help", "--help", "-h"} & {name, *rest}:
        frontend.show(Shown(help_text(), f"<pre>{html.escape(help_text())}</pre>"))
        return
    if name not in VERBS:
        near = nearest(name, VERBS, 0.5)
        hint = f"did you mean %taas {near}?" if near else f"allowed is {', '.join(VERBS)}"
        if name.startswith("-"):
            hint = f"options belong to a cell; type %%taas {shown(text.strip())} above its code"
        raise HeaderError(f"%taas {shown(name)}: there is no such verb; {hint}")
    line = VERBS[name].read(rest)
    if "json" in line.options:
        sys.stdout.write(msgspec.json.encode(_FACTS[name]()).decode() + "\n")
    else:
        _HANDLERS[name](frontend, line)
