"""Print, for pip, the oldest supported environment.

It has pyproject.toml's floors, and the tests' tools.

The tools have the versions of constraints.txt, of which nothing else holds here. With ``exactly``
as its argument: the floors, all of them, and of the tools only those without which no test runs
(Colab's IPython is one of these floors).
"""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

TOOLS = (
    "hypothesis",
    "matplotlib",
    "nbclient",
    "nbconvert",
    "pandas",
    "pytest",
    "pytest-timeout",
    "pytest-xdist",
    "scikit-learn",
)
TO_RUN_ONE = ("hypothesis", "pytest", "pytest-timeout")
FOR_THE_SUITE = {"ipython": "8.20", "ipykernel": "6.29"}
"""Still older ones, Colab's, have an environment of their own, for tests/test_colab.py."""
ROOT = Path(__file__).resolve().parent.parent

project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
exactly = sys.argv[1:] == ["exactly"]
tested = dict(
    re.findall(r"^([\w-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
)
for need in project["dependencies"]:
    name, floor = re.match(r"([\w-]+)>=([\w.]+)", need).groups()
    floor = floor if exactly else FOR_THE_SUITE.get(name, floor)
    print(f"{name}=={floor}")  # noqa: T201 the result
for tool in TO_RUN_ONE if exactly else TOOLS:
    print(f"{tool}=={tested[tool]}")  # noqa: T201
