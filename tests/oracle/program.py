"""A small notebook, and what comes of it."""

from __future__ import annotations

import ast
import re
import symtable
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from notebook_harness import Ran

from oracle.graph import Graph

__all__ = ["HEADER", "Played", "Program", "row", "together"]

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
        here_also: what the headed cells do in addition where headers are comments: what taas does
            by itself.
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


def together(programs: Iterable[Program], most: int = 16) -> Iterator[Program]:
    """Yield notebooks of the cells of several with as many headed cells, which are played in the time of one.

    Names that a notebook binds get its number (``a_3``), so that a difference says whose it is. An
    identifier is the same everywhere in it, as a global, an attribute, an argument; texts stay as
    they are.
    """
    alike: dict[tuple[int, str], list[Program]] = {}
    for one in programs:
        alike.setdefault((len(one.headed), one.header), []).append(one)
    for (count, header), group in alike.items():
        for at in range(0, len(group), most):
            some = group[at : at + most]
            parts, files = zip(
                *(_numbered(one, number) for number, one in enumerate(some)), strict=True
            )
            cells = tuple(map("\n".join, zip(*parts, strict=True)))
            name = "; ".join(f"{number} {one.name}" for number, one in enumerate(some))
            yield Program(name, cells, tuple(range(1, 2 * count, 2)), header, sum(files, ()))


def _numbered(program: Program, number: int) -> tuple[list[str], tuple[tuple[str, str], ...]]:
    """Return a notebook's cells, every second one a headed one, and its files, with the number in its names and theirs."""
    table = symtable.symtable("\n".join(program.cells), program.name, "exec")
    bound = {s.get_name() for s in table.get_symbols() if s.is_assigned() and not s.is_imported()}
    stems = [name.partition(".")[0] for name, _ in program.files]

    def with_files(text: str) -> str:
        return re.sub(rf"\b({'|'.join(stems)})\b", rf"\1_{number}", text) if stems else text

    cells = [""]
    for n, cell in enumerate(program.cells):
        tree = ast.parse(with_files(cell))
        for node in ast.walk(tree):
            for place in (
                ("id", "attr", "arg", "name", "rest") if not isinstance(node, ast.alias) else ()
            ):
                if getattr(node, place, None) in bound:
                    setattr(node, place, f"{getattr(node, place)}_{number}")
            if isinstance(node, (ast.Global, ast.Nonlocal)):
                node.names = [f"{name}_{number}" if name in bound else name for name in node.names]
        if isinstance(last := tree.body[-1], ast.Expr):
            tree.body[-1] = ast.Assign(
                [ast.Name(f"shown_{number}", ast.Store())], last.value, lineno=0
            )
        text = ast.unparse(tree)
        if n in program.headed:
            cells += [text, ""]
        else:
            cells[-1] += text + "\n"
    return cells, tuple((with_files(name), with_files(text)) for name, text in program.files)


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
        return [
            line
            for ran in self.cells
            for line in ran.stdout.splitlines()
            if line.startswith("taas: ")
        ]
