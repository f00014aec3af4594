"""The cell header's grammar: text to `RunSpec`, or a one-line `HeaderError`.

::

    #!g2.8                              the instance type; optional where a pragma stands
    #pragma taas --gpus 16 --cpus 4     the options; optional where an instance type stands
    <ordinary cell>

``find_header`` looks at every cell the user runs: it is quick and never raises. Only blank lines and comments may stand
above and between the two lines. What looks like a header and is none (``#pragma tass``, a header below code) is a
problem to tell, never silently a comment (`_nearly`). ``# pragma taas`` is a header: formatters put that space there. A
header is switched off by commenting it out: ``##pragma taas`` or ``# #pragma taas``.

``parse_header`` judges it, before anything starts, by the option table (`header.options`) and the instance types
(`config`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from taas.config import BUILT_IN_TYPES, Catalog, InstanceType
from taas.errors import HeaderError
from taas.header.options import OPTIONS, RunSpec, read_options, spec_values
from taas.wording import counted, misspelt, nearest, shown

__all__ = ["HeaderText", "RunSpec", "find_header", "has_code", "parse_header", "parse_magic_line"]


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
_PRAGMA = re.compile(r"#\s*pragma\s+taas(?:\s+(.*))?")
_SPACED_TYPE = re.compile(r"#\s*([cg]\d+\.\d+)", re.ASCII | re.IGNORECASE)
_WORD = re.compile(r"([^\W\d_]*)[\s:,;]*")
_SLIPS = {"pragma": 2, "taas": 1, "pragmataas": 2}
"""With how many slips a word of the header is still known."""
_OPTION = re.compile(r"(?:(?<!\w)[-\u2010-\u2015\u2212]+|--)(\w[\w-]*)")
# Comments outside strings. Not `tokenize`: a cell is IPython's language, whose magics tokenize stumbles over.
_LEXEME = re.compile(
    r'''"""(?:\\.|[^\\])*?(?:"""|\Z)|\'\'\'(?:\\.|[^\\])*?(?:\'\'\'|\Z)'''
    r"""|"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*'|(?P<comment>\#[^\n]*)""",
    re.DOTALL,
)
_WORTH_READING = ("#!", "--", "taas", "pragma")
"""What stands in code that may have a header among it; most cells have nothing of it, and many comments."""
_PYTHON_MAGICS = ("%%time", "%%timeit", "%%capture", "%%prun")


def find_header(cell: str) -> HeaderText | None:
    """The header of a cell, or None for an ordinary cell. Never raises.

    Cells that begin with a cell magic are ordinary, as what is in them may be another language, unless the magic
    runs Python: ``%%time`` above a header would leave the header a comment.
    """
    if "#" not in cell:
        return None
    magic = cell.split(maxsplit=1)[0]
    if magic.startswith("%%") and magic not in _PYTHON_MAGICS:
        return None
    cell = cell.replace("\r\n", "\n").replace("\r", "\n")
    header, body_at = _read_top(cell)
    headed = header.instance is not None or header.options is not None
    if header.problem is None:
        header = replace(header, problem=_misplaced(cell, body_at, headed=headed))
    return header if headed or header.problem is not None else None


def parse_magic_line(line: str) -> HeaderText:
    """The header that a line ``%%taas --on g2.8 --gpus 16`` stands for."""
    return HeaderText(options=line.strip(), magic=True)


def has_code(cell: str) -> bool:
    """Whether anything but comments stands in a cell."""
    return any(line.strip() and not line.lstrip().startswith("#") for line in cell.splitlines())


def _read_top(cell: str) -> tuple[HeaderText, int]:
    """Read the head of a cell, up to its first line of code, whose place is the second result, or to the first problem."""
    instance = options = problem = None
    comments, at = [], 0
    for line in cell.split("\n"):
        text = line.strip()
        if problem is not None or (text and not text.startswith("#")):
            break
        at += len(line) + 1
        shebang = _SHEBANG.fullmatch(text)
        if (pragma := _PRAGMA.fullmatch(text)) is not None:
            if options is not None:
                problem = "a second #pragma taas: allowed is one; type all options on one"
            options = options or pragma[1] or ""
        elif shebang is not None and _like_a_type(shebang[1]):
            problem = _type_line_problem(shebang, instance, options)
            instance = instance or shebang[1]
        elif (problem := _nearly(text)) is None and options is None:
            comments.append(text)
    if problem is None:
        instance, problem = _said_by_comments(comments, instance, options)
    return HeaderText(instance=instance, options=options, problem=problem), at


