"""Random small notebooks of ordinary code, for Hypothesis.

A notebook is grown statement by statement from the table: each names the kinds of things that it
needs, which earlier statements have made, and the kind that it makes, so that a notebook runs, but
for the statements that raise.
"""

from __future__ import annotations

import re

from hypothesis import strategies as st

from oracle.program import HEADER, KEPT, Program
from oracle.statements import HELPER, IMPORTS, LAST, STATEMENTS, Statement

__all__ = ["notebooks"]

_PLACE = re.compile(r"\{(\w+)\}")


class _Grown:
    """A notebook so far: the names that there are, by kind."""

    def __init__(self, draw: st.DrawFn) -> None:
        self._draw = draw
        self._names: dict[str, list[str]] = {}
        self._count = 0

    def one_of(self, statements: list[Statement]) -> str:
        """Draw a statement that can stand here, with its names."""
        statement = self._draw(st.sampled_from([s for s in statements if self._can(s)]))
        names = {
            kind: self._name(kind)
            for kind in set(_PLACE.findall(statement.text.replace("{{", "").replace("}}", "")))
        }
        if statement.makes:
            self._count += 1
            names["new"] = f"{statement.makes}_{self._count}"
            self._names.setdefault(statement.makes, []).append(names["new"])
        if statement.text.startswith("del {") and "[" not in statement.text:
            kind = _PLACE.findall(statement.text)[0]
            self._names[kind].remove(names[kind])
        return statement.text.format(**names)

    def _can(self, statement: Statement) -> bool:
        places = set(_PLACE.findall(statement.text)) - {"new", "n"}
        return all(self._names.get(kind) for kind in places - {"any"}) and (
            "any" not in places or bool(self._names)
        )

    def _name(self, kind: str) -> str:
        if kind == "n":
            return str(self._draw(st.integers(0, 5)))
        if kind == "new":
            return ""
        found = (
            self._names.get(kind, [])
            if kind != "any"
            else [n for names in self._names.values() for n in names]
        )
        return self._draw(st.sampled_from(found)) if found else "None"


@st.composite
def notebooks(draw: st.DrawFn, *, kept: bool = False) -> Program:
    """Draw a notebook.

    Args:
        draw: Hypothesis' own.
        kept: whether its ranks stay, and it is longer.
    """
    grown = _Grown(draw)
    cells = []
    for number in range(draw(st.integers(4, 7) if kept else st.integers(2, 4))):
        lines = [IMPORTS] if number == 0 else []
        lines += [grown.one_of(STATEMENTS) for _ in range(draw(st.integers(3, 9)))]
        if draw(st.booleans()):
            lines.append(grown.one_of(LAST))
        cells.append("\n".join(lines))
    headed = draw(st.sets(st.integers(0, len(cells) - 1), min_size=2 if kept else 1))
    return Program(
        "random",
        tuple(cells),
        tuple(sorted(headed)),
        header=KEPT if kept else HEADER,
        files=(("helper.py", HELPER),),
        goes_on=True,
    )
