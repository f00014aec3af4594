"""The parser of words and options after ``#pragma taas``, ``%%taas`` and ``%taas VERB``."""

from __future__ import annotations

import itertools
import math
import re
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from taas.base.wording import counted, nearest, refusal, shown
from taas.errors import HeaderError

TYPE_NAME = re.compile(r"[a-z]\d+\.\d+", re.ASCII)


@dataclass(frozen=True)
class Option:
    """A row of a table of options.

    Attributes:
        metavar: the placeholder for its value in help texts; empty for an option without a value.
        convert: the kind of its value; None for an option without a value.
        setting: the section and key of ``taas.toml`` that set its default.
        repeats: whether it may be given several times; its value is a tuple then.
        delivers: whether it is for registered loaders only, and so needs ``--cpus``.
        meant_by: its names in other launchers, and other words that people type for it.
    """

    name: str
    metavar: str = ""
    convert: Kind | None = None
    help: str = ""
    setting: str = ""
    repeats: bool = False
    delivers: bool = False
    meant_by: tuple[str, ...] = ()

    @property
    def choices(self) -> list[str]:
        """The words among its values, for completion."""
        return [word for word in self.metavar.split("|") if word.islower() or word.isdecimal()]

    @property
    def usage(self) -> str:
        """The option with its value, for help texts."""
        return f"--{self.name} {self.metavar}".rstrip()

    @property
    def about(self) -> str:
        """For completion: the option's value, and what the option does."""
        return ": ".join(filter(None, (self.metavar, self.help)))


@dataclass(frozen=True)
class Line:
    """The words and options of a line.

    The value of an option without a value is True; that of an option that repeats is a tuple.
    """

    words: tuple[str, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)


def split_words(text: str) -> list[str]:
    """Split at whitespace outside quotes, as a shell does, up to a ``#`` that starts a word."""
    reader = shlex.shlex(text, posix=True)
    reader.whitespace_split, reader.commenters, reader.escape = True, "", ""
    reader.whitespace += "\u00a0"
    try:
        return [*itertools.takewhile(lambda word: not word.startswith("#"), reader)]
    except ValueError:
        fact = f"{shown(text.strip())}: a quote is opened and not closed"
        raise HeaderError(refusal(fact, "close it, as in 'a b' or \"a b\"")) from None


