"""The table of verbs for ``%taas VERB`` in a notebook and ``taas VERB`` in a terminal.

:mod:`taas.notebook.steering` defines their actions; it is imported at its first use.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from taas.base.wording import in_columns
from taas.errors import HeaderError
from taas.header.arguments import Line, Option, ranks, read_line, text_of
from taas.header.catalog import SLURM_OPTIONS

_MOST_RUNS = 20


@dataclass(frozen=True)
class Verb:
    """One row of the table.

    Attributes:
        words: the words that may follow, as shown in the help.
        offers: those of the words that are typed literally, each with its meaning.
    """

    name: str
    words: str
    help: str
    options: tuple[Option, ...] = ()
    offers: Mapping[str, str] = field(default_factory=dict)

    @property
    def usage(self) -> str:
        """How to type the verb."""
        return " ".join(
            (self.name, *self.words.split(), *(f"[{option.usage}]" for option in self.options))
        )

    def read(self, words: list[str]) -> Line:
        """Read the words after the verb; a `HeaderError` says what to type instead."""
        try:
            return read_line(words, {o.name: o for o in self.options}, len(self.words.split()))
        except HeaderError as error:
            raise HeaderError(f"%taas {self.name} {error}") from None


def help_text() -> str:
    """Return the text of ``%taas?`` and ``--help``."""
    table = in_columns((verb.usage, verb.help) for verb in VERBS.values())
    return (
        "See and steer runs. %taas VERB in a notebook and taas VERB in a terminal are\n"
        "the same; %taas alone is %taas status. RUN is a run's name, this notebook's own\n"
        f"first; without it its newest is meant.\n\n{table}\n\n"
        "A cell becomes a run by the line `#pragma taas --gpus 8` on top of it;\n"
        "%%taas? lists the options."
    )


def complete(line: str) -> dict[str, str]:
    """Return the possible completions of the last word of a line, each with its meaning.

    The line begins after ``%taas``.
    """
    name, *rest = re.split(r"[\s=]+", line)
    verb = VERBS.get(name)
    if not rest:
        return {verb.name: verb.help for verb in VERBS.values()}
    if verb is None:
        return {}
    options = {f"--{option.name}": option for option in verb.options}
    asking = options.get(([name, *rest])[-2])
    if asking is not None and asking.convert is not None:
        return dict.fromkeys(asking.choices, asking.help)
    if rest[-1].startswith("-") or len(rest) > len(verb.words.split()):
        return {text: option.about for text, option in options.items()}
    if "RUN" in verb.words:
        return _runs(live=name in ("stop", "stacks"))
    return dict(verb.offers) or {text: option.about for text, option in options.items()}


def _runs(*, live: bool) -> dict[str, str]:
    """Return the newest runs, each with its outcome; ``live``: only active ones."""
    from taas.runs.records import read_records  # here, so that `import taas` stays cheap

    found = [record for record in read_records()[::-1] if record.live or not live]
    return {
        record.name: f"{record.outcome or record.state}, of {record.owner}"
        for record in found[:_MOST_RUNS]
    }


# ---------------------------------------------------------------- the table


_JSON = (Option("json", help="for programs: one line of JSON"),)
_TO = Option("to", "DIR", text_of("a folder", "program"), "where the program is written")
_STOP = (
    "end this notebook's run, or any by its name, as the interrupt button ends a cell; again, or"
    " --now: at once"
)
_ROWS = (
    Verb(
        "status",
        "",
        "the runs that go on: state, ranks, time, device, delivery, what is wrong",
        _JSON,
    ),
    Verb(
        "logs",
        "[RUN]",
        "what all ranks have written, or some (--rank 0,3-5)",
        (
            Option("rank", "R", ranks("all"), "of these ranks, such as 0,3-5"),
            Option("follow", help="go on until the run is over, or somebody has seen enough"),
        ),
    ),
    Verb(
        "stop",
        "[RUN]",
        _STOP,
        (Option("now", help="at once: what its cell would still save is lost"),),
    ),
    Verb("stacks", "[RUN]", "where each rank stands now, ranks at one place together"),
    Verb("attach", "[RUN]", "a run's output from its beginning, then live, then its names"),
    Verb("top", "[RUN]", "a run's ranks, a row each: state, use, last line; redrawn each second"),
    Verb("history", "", "all runs that are kept, how they ended, and why", _JSON),
    Verb(
        "recover",
        "[RUN]",
        "bring what only ranks other than 0 wrote into the project",
        (Option("overwrite", help="also in place of files that the project has"),),
    ),
    Verb(
        "export",
        "[RUN]",
        "a run's cell, and what it needs of the notebook, as a program for torchrun",
        (_TO,),
    ),
    Verb(
        "engine",
        "[local|ray ADDRESS|slurm]",
        "where machines come from; the options are Slurm's, --check tries it",
        (
            *SLURM_OPTIONS,
            Option("check", help="try what a run needs of it, and say what is missing"),
        ),
        {
            "local": "this machine",
            "ray": "a Ray cluster: the address of its head, or auto on one of its nodes",
            "slurm": "a Slurm cluster, with its options",
        },
    ),
    Verb(
        "config",
        "",
        "the settings that hold, where each was set, and the option that a header has for it",
        _JSON,
    ),
    Verb(
        "setup",
        "",
        "the setup cells, which each new process of a run runs first; --clear: forget them",
        (Option("clear"),),
    ),
    Verb("types", "", "the instance types that #!TYPE may name, and their GPUs", _JSON),
    Verb(
        "run",
        "SCRIPT",
        "in a terminal: a script as a cell; its header, or options such as --gpus 8 --on g2.8",
    ),
    Verb(
        "install",
        "",
        "have every notebook load taas: a file in IPython's startup folder",
        (Option("undo", help="take that file away again"),),
    ),
    Verb("release", "", "give back warm ranks and machines that no run uses"),
    Verb(
        "doctor",
        "",
        "what this machine has, what it lacks, and what to do; --report: a file about a run, for a"
        " bug report",
        (Option("report", "RUN", text_of("a run's name", "r5")),),
    ),
)
VERBS = {verb.name: verb for verb in _ROWS}
