"""The demo, run as ``make demo`` runs it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from example_runs import run_example


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_demo_trains(tmp_path: Path) -> None:
    """The demo runs to its end: both losses fall, and the notebook's model is the trained one."""
    pytest.importorskip("sklearn")
    pytest.importorskip("matplotlib")
    printed, outputs = run_example("mnist_ddp.ipynb", tmp_path, "offline_mnist.py")
    losses = [float(loss) for loss in re.findall(r"loss (\d+\.\d+), ", printed)]
    half = len(losses) // 2
    assert half >= 3, printed
    for form in (losses[:half], losses[half:]):
        assert form == sorted(form, reverse=True), printed
    (right, images) = re.findall(r"DigitNet reads (\d+) of (\d+)", printed)[0]
    assert int(right) / int(images) > 0.8
    assert (tmp_path / "mnist_cnn.pt").stat().st_size > 10_000
    assert sum("image/png" in out.get("data", {}) for out in outputs) == 2
