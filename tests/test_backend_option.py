"""``--backend``: the header's choice holds, whatever the cell asks for."""

from __future__ import annotations

import pytest
from notebook_harness import Notebook

pytestmark = pytest.mark.slow

CELL = """
import torch, torch.distributed as dist
dist.init_process_group({asked})
backend = dist.get_backend()
group = dist.new_group(backend="gloo")
total = torch.ones(1); dist.all_reduce(total, group=group)
dist.destroy_process_group()
"""


def test_the_headers_backend_is_used(notebook: Notebook) -> None:
    """A cell that asks for a backend this torch lacks runs with the one the header names."""
    asked = '"mpi", device_id=torch.device("cuda", 0)'
    notebook.good("#pragma taas --gpus 2 --backend gloo" + CELL.format(asked=asked))
    assert notebook.value("backend, total.item()") == "gloo 2.0"


def test_nccl_is_rehearsed(notebook: Notebook) -> None:
    """Without a GPU the backend chosen by the header is rehearsed as one chosen by the cell is."""
    notebook.good("#pragma taas --gpus 2 --rehearse --backend nccl" + CELL.format(asked='"gloo"'))
    assert notebook.value("backend, total.item()") == "gloo 2.0"


def test_a_backend_that_is_not_there_is_refused(notebook: Notebook) -> None:
    """It is said before the cell's first line runs."""
    ran = notebook.run("#pragma taas --gpus 2 --backend mpi\nprint('the body ran')")
    assert "--backend mpi: this torch has no mpi; it was built with gloo" in ran.evalue
    assert "the body ran" not in ran.stdout
