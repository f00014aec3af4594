"""A small notebook, and what comes of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from notebook_harness import Ran

from oracle.graph import Graph

__all__ = ["HEADER", "Played", "Program", "row"]

HEADER = "#!c1.4\n"
_LOST = "taas: did not come back: "


@dataclass(frozen=True)
class Program:
    """A small notebook.

    Attributes:
        cells: their text, without headers.
        headed: numbers of the cells that run in ranks.
        header: their header lines.
        files: of the project, name and text.
        here_also: what the headed cells do in addition where headers are comments: what taas does by itself.
        goes_on: whether a cell shows an error and goes on.
    """

    name: str
    cells: tuple[str, ...]
    headed: tuple[int, ...]
    header: str = HEADER
    files: tuple[tuple[str, str], ...] = ()
    here_also: str = ""
    goes_on: bool = False

    def text(self, number: int, *, plain: bool) -> str:
        """Return a cell as it is typed."""
        from taas.capture.cells import magic_on_top

        cell = self.cells[number]
        if number not in self.headed:
            return cell
        cell = self.header + cell
        return magic_on_top(cell + self.here_also) if plain else cell


def row(
    name: str,
    earlier: tuple[str, ...],
    cell: str,
    probe: str = "",
    files: tuple[tuple[str, str], ...] = (),
    **more: Any,
) -> Program:
    """Return the notebook of earlier cells, one headed cell, and one that looks at what it left."""
    cells = (*earlier, cell, probe) if probe else (*earlier, cell)
    return Program(name, cells, (len(earlier),), files=files, **more)


@dataclass
class Played:
    """What a notebook showed, and what it left.

    Attributes:
        cells: what each cell showed.
        left: after which cell, names and process as they are then.
        files: of the project, with hashes of what is in them.
        sizes: bytes of what travelled to the ranks, for each headed cell.
    """

    cells: list[Ran] = field(default_factory=list)
    left: list[tuple[int, Graph, dict[str, Any]]] = field(default_factory=list)
    files: dict[str, str] = field(default_factory=dict)
    sizes: list[int] = field(default_factory=list)

    @property
    def lost(self) -> list[str]:
        """What taas said that it could not bring back."""
        lines = [line.removeprefix(_LOST) for line in self.said if line.startswith(_LOST)]
        return [what for line in lines for what in line.split("; ")]

    @property
    def value(self) -> str:
        """Text of the last cell's value."""
        return str(self.cells[-1].result["text/plain"]) if self.cells[-1].result else ""

    @property
    def said(self) -> list[str]:
        """Lines of taas itself."""
        return [line for ran in self.cells for line in ran.stdout.splitlines() if line.startswith("taas: ")]
