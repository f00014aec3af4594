"""Finding the header of a cell, and telling what only looks like one.

Only blank lines and comments may stand above and between the two lines ``#!TYPE`` and ``#pragma taas``.
``find_header`` looks at every cell the user runs: it is quick and never raises. What looks like a header and is
none (``#pragma tass``, a header below code) is a problem to tell, never silently a comment. ``# pragma taas`` is a
header: formatters put that space there. A header is switched off by commenting it out: ``##pragma taas`` or
``# #pragma taas``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from taas.options import OPTIONS
from taas.wording import nearest, shown

__all__ = ["HeaderText", "find_header", "parse_magic_line"]


@dataclass(frozen=True, kw_only=True)
class HeaderText:
    """A header as found in a cell, not yet judged.

    Attributes:
        instance: what stands after ``#!``; None without such a line.
        options: what stands after ``#pragma taas``; None without such a line.
        problem: why this cannot be a header; None where it can.
        magic: it is a ``%%taas`` line, which IPython has expanded already and where ``--on`` is allowed.
    """

    instance: str | None = None
    options: str | None = None
    problem: str | None = None
    magic: bool = False


_PLAIN_TYPE = re.compile(r"[A-Za-z]\d+\.\d+", re.ASCII)
_SHEBANG = re.compile(r"#!\s*((?:\{[^{}]*\}|[^\s{}/])(?:\{[^{}]*\}|[^\s{}])*)\s*(.*)")
# With a space after "#" too: formatters (black, ruff) put one there. Then only options may follow, not prose.
_PRAGMA = re.compile(r"#(?:pragma\s+taas(?:\s+(.*))?|\s+pragma\s+taas(?:\s+([-{$#].*))?)")
_NEARLY = re.compile(r"#(?!#)\s*!?\s*pragma(\W*)(\w+)\s*(.*)", re.IGNORECASE)
_SPACED_TYPE = re.compile(r"#\s*(?:!\s*)?([cgCG]\d+\.\d+)", re.ASCII)
# Comments outside strings. Not `tokenize`: a cell is IPython's language, whose magics tokenize stumbles over.
_LEXEME = re.compile(
    r'''"""(?:\\.|[^\\])*?(?:"""|\Z)|\'\'\'(?:\\.|[^\\])*?(?:\'\'\'|\Z)'''
    r"""|"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*'|(?P<comment>\#[^\n]*)""",
    re.DOTALL,
)
_PYTHON_MAGICS = ("%%time", "%%timeit", "%%capture", "%%prun")
_DASHED = re.compile(r"[-\u2010-\u2015\u2212]+([\w-]+)")


def find_header(cell: str) -> HeaderText | None:
    """The header of a cell, or None for an ordinary cell. Never raises.

    Cells that begin with a cell magic are ordinary, as what is in them may be another language, unless the magic
    runs Python: ``%%time`` above a header would leave the header a comment.
    """
    if not ("#!" in cell or "ragma" in cell or "RAGMA" in cell):
        return None
    magic = cell.lstrip().split(maxsplit=1)[0]
    if magic.startswith("%%") and magic not in _PYTHON_MAGICS:
        return None
    cell = cell.replace("\r\n", "\n").replace("\r", "\n")
    instance, options, body_at, problem = _read_top(cell)
    problem = problem or _misplaced(cell, body_at, headed=instance is not None or options is not None)
    if problem is None and instance is None and options is None:
        return None
    return HeaderText(instance=instance, options=options, problem=problem)


def parse_magic_line(line: str) -> HeaderText:
    """The header that a line ``%%taas --on g2.8 --gpus 16`` stands for."""
    return HeaderText(options=line.strip(), magic=True)


