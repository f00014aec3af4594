"""Which of torch's NCCL backends a rank gets.

No GPU is needed, since torch chooses it before it asks for one.
"""

from __future__ import annotations

import pytest
import torch.distributed as dist
from notebook_harness import Notebook

pytestmark = pytest.mark.skipif(
    not hasattr(dist, "ProcessGroupNCCL2"), reason="this torch has one NCCL backend"
)

CREATOR = "torch.distributed.Backend._plugins['NCCL'].creator_fn.__name__"
CELLS = {
    "in a rank": f"print({CREATOR})",
    "in a process that a rank forks": f"""
import os
if (child := os.fork()) == 0:
    print({CREATOR}, flush=True)
    os._exit(0)
os.waitpid(child, 0)
""",
    "in a process that a rank starts afresh": f"""
import torch.multiprocessing as mp
creator = "__import__('torch.distributed') and __import__('torch').{CREATOR[6:]}"
with mp.get_context("forkserver").Pool(1) as pool:
    print(pool.apply(eval, [creator]))
""",
    "after the program has made and destroyed a group": f"""
torch.distributed.init_process_group("gloo")
torch.distributed.destroy_process_group()
print({CREATOR})
""",
}


@pytest.mark.parametrize("cell", CELLS.values(), ids=CELLS)
def test_nccl_is_the_backend_that_can_be_aborted(notebook: Notebook, cell: str) -> None:
    """What "nccl" means is settled when the forkserver registers it, for all that comes from it."""
    ran = notebook.good(f"#pragma taas --gpus 2\nimport torch\n{cell}")
    assert ran.own == "_create_nccl_process_group\n"


def test_the_notebook_chooses_the_other_one(notebook: Notebook) -> None:
    """Who asks for NCCL2 by torch's variable has it.

    Who does not finds no such variable in the ranks.
    """
    asked = "import os, torch\nprint(os.environ.get('TORCH_DIST_USE_NCCL2'), " + CREATOR + ")"
    ran = notebook.good(f"#pragma taas --gpus 2\n{asked}")
    assert ran.own == "None _create_nccl_process_group\n"
    assert notebook.value("os.environ.get('TORCH_DIST_USE_NCCL2')") == "None"
    notebook.good("import os\nos.environ['TORCH_DIST_USE_NCCL2'] = '1'")
    ran = notebook.good(f"#pragma taas --gpus 2\n{asked}")
    assert ran.own == "1 _create_nccl2_process_group\n"
    notebook.good("del os.environ['TORCH_DIST_USE_NCCL2']")
    ran = notebook.good(f"#pragma taas --gpus 2\n{asked}")
    assert ran.own == "None _create_nccl_process_group\n"
