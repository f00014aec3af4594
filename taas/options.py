"""The options of a cell header: one table that the parser, the help and the tests read.

Adding an option is adding a row to `OPTIONS`. A row's converter turns the text of a value into the value, or
raises `Wrong` with what is allowed and what to type instead.
"""

from __future__ import annotations

import keyword
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from taas.errors import HeaderError
from taas.wording import nearest, shown

__all__ = ["OPTIONS", "Option", "Wrong", "options_table", "read_options"]

_NUMBER = re.compile(r"\d{1,15}", re.ASCII)
_WORD = re.compile(r"""(?:"[^"]*"|'[^']*'|[^\s"'])+""")
_QUOTED = re.compile(r""""([^"]*)"|'([^']*)'""")
_DASHES = re.compile(r"[-\u2010-\u2015\u2212]+")


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
        if not _NUMBER.fullmatch(text):
            raise Wrong(allowed, str(low if high is None else high))
        number = int(text)
        if number < low or (high is not None and number > high):
            raise Wrong(allowed, str(low if number < low or high is None else high))
        return number

    return convert


def choice(*allowed: str) -> Callable[[str], str]:
    """A converter that takes one of a few words."""

    def convert(text: str) -> str:
        if text not in allowed:
            raise Wrong(" or ".join(allowed), nearest(text, allowed) or allowed[0])
        return text

    return convert


MAX_GPUS = 1024


def gpus(text: str) -> int | None:
    """How many ranks; None for ``auto``."""
    if text == "auto":
        return None
    try:
        return whole(1, MAX_GPUS)(text)
    except Wrong as wrong:
        instead = wrong.instead if _NUMBER.fullmatch(text) else nearest(text, ["auto"], 0.6) or "8"
        raise Wrong(f"{wrong.allowed}, or auto", instead) from None


def units(text: str) -> int | dict[str, int]:
    """Elements of each loader, or of each loader by its name."""
    if "=" not in text:
        try:
            return whole(1)(text)
        except Wrong as wrong:
            raise Wrong(f"{wrong.allowed}, or train=20480,valid=400", wrong.instead) from None
    counts: dict[str, int] = {}
    for part in text.split(","):
        name, _, number = part.partition("=")
        if not name.isidentifier() or not _NUMBER.fullmatch(number) or int(number) < 1 or name in counts:
            raise Wrong("each loader's name once, with a whole number of at least 1", "train=20480,valid=400")
        counts[name] = int(number)
    return counts


def output(text: str) -> str | tuple[tuple[int, int], ...]:
    """``0``, ``all``, ``none``, or inclusive ranges of ranks (not spread out: nobody has checked them yet)."""
    if text in ("0", "all", "none"):
        return text
    ranges = []
    for part in text.split(","):
        first, dash, last = part.partition("-")
        last = last if dash else first
        if not _NUMBER.fullmatch(first) or not _NUMBER.fullmatch(last) or int(first) > int(last):
            raise Wrong("0, all, none, or ranks such as 0,3-5", nearest(text, ["all", "none"], 0.5) or "all")
        ranges.append((int(first), int(last)))
    return tuple(ranges)


def returned(text: str) -> tuple[str, ...]:
    """The names that come back."""
    if text == "none":
        return ()
    names = tuple(text.split(","))
    if not all(name.isidentifier() and not keyword.iskeyword(name) for name in names):
        raise Wrong(
            "names of the notebook with commas and without spaces between them, or none", "model,losses"
        )
    return tuple(dict.fromkeys(names))


def seconds(text: str) -> float:
    """A number of seconds above 0."""
    if not re.fullmatch(r"\d{1,9}(\.\d{1,6})?", text, re.ASCII) or float(text) <= 0:
        number = re.match(r"[1-9]\d{0,8}", text, re.ASCII)
        raise Wrong("a number of seconds above 0", number[0] if number else "300")
    return float(text)


def run_name(text: str) -> str:
    """A name that can be typed after ``%taas logs``."""
    if not re.fullmatch(r"\w[\w.-]{0,59}", text):
        near = re.sub(r"[^\w.-]+", "-", text).strip("-.")[:40]
        raise Wrong("up to 60 letters, digits, dots, dashes and underscores", near or "train")
    return text


BACKENDS = ("gloo", "nccl", "mpi", "ucc")


def backend(text: str) -> str:
    """A torch.distributed backend, or one per device type."""
    for part in text.split(","):
        device, colon, name = part.rpartition(":")
        if name not in BACKENDS or (colon and device not in ("cpu", "cuda")) or (not colon and part != text):
            allowed = f"{', '.join(BACKENDS)}, or one per device such as cpu:gloo,cuda:nccl"
            raise Wrong(allowed, nearest(name, BACKENDS) or BACKENDS[0])
    return text


def path(text: str) -> str:
    """A directory; whether it can be had is seen when the run starts."""
    if not text or "\0" in text:
        raise Wrong("a directory", "checkpoints")
    return text


@dataclass(frozen=True)
class Option:
    """One row of the table.

    Attributes:
        name: without its dashes.
        metavar: how its value is written in help; empty for an option that takes none.
        convert: text to value, or `Wrong`; None for an option that takes no value.
        help: one line.
        repeats: may be given several times.
        delivers: concerns registered loaders only, so that it needs ``--cpus``.
    """

    name: str
    metavar: str
    convert: Callable[[str], Any] | None
    help: str
    repeats: bool = False
    delivers: bool = False


