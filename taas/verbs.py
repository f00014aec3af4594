"""What one can do with runs: one table, for ``%taas VERB`` in a notebook and ``taas VERB`` in a terminal.

What each verb does is in :mod:`taas.steering`, which is loaded when one is used.
"""

from __future__ import annotations

import html
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from taas.errors import HeaderError
from taas.options import split_words
from taas.wording import nearest, shown

if TYPE_CHECKING:
    from taas.cell_output import Screen
    from taas.records import RunRecord
    from taas.status import Shown

__all__ = ["VERBS", "Desk", "Line", "Verb", "complete", "do", "help_text"]


class Desk(Protocol):
    """Where somebody sits who types a verb.

    Attributes:
        kernel: process id of the notebook's kernel; 0 in a terminal.
    """

    kernel: int

    def show(self, what: Shown) -> None:
        """Show a view."""

    def show_status(self) -> None:
        """Show which runs go on, for as long as they do where that can be shown in place."""

    def screen(self, plain: int | None) -> Screen:
        """Return where ranks' output is shown; lines of the rank ``plain`` carry no number."""

    def attach(self, record: RunRecord) -> None:
        """Follow a run, and take its names if there is a notebook to take them."""


@dataclass(frozen=True)
class Line:
    """What was typed after a verb."""

    words: tuple[str, ...] = ()
    options: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Verb:
    """One row of the table.

    Attributes:
        arguments: as help shows them.
        most: how many words may follow.
        options: option to whether it takes a value.
        runs: which runs complete its first word: ``live``, ``all`` or none.
    """

    name: str
    arguments: str
    help: str
    most: int = 0
    options: dict[str, bool] = field(default_factory=dict)
    runs: str = ""


# ---------------------------------------------------------------- reading a line


def do(text: str, desk: Desk) -> None:
    """Do what a line says; an empty one is ``status``.

    Raises:
        HeaderError: one line: what is wrong with it, and what to type instead.
        EngineError: a supervisor could not be reached.
    """
    from taas import steering
    from taas.status import Shown

    name, *rest = split_words(text) or ["status"]
    if name in ("help", "--help", "-h") or (name in VERBS and {"--help", "-h"} & set(rest)):
        about = help_text(name if name in VERBS else rest[0] if rest and rest[0] in VERBS else None)
        desk.show(Shown(about, f"<pre>{html.escape(about)}</pre>"))
        return
    if name not in VERBS:
        near = nearest(name.lstrip("-"), VERBS, 0.5)
        hint = f"did you mean %taas {near}?" if near else f"allowed is {', '.join(VERBS)}"
        raise HeaderError(f"%taas {shown(name)}: there is no such verb; {hint}")
    steering.DEEDS[name](desk, _read(VERBS[name], rest))


def _read(verb: Verb, rest: list[str]) -> Line:
    words: list[str] = []
    options: dict[str, str] = {}
    waiting = list(rest)
    while waiting:
        word = waiting.pop(0)
        if not word.startswith("-"):
            words.append(word)
            continue
        name, equals, value = word.lstrip("-").partition("=")
        if name not in verb.options or not word.startswith("--"):
            near = nearest(name, verb.options, 0.4)
            hint = f"type --{near}" if near else f"it has {_options(verb) or 'no options'}"
            raise HeaderError(f"%taas {verb.name} {shown(word)}: there is no such option; {hint}")
        if verb.options[name] and not equals:
            if not waiting:
                raise HeaderError(
                    f"%taas {verb.name} --{name}: a value is missing; type --{name} and the value"
                )
            value = waiting.pop(0)
        options[name] = value
    if len(words) > verb.most:
        raise HeaderError(
            f"%taas {verb.name}: {shown(words[verb.most])} is one word too many; type %taas {verb.name} "
            f"{verb.arguments}".rstrip()
        )
    return Line(tuple(words), options)


def _options(verb: Verb) -> str:
    return ", ".join(f"--{name}" for name in verb.options)


def help_text(name: str | None = None) -> str:
    """Return what ``%taas?``, ``--help`` and ``%taas help VERB`` show."""
    if name is not None:
        verb = VERBS[name]
        return f"%taas {verb.name} {verb.arguments}".rstrip() + f"\n    {verb.help}"
    rows = [(f"{verb.name} {verb.arguments}".rstrip(), verb.help) for verb in VERBS.values()]
    width = max(len(left) for left, _ in rows)
    table = "\n".join(f"  {left:<{width}}  {right}" for left, right in rows)
    return (
        "See and steer runs. %taas VERB in a notebook and taas VERB in a terminal are the same; %taas alone is\n"
        f"%taas status. RUN is a run's name; without it the newest one is meant.\n\n{table}\n\n"
        "A cell becomes a run by the line `#pragma taas --gpus 8` on top of it; %%taas? lists the options."
    )


def complete(line: str) -> list[str]:
    """Return what may stand where the last word of a line is; the line begins after ``%taas``."""
    words = line.split()
    if not words or (len(words) == 1 and not line.endswith(" ")):
        return list(VERBS)
    verb = VERBS.get(words[0])
    if verb is None:
        return []
    last = "" if line.endswith(" ") else words[-1]
    if last.startswith("-"):
        return [f"--{name}" for name in verb.options]
    if verb.name == "engine":
        return ["local", "ray"]
    if not verb.runs:
        return []
    from taas.records import read_records

    records = read_records()
    return list(dict.fromkeys(r.name for r in reversed(records) if r.live or verb.runs == "all"))


# ---------------------------------------------------------------- the table


def _table(verbs: Iterable[Verb]) -> dict[str, Verb]:
    return {verb.name: verb for verb in verbs}


VERBS: dict[str, Verb] = _table(
    (
        Verb("status", "", "the runs that go on: state, ranks, time, device, delivery, what is wrong"),
        Verb(
            "logs",
            "[RUN] [--rank R] [--follow]",
            "what all ranks have written, or some (--rank 0,3-5)",
            1,
            {"rank": True, "follow": False},
            "all",
        ),
        Verb(
            "stop", "[RUN]", "end a run, as the interrupt button ends a cell; again: at once", 1, {}, "live"
        ),
        Verb("stacks", "[RUN]", "where each rank stands now, ranks at one place together", 1, {}, "live"),
        Verb("attach", "[RUN]", "a run's output from its beginning, then live, then its names", 1, {}, "all"),
        Verb("history", "", "all runs that are kept, how they ended, and why"),
        Verb(
            "recover",
            "[RUN] [--overwrite]",
            "bring what only ranks other than 0 wrote into the project",
            1,
            {"overwrite": False},
            "all",
        ),
        Verb("engine", "[local|ray ADDRESS]", "where machines come from", 2),
        Verb("release", "", "give back warm ranks and machines that no run uses"),
        Verb("doctor", "", "what this machine has, what it lacks, and what to do about it"),
    )
)
