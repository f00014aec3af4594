"""Imports point down the house: the table of rooms in ARCHITECTURE.md, from top to bottom."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "taas"


class Import(NamedTuple):
    """One line that imports a module of taas."""

    module: str
    line: int
    imported: str


@cache
def rooms() -> dict[str, int]:
    """The row of each room in the table, counted from the top."""
    text = (ROOT / "ARCHITECTURE.md").read_text()
    table = text.partition("| room | what is in it |")[2].partition("\n\n")[0]
    rows = [row.split("|")[1] for row in table.splitlines()[2:]]
    return {room: number for number, row in enumerate(rows) for room in re.findall("`(.+?)`", row)}


def module_of(path: Path) -> str:
    """The name of a module below ``taas``: ``rank.cell``; of the package itself ``__init__``."""
    name = ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
    return name.removesuffix(".__init__")


@cache
def modules() -> dict[str, Path]:
    return {module_of(path): path for path in sorted(PACKAGE.rglob("*.py"))}


def room_of(module: str) -> str:
    """The room that a module stands in: the one with the longest name."""
    known, parts = rooms(), module.split(".")
    names = [".".join(parts[:number]) for number in range(len(parts), 0, -1)]
    found = [name for name in names if name in known]
    assert found, f"taas/{module.replace('.', '/')}.py stands in no room of ARCHITECTURE's table"
    return found[0]


def imports_of(module: str, source: str, known: set[str]) -> Iterator[Import]:
    """What a module imports of taas, at its top, in functions and for its annotations."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "taas":
            assert not node.level, "imports are absolute"
            base = (node.module or "").partition(".")[2]
            for alias in node.names:
                inner = f"{base}.{alias.name}" if base else alias.name
                yield Import(module, node.lineno, inner if inner in known else base or "__init__")
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.partition(".")[0] == "taas":
                    yield Import(module, node.lineno, alias.name.partition(".")[2] or "__init__")


def why_not(one: Import) -> str | None:
    """Why a line may not stand where it does, and where it belongs; None: it may."""
    levels, here, there = rooms(), room_of(one.module), room_of(one.imported)
    if here == there or levels[there] > levels[here]:
        return None
    return (
        f"taas/{one.module.replace('.', '/')}.py:{one.line} imports taas.{one.imported}: imports"
        f' point down, and `{there}` does not stand below `{here}` (ARCHITECTURE.md, "Where things'
        f' are"). What needs both belongs into `{there}` or above it; what both need, below'
        f" `{here}`"
    )


def every_import() -> list[Import]:
    known = modules()
    return [
        one
        for module, path in known.items()
        for one in imports_of(module, path.read_text(), set(known))
    ]


def test_imports_point_down() -> None:
    wrong = [why for one in every_import() if (why := why_not(one)) is not None]
    assert not wrong, "\n".join(wrong)


def test_no_modules_import_each_other() -> None:
    """Also not by way of others, within a room."""
    below: dict[str, set[str]] = {}
    for one in every_import():
        below.setdefault(one.module, set()).add(one.imported)
    circles = []
    for module in below:
        seen, waiting = set[str](), [*below[module]]
        while waiting:
            there = waiting.pop()
            if there not in seen:
                seen.add(there)
                waiting += below.get(there, ())
        if module in seen:
            circles.append(module)
    assert not circles, f"these import each other: {', '.join(circles)}"


def test_every_room_is_there() -> None:
    empty = [room for room in rooms() if room not in {room_of(module) for module in modules()}]
    assert not empty, f"rooms of the table without a file: {empty}"


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("base.linux", "from taas.rank import cell"),
        ("header.options", "def later():\n    from taas.config import load_catalog"),
        ("capture.describe.memory", "if TYPE_CHECKING:\n    import taas.capture.moves.kept"),
        ("calls", "from taas import frontend"),
    ],
)
def test_a_line_that_points_up_is_found(module: str, line: str) -> None:
    """Wherever it stands; rooms of one row do not import each other either."""
    [found] = imports_of(module, line, set(modules()))
    why = why_not(found)
    assert why is not None and f"taas/{module.replace('.', '/')}.py:" in why
