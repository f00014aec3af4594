"""Only rank 0 writes the project, seen from a notebook."""

from __future__ import annotations

from pathlib import Path

import pytest
from notebook_harness import Notebook

from taas.storage import walls

pytestmark = pytest.mark.slow

SAVE = """
import os, torch
torch.save({"from": int(os.environ["RANK"])}, "model.pt")
"""


def test_a_replicated_save_is_rank_0s(notebook: Notebook) -> None:
    """Every rank saves: one file, rank 0's, and not a word about the others."""
    ran = notebook.good("#pragma taas --gpus 3" + SAVE)
    assert notebook.value('__import__("torch").load("model.pt")') == "{'from': 0}"
    assert ran.own == ""
    assert "model.pt" not in ran.stdout


def test_a_checkpoint_of_all_ranks_is_saved_and_loaded_in_one_cell(notebook: Notebook) -> None:
    """torch.distributed.checkpoint splits also what all ranks have alike: without --shared it is whole, and stays so."""
    notebook.good(
        "import torch\nnet = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(4)))"
    )
    notebook.good(
        "#pragma taas --gpus 3\nimport torch, torch.distributed as dist,"
        " torch.distributed.checkpoint as dcp\ndist.init_process_group()\nmodel ="
        " torch.nn.parallel.DistributedDataParallel(net)\nfor turn in range(2):\n    with"
        " torch.no_grad(): net[0].weight += 1\n    dcp.save({'net': model.state_dict()},"
        " checkpoint_id='ck')\n    state = {'net': {name: torch.zeros_like(value) for name, value"
        " in model.state_dict().items()}}\n    dcp.load(state, checkpoint_id='ck')\n    assert"
        " all(torch.equal(value, model.state_dict()[name]) for name, value in"
        " state['net'].items())\ndel model, dcp, dist"
    )
    ran = notebook.good(
        "import torch.distributed.checkpoint as dcp\nstate = {'net': {'module.' + name:"
        " torch.zeros_like(value) for name, value in net.state_dict().items()}}\ndcp.load(state,"
        " checkpoint_id='ck', no_dist=True)\nprint(all(torch.equal(value,"
        " net.state_dict()[name[7:]]) for name, value in state['net'].items()))"
    )
    assert ran.own.strip() == "True"


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
    assert sorted(ran.own.splitlines()) == ["[rank 0] all seen", "[rank 1] all seen"]


def test_the_whole_machine_as_project() -> None:
    """A kernel started in ``/``: runs of several ranks work, and write only where nobody's project files are."""
    written = Path("/written by rank 1 of a test")
    book = Notebook(Path("/"))
    try:
        book.good("%load_ext taas")
        book.good(
            "#pragma taas --gpus 2\n"
            "import os, subprocess, tempfile, torch.distributed as dist\n"
            "dist.init_process_group()\n"
            "if dist.get_rank():\n"
            f"    subprocess.run(['sh', '-c', 'echo > \"$0\"', {str(written)!r}])\n"
            "    tempfile.TemporaryFile().write(b'x')\n"
            "dist.barrier()"
        )
        assert not written.exists() or walls.verdicts()[0].startswith("write rule: diversion")
    finally:
        book.close()
        written.unlink(missing_ok=True)


def test_an_error_of_a_program_that_met_the_wall_has_its_words(notebook: Notebook) -> None:
    """``check=True`` raises with the program's status alone: the cell says what the program said, and why."""
    ran = notebook.run(
        "#pragma taas --gpus 2\nimport subprocess\n"
        "subprocess.run(['cp', '/dev/null', 'result.txt'], check=True, capture_output=True)"
    )
    assert 'returned non-zero exit status 1. "cp: cannot create' in ran.evalue
    assert "only rank 0 writes the project" in ran.evalue
    last = ran.traceback.splitlines()[-1]
    assert last.startswith(
        'CellFailed: rank 1 raised the CalledProcessError above: "cp: cannot create'
    )
