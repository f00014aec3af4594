"""Only rank 0 writes the project, seen from a notebook."""

from __future__ import annotations

import pytest
from notebook_harness import Notebook

pytestmark = pytest.mark.slow

SAVE = """
import os, torch
torch.save({"from": int(os.environ["RANK"])}, "model.pt")
"""


def test_a_replicated_save_is_rank_0s(notebook: Notebook) -> None:
    """Every rank saves: one file, rank 0's, and one line about the others."""
    ran = notebook.good("#pragma taas --gpus 3" + SAVE)
    assert notebook.value('__import__("torch").load("model.pt")') == "{'from': 0}"
    assert "model.pt ×2 dropped (rank 0 wrote it)" in ran.stdout


def test_what_only_another_rank_wrote_is_kept(notebook: Notebook) -> None:
    """A file that rank 0 did not write is not in the project, and not lost."""
    ran = notebook.good(
        "#pragma taas --gpus 2 --name sharded\n"
        "import os\nfrom pathlib import Path\n"
        "if os.environ['RANK'] == '1': Path('shard-1').write_text('mine')\n"
        "found = Path('shard-1').exists()"
    )
    assert notebook.value("__import__('os').path.exists('shard-1')") == "False"
    assert "%taas recover sharded" in ran.stdout


def test_deny_is_an_error_with_path_and_rank(notebook: Notebook) -> None:
    """``--rank-writes deny`` makes such a write fail, by name."""
    ran = notebook.run("#pragma taas --gpus 2 --rank-writes deny" + SAVE)
    assert ran.ename == "CellFailed"
    assert "rank 1" in ran.evalue
    assert "model.pt" in ran.evalue


def test_live_reads(notebook: Notebook) -> None:
    """What rank 0 saves, and replaces later, all ranks load at once, also where they looked before."""
    ran = notebook.good(
        "#pragma taas --gpus 2 --output all\n"
        "import os, torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "assert not os.path.exists('ckpt.pt')\n"
        "for step in range(20):\n"
        "    dist.barrier()\n"
        "    if dist.get_rank() == 0:\n"
        "        torch.save(step, 'ckpt.tmp'); os.replace('ckpt.tmp', 'ckpt.pt')\n"
        "    dist.barrier()\n"
        "    assert torch.load('ckpt.pt') == step\n"
        "print('all seen')"
    )
    assert ran.own == "all seen\n[rank 1] all seen\n" or ran.own == "[rank 1] all seen\nall seen\n"
