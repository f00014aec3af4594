"""The one parser of what is typed after ``#pragma taas``, ``%%taas`` and ``%taas VERB``: words, and options of a table."""

from __future__ import annotations

import itertools
import re
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from taas.errors import HeaderError
from taas.wording import counted, nearest, shown

TYPE_NAME = re.compile(r"[a-z]\d+\.\d+", re.ASCII)


@dataclass(frozen=True)
class Option:
    """One row of a table of options.

    Attributes:
        metavar: how its value is written in help; empty for an option that takes none, as ``convert`` is None then.
        convert: what its value may be.
        setting: section and key of ``taas.toml`` that say what holds without it.
        delivers: concerns registered loaders only, so that it needs ``--cpus``.
    """

    name: str
    metavar: str = ""
    convert: Kind | None = None
    help: str = ""
    setting: str = ""
    repeats: bool = False
    delivers: bool = False

    @property
    def choices(self) -> list[str]:
        """The words among its values, for completion."""
        return [word for word in self.metavar.split("|") if word.islower() or word.isdecimal()]

    @property
    def usage(self) -> str:
        """How it is typed."""
        return f"--{self.name} {self.metavar}".rstrip()


@dataclass(frozen=True)
class Line:
    """What was typed: words, and options by name: one without a value is True, one that repeats a tuple."""

    words: tuple[str, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)


def split_words(text: str) -> list[str]:
    """Split at blanks outside quotes, as a shell does, up to a ``#`` that starts a word."""
    reader = shlex.shlex(text, posix=True)
    reader.whitespace_split, reader.commenters, reader.escape = True, "", ""
    reader.whitespace += "\u00a0"
    try:
        return [*itertools.takewhile(lambda word: not word.startswith("#"), reader)]
    except ValueError:
        fact = f"{shown(text.strip())}: a quote is opened and not closed"
        raise HeaderError(f"{fact}; allowed is 'a b' or \"a b\"; close it") from None


def read_line(words: list[str], table: Mapping[str, Option], most_words: int = 0, above: str = "") -> Line:
    """Read a line by a table of options, among which so many words may stand; ``above``: what else it may be, elsewhere.

    Raises:
        HeaderError: one line: what is wrong, what is allowed, what to type instead.
    """
    alone: list[str] = []
    given: dict[str, Any] = {}
    waiting = list(words)
    while waiting:
        word = waiting.pop(0)
        name, equals, value = word[2:].partition("=")
        if not word.startswith("-") and len(alone) < most_words:
            alone.append(word)
            continue
        if not word.startswith("--") or name not in table:
            raise HeaderError(_unknown(word, table, above))
        option = table[name]
        if name in given and not option.repeats:
            raise HeaderError(f"--{name} is given twice: allowed is once; leave one of them out")
        result = _read_value(option, value if equals else None, waiting)
        given[name] = (*given.get(name, ()), result) if option.repeats else result
    return Line(tuple(alone), given)


def _unknown(word: str, table: Mapping[str, Option], above: str) -> str:
    name = word.lstrip("-").partition("=")[0].replace("_", "-")
    near = nearest(name, table, 0.6 if word.startswith("-") else 0.8)
    step = f"type --{near}" if near else "leave it out (a value is one word: a,b or 'a b')"
    allowed = ", ".join([above] * bool(above) + [f"--{name}" for name in table])
    return f"{shown(word)} is no option: allowed is {allowed or 'none'}; {step}"


def _read_value(option: Option, joined: str | None, waiting: list[str]) -> Any:
    """Read an option's value: what was joined to it by ``=``, else the next word."""
    name = option.name
    if option.convert is None:
        if joined is not None:
            raise HeaderError(f"--{name}={shown(joined)}: allowed is --{name} without a value; type --{name}")
        return True
    missing = joined is None and (not waiting or waiting[0].startswith("--"))
    value = joined if joined is not None else "" if missing else waiting.pop(0)
    try:
        return option.convert(value)
    except ValueError:
        what = f"--{name} has no value" if missing else f"--{name} {shown(value)}"
        allowed = f"allowed is {option.convert.allowed}; type --{name} {option.convert.instead}"
        more = (
            " (a name in {} or after $ is expanded only where the notebook has it)"
            if {*"{$"} & {*value}
            else ""
        )
        raise HeaderError(f"{what}: {allowed}{more}") from None


# ---------------------------------------------------------------- kinds of values


@dataclass(frozen=True)
class Kind:
    """What may be typed for a value, and what it comes to.

    Attributes:
        pattern: how its whole text looks.
        allowed, instead: that in words, and an example.
        make: text to value; a ValueError: it looks right and is not.
    """

    pattern: str
    allowed: str
    instead: str
    make: Callable[[str], Any] = str

    def __call__(self, text: str) -> Any:
        """Return the value of a text; a ValueError: it is not allowed."""
        if not re.fullmatch(self.pattern, text, re.DOTALL):
            raise ValueError(text)
        return self.make(text)


_NUMBER, _NAME = "[0-9]{1,15}", r"[^\W\d]\w*"


def _listed(one: str) -> str:
    """The pattern of several with commas between them."""
    return f"{one}(?:,{one})*"


