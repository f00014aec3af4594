"""Programs in an interpreter of their own."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path


def printed(program: str, folder: Path | None = None) -> list[str]:
    """Run a program in a fresh interpreter, which must not complain.

    Returns the lines it prints.
    """
    ran = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        cwd=folder,
    )
    assert ran.stderr == ""
    return ran.stdout.splitlines()


_EACH = """
import os, sys, {imports}
for name, program in {programs!r}.items():
    if (pid := os.fork()) == 0:
        print("#", name)
        exec(program, {{"__name__": "__main__"}})
        sys.stdout.flush()
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0, name
"""


def all_printed(programs: Mapping[str, str], *, imports: str) -> dict[str, list[str]]:
    """Run programs in forks of a fresh interpreter that has imported some modules.

    Returns the lines that each prints.
    """
    lines = "\n".join(printed(_EACH.format(imports=imports, programs={**programs})))
    parts = (part.partition("\n") for part in f"\n{lines}".split("\n# ")[1:])
    return {name: said.splitlines() for name, _, said in parts}
