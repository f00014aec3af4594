"""The one parser of what is typed after ``#pragma taas``, ``%%taas`` and ``%taas VERB``: words, and options of a table."""

from __future__ import annotations

import keyword
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from taas.errors import HeaderError
from taas.wording import counted, nearest, shown

_WORD = re.compile(r"""(?:"[^"]*"|'[^']*'|[^\s"'])+""")
_QUOTED = re.compile(r""""([^"]*)"|'([^']*)'""")
TYPE_NAME = re.compile(r"[a-z]\d+\.\d+", re.ASCII)
DASHES = re.compile(r"[-\u2010-\u2015\u2212]+")


@dataclass(frozen=True)
class Option:
    """One row of a table of options.

    Attributes:
        metavar: how its value is written in help; empty for an option that takes none, as ``convert`` is None then.
        convert: text to value, or `Wrong`.
        setting: section and key of ``taas.toml`` that say what holds without it.
        delivers: concerns registered loaders only, so that it needs ``--cpus``.
    """

    name: str
    metavar: str = ""
    convert: Callable[[str], Any] | None = None
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
    words, at = [], 0
    while rest := text[at:].lstrip():
        at = len(text) - len(rest)
        if rest[0] == "#":
            break
        match = _WORD.match(text, at)
        if match is None or (match.end() < len(text) and not text[match.end()].isspace()):
            raise HeaderError(
                f"{shown(rest)}: a quote is opened and not closed; allowed is 'a b' or \"a b\"; close it"
            )
        at = match.end()
        words.append(_QUOTED.sub(lambda m: m[1] if m[1] is not None else m[2], match[0]))
    return words


def read_line(
    words: list[str], table: Mapping[str, Option], unknown: Callable[[str], str], most_words: int = 0
) -> Line:
    """Read a line by a table of options, among which so many words may stand; ``unknown`` says why another one may not.

    Raises:
        HeaderError: one line: what is wrong, what is allowed, what to type instead.
    """
    alone: list[str] = []
    given: dict[str, Any] = {}
    waiting = list(words)
    while waiting:
        word = waiting.pop(0)
        name, equals, value = word[2:].partition("=")
        if not DASHES.match(word) and len(alone) < most_words:
            alone.append(word)
            continue
        if not word.startswith("--") or name not in table:
            raise HeaderError(unknown(word))
        option = table[name]
        if name in given and not option.repeats:
            raise HeaderError(f"--{name} is given twice: allowed is once; leave one of them out")
        result = _read_value(option, value if equals else None, waiting)
        given[name] = (*given.get(name, ()), result) if option.repeats else result
    return Line(tuple(alone), given)


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
    except Wrong as wrong:
        what = f"--{name} has no value" if missing else f"--{name} {shown(value)}"
        line = f"{what}: allowed is {wrong.allowed}; type --{name} {wrong.instead}"
        if "{" in what or "$" in what:
            line += " (a name in {} or after $ is expanded only where the notebook has it)"
        raise HeaderError(line) from None


# ---------------------------------------------------------------- converters


NUMBER = re.compile(r"\d{1,15}", re.ASCII)
_RANGE = re.compile(r"(\d{1,15})(?:-(\d{1,15}))?", re.ASCII)
_ELEMENTS = re.compile(r"(?:([^\W\d]\w*)=)?0*([1-9][0-9]{0,14})")


class Wrong(Exception):
    """A value is not allowed: what is, and what to type instead."""

    def __init__(self, allowed: str, instead: str) -> None:
        super().__init__(allowed, instead)
        self.allowed = allowed
        self.instead = instead


def whole(low: int, high: int | None = None) -> Callable[[str], int]:
    """A converter to a whole number from ``low`` to ``high``."""
    allowed = (
        f"a whole number from {low} to {high}" if high is not None else f"a whole number of at least {low}"
    )

    def convert(text: str) -> int:
        begins = NUMBER.match(text)  # "2," and "8x"
        number = int(begins[0]) if begins else max(low, 1)
        near = max(low, min(number, number if high is None else high))
        if near != number or not NUMBER.fullmatch(text):
            raise Wrong(allowed, str(near))
        return number

    return convert


def choice(*allowed: str) -> Callable[[str], str]:
    """A converter that takes one of a few words."""

    def convert(text: str) -> str:
        if text not in allowed:
            raise Wrong(" or ".join(allowed), nearest(text, allowed, 0.3) or allowed[0])
        return text

    return convert


MAX_GPUS = 8192


def gpus(text: str) -> int | None:
    """How many ranks; None for ``auto``."""
    try:
        return None if text == "auto" else whole(1, MAX_GPUS)(text)
    except Wrong as wrong:
        raise Wrong(f"{wrong.allowed}, or auto", wrong.instead if NUMBER.match(text) else "auto") from None


