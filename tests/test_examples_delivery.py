"""The delivery example, run in a kernel as a reader runs it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_data_vms_shorten_the_waiting(tmp_path: Path) -> None:
    """Every rank reads all alone; with ``--cpus 4`` half the steps, and less waiting in each; both are plotted."""
    pytest.importorskip("matplotlib")
    shutil.copy(EXAMPLES / "data_delivery.ipynb", tmp_path)
    done = subprocess.run(
        [
            sys.executable,
            EXAMPLES / "run_notebook.py",
            tmp_path / "data_delivery.ipynb",
            "--out",
            tmp_path / "out",
        ],
        env={**os.environ, "PYTHONPATH": str(EXAMPLES.parent)},
        capture_output=True,
        text=True,
        timeout=380,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    said = re.findall(r"(\d+) steps, (\d+\.\d) s waited", done.stdout)
    assert [int(steps) for steps, _ in said] == [32, 16]
    assert float(said[1][1]) < float(said[0][1])
    executed = nbformat.read(tmp_path / "out" / "data_delivery.ipynb", as_version=4)
    outputs = [out for cell in executed.cells for out in cell.get("outputs", [])]
    assert sum("image/png" in out.get("data", {}) for out in outputs) == 1
    assert any("of 32 units" in out.get("data", {}).get("text/plain", "") for out in outputs)
