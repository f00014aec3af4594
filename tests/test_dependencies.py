"""What taas imports is what it asks for.

An environment made of the floors and nothing else has all of it.
"""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import packages_distributions
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
MODULES = sorted((ROOT / "taas").rglob("*.py"))
ALWAYS_BROUGHT = {"traitlets": "ipython", "numpy": "torchvision"}
"""Packages that all versions of a declared one need, from its floor on."""


def _names(needs: list[str]) -> set[str]:
    names = [re.split(r"[^\w-]", need, maxsplit=1)[0] for need in needs]
    return {name.lower().replace("_", "-") for name in names}


def _imported_at_once(body: list[ast.stmt]) -> Iterator[str]:
    """Yield the packages that a module cannot be imported without."""
    for node in body:
        match node:
            case ast.Import(names=names):
                yield from (alias.name for alias in names)
            case ast.ImportFrom(module=str(module), level=0):
                yield module
            case ast.ClassDef(body=inner) | ast.With(body=inner):
                yield from _imported_at_once(inner)


def test_what_is_imported_at_once_is_declared() -> None:
    """Of a package that another one brings, the oldest versions of that may not.

    ``comm`` came with ipykernel 6.18.
    """
    declared = _names(PROJECT["dependencies"])
    of_engines = _names(PROJECT["optional-dependencies"]["ray"])
    distributions = packages_distributions()
    missing = {}
    for path in MODULES:
        for name in _imported_at_once(ast.parse(path.read_text()).body):
            package = name.partition(".")[0]
            if package in sys.stdlib_module_names or package == "taas":
                continue
            package = ALWAYS_BROUGHT.get(package, package)
            found = {one.lower().replace("_", "-") for one in distributions.get(package, [package])}
            if not found & (declared | of_engines):
                missing[package] = str(path.relative_to(ROOT))
    assert not missing