def units(text: str) -> int | dict[str, int]:
    """Elements of each loader, or of each loader by its name."""
    parts = [_ELEMENTS.fullmatch(part) for part in text.split(",")]
    counts = {part[1] or "": int(part[2]) for part in parts if part}
    if len(counts) < len(parts) or ("" in counts and len(parts) > 1):
        allowed = "a whole number of at least 1, or NAME=K,… with each loader once"
        raise Wrong(allowed, "train=20480,valid=400" if "=" in text else "20480")
    return counts.get("", counts)


@dataclass(frozen=True)
class RankRanges:
    """Inclusive ranges of ranks as typed (``0,3-5``): not spread out, since nobody has compared them with the run yet."""

    ranges: tuple[tuple[int, int], ...]

    def within(self, world_size: int, option: str) -> tuple[int, ...]:
        """Return the ranks, in order; a HeaderError: the run has fewer."""
        highest = max(last for _, last in self.ranges)
        if highest >= world_size:
            raise HeaderError(
                f"--{option} with rank {highest}: allowed is up to {world_size - 1} in a run of "
                f"{counted(world_size, 'rank')}; type --{option} all"
            )
        return tuple(sorted({rank for first, last in self.ranges for rank in range(first, last + 1)}))


def ranks(*words: str) -> Callable[[str], str | RankRanges]:
    """A converter to one of a few words, or ranges of ranks."""

    def convert(text: str) -> str | RankRanges:
        if text in words:
            return text
        parts = [_RANGE.fullmatch(part) for part in text.split(",")]
        ranges = tuple((int(part[1]), int(part[2] or part[1])) for part in parts if part)
        if len(ranges) < len(parts) or any(first > last for first, last in ranges):
            raise Wrong(f"{', '.join(words)}, or ranks such as 0,3-5", nearest(text, words, 0.5) or "all")
        return RankRanges(ranges)

    return convert


def names(text: str) -> tuple[str, ...]:
    """Names of the notebook, or none."""
    if text == "none":
        return ()
    found = tuple(text.split(","))
    if not all(name.isidentifier() and not keyword.iskeyword(name) for name in found):
        raise Wrong(
            "names of the notebook with commas and without spaces between them, or none", "model,losses"
        )
    return tuple(dict.fromkeys(found))


_TIME = re.compile(r"(\d{1,9}(?:\.\d{1,6})?)(s|sec|m|min|h)?", re.ASCII)
_SECONDS = {"m": 60, "min": 60, "h": 3600}


def seconds(text: str) -> float:
    """A length of time above 0, in seconds where no unit is given."""
    match = _TIME.fullmatch(text)
    if match is None or float(match[1]) <= 0:
        raise Wrong("a number of seconds above 0, or a time such as 5min", "300")
    return float(match[1]) * _SECONDS.get(match[2] or "s", 1)


def seconds_or_none(text: str) -> float:
    """A length of time that may be 0."""
    return 0.0 if re.fullmatch(r"0+(\.0+)?", text) else seconds(text)


_SIZE = re.compile(r"(\d{1,12}(?:\.\d{1,6})?)\s*([KMGT]i?)?B?", re.ASCII)
_UNITS = {"K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}


def size(text: str) -> int:
    """A number of bytes: ``2 GiB``, ``500 MB``, or a whole number."""
    match = _SIZE.fullmatch(text.strip())
    if match is None or (match[2] is None and not NUMBER.fullmatch(text)):
        raise Wrong('a size: bytes, or "2 GiB", or "500 MB"', '"2 GiB"')
    return int(float(match[1]) * _UNITS.get(match[2] or "", 1))


def run_name(text: str) -> str:
    """A name that can be typed after ``%taas logs``."""
    if not re.fullmatch(r"\w[\w.-]{0,59}", text):
        near = re.sub(r"[^\w.-]+", "-", text).strip("-.")[:40]
        raise Wrong("up to 60 letters, digits, dots, dashes and underscores", near or "train")
    return text


BACKENDS = ("gloo", "nccl", "mpi", "ucc")
_BACKEND = re.compile("{0}|{1}(,{1})*".format(one := f"(?:{'|'.join(BACKENDS)})", f"(cpu|cuda):{one}"))


def backend(text: str) -> str:
    """A torch.distributed backend, or one per device type."""
    if not _BACKEND.fullmatch(text):
        allowed = f"{', '.join(BACKENDS)}, or one per device such as cpu:gloo,cuda:nccl"
        raise Wrong(allowed, nearest(text, BACKENDS, 0.3) or BACKENDS[0])
    return text


def text_of(allowed: str, instead: str) -> Callable[[str], str]:
    """A converter that takes any text but none; what it names is looked for when the run starts."""

    def convert(text: str) -> str:
        if not text or "\0" in text:
            raise Wrong(allowed, instead)
        return text

    return convert
