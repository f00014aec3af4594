"""Tab in a header line and after ``%taas``: a matcher of IPython's that lets no other one speak there."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from IPython.core.completer import SimpleCompletion, context_matcher

from taas.config import load_catalog
from taas.errors import TaasError
from taas.header.arguments import Option
from taas.header.options import ON, OPTIONS
from taas.notebook.verbs import complete

_TYPE = re.compile(r"\s*#!\s*([\w.]*)", re.ASCII)
_OPTIONS = re.compile(r"\s*(?:#\s?pragma\s+taas|(%%)taas)\s(.*)")
_VERB = re.compile(r"\s*%taas\s(.*)")


def offers(line: str) -> tuple[str, list[str]]:
    """Return the text that is completed at the end of a line, and what it may become."""
    *before, word = re.split(r"[\s=]+", line)
    allowed: Iterable[str] = ()
    if kind := _TYPE.fullmatch(line):
        word, allowed = kind[1], load_catalog().instances
    elif verb := _VERB.fullmatch(line):
        allowed = complete(verb[1].lstrip())
    elif header := _OPTIONS.fullmatch(line):
        table = {"on": ON, **OPTIONS} if header[1] else OPTIONS
        asking = table.get(before[-1].removeprefix("--"))
        allowed = _values(asking) if asking and asking.convert else [f"--{name}" for name in table]
    return word, [text for text in allowed if text.startswith(word)]


def _values(option: Option) -> Iterable[str]:
    return load_catalog().instances if option.name == "on" else option.choices


@context_matcher(identifier="taas", priority=100)
def header_matcher(context: Any) -> dict[str, Any]:
    """Complete a header line, or a line with ``%taas`` (IPython's matchers, second version of their interface)."""
    try:
        word, texts = offers(context.text_until_cursor.splitlines()[-1])
    except (
        IndexError,
        TaasError,
    ):  # nothing is typed; or taas.toml is wrong: the cell says so when it is executed
        return {"completions": [], "suppress": False}
    return {
        "completions": [SimpleCompletion(text, type="taas") for text in texts],
        "matched_fragment": word,
        "ordered": True,
        "suppress": bool(texts),
    }
