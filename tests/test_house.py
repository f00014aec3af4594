"""Imports follow the table of packages in ARCHITECTURE.md, from the top row to the bottom."""

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
def packages() -> dict[str, int]:
    """Return the row of each package in the table, counted from the top."""
    text = (ROOT / "ARCHITECTURE.md").read_text()
    table = text.partition("| package | contents |")[2].partition("\n\n")[0]
    rows = [row.split("|")[1] for row in table.splitlines()[2:]]
    return {name: number for number, row in enumerate(rows) for name in re.findall("`(.+?)`", row)}


def module_of(path: Path) -> str:
    """Return the name of a module below ``taas``, such as ``rank.cell``.

    The package ``taas`` itself is called ``__init__``.
    """
    name = ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
    return name.removesuffix(".__init__")


@cache
def modules() -> dict[str, Path]:
    return {module_of(path): path for path in sorted(PACKAGE.rglob("*.py"))}


def package_of(module: str) -> str:
    """Return the innermost package of the table that contains a module."""
    known, parts = packages(), module.split(".")
    names = [".".join(parts[:number]) for number in range(len(parts), 0, -1)]
    found = [name for name in names if name in known]
    assert found, f"taas/{module.replace('.', '/')}.py is in no package of ARCHITECTURE's table"
    return found[0]


def imports_of(module: str, source: str, known: set[str]) -> Iterator[Import]:
    """Yield what a module imports of taas: at its top, in functions and for its annotations."""
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
    """Return why an import is not allowed, and where the code belongs; None if it is allowed."""
    levels, here, there = packages(), package_of(one.module), package_of(one.imported)
    if here == there or levels[there] > levels[here]:
        return None
    return (
        f"taas/{one.module.replace('.', '/')}.py:{one.line} imports taas.{one.imported}: imports"
        f' point down, and `{there}` is not below `{here}` (ARCHITECTURE.md, "Where things are").'
        f" Code that needs both belongs into `{there}` or above it; code that both need, below"
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
    """There are no circular imports within a package, direct or indirect."""
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


def test_every_package_exists() -> None:
    empty = [name for name in packages() if name not in {package_of(one) for one in modules()}]
    assert not empty, f"packages of the table without a file: {empty}"


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("base.linux", "from taas.rank import cell"),
        ("header.options", "def later():\n    from taas.config import load_catalog"),
        ("capture.describe.memory", "if TYPE_CHECKING:\n    import taas.capture.moves.kept"),
        ("calls", "from taas import frontend"),
    ],
)
def test_an_import_that_points_up_is_found(module: str, line: str) -> None:
    """Such an import is found at any place; packages in the same row do not import each other."""
    [found] = imports_of(module, line, set(modules()))
    why = why_not(found)
    assert why is not None and f"taas/{module.replace('.', '/')}.py:" in why