def _read_top(cell: str) -> tuple[str | None, str | None, int, str | None]:
    """Instance, options, where the first line of code begins, and the first problem, of a cell's head."""
    instance = options = doubtful = None
    at = 0
    for line in cell.split("\n"):
        text = line.strip()
        if text and not text.startswith("#"):
            break
        at += len(line) + 1
        if (pragma := _PRAGMA.fullmatch(text)) is not None:
            if options is not None:
                return instance, options, at, "a second #pragma taas: allowed is one; type all options on one"
            options = pragma[1] or pragma[2] or ""
        elif (shebang := _SHEBANG.fullmatch(text)) is not None and not _NEARLY.match(text):
            name, rest = shebang.groups()
            if not (_PLAIN_TYPE.fullmatch(name) or "{" in name or "$" in name):
                doubtful = doubtful or (name if options is None else None)
                continue
            if problem := _type_line_problem(text, name, rest, instance, options):
                return instance, options, at, problem
            instance = name
        elif problem := _nearly(text, headed=instance is not None):
            return instance, options, at, problem
        elif options is None and (spaced := _SPACED_TYPE.fullmatch(text)) is not None:
            doubtful = doubtful or spaced[1]
    if options is not None and instance is None and doubtful is not None:
        instance = doubtful  # beside a pragma it can only be meant as a type; the catalog says which is near
    return instance, options, at, None


def _type_line_problem(
    text: str, name: str, rest: str, instance: str | None, options: str | None
) -> str | None:
    if instance is not None:
        return f"{shown(text)}: a second instance type: allowed is one; leave one of them out"
    if options is not None:
        return f"{shown(text)} stands below #pragma taas: allowed is above; type it on the line before"
    if rest.startswith("#") and "pragma" in rest:
        return f"{shown(text)}: allowed is {shown(rest)} on a line of its own; type it below #!{shown(name)}"
    if rest and not rest.startswith("#"):
        return f"{shown(text)}: allowed is #!{shown(name)} alone on its line; type #pragma taas {shown(rest)} below it"
    return None


def _nearly(comment: str, *, headed: bool) -> str | None:
    """Why a comment that was surely meant as a pragma is none; None for an ordinary comment."""
    match = _NEARLY.fullmatch(comment)
    if match is None or _PRAGMA.fullmatch(comment):
        return None
    between, word, rest = match.groups()
    if "-" in between and nearest(word, OPTIONS, 0.8):
        meant = f"{between.strip()}{word} {rest}"
    elif nearest(word, ["taas"], 0.75) and (_begins_with_option(rest) if rest else headed or word == "taas"):
        meant = rest
    else:
        return None
    return (
        f"{shown(comment)} is a comment: allowed is #pragma taas and options; "
        f"type {shown(f'#pragma taas {meant}'.strip())} (or ##pragma to switch it off)"
    )


def _begins_with_option(text: str) -> bool:
    """Whether a word with dashes stands first and looks like one of the options."""
    match = _DASHED.match(text)
    return match is not None and nearest(match[1], OPTIONS, 0.7) is not None


def _comments(cell: str) -> Iterator[tuple[int, str]]:
    """Position and text of the comments of a cell, those in strings left out."""
    for lexeme in _LEXEME.finditer(cell):
        if lexeme["comment"] is not None:
            yield lexeme.start(), lexeme["comment"].strip()


def _misplaced(cell: str, body_at: int, *, headed: bool) -> str | None:
    """The problem of a header that stands below code."""
    for at, comment in _comments(cell):
        if at < body_at:
            continue
        alone = cell[cell.rfind("\n", 0, at) + 1 : at].isspace() or cell[at - 1 : at] in ("", "\n")
        shebang = _SHEBANG.fullmatch(comment) if alone else None
        is_type = shebang is not None and _PLAIN_TYPE.fullmatch(shebang[1]) is not None
        if is_type or _PRAGMA.fullmatch(comment) or _nearly(comment, headed=False):
            where = f"line {cell.count(chr(10), 0, at) + 1}, {shown(comment)}, stands below code"
            cure = "leave it out: the cell has a header" if headed else "move it to the top of the cell"
            return f"{where}: allowed is only blank lines and comments above a header; {cure}"
    return None
