"""Headed cells where IPython and ipykernel are as old as Colab and Kaggle have them.

`make test-oldest` installs these.
"""

from __future__ import annotations

import IPython
import pytest
from blocks import block
from notebook_harness import Notebook

pytestmark = pytest.mark.skipif(
    IPython.version_info >= (8,), reason="for IPython 7.34: make test-oldest runs it there"
)


def test_names_travel_and_come_back(notebook: Notebook) -> None:
    notebook.good("import torch\nnet = torch.nn.Linear(2, 1)\ndef double(x):\n    return 2 * x")
    ran = notebook.good(
        block("""
            #pragma taas --gpus 2
            import torch.distributed as dist
            dist.init_process_group('nccl')
            total = double(torch.ones(3, device='cuda'))
            dist.all_reduce(total)
            net.trained = True
            print(total)
            total.sum()
        """)
    )
    assert "tensor([4., 4., 4.])" in ran.stdout
    assert ran.result is not None and ran.result["text/plain"] == "tensor(12.)"
    assert notebook.value("net.trained, total.sum().item()") == "True 12.0"


def test_an_error_shows_the_cells_line(notebook: Notebook) -> None:
    ran = notebook.run("#pragma taas --gpus 2\nwrong = 1\nwrong / 0")
    assert ran.ename == "CellFailed"
    assert "----> 3 wrong / 0" in ran.traceback


def test_a_background_run_is_attached(notebook: Notebook) -> None:
    notebook.good("#pragma taas --gpus 2 --background --name late\nlate = 5")
    notebook.good("%taas attach late")
    assert notebook.value("late") == "5"
