"""Programs in a test's file: code in triple quotes, indented as the lines around it."""

from __future__ import annotations

import textwrap

__all__ = ["block"]


def block(*parts: str) -> str:
    """Return the lines of all parts, without the indentation that they have in a test's file."""
    return "\n".join(textwrap.dedent(part).strip("\n") for part in parts)
