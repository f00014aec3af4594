"""Tab in a header line and after ``%taas``: a matcher of IPython's that lets no other one speak there."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from IPython.core.completer import SimpleCompletion, context_matcher

from taas.config import load_catalog
from taas.errors import TaasError
from taas.header.arguments import Option
from taas.header.grammar import find_header
from taas.header.options import ON, OPTIONS
from taas.notebook.verbs import complete

_TYPE = re.compile(r"\s*#!\s*([\w.]*)", re.ASCII)
_OPTIONS = re.compile(r"\s*(?:#\s?pragma\s+taas|(%%)taas)\s(.*)")
_VERB = re.compile(r"\s*%taas\s(.*)")


def offers(line: str, cell: str) -> tuple[str, list[str]] | None:
    """Return the text that is completed at the end of a line of a cell, and what it may become; None: the line is not taas'."""
    if kind := _TYPE.fullmatch(line):
        found = _beginning(kind[1], load_catalog().instances)
        return (kind[1], found) if found else None  # a line for a system's shell
    if verb := _VERB.fullmatch(line):
        word = _last_word(verb[1])
        return word, _beginning(word, complete(verb[1].lstrip()))
    if header := _OPTIONS.fullmatch(line):
        table = {"on": ON, **OPTIONS} if header[1] else OPTIONS
        return _option_or_value(header[2], table, cell)
    return None


def _last_word(text: str) -> str:
    return re.split(r"\s", text)[-1]


def _beginning(word: str, allowed: Iterable[str]) -> list[str]:
    return [text for text in allowed if text.startswith(word)]


def _option_or_value(text: str, table: dict[str, Option], cell: str) -> tuple[str, list[str]]:
    """Return the last word of a header line, and what may stand there: values, or the options not yet given."""
    word = _last_word(text)
    before = text.removesuffix(word).split()
    name, equals, value = word.removeprefix("--").partition("=")
    if equals and name in table:
        return value, _beginning(value, _values(table[name], text, cell))
    asking = table.get(before[-1].removeprefix("--")) if before and before[-1].startswith("--") else None
    if asking is not None and asking.convert is not None:
        return word, _beginning(word, _values(asking, text, cell))
    given = {option.partition("=")[0] for option in before}
    options = (f"--{o.name}" for o in table.values() if o.repeats or f"--{o.name}" not in given)
    return word, _beginning(word, options)


def _values(option: Option, text: str, cell: str) -> list[str]:
    if option.name == "on":
        return list(load_catalog().instances)
    if option.name == "shared":
        return sorted(path.name for path in Path.cwd().iterdir() if path.is_dir())
    return [*option.choices, *(_gpu_counts(text, cell) if option.name == "gpus" else ())]


def _gpu_counts(text: str, cell: str) -> list[str]:
    header, on = find_header(cell), re.search(r"--on[\s=]+(\S+)", text)
    name = on[1] if on else header.instance if header is not None else None
    kind = load_catalog().instances.get(name or "")
    return [str(kind.gpus * vms) for vms in sorted(kind.vms)] if kind is not None and kind.gpus else []


class _Offered(list[SimpleCompletion]):
    """Completions that count as one where there is none: only who has one may silence the others."""

    def __len__(self) -> int:
        return max(super().__len__(), 1)


@context_matcher(identifier="taas", priority=100)
def header_matcher(context: Any) -> dict[str, Any]:
    """Complete a header line, or a line with ``%taas`` (IPython's matchers, second version of their interface)."""
    try:
        found = offers(context.text_until_cursor, context.full_text)
    except TaasError:  # taas.toml is wrong: the cell says so when it is executed
        found = None
    if found is None:
        return {"completions": [], "suppress": False}
    word, texts = found
    return {
        "completions": _Offered(SimpleCompletion(text, type="taas") for text in texts),
        "matched_fragment": word,
        "ordered": True,
        "suppress": True,
    }
