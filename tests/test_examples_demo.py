"""The demo, run as ``make demo`` runs it."""

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
def test_demo_trains(tmp_path: Path) -> None:
    """The demo runs to its end: both losses fall, and the notebook's model is the trained one."""
    pytest.importorskip("sklearn")
    pytest.importorskip("matplotlib")
    for name in ("mnist_ddp.ipynb", "offline_mnist.py"):
        shutil.copy(EXAMPLES / name, tmp_path)
    done = subprocess.run(
        [
            sys.executable,
            EXAMPLES / "run_notebook.py",
            tmp_path / "mnist_ddp.ipynb",
            "--out",
            tmp_path / "out",
        ],
        env={**os.environ, "PYTHONPATH": str(EXAMPLES.parent)},
        capture_output=True,
        text=True,
        timeout=380,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    losses = [float(loss) for loss in re.findall(r"loss (\d+\.\d+), ", done.stdout)]
    half = len(losses) // 2
    assert half >= 3, done.stdout
    for form in (losses[:half], losses[half:]):
        assert form == sorted(form, reverse=True), done.stdout
    (right, images) = re.findall(r"DigitNet reads (\d+) of (\d+)", done.stdout)[0]
    assert int(right) / int(images) > 0.8
    assert (tmp_path / "mnist_cnn.pt").stat().st_size > 10_000
    executed = nbformat.read(tmp_path / "out" / "mnist_ddp.ipynb", as_version=4)
    pictures = [
        out
        for cell in executed.cells
        for out in cell.get("outputs", [])
        if "image/png" in out.get("data", {})
    ]
    assert len(pictures) == 2