def read_line(
    words: list[str],
    table: Mapping[str, Option],
    most_words: int = 0,
    elsewhere: Mapping[str, str] | None = None,
) -> Line:
    """Parse a line by a table of options; up to ``most_words`` other words may be among them.

    ``elsewhere`` has, by name, the advice for words that people mistake for options of this line.

    Raises:
        HeaderError: one line: what is wrong, what to type instead, and what is allowed.
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
            raise HeaderError(_unknown(word, table, elsewhere or {}))
        option = table[name]
        if name in given and not option.repeats:
            raise HeaderError(refusal(f"--{name} is given twice", "leave one of them out"))
        result = _read_value(option, value if equals else None, waiting, alone=most_words == 0)
        given[name] = (*given.get(name, ()), result) if option.repeats else result
    return Line(tuple(alone), given)


_DASHES = "-\u2010\u2011\u2012\u2013\u2014\u2212"
"""The hyphen that begins an option, and the dashes into which editors and web pages convert it."""


def _unknown(word: str, table: Mapping[str, Option], elsewhere: Mapping[str, str]) -> str:
    """Return which option an unknown word was meant to be, or else list the options."""
    typed, equals, value = word.partition("=")
    name = typed.lstrip(_DASHES).replace("_", "-").lower()
    has_dashes = typed[:1] in tuple(_DASHES) and bool(name)
    # in `gpus=4`, too, the beginning is the name of an option
    names_one = has_dashes or bool(equals)
    fact = f"no option {shown(typed)}" if has_dashes else f"{shown(word)} is no option"
    if name in elsewhere and names_one:
        return refusal(fact, elsewhere[name].format(value=shown(value) or "…"))
    meant = _option_called(name, table, also_nearly=names_one)
    if word.isdecimal() and "gpus" in table:
        return f"{fact}: did you mean --gpus {shown(word)}?"
    near = meant or nearest(name, table, 0.6 if has_dashes else 0.8)
    if near:
        return f"{fact}: did you mean --{near}{equals}{shown(value)}?"
    instead = "leave it out" if has_dashes else "leave it out, or put a value in quotes"
    allowed = ", ".join(f"--{name}" for name in table) or "none"
    return refusal(fact, instead, allowed)


def _option_called(name: str, table: Mapping[str, Option], *, also_nearly: bool) -> str | None:
    """Return the option with this name or, if ``also_nearly``, with this other name."""
    if name in table:
        return name
    if also_nearly:
        for option in table.values():
            if name in option.meant_by:
                return option.name
    return None


def _read_value(option: Option, joined: str | None, waiting: list[str], *, alone: bool) -> Any:
    """Parse an option's value: the text after ``=``, or else the next word.

    ``alone``: the line consists of options only, so words after the value were meant for it, too.
    """
    name, kind = option.name, option.convert
    if kind is None:
        _refuse_value(name, joined, waiting, alone=alone)
        return True
    missing = joined is None and (not waiting or waiting[0].startswith("--"))
    if joined is not None:
        value = joined
    elif missing:
        value = ""
    else:
        value = waiting.pop(0)
    beside: list[str] = []
    if alone:
        words = (word for word in waiting if word)
        beside = [*itertools.takewhile(lambda word: word[0] not in _DASHES, words)]
    whole = " ".join((value, *beside))
    try:
        result = kind(value)
    except ValueError:
        fact = f"--{name} has no value" if missing else f"--{name} {shown(whole) or repr(whole)}"
        raise HeaderError(_wrong_value(option, fact, kind.near(whole))) from None
    near = kind.near(whole) if beside else None
    if near and near != value:  # otherwise the words after it were not meant for it
        raise HeaderError(_wrong_value(option, f"--{name} {shown(whole)}", near))
    return result


def _refuse_value(name: str, joined: str | None, waiting: list[str], *, alone: bool) -> None:
    """Raise HeaderError if an option without a value was given one."""
    instead = f"type --{name}, which takes no value"
    if joined is not None:
        raise HeaderError(refusal(f"--{name}={shown(joined)}", instead))
    next_word = waiting[0] if waiting else ""
    is_meant_for_it = alone and "=" not in next_word and next_word[:1] not in _DASHES
    if is_meant_for_it:
        raise HeaderError(refusal(f"--{name} {shown(next_word)}", instead))


def _wrong_value(option: Option, fact: str, near: str | None) -> str:
    """Return the message about a wrong value: which value was meant, or which are allowed."""
    assert option.convert is not None
    if near:
        return f"{fact}: did you mean --{option.name} {near}? Allowed is {option.convert.allowed}"
    more = (
        " (a name in {} or after $ is expanded only where the notebook has it)"
        if {*"{$"} & {*fact}
        else ""
    )
    return refusal(
        fact, f"type --{option.name} {option.convert.instead}", option.convert.allowed + more
    )


# ---------------------------------------------------------------- kinds of values


@dataclass(frozen=True)
class Kind:
    """A kind of value: the text that may be typed for it, and how it is converted.

    Attributes:
        pattern: a regular expression for the whole text.
        allowed, instead: what is allowed, in words, and an example.
        make: converts a text that matches the pattern; raises ValueError if the text is invalid.
        guess: returns the text that was probably meant by an invalid one; empty if unknown.
    """

    pattern: str
    allowed: str
    instead: str
    make: Callable[[str], Any] = str
    guess: Callable[[str], str] = str

    def __call__(self, text: str) -> Any:
        """Return the value of a text; raise ValueError if it is not allowed, or is not UTF-8."""
        text.encode()
        if not re.fullmatch(self.pattern, text, re.DOTALL):
            raise ValueError(text)
        return self.make(text)

    def near(self, text: str) -> str | None:
        """Return the text that was surely meant by an invalid one, ready to type; or None."""
        guess = self.guess(text.strip())
        try:
            self(guess)
        except ValueError:
            return None
        return guess if re.fullmatch(r"[^\s'\"#]+", guess) else f"'{guess}'"


_NUMBER, _NAME = "[0-9]{1,15}", r"[^\W\d]\w*"


def _list_pattern(one: str) -> str:
    """Return the pattern of a list with commas, from the pattern of one item."""
    return f"{one}(?:,{one})*"


def _between(low: int, high: int) -> Callable[[str], int]:
    def make(text: str) -> int:
        if not low <= int(text) <= high:
            raise ValueError(text)
        return int(text)

    return make


_MOST = 10**15 - 1
_THOUSANDS = {"k": 10**3, "m": 10**6, "g": 10**9, "b": 10**9}
_IN_WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight")


def _number_in(text: str) -> str:
    """Return the number that a text was meant to be, or else an empty string.

    Such texts are ``20,480``, ``20k``, ``1e3``, ``8 GPUs`` and ``four``.
    """
    plain = text.lower().replace("_", "").replace(",", "").strip("=\"' ")
    if plain in _IN_WORDS:
        return str(_IN_WORDS.index(plain))
    found = re.match(r"([0-9]{1,15}(?:\.[0-9]+)?(?:e[0-9])?)\s*([kmgb]?)(?![0-9])", plain)
    if found is None:
        return ""
    return f"{math.ceil(float(found[1]) * _THOUSANDS.get(found[2], 1) - 1e-6)}"


def _number_within(low: int, high: int) -> Callable[[str], str]:
    def guess(text: str) -> str:
        number = _number_in(text)
        return str(min(max(int(number), low), high)) if number else ""

    return guess


def whole(low: int, high: int = _MOST) -> Kind:
    """Return the kind for whole numbers from ``low`` to ``high``."""
    bounds = f"of at least {low}" if high == _MOST else f"from {low} to {high}"
    return Kind(
        _NUMBER,
        f"a whole number {bounds}",
        "1",
        _between(low, high),
        guess=_number_within(low, high),
    )


def choice(*words: str) -> Kind:
    """Return the kind for one of a few words."""
    return Kind(
        "|".join(words),
        " or ".join(words),
        words[0],
        guess=lambda text: nearest(text, words, 0.5) or "",
    )


def text_of(allowed: str, instead: str) -> Kind:
    """Return the kind for any text that is not empty; it is checked when the run starts."""
    return Kind("[^\0]+", allowed, instead)


MAX_GPUS = 8192
gpus = Kind(
    f"auto|{_NUMBER}",
    f"a whole number from 1 to {MAX_GPUS}, or auto",
    "auto",
    lambda text: None if text == "auto" else _between(1, MAX_GPUS)(text),
    lambda text: "auto" if text.lower() in ("all", "every", "max", "-1", "*") else _number_in(text),
)
"""The number of ranks; None for ``auto``."""


def _counts(text: str) -> int | dict[str, int]:
    pairs = [part.rpartition("=") for part in text.split(",")]
    counts = {name: _between(1, _MOST)(count) for name, _, count in pairs}
    if len(counts) < len(pairs):
        raise ValueError(text)
    return counts.get("", counts)


def _counts_meant(text: str) -> str:
    """Return the numbers that a text was meant to be: ``20k``, ``train: 5, valid: 6``."""
    if not re.search("[=:]", text):
        return _number_in(text)
    return re.sub(r"[\s,;]+", ",", re.sub(r"\s*[=:]\s*", "=", text))


units = Kind(
    f"{_NUMBER}|{_list_pattern(f'{_NAME}={_NUMBER}')}",
    "a whole number of at least 1, or NAME=K,… with each loader once",
    "20480",
    _counts,
    _counts_meant,
)
"""A number of batches for each loader, or numbers by the names of the loaders."""


def ranks(*words: str) -> Kind:
    """Return the kind for one of a few words, or for ranges of ranks."""

    def make(text: str) -> str | tuple[int, ...]:
        if text in words:
            return text
        ends = [[_between(0, MAX_GPUS)(end) for end in part.split("-")] for part in text.split(",")]
        if any(end[0] > end[-1] for end in ends):
            raise ValueError(text)
        return tuple(sorted({rank for end in ends for rank in range(end[0], end[-1] + 1)}))

    pattern = "|".join((*words, _list_pattern(f"{_NUMBER}(?:-{_NUMBER})?")))
    allowed = f"{', '.join(words)}, or ranks such as 0,3-5"
    return Kind(pattern, allowed, "all", make, _ranks_meant)


def _ranks_meant(text: str) -> str:
    """Return the ranks that a text was meant to list: ``[0,1]``, ``0:3``, ``0..3``, ``rank 3``."""
    inner = re.sub(r"ranks?|[\[\](){}'\"]", "", text.lower()).strip()
    inner = re.sub(r"\s*(?:-|–|:|\.\.+|to)\s*", "-", inner)
    return re.sub(r"[\s,;]+", ",", inner)


def check_ranks(ranks: tuple[int, ...], world_size: int, option: str) -> None:
    """Raise a HeaderError for ranks that a run does not have."""
    if ranks[-1] >= world_size:
        raise HeaderError(
            f"--{option} with rank {ranks[-1]}: type --{option} all; allowed is up to"
            f" {world_size - 1} in a run of {counted(world_size, 'rank')}"
        )


names = Kind(
    _list_pattern(_NAME),
    "names of the notebook with commas and without spaces between them, or none",
    "model,losses",
    lambda text: () if text == "none" else tuple(dict.fromkeys(text.split(","))),
    lambda text: ",".join(re.findall(r"(?<![\w.])[^\W\d]\w*", text)),
)
"""Names of variables of the notebook, or none."""

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


def _parse_quantity(text: str) -> float:
    """Return a decimal number times its unit."""
    number = re.match("[0-9.]+", text)
    assert number is not None
    return float(number[0]) * _UNITS[text[number.end() :].strip().removesuffix("B")]


_TIME = r"[0-9]{1,9}(?:\.[0-9]{1,6})?(?:s|sec|m|min|h)?"
_OTHER_TIMES = {
    "ms": (0.001, "s"),
    "s": (1, "s"),
    "m": (1, "min"),
    "h": (1, "h"),
    "d": (24, "h"),
    "w": (168, "h"),
}


def _time_meant(text: str) -> str:
    """Return the time that a text was meant to be: ``2hrs``, ``1 day``, ``1:30:00``, ``500ms``."""
    clock = re.fullmatch(r"(?:([0-9]{1,3}):)?([0-9]{1,3}):([0-9]{2})", text)
    if clock is not None:
        hours, minutes, left = (int(part or 0) for part in clock.groups())
        return f"{3600 * hours + 60 * minutes + left}"
    found = re.fullmatch(r"([0-9]{1,9}(?:\.[0-9]{1,6})?)\s*(ms|[smhdw])[a-z]*\.?", text.lower())
    if found is None:
        return ""
    times, unit = _OTHER_TIMES[found[2]]
    return f"{float(found[1]) * times:g}{unit}"


seconds = Kind(
    rf"(?=[^a-z]*[1-9]){_TIME}",
    "a number of seconds above 0, or a time such as 5min",
    "300",
    _parse_quantity,
    _time_meant,
)
"""A duration above 0, in seconds if it has no unit."""
seconds_or_none = Kind(
    _TIME, "a number of seconds, or a time such as 5min", "300", _parse_quantity, _time_meant
)
"""A duration, which may be 0."""
size = Kind(
    r"[0-9]{1,15}|[0-9]{1,12}(?:\.[0-9]{1,6})?\s*[KMGT]i?B?",
    'a size: bytes, or "2 GiB", or "500 MB"',
    '"2 GiB"',
    lambda text: int(_parse_quantity(text)),
)
"""A number of bytes."""
run_name = Kind(
    r"\w[\w.-]{0,59}",
    "up to 60 letters, digits, dots, dashes and underscores",
    "train",
    guess=lambda text: re.sub(r"[^\w.-]+", "-", text).strip(".-")[:60],
)
"""A name that can be typed after ``%taas logs``."""

BACKENDS = ("gloo", "nccl", "mpi", "ucc")
_BACKEND = f"(?:{'|'.join(BACKENDS)})"
backend = Kind(
    f"{_BACKEND}|{_list_pattern(f'(?:cpu|cuda):{_BACKEND}')}",
    f"{', '.join(BACKENDS)}, or one per device such as cpu:gloo,cuda:nccl",
    "gloo",
    guess=lambda text: nearest(text, (*BACKENDS, "cpu:gloo,cuda:nccl"), 0.5) or "",
)
"""A torch.distributed backend, or one for each device type."""
