"""Parts of messages: make foreign text printable, find the nearest words, describe causes."""

from __future__ import annotations

import difflib
import os
import re
import signal
import textwrap
from collections.abc import Iterable, Sequence

LONGEST = 1 << 18
"""The maximum length of one text in characters: messages between processes have a size limit, and
people read no more.
"""
_MOST_LINES = 2000
_COMMANDS = re.compile(r"(\x1b\[[0-9;:]*m)|[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]")
"""Characters that a terminal interprets as a command: a colour, or any other control sequence
(ECMA-48: C0 without tab and line ends, DEL, C1).
"""


def shown(text: str, limit: int = 60) -> str:
    """Return the user's text on one line: printable, and cut to ``limit`` characters."""
    text = text[: limit + 1]
    text = text if text.isprintable() else repr(text)[1:-1]
    return text if len(text) <= limit else text[: limit - 1] + "…"


def shown_path(path: str | bytes | os.PathLike[str]) -> str:
    """Return a path on one line; it need not be UTF-8."""
    return shown(os.fsdecode(path), 200)


def visible(text: str) -> str:
    """Return a text for a terminal: colours stay, other control characters are escaped."""
    return _COMMANDS.sub(lambda found: found[1] or f"\\x{ord(found[0]):02x}", text)


def nearest(text: str, allowed: Iterable[str], cutoff: float = 0.0) -> str | None:
    """Return the element of ``allowed`` nearest to ``text``; None if none is near enough."""
    names = list(allowed)
    found = difflib.get_close_matches(text[:60].lower(), names, n=1, cutoff=cutoff)
    return found[0] if found else None


def refusal(fact: str, answer: str, allowed: str = "") -> str:
    """Return a rejection in one line: what is wrong, what to type, and what is allowed."""
    return f"{fact}: {answer}{f'; allowed is {allowed}' if allowed else ''}"


_COLUMNS, _LEFT = 80, 24


def in_columns(rows: Iterable[tuple[str, str]]) -> str:
    """Lay out commands and their descriptions in two columns of an 80-column terminal."""
    lines = list[str]()
    for left, right in rows:
        typed = textwrap.wrap(left, _COLUMNS, subsequent_indent=" " * 6, break_on_hyphens=False)
        about = textwrap.wrap(right, _COLUMNS - _LEFT, break_on_hyphens=False)
        if len(typed) == 1 and len(left) <= _LEFT - 2:
            lines.append(f"{left:<{_LEFT}}{about.pop(0)}")
        else:
            lines += typed
        lines += [" " * _LEFT + line for line in about]
    return "\n".join(lines)


def counted(count: int, thing: str) -> str:
    """Return a number with its noun: ``1 GPU``, ``8 GPUs``."""
    return f"{count} {thing}" if count == 1 else f"{count} {thing}s"


def named(word: str, name: str) -> str:
    """Return a preposition and a name, such as `` on g2.8-0``; empty without a name.

    This machine, if it is the only one, has no name.
    """
    return f" {word} {name}" if name else ""


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text, or else the error's type.

    In errors of CUDA and Ray, about ten more lines follow.
    """
    lines = str(error).strip().splitlines()
    return lines[0].strip() if lines else type(error).__name__


def text_of(error: BaseException) -> str:
    """Return an exception's text; if its ``__str__`` raises, the text of that error."""
    try:
        return fitting(str(error))
    except Exception as failure:
        return f"<its __str__ raised {type(failure).__name__}>"


def fitting(text: str, longest: int = LONGEST) -> str:
    """Return a text that UTF-8 can encode, with its middle left out if it is too long.

    File names that are not UTF-8 contain lone surrogates.
    """
    if len(text) > longest:
        half = longest // 2
        text = f"{text[:half]} … {len(text) - 2 * half:,} characters … {text[-half:]}"
    return text.encode("utf-8", "backslashreplace").decode()


def fitting_lines(lines: Sequence[str]) -> tuple[str, ...]:
    """Return the lines of a traceback; shorten a line, or the whole, if it is too long."""
    if len(lines) > _MOST_LINES:
        half = _MOST_LINES // 2
        lines = [*lines[:half], f"… {len(lines) - 2 * half:,} lines …", *lines[-half:]]
    many = sum(map(len, lines)) > 4 * LONGEST
    return tuple(fitting(line, 4 * LONGEST // len(lines) if many else LONGEST) for line in lines)


def killed_by(exitcode: int) -> str:
    """Return the signal of a negative exit code: ``SIGTERM``, or ``SIGKILL: out of memory?``."""
    name = signal.Signals(-exitcode).name
    return f"{name}: out of memory?" if name == "SIGKILL" else name


def size_in_words(nbytes: float) -> str:
    """Return a size in powers of 1000, as for disks: ``512 bytes``, ``3.2 MB``, ``70 GB``."""
    size = float(nbytes)
    for unit in ("bytes", "kB", "MB", "GB"):
        if size < 999.5:
            return f"{size:.0f} {unit}" if unit == "bytes" or size >= 9.95 else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"


def ranks_in_words(ranks: Iterable[int]) -> str:
    """Return ``rank 3`` or ``ranks 0–2, 5``: the syntax of ``--output``, but with en dashes."""
    spans: list[list[int]] = []
    for rank in sorted(ranks):
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    text = ", ".join(str(first) if first == last else f"{first}–{last}" for first, last in spans)
    return f"rank {text}" if text.isdigit() else f"ranks {text}"