OPTIONS: dict[str, Option] = {
    option.name: option
    for option in (
        Option(
            "gpus",
            "N|auto",
            gpus,
            "ranks, one GPU each; auto: every GPU there is (2 rehearsed ranks if none)",
        ),
        Option("cpus", "1..8", whole(1, 8), "c1.4 VMs on which each registered DataLoader runs"),
        Option(
            "units", "K|NAME=K,…", units, "elements taken from each registered loader in all", delivers=True
        ),
        Option("name", "NAME", run_name, "what the run is called in %taas status, logs and stop"),
        Option("background", "", None, "give the prompt back at once; %taas attach brings the results"),
        Option("rehearse", "", None, "CPU ranks in place of GPUs, also where there are GPUs"),
        Option("backend", "NAME", backend, "torch.distributed backend in place of the one the cell asks for"),
        Option("max-restarts", "R", whole(0, 100), "start again up to R times when a rank or VM is lost"),
        Option(
            "hang-timeout", "S", seconds, "seconds without progress after which the cell shows the stacks"
        ),
        Option("output", "0|all|none|LIST", output, "ranks whose output the cell shows, such as 0,3-5"),
        Option(
            "return", "NAME,…|none", returned, "names that come back; all new and changed ones if not given"
        ),
        Option("rank-writes", "discard|deny", choice("discard", "deny"), "writes of ranks other than 0"),
        Option(
            "shared", "PATH", path, "a directory where every rank may write; may be repeated", repeats=True
        ),
        Option("prebuffer", "UNITS", whole(0), "elements made ready before the ranks start", delivers=True),
        Option(
            "uneven", "drop|pad|raise", choice("drop", "pad", "raise"), "an uneven last round", delivers=True
        ),
        Option("keep", "", None, "the ranks stay for the next --keep cell; %taas release ends them"),
        Option("post-mortem", "", None, "open the debugger in a rank that fails"),
    )
}
ON = Option("on", "TYPE", str, "instance type, as #!TYPE above a cell (only on a %%taas line)")


def options_table() -> str:
    """The options as plain text, for ``%%taas?`` and ``--help``."""
    left = {o.name: f"--{o.name} {o.metavar}".rstrip() for o in (ON, *OPTIONS.values())}
    width = max(map(len, left.values()))
    return "\n".join(f"{left[o.name]:<{width}}  {o.help}" for o in (ON, *OPTIONS.values()))


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


def read_options(text: str, *, magic: bool = False) -> dict[str, Any]:
    """Read the options of a header or magic line.

    Args:
        text: what stands after ``#pragma taas`` or ``%%taas``, expanded.
        magic: it is a ``%%taas`` line, where ``--on TYPE`` is allowed.

    Returns:
        Option name to value: True for options without a value, a tuple for those that repeat. Options that
        were not given are not in it.

    Raises:
        HeaderError: one line: what is wrong, what is allowed, what to type instead.
    """
    table = {"on": ON, **OPTIONS} if magic else OPTIONS
    given: dict[str, Any] = {}
    words = split_words(text)
    while words:
        word = words.pop(0)
        name, equals, value = word[2:].partition("=")
        if not word.startswith("--") or name not in table:
            raise HeaderError(_unknown(word, words, table))
        option = table[name]
        if option.convert is None:
            if equals:
                raise HeaderError(f"{shown(word)}: allowed is --{name} without a value; type --{name}")
        elif not equals:
            if not words or words[0].startswith("--"):
                raise HeaderError(
                    f"--{name} has no value: allowed is {option.metavar}; type --{name} and the value"
                )
            value = words.pop(0)
        if name in given and not option.repeats:
            raise HeaderError(f"--{name} is given twice: allowed is once; leave one of them out")
        result = _converted(option, value)
        given[name] = (*given.get(name, ()), result) if option.repeats else result
    return given


def _converted(option: Option, value: str) -> Any:
    if option.convert is None:
        return True
    try:
        return option.convert(value)
    except Wrong as wrong:
        raise HeaderError(refusal(f"--{option.name} {shown(value)}", wrong, f"--{option.name} ")) from None


def refusal(what: str, wrong: Wrong, before: str = "") -> str:
    """The one line that says what is wrong, what is allowed, and what to type instead."""
    line = f"{what}: allowed is {wrong.allowed}; type {before}{wrong.instead}"
    if "{" in what or "$" in what:
        line += " (a name in {} or after $ is expanded only where the notebook has it)"
    return line


def _unknown(word: str, rest: list[str], table: dict[str, Option]) -> str:
    """Why a word that should be an option is none."""
    if word == "\\":
        return "\\ at the end of the line: allowed is one line; type all options on it"
    bare, equals, value = (
        _DASHES.sub("", word, count=1).partition("=") if _DASHES.match(word) else word.partition("=")
    )
    if bare == "on":
        return f"{shown(word)}: allowed is a line of its own above #pragma taas; type #!{shown(' '.join(rest[:1]) or value or 'g2.8')}"
    if _NUMBER.fullmatch(word):
        return f"{shown(word)} stands alone: allowed is an option before it; type --gpus {shown(word)}"
    near = nearest(bare.replace("_", "-"), table, 0.5)
    known = ", ".join(f"--{name}" for name in table)
    instead = f"type --{near}{equals}{shown(value)}" if near else "type one of them, or leave it out"
    return f"{shown(word)} is no option: allowed is {known}; {instead}"