def _between(low: int, high: int) -> Callable[[str], int]:
    def make(text: str) -> int:
        if not low <= int(text) <= high:
            raise ValueError(text)
        return int(text)

    return make


_MOST = 10**15 - 1


def whole(low: int, high: int = _MOST) -> Kind:
    """A whole number from ``low`` to ``high``."""
    bounds = f"of at least {low}" if high == _MOST else f"from {low} to {high}"
    return Kind(_NUMBER, f"a whole number {bounds}", "1", _between(low, high))


def choice(*words: str) -> Kind:
    """One of a few words."""
    return Kind("|".join(words), " or ".join(words), words[0])


def text_of(allowed: str, instead: str) -> Kind:
    """Any text but none; what it names is looked for when the run starts."""
    return Kind("[^\0]+", allowed, instead)


MAX_GPUS = 8192
gpus = Kind(
    f"auto|{_NUMBER}",
    f"a whole number from 1 to {MAX_GPUS}, or auto",
    "auto",
    lambda text: None if text == "auto" else _between(1, MAX_GPUS)(text),
)
"""How many ranks; None for ``auto``."""


def _counts(text: str) -> int | dict[str, int]:
    pairs = [part.rpartition("=") for part in text.split(",")]
    counts = {name: _between(1, _MOST)(count) for name, _, count in pairs}
    if len(counts) < len(pairs):
        raise ValueError(text)
    return counts.get("", counts)


units = Kind(
    f"{_NUMBER}|{_listed(f'{_NAME}={_NUMBER}')}",
    "a whole number of at least 1, or NAME=K,… with each loader once",
    "20480",
    _counts,
)
"""Elements of each loader, or of each loader by its name."""


def ranks(*words: str) -> Kind:
    """One of a few words, or ranges of ranks."""

    def make(text: str) -> str | tuple[int, ...]:
        if text in words:
            return text
        ends = [[_between(0, MAX_GPUS)(end) for end in part.split("-")] for part in text.split(",")]
        if any(end[0] > end[-1] for end in ends):
            raise ValueError(text)
        return tuple(sorted({rank for end in ends for rank in range(end[0], end[-1] + 1)}))

    pattern = "|".join((*words, _listed(f"{_NUMBER}(?:-{_NUMBER})?")))
    return Kind(pattern, f"{', '.join(words)}, or ranks such as 0,3-5", "all", make)


def check_ranks(ranks: tuple[int, ...], world_size: int, option: str) -> None:
    """Refuse ranks, by a HeaderError, that a run does not have."""
    if ranks[-1] >= world_size:
        raise HeaderError(
            f"--{option} with rank {ranks[-1]}: allowed is up to {world_size - 1} in a run of "
            f"{counted(world_size, 'rank')}; type --{option} all"
        )


names = Kind(
    _listed(_NAME),
    "names of the notebook with commas and without spaces between them, or none",
    "model,losses",
    lambda text: () if text == "none" else tuple(dict.fromkeys(text.split(","))),
)
"""Names of the notebook, or none."""

_UNITS = {"": 1, "s": 1, "sec": 1, "m": 60, "min": 60, "h": 3600}
_UNITS |= {
    "K": 10**3,
    "M": 10**6,
    "G": 10**9,
    "T": 10**12,
    "Ki": 2**10,
    "Mi": 2**20,
    "Gi": 2**30,
    "Ti": 2**40,
}


def _measured(text: str) -> float:
    """Return a decimal number times what the unit behind it stands for."""
    number = re.match("[0-9.]+", text)
    assert number is not None
    return float(number[0]) * _UNITS[text[number.end() :].strip().removesuffix("B")]


_TIME = r"[0-9]{1,9}(?:\.[0-9]{1,6})?(?:s|sec|m|min|h)?"
seconds = Kind(
    rf"(?=[^a-z]*[1-9]){_TIME}", "a number of seconds above 0, or a time such as 5min", "300", _measured
)
"""A length of time above 0, in seconds where no unit is given."""
seconds_or_none = Kind(_TIME, "a number of seconds, or a time such as 5min", "300", _measured)
"""A length of time that may be 0."""
size = Kind(
    r"[0-9]{1,15}|[0-9]{1,12}(?:\.[0-9]{1,6})?\s*[KMGT]i?B?",
    'a size: bytes, or "2 GiB", or "500 MB"',
    '"2 GiB"',
    lambda text: int(_measured(text)),
)
"""A number of bytes."""
run_name = Kind(r"\w[\w.-]{0,59}", "up to 60 letters, digits, dots, dashes and underscores", "train")
"""A name that can be typed after ``%taas logs``."""

BACKENDS = ("gloo", "nccl", "mpi", "ucc")
_BACKEND = f"(?:{'|'.join(BACKENDS)})"
backend = Kind(
    f"{_BACKEND}|{_listed(f'(?:cpu|cuda):{_BACKEND}')}",
    f"{', '.join(BACKENDS)}, or one per device such as cpu:gloo,cuda:nccl",
    "gloo",
)
"""A torch.distributed backend, or one per device type."""
