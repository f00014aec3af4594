"""What the verbs of :mod:`taas.verbs` do."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from taas import connections, status
from taas.cell_output import say
from taas.errors import EngineError, HeaderError
from taas.messages.clients import AskStacks, Interrupt, Prepare, Release, Released, Stacks
from taas.records import RunRecord, find_run, read_record, read_records
from taas.status import Shown
from taas.verbs import Desk, Line
from taas.wording import shown

__all__ = ["DEEDS"]

_STOP_SECONDS = 12.0


def _named(desk: Desk, line: Line, *, live: bool) -> RunRecord:
    return find_run(line.words[0] if line.words else None, read_records(), live=live, kernel=desk.kernel)


def _status(desk: Desk, line: Line) -> None:
    desk.show_status()


def _history(desk: Desk, line: Line) -> None:
    desk.show(status.history(read_records()))


def _ranks(text: str | None, size: int) -> list[int]:
    """Read the value of ``--rank``."""
    if text in (None, "all"):
        return list(range(size))
    found: list[int] = []
    for part in str(text).split(","):
        first, dash, last = part.partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise HeaderError(
                f"--rank {shown(str(text))}: allowed is a rank, or ranks such as 0,3-5; type --rank 0"
            )
        found += range(int(first), int(last or first) + 1)
    missing = [rank for rank in found if rank >= size]
    if missing:
        raise HeaderError(
            f"--rank {shown(str(text))}: the run has ranks 0 to {size - 1}; type --rank {size - 1}"
        )
    return found


def _logs(desk: Desk, line: Line) -> None:
    from taas.attach import follow, read_output

    record = _named(desk, line, live=False)
    ranks = _ranks(line.options.get("rank"), record.world_size)
    screen = desk.screen(ranks[0] if len(ranks) == 1 else None)
    if "follow" in line.options:
        try:
            follow(record, ranks, screen)
        except KeyboardInterrupt:
            say(f"no longer followed; {record.name} goes on")
        return
    for rank, items in read_output(record, ranks):
        screen.show(rank, items)


def _stop(desk: Desk, line: Line) -> None:
    live = [record for record in read_records() if record.live]
    if not line.words and len(live) > 1:
        names = ", ".join(record.name for record in live)
        raise HeaderError(f"%taas stop: {len(live)} runs go on ({names}); type %taas stop {live[-1].name}")
    record = _named(desk, line, live=True)
    with connections.Visit(connections.connection_of(record)) as visit:
        visit.say(Interrupt(run=record.name))
        began = time.monotonic()
        while (now := read_record(record.folder)) is not None and now.live:
            if time.monotonic() > began + _STOP_SECONDS:
                raise EngineError(
                    f"{record.name} has not ended within {_STOP_SECONDS:.0f} s. `%taas stacks {record.name}` shows "
                    f"where its ranks stand; `%taas stop {record.name}` again kills them at once."
                )
            time.sleep(0.05)
    say(f"{record.name} stopped after {status.span(time.time() - record.submitted)}")


def _stacks(desk: Desk, line: Line) -> None:
    record = _named(desk, line, live=True)
    with connections.Visit(connections.connection_of(record)) as visit:
        answer = visit.ask(AskStacks(run=record.name), Stacks)
    desk.show(status.stacks(answer.places) if answer.places else Shown(f"{record.name} has no rank now", ""))


def _attach(desk: Desk, line: Line) -> None:
    desk.attach(_named(desk, line, live=False))


def _recover(desk: Desk, line: Line) -> None:
    from taas import rank_storage
    from taas.supervisor.rank_writes import kept_root

    kept = rank_storage.kept_runs(kept_root())
    if not line.words and not kept:
        raise HeaderError("%taas recover: no run has kept writes of ranks other than 0")
    name = line.words[0] if line.words else kept[-1].run
    paths = rank_storage.recover(name, kept_root(), overwrite="overwrite" in line.options)
    say(
        f"{len(paths)} file{'s' if len(paths) != 1 else ''} of {name} recovered",
        *(f"  {path}" for path in paths[:20]),
    )


def _engine(desk: Desk, line: Line) -> None:
    from taas import engine_choice

    if not line.words:
        choice = engine_choice.chosen(Path.cwd())
    elif desk.kernel == 0:
        engine_choice.read_choice(list(line.words), "taas engine", 0.0)
        raise HeaderError(
            "taas engine in a terminal changes nothing: allowed is %taas engine in a notebook; or write [engine] "
            f'default = "{line.words[0]}" into taas.toml'
        )
    else:
        choice = engine_choice.choose(list(line.words))
        if choice.kind != "local":
            from taas.supervised import supervised

            supervised(warm=False).say(Prepare(engine=choice))  # it takes seconds to become part of a cluster
    say(f"engine: {' '.join(word for word in (choice.kind, choice.address) if word)}")


def _release(desk: Desk, line: Line) -> None:
    mine = [c for c in connections.all_connections() if desk.kernel in (0, c.kernel.pid)]
    count = 0
    for connection in mine:
        with connections.Visit(connection) as visit:
            count += visit.ask(Release(), Released).count
    say(f"{count} idle VM{'s' if count != 1 else ''} given back; the next run starts new ones")


def _doctor(desk: Desk, line: Line) -> None:
    from taas import doctor

    desk.show(doctor.report(doctor.examine()))


DEEDS: dict[str, Callable[[Desk, Line], None]] = {
    "status": _status,
    "logs": _logs,
    "stop": _stop,
    "stacks": _stacks,
    "attach": _attach,
    "history": _history,
    "recover": _recover,
    "engine": _engine,
    "release": _release,
    "doctor": _doctor,
}
