"""Running an example's notebook as its reader does, by ``examples/run_notebook.py``."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import nbformat

EXAMPLES = Path(__file__).parents[1] / "examples"


def run_example(name: str, folder: Path, *beside: str) -> tuple[str, list[dict[str, Any]]]:
    """Run a copy of a notebook in a folder; returns what is printed, and the outputs of the executed notebook.

    ``beside`` are files of the examples that it needs. The notebook has to run to its end.
    """
    for file in (name, *beside):
        shutil.copy(EXAMPLES / file, folder)
    done = subprocess.run(
        [sys.executable, EXAMPLES / "run_notebook.py", folder / name, "--out", folder / "out"],
        env={**os.environ, "PYTHONPATH": str(EXAMPLES.parent)},
        capture_output=True,
        text=True,
        timeout=380,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    executed = nbformat.read(folder / "out" / name, as_version=4)
    return done.stdout, [out for cell in executed.cells for out in cell.get("outputs", [])]
