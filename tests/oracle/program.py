"""A small notebook, and what comes of it."""

from __future__ import annotations

import ast
import re
import symtable
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from blocks import block
from notebook_harness import Ran

from oracle.graph import Graph

__all__ = ["HEADER", "KEPT", "Played", "Program", "in_ranks", "kept", "row", "together"]

HEADER = "#!c1.4\n"
KEPT = "#pragma taas --gpus 2 --keep\n"
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
        if not plain:
            return cell
        return magic_on_top(f"{cell}\n{self.here_also}" if self.here_also else cell)


def row(
    name: str,
    *,
    setup: str | tuple[str, ...] = (),
    cell: str,
    check: str = "",
    files: Mapping[str, str] | None = None,
    here_also: str = "",
    goes_on: bool = False,
) -> Program:
    """Return a notebook with one headed cell.

    Code may be indented as it is in the test's file.

    Args:
        name: what the row is about.
        setup: the cell before the headed one, or several of them.
        cell: the headed cell.
        check: the cell after it, which looks at what it left.
        files: of the project, by their names.
        here_also: see ``Program``.
        goes_on: see ``Program``.
    """
    earlier = (setup,) if isinstance(setup, str) else setup
    cells = (*earlier, cell, check) if check else (*earlier, cell)
    return Program(
        name,
        tuple(map(block, cells)),
        headed=(len(earlier),),
        files=_with_text(files),
        here_also=block(here_also),
        goes_on=goes_on,
    )


class _Headed(str):
    """Text of a cell that runs in ranks."""


def in_ranks(*parts: str) -> str:
    """Return a cell of :func:`kept` that runs in ranks."""
    return _Headed(block(*parts))


def kept(
    name: str, *cells: str, files: Mapping[str, str] | None = None, goes_on: bool = False
) -> Program:
    """Return a notebook of these cells; those of :func:`in_ranks` run in ranks that stay."""
    return Program(
        name,
        tuple(map(block, cells)),
        headed=tuple(n for n, cell in enumerate(cells) if isinstance(cell, _Headed)),
        header=KEPT,
        files=_with_text(files),
        goes_on=goes_on,
    )


def _with_text(files: Mapping[str, str] | None) -> tuple[tuple[str, str], ...]:
    return tuple((path, block(text) + "\n") for path, text in (files or {}).items())


def together(programs: Iterable[Program], most: int = 16) -> Iterator[Program]:
    """Yield notebooks that each join the cells of several, and are played in the time of one.

    Programs are joined that have as many headed cells, and the same header.

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
    """Return a notebook's cells, every second one headed, and its files, numbered in all names."""
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
