"""The delivery example, run in a kernel as a reader runs it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from example_runs import run_example


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_data_vms_share_the_reading(tmp_path: Path) -> None:
    """Every rank reads all alone; with ``--cpus 4`` each takes half the steps; the waiting of both is plotted."""
    pytest.importorskip("matplotlib")
    printed, outputs = run_example("data_delivery.ipynb", tmp_path)
    assert re.findall(r"(\d+) steps, \d+\.\d s waited", printed) == ["32", "16"]
    assert sum("image/png" in out.get("data", {}) for out in outputs) == 1
    assert any("of 32 units" in out.get("data", {}).get("text/plain", "") for out in outputs)
