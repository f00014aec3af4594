"""Processes that hold more descriptors than select(2) knows of: an agent with hundreds of ranks, a kernel with many files."""

from __future__ import annotations

from pathlib import Path

from notebook_harness import Notebook, gone

MANY = 1100
HOLD = f"""
import os, resource
resource.setrlimit(resource.RLIMIT_NOFILE, (4096, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
held = [os.open(os.devnull, os.O_RDONLY) for _ in range({MANY})]
"""


def test_a_kernel_runs_cells_and_comes_back_to_runs(tmp_path: Path) -> None:
    """It sees that its supervisor lives, and waits for what a run writes."""
    notebook = Notebook(tmp_path)
    try:
        notebook.good("%load_ext taas\n" + HOLD)
        assert notebook.good("#pragma taas --gpus 2\nx = 1\nprint('here')").own == "here\n"
        notebook.good("#pragma taas --gpus 2 --background --name fox\nx = 2")
        notebook.good("%taas attach fox")
        assert notebook.value("x") == "2"
        everybody = notebook.processes()
        notebook.good("%taas release")
        assert gone(everybody.agents)
    finally:
        notebook.close()
