"""A view: the same facts as plain text and as HTML."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Shown:
    """A view, as plain text and as HTML."""

    text: str
    html: str

    def _repr_mimebundle_(self, **_: Any) -> dict[str, str]:
        return {"text/plain": self.text, "text/html": self.html}

    def __str__(self) -> str:
        return self.text

    def __add__(self, below: Shown) -> Shown:
        return Shown(f"{self.text}\n{below.text}", self.html + below.html)
