"""Pieces of messages: the user's own text, made fit to print; the nearest thing that is allowed; another's error."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

__all__ = ["first_line", "nearest", "shown"]


def shown(text: str, limit: int = 60) -> str:
    """The user's text on one line: printable, and cut to ``limit`` characters."""
    text = text[: limit + 1]
    text = text if text.isprintable() else repr(text)[1:-1]
    return text if len(text) <= limit else text[: limit - 1] + "…"


def nearest(text: str, allowed: Iterable[str], cutoff: float = 0.0) -> str | None:
    """The one of ``allowed`` that looks most like ``text``, or None where none is as alike as ``cutoff``."""
    names = list(allowed)
    found = difflib.get_close_matches(text[:60].lower(), names, n=1, cutoff=cutoff)
    return found[0] if found else None


def first_line(error: BaseException) -> str:
    """The first line of another library's message, where CUDA's and Ray's go on for ten; else the error's type."""
    lines = str(error).strip().splitlines()
    return lines[0].strip() if lines else type(error).__name__