def _said_by_comments(
    comments: list[str], instance: str | None, options: str | None
) -> tuple[str | None, str | None]:
    """Return the type, and what is wrong, with what comments in the head of a cell can only have been meant as."""
    if options is not None:  # the catalog says which type is near
        doubtful = (_SHEBANG.fullmatch(text) or _SPACED_TYPE.fullmatch(text) for text in comments)
        return instance or next((found[1] for found in doubtful if found), None), None
    if instance is not None:
        return instance, next(filter(None, (_nearly(text, headed=True) for text in comments)), None)
    return None, None


def _like_a_type(name: str) -> bool:
    """Whether it is surely meant as a type: one, nearly one, a family, or a GPU: ``g2.8``, ``g2-8``, ``g2``, ``8xA100``."""
    if _PLAIN_TYPE.fullmatch(name) or "{" in name or "$" in name:
        return True
    types, name = BUILT_IN_TYPES.values(), name.lower()
    return any(kind.gpu_model.lower() in name for kind in types if kind.gpu_model) or any(
        misspelt(name, word, 1) for kind in types for word in (kind.name, kind.name.partition(".")[0])
    )


def _type_line_problem(line: re.Match[str], instance: str | None, options: str | None) -> str | None:
    text, name, rest = shown(line[0]), shown(line[1]), line[2]
    if instance is not None:
        return f"{text}: a second instance type: allowed is one; leave one of them out"
    if options is not None:
        return f"{text} stands below #pragma taas: allowed is above; type it on the line before"
    pragma = rest if rest.startswith("#") else rest and f"#pragma taas {rest}"
    if pragma and (_PRAGMA.fullmatch(pragma) or _nearly(pragma, headed=True)):
        return f"{text}: allowed is #!{name} alone on its line; type {shown(pragma)} below it"
    return None


def _nearly(comment: str, *, headed: bool = False) -> str | None:
    """Why a comment that was surely meant as a pragma is none; None for an ordinary comment.

    Of ``pragma``, ``taas`` and an option, nearly as they are spelt, it has two; or one, where it is ``headed`` by an
    instance type alone: there the cell would train in one rank.
    """
    said, rest = 0, comment.removeprefix("#").lstrip("! \t")
    while (word := _WORD.match(rest)) and _is_of_header(word[1].lower()):
        said, rest = said + 1, rest[word.end() :]
    option, at = next(
        (
            (near, match.end())
            for match in _OPTION.finditer(rest)
            if (near := nearest(match[1], OPTIONS, 0.7))
        ),
        ("", 0),
    )
    if not (said > 1 or (option and (said or headed)) or (headed and said and not rest)):
        return None
    meant = f"#pragma taas {f'--{option}{rest[at:]}' if option else rest}".strip()
    return (
        f"{shown(comment)} is a comment: allowed is #pragma taas and options; type {shown(meant)} "
        "(or ##pragma to switch it off)"
    )


def _is_of_header(word: str) -> bool:
    return any(misspelt(word, meant, most) for meant, most in _SLIPS.items())


def _comments(cell: str) -> Iterator[tuple[int, str]]:
    """Position and text of the comments of a cell, those in strings left out."""
    for lexeme in _LEXEME.finditer(cell):
        if lexeme["comment"] is not None:
            yield lexeme.start(), lexeme["comment"].strip()


def _misplaced(cell: str, body_at: int, *, headed: bool) -> str | None:
    """The problem of a header that stands below code."""
    body = cell[body_at:].lower()
    if not any(word in body for word in _WORTH_READING):
        return None
    for at, comment in _comments(cell):
        if at < body_at:
            continue
        alone = cell[cell.rfind("\n", 0, at) + 1 : at].isspace() or cell[at - 1 : at] in ("", "\n")
        shebang = _SHEBANG.fullmatch(comment) if alone else None
        is_type = shebang is not None and _PLAIN_TYPE.fullmatch(shebang[1]) is not None
        if is_type or _PRAGMA.fullmatch(comment) or _nearly(comment):
            where = f"line {cell.count(chr(10), 0, at) + 1}, {shown(comment)}, stands below code"
            cure = "leave it out: the cell has a header" if headed else "move it to the top of the cell"
            return f"{where}: allowed is only blank lines and comments above a header; {cure}"
    return None


# ---------------------------------------------------------------- judging it


