"""Print, for pip, what the oldest supported environment is: pyproject.toml's floors, and the tests' tools.

The tools have the versions of constraints.txt, of which nothing else holds here.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

TOOLS = (
    "hypothesis", "matplotlib", "nbclient", "nbconvert", "pandas", "pytest", "pytest-timeout", "pytest-xdist", "scikit-learn"
)  # fmt: skip
FOR_THE_SUITE = {"ipython": "8.20", "ipykernel": "6.29"}
"""Still older ones, Colab's, are installed beside them, for tests/test_colab.py."""
ROOT = Path(__file__).resolve().parent.parent

project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
tested = dict(re.findall(r"^([\w-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
for need in project["dependencies"]:
    name, floor = re.match(r"([\w-]+)>=([\w.]+)", need).groups()
    print(f"{name}=={FOR_THE_SUITE.get(name, floor)}")  # noqa: T201 the result
for tool in TOOLS:
    print(f"{tool}=={tested[tool]}")  # noqa: T201
