"""The grammar of the cell header: from text to `RunSpec`, or to a one-line `HeaderError`.

::

    #!g2.8                             the instance type; optional if there is a pragma
    #pragma taas --gpus 16 --cpus 4    the options; optional if there is an instance type
    <ordinary cell>

``find_header`` checks every cell that the user runs: it is quick and never raises. Only blank lines
and comments may be above and between the two lines. A line that looks like a header but is not
valid (``#pragma tass``, a header below code) is reported, and never silently treated as a comment
(`_meant`). ``# pragma taas`` is a header, because formatters insert that space. A header is
switched off by commenting it out: ``##pragma taas`` or ``# #pragma taas``.

``parse_header`` checks the header against the option table (`header.options`) and the instance
types (`header.catalog`), before anything starts.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from taas.base.wording import counted, nearest, refusal, shown
from taas.errors import HeaderError
from taas.header.arguments import TYPE_NAME
from taas.header.catalog import Catalog, InstanceType
from taas.header.options import OPTIONS, RunSpec, read_options, spec_values


@dataclass(frozen=True, kw_only=True)
class HeaderText:
    """The text of a header in a cell, not yet checked.

    It contains the text after ``#!`` and ``#pragma taas``, or the reason why it cannot be a header.
    In a ``%%taas`` line (``magic``), IPython has already expanded variables, and ``--on`` is
    allowed.
    """

    instance: str | None = None
    options: str | None = None
    problem: str | None = None
    magic: bool = False


_PRAGMA = re.compile(r"#\s*pragma\s+taas(?:\s+(.*))?")
_TYPE = re.compile(r"#!\s*((?:\{[^{}]*\}|[^\s{}/])+)\s*((?:--|#).*)?")
"""A type after ``#!``, and options or a comment after it. If other words follow the type, the line
is an ordinary comment.
"""
_TYPE_LIKE = re.compile(r"(\d+x)?[a-z]{1,2}\d\w*([.,:-]\w+)?|.*[{$].*", re.ASCII | re.IGNORECASE)
"""A text that is meant as a type even without a pragma: it is written like a type, or like a GPU:
``g2-8``, ``8xA100``.
"""
_WORDS = re.compile(r"#?[!\s]*([^\W\d_]*)[\s:,;]*([^\W\d_]*)\s*(.*)")
"""The first two words of a comment, and the rest."""
NOT_WITH_KEEP = ("background", "max-restarts", "return")
"""Options by which ranks outlive their notebook, start again, or hold variables that the notebook
lacks.
"""
_AS_MAGIC = re.compile(r"\s*(%+[ \t]*pragma[ \t]*taas\b(.*))", re.IGNORECASE)
"""A header that is typed as a magic, for which IPython would only report that there is no such
magic.
"""
_PYTHON_MAGICS = ("%%time", "%%timeit", "%%capture", "%%prun")


def find_header(cell: str) -> HeaderText | None:
    """Return the header of a cell, or None for an ordinary cell; never raise.

    A cell that begins with a cell magic is ordinary, because its body may be in another language,
    unless the magic runs Python: below ``%%time``, a header would otherwise remain a comment.
    """
    if as_magic := _AS_MAGIC.match(cell):
        right = shown(f"#pragma taas {as_magic[2].strip()}".strip())
        return HeaderText(problem=f"{shown(as_magic[1])} is no magic: type {right}")
    if "#" not in cell:
        return None
    magic = cell.split(maxsplit=1)[0]
    if magic.startswith("%%") and magic not in _PYTHON_MAGICS:
        return None
    cell = cell.replace("\r\n", "\n").replace("\r", "\n")
    header, body_at = _read_top(cell)
    headed = header.instance is not None or header.options is not None
    if header.problem is None:
        header = replace(header, problem=_find_misplaced(cell, body_at, headed=headed))
    return header if headed or header.problem is not None else None


def parse_magic_line(line: str) -> HeaderText:
    """Return the header for a line ``%%taas --on g2.8 --gpus 16``."""
    return HeaderText(options=line.strip(), magic=True)


def has_code(cell: str) -> bool:
    """Return whether a cell contains anything except comments."""
    return any(line.strip() and not line.lstrip().startswith("#") for line in cell.splitlines())


def _read_top(cell: str) -> tuple[HeaderText, int]:
    """Parse the head of a cell, up to its first line of code.

    Return the header and the index in the cell at which the code begins.
    """
    head, at = [], 0
    for line in cell.split("\n"):
        if line.strip() and not line.lstrip().startswith("#"):
            break
        head.append(line.strip())
        at += len(line) + 1
    pragmas = [*filter(None, map(_PRAGMA.fullmatch, head))]
    above = head[: head.index(pragmas[0][0])] if pragmas else []
    types = [
        line
        for line in filter(None, map(_TYPE.fullmatch, head))
        if _TYPE_LIKE.fullmatch(line[1]) or line[0] in above
    ]
    known = {line[0] for line in (*pragmas, *types)}
    near = (_nearly(text, headed=bool(types) and not pragmas) for text in head if text not in known)
    problem = next(filter(None, near), None) or _out_of_order(head, types, pragmas)
    options = (pragmas[0][1] or "") if pragmas else None
    return HeaderText(instance=types[0][1] if types else None, options=options, problem=problem), at


def _out_of_order(
    head: list[str], types: list[re.Match[str]], pragmas: list[re.Match[str]]
) -> str | None:
    """Return the error of a header that is not one type on its own line and one pragma below it."""
    beside = [
        meant for line in types if line[2] and (meant := _meant(line[2], headed=True)) is not None
    ]
    said = [line[0] for line in (*types, *pragmas)]
    lines = sorted(said, key=head.index)
    if max(len(types), len(pragmas)) < 2 and not beside and lines == said:
        return None
    options = " ".join(["#pragma taas", *(line[1] for line in pragmas if line[1]), *beside])
    right = f"#!{types[0][1]} and below it {options}" if types else options
    allowed = "one #!TYPE alone on its line, and one #pragma taas below it"
    return refusal(shown(" / ".join(lines)), f"type {shown(right, 120)}", allowed)


def _nearly(comment: str, *, headed: bool) -> str | None:
    """Return the error for a comment that was surely meant as a pragma; None for others."""
    meant = _meant(comment, headed=headed)
    if meant is None:
        return None
    right = shown(f"#pragma taas {meant}".strip())
    return f"{shown(comment)} is a comment: type {right}, or ##pragma to switch it off"


def _meant(comment: str, *, headed: bool = False) -> str | None:
    """Return the options in a comment that was surely meant as a pragma; None for others.

    Such a comment begins with ``pragma taas``, or a similar spelling, or with one of these words
    and an option. If the cell so far has only an instance type (``headed``), so that it would train
    in one rank, a word or an option is enough.
    """
    words = _WORDS.match(comment)
    assert words is not None
    first, second, rest = words.groups()
    option = rest.startswith("--")
    if nearest(first + second, ["pragmataas"], 0.8) or (headed and option and not first):
        return rest
    one = not second and nearest(first, ["pragma", "taas"], 0.8)
    return rest if one and (option or (headed and not rest)) else None


def _find_misplaced(cell: str, body_at: int, *, headed: bool) -> str | None:
    """Return the error of a header below code; lines inside triple quotes do not count."""
    at, quotes = 0, 0
    for number, line in enumerate(cell.split("\n"), 1):
        comment = line.strip()
        if at >= body_at and comment.startswith("#") and quotes % 2 == 0:
            kind = _TYPE.fullmatch(comment)
            if (kind and TYPE_NAME.fullmatch(kind[1].lower())) or _meant(comment) is not None:
                where = f"line {number}, {shown(comment)}, stands below code"
                cure = (
                    "leave it out, the cell has a header"
                    if headed
                    else "move it to the top of the cell"
                )
                return refusal(where, cure, "only blank lines and comments above a header")
        at += len(line) + 1
        quotes += line.count('"""') + line.count("'''")
    return None


