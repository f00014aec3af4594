"""What is said of an exception, fit for a message whatever the exception is like."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["fitting", "fitting_lines", "text_of"]

LONGEST = 1 << 18
"""Characters of one text. A message on the wire has a limit, and nobody reads more."""
MOST_LINES = 2000


def text_of(error: BaseException) -> str:
    """Return an exception's text; one whose own ``__str__`` fails has its failure."""
    try:
        return fitting(str(error))
    except Exception as failure:
        return f"<its __str__ raised {type(failure).__name__}>"


def fitting(text: str, longest: int = LONGEST) -> str:
    """Return a text as UTF-8 can have it, its middle left out where it is too long.

    File names that are not UTF-8 come with lone surrogates.
    """
    if len(text) > longest:
        half = longest // 2
        text = f"{text[:half]} … {len(text) - 2 * half:,} characters … {text[-half:]}"
    return text.encode("utf-8", "backslashreplace").decode()


def fitting_lines(lines: Sequence[str]) -> tuple[str, ...]:
    """Return the lines of a traceback, each fitting, and shorter ones or fewer where all are too much."""
    if len(lines) > MOST_LINES:
        half = MOST_LINES // 2
        lines = [*lines[:half], f"… {len(lines) - 2 * half:,} lines …", *lines[-half:]]
    many = sum(map(len, lines)) > 4 * LONGEST
    return tuple(fitting(line, 4 * LONGEST // len(lines) if many else LONGEST) for line in lines)