def parse_header(
    header: HeaderText,
    *,
    expand: Callable[[str], str],
    catalog: Catalog,
    visible_gpus: int,
    registered: Sequence[str],
) -> RunSpec:
    """Judge a header.

    Args:
        header: from `find_header` or `parse_magic_line`.
        expand: what replaces ``{name}`` and ``$name``: IPython's ``shell.var_expand``.
        catalog: instance types and defaults.
        visible_gpus: GPUs of this machine, for ``--gpus auto``.
        registered: names of the registered loaders.

    Raises:
        HeaderError: one line: what is wrong, what is allowed, what to type instead.
    """
    if header.problem is not None:
        raise HeaderError(header.problem)
    fill = (lambda text: text) if header.magic else expand
    given = read_options(fill(header.options or ""), magic=header.magic)
    name = given.pop("on", None) if header.magic else header.instance and fill(header.instance).strip()
    before = "--on " if header.magic else "#!"
    kind = catalog.find(name, before) if name is not None else None
    _check_delivery(given, registered)
    _check_keep(given)
    shape = _shape(kind, given, visible_gpus, before, catalog)
    return RunSpec(
        instance=kind.name if kind else None,
        **shape,
        **spec_values(given, catalog.settings, shape["vms"] * shape["ranks_per_vm"]),
    )


def _shape(
    kind: InstanceType | None, given: dict[str, Any], visible_gpus: int, before: str, catalog: Catalog
) -> dict[str, Any]:
    """How many VMs, ranks on each, and GPUs for each rank; an instance type is typed after ``before``."""
    if kind is None:
        if "gpus" not in given:
            raise HeaderError(
                f"neither {before}TYPE nor --gpus: allowed is {before}g2.8, or --gpus N; type --gpus auto"
            )
        return {"vms": 1, "ranks_per_vm": given["gpus"] or visible_gpus or 2, "gpus_per_rank": 1}
    if kind.gpus == 0:
        for option in ("gpus", "rehearse"):
            if option in given:
                raise HeaderError(
                    f"--{option} on {kind.name}, which has no GPU: allowed is one process without it; "
                    f"leave --{option} out, or type {before}g2.8"
                )
    if "gpus" not in given:
        return {"vms": 1, "ranks_per_vm": 1, "gpus_per_rank": kind.gpus}
    ranks = given["gpus"] or kind.gpus
    possible = {kind.gpus * vms: vms for vms in sorted(kind.vms)}
    if ranks not in possible:
        raise HeaderError(
            f"--gpus {ranks} on {kind.name}: allowed is {_either(list(possible))} ({_either(sorted(kind.vms))} "
            f"{'VMs' if max(kind.vms) > 1 else 'VM'} of {counted(kind.gpus, 'GPU')}); "
            f"type {_for_ranks(ranks, kind, before, catalog)}"
        )
    return {"vms": possible[ranks], "ranks_per_vm": kind.gpus, "gpus_per_rank": 1}


def _for_ranks(ranks: int, kind: InstanceType, before: str, catalog: Catalog) -> str:
    """What to type for so many ranks, or the next larger number, on the same GPUs: this type, another, in few VMs."""
    enough = [
        (other.gpus * vms, other is not kind, vms, other.name)
        for other in catalog.instances.values()
        if other.gpus and other.gpu_model == kind.gpu_model
        for vms in other.vms
        if other.gpus * vms >= ranks
    ]
    count, another, _, name = min(enough, default=(kind.gpus * max(kind.vms), False, 0, kind.name))
    said = [f"{before}{name}"] * another + [f"--gpus {count}"] * (count != ranks)
    return " and ".join(said)


def _either(numbers: list[int]) -> str:
    *most, last = map(str, numbers)
    return f"{', '.join(most)} or {last}" if most else last


def _check_keep(given: dict[str, Any]) -> None:
    """Ranks stay for the cells of their notebook: not where it goes on without them, nor in a new start's place."""
    others = {
        "background": "its names come later",
        "max-restarts": "a new start has new ranks",
        "return": "kept ranks and the notebook hold the same names",
    }
    for other, why in others.items():
        if "keep" in given and given.get(other):
            raise HeaderError(f"--keep with --{other}: allowed is one of them, as {why}; leave --{other} out")


def _check_delivery(given: dict[str, Any], registered: Sequence[str]) -> None:
    """Options about registered loaders need ``--cpus``, and ``--cpus`` needs a registered loader."""
    asked = next((name for name in given if OPTIONS[name].delivers or name == "cpus"), None)
    if asked is not None and not registered:
        raise HeaderError(
            f"--{asked}, and no DataLoader is registered: allowed is after taas.register(loader); "
            f"type that in a cell above, or leave --{asked} out"
        )
    if asked is not None and "cpus" not in given:
        raise HeaderError(
            f"--{asked} without --cpus: allowed is with --cpus 1 to 8; type --cpus 1 --{asked} …"
        )
    units = given.get("units")
    for name, count in units.items() if isinstance(units, dict) else ():
        if name not in registered:
            raise HeaderError(
                f"--units {shown(name)}={count}: allowed is the registered {', '.join(registered)}; "
                f"type --units {nearest(name, registered)}={count}"
            )