# ------------------------------------------------------------------ checking


def parse_header(
    header: HeaderText,
    *,
    expand: Callable[[str], str],
    catalog: Catalog,
    visible_gpus: int,
    registered: Sequence[str],
) -> RunSpec:
    """Check a header; ``expand`` replaces ``{name}`` and ``$name`` in it.

    ``registered`` are the names of the registered loaders.

    Raises:
        HeaderError: one line: what is wrong, what is allowed, and what to type instead.
    """
    if header.problem is not None:
        raise HeaderError(header.problem)
    fill = (lambda text: text) if header.magic else expand
    given = read_options(fill(header.options or ""), magic=header.magic)
    name = (
        given.pop("on", None) if header.magic else header.instance and fill(header.instance).strip()
    )
    before = "--on " if header.magic else "#!"
    kind = catalog.find(name, before) if name is not None else None
    _check_setup(given, kind)
    _check_delivery(given, registered)
    _check_keep(given)
    shape = _shape(kind, given, visible_gpus, before)
    return RunSpec(
        instance=kind.name if kind else None,
        **shape,
        **spec_values(given, catalog.settings, shape["vms"] * shape["ranks_per_vm"]),
    )


def is_setup(header: HeaderText | None) -> bool:
    """Return whether a header is ``#pragma taas --setup``.

    Such a cell runs in the notebook, and again in each process of a run.
    """
    if header is None or header.problem is not None or header.instance is not None:
        return False
    try:
        return read_options(header.options or "", magic=header.magic) == {"setup": True}
    except HeaderError:
        return False


