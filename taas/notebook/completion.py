"""Tab completion in headers and after ``%taas``, by a matcher that suppresses other matchers."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from IPython.core.completer import SimpleCompletion, context_matcher

from taas.base.wording import shown
from taas.config import load_catalog
from taas.errors import TaasError
from taas.header.arguments import Option
from taas.header.options import ON, OPTIONS
from taas.notebook.verbs import complete

_TYPE = re.compile(r"\s*#!\s*([\w.]*)", re.ASCII)
_OPTIONS = re.compile(r"\s*(?:#\s?pragma\s+taas|(%%)taas)\s(.*)")
_WIDTH = 48
_UNBROKEN = str.maketrans({" ": "\u00a0", "-": "\u2011"})
_VERB = re.compile(r"\s*%taas\s(.*)")


def offers(line: str) -> tuple[str, dict[str, str]]:
    """Return the last word of a line, and its possible completions with their meanings."""
    *before, word = re.split(r"[\s=]+", line)
    allowed: Mapping[str, str] = {}
    if kind := _TYPE.fullmatch(line):
        word, allowed = kind[1], _types()
    elif verb := _VERB.fullmatch(line):
        allowed = complete(verb[1].lstrip())
    elif header := _OPTIONS.fullmatch(line):
        table = {"on": ON, **OPTIONS} if header[1] else OPTIONS
        asking = table.get(before[-1].removeprefix("--"))
        if asking is not None and asking.convert is not None:
            allowed = _values(asking)
        else:
            allowed = {f"--{name}": option.about for name, option in table.items()}
    return word, {text: about for text, about in allowed.items() if text.startswith(word)}


def _types() -> dict[str, str]:
    kinds = load_catalog().instances.values()
    return {
        kind.name: (
            f"{kind.gpus} {kind.gpu_model}, {kind.vcpus} vCPUs"
            if kind.gpus
            else f"{kind.vcpus} vCPUs"
        )
        for kind in kinds
    }


def _values(option: Option) -> dict[str, str]:
    return _types() if option.name == "on" else dict.fromkeys(option.choices, option.help)


@context_matcher(identifier="taas", priority=100)
def header_matcher(context: Any) -> dict[str, Any]:
    """Complete a header line or a ``%taas`` line (version 2 of IPython's matcher API)."""
    try:
        word, texts = offers(context.text_until_cursor.splitlines()[-1])
    except (IndexError, TaasError):
        # the line is empty, or taas.toml is invalid; the cell reports that when it runs
        return {"completions": [], "suppress": False}
    return {
        # JupyterLab shows only the type next to each text, in a box that wraps at blanks and dashes
        "completions": [
            SimpleCompletion(text, type=shown(about, _WIDTH).translate(_UNBROKEN))
            for text, about in texts.items()
        ],
        "matched_fragment": word,
        "ordered": True,
        "suppress": bool(texts),
    }