def _check_setup(given: dict[str, Any], kind: InstanceType | None) -> None:
    """Reject other options in addition to ``--setup``: a setup cell is not a run."""
    if "setup" not in given:
        return
    others = [f"--{name}" for name in given if name != "setup"] + ([kind.name] if kind else [])
    beside = others[0] if others else "a name that is expanded"
    answer = f"leave {beside} out: #pragma taas --setup stands alone, as such a cell is no run"
    raise HeaderError(refusal(f"--setup with {beside}", answer))


def _shape(
    kind: InstanceType | None, given: dict[str, Any], visible: int, before: str
) -> dict[str, Any]:
    """Return the number of VMs, of ranks on each VM, and of GPUs for each rank.

    ``before`` is the text after which an instance type is typed.
    """
    if kind is None:
        if "gpus" not in given:
            fact = f"neither {before}TYPE nor --gpus says what the cell runs on"
            raise HeaderError(refusal(fact, "type --gpus auto"))
        return {"vms": 1, "ranks_per_vm": given["gpus"] or visible or 2, "gpus_per_rank": 1}
    needing = next((option for option in ("gpus", "rehearse") if option in given), None)
    if needing is not None and kind.gpus == 0:
        answer = f"leave --{needing} out for one process, or type {before}g2.8"
        raise HeaderError(refusal(f"--{needing} on {kind.name}, which has no GPU", answer))
    if "gpus" not in given:
        return {"vms": 1, "ranks_per_vm": 1, "gpus_per_rank": kind.gpus}
    ranks = given["gpus"] or kind.gpus
    possible = {kind.gpus * vms: vms for vms in sorted(kind.vms)}
    if ranks not in possible:
        counts, vms = (", ".join(map(str, numbers)) for numbers in (possible, possible.values()))
        fit = min((count for count in possible if count >= ranks), default=max(possible))
        allowed = f"{counts} ({vms} times the {counted(kind.gpus, 'GPU')} of a VM)"
        raise HeaderError(refusal(f"--gpus {ranks} on {kind.name}", f"type --gpus {fit}", allowed))
    return {"vms": possible[ranks], "ranks_per_vm": kind.gpus, "gpus_per_rank": 1}


def _check_keep(given: dict[str, Any]) -> None:
    """Reject options that contradict ``--keep``: kept ranks hold their notebook's variables."""
    for other in NOT_WITH_KEEP:
        if "keep" in given and given.get(other, 0) != 0:  # --max-restarts 0 requests nothing
            raise HeaderError(refusal(f"--keep with --{other}", f"leave --{other} out"))


def _check_delivery(given: dict[str, Any], registered: Sequence[str]) -> None:
    """Reject options for registered loaders without ``--cpus``, or without a registered loader."""
    asked = next((name for name in given if OPTIONS[name].delivers or name == "cpus"), None)
    if asked is not None and not registered:
        fact = f"--{asked}, and no DataLoader is registered"
        answer = f"type taas.register(loader) in a cell above, or leave --{asked} out"
        raise HeaderError(refusal(fact, answer))
    if asked is not None and "cpus" not in given:
        raise HeaderError(refusal(f"--{asked} without --cpus", f"type --cpus 1 --{asked} …"))
    units = given.get("units")
    for name, count in units.items() if isinstance(units, dict) else ():
        if name not in registered:
            fact = f"--units {shown(name)}={count}: no loader is registered as {shown(name)}"
            answer = f"type --units {nearest(name, registered)}={count}"
            raise HeaderError(refusal(fact, answer, f"the registered {', '.join(registered)}"))
