"""Only rank 0 writes the project, seen from a notebook."""

from __future__ import annotations

from pathlib import Path

import pytest
from blocks import block
from notebook_harness import Notebook

from taas.project.wall import walls

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
    """torch.distributed.checkpoint splits also what all ranks have alike.

    Without --shared it is whole, and stays so.
    """
    notebook.good(
        "import torch\nnet = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(4)))"
    )
    notebook.good(
        block("""
            #pragma taas --gpus 3
            import torch, torch.distributed as dist, torch.distributed.checkpoint as dcp
            dist.init_process_group()
            model = torch.nn.parallel.DistributedDataParallel(net)
            for turn in range(2):
                with torch.no_grad(): net[0].weight += 1
                saved = model.state_dict()
                dcp.save({'net': saved}, checkpoint_id='ck')
                state = {'net': {name: torch.zeros_like(value) for name, value in saved.items()}}
                dcp.load(state, checkpoint_id='ck')
                assert all(torch.equal(value, saved[name]) for name, value in state['net'].items())
            del model, dcp, dist, saved
        """)
    )
    ran = notebook.good(
        block("""
            import torch.distributed.checkpoint as dcp
            values = net.state_dict()
            empty = {'module.' + name: torch.zeros_like(one) for name, one in values.items()}
            state = {'net': empty}
            dcp.load(state, checkpoint_id='ck', no_dist=True)
            print(all(torch.equal(value, values[name[7:]]) for name, value in state['net'].items()))
        """)
    )
    assert ran.own.strip() == "True"


def test_deny_is_an_error_with_path_and_rank(notebook: Notebook) -> None:
    """``--rank-writes deny`` makes such a write fail, by name."""
    ran = notebook.run("#pragma taas --gpus 2 --rank-writes deny" + SAVE)
    assert ran.ename == "CellFailed"
    assert "rank 1" in ran.evalue
    assert "model.pt" in ran.evalue


def test_live_reads(notebook: Notebook) -> None:
    """What rank 0 saves, and replaces later, all ranks load, also where they looked before."""
    ran = notebook.good(
        block("""
            #pragma taas --gpus 2 --output all
            import os, torch, torch.distributed as dist
            dist.init_process_group('gloo')
            assert not os.path.exists('ckpt.pt')
            for step in range(20):
                dist.barrier()
                if dist.get_rank() == 0:
                    torch.save(step, 'ckpt.tmp'); os.replace('ckpt.tmp', 'ckpt.pt')
                dist.barrier()
                assert torch.load('ckpt.pt') == step
            print('all seen')
        """)
    )
    assert sorted(ran.own.splitlines()) == ["[rank 0] all seen", "[rank 1] all seen"]


def test_functions_of_os_that_an_earlier_cell_imported_by_name(notebook: Notebook) -> None:
    """They are diverted in the ranks, and are the notebook's own afterwards.

    So are those that an object holds, and those that the cell itself imports.
    """
    notebook.good(
        block("""
            import io, os
            from functools import partial
            from os import mkdir, rename
            write = partial(io.open, mode="w")
            calls = {"remove": os.remove}
        """)
    )
    notebook.good(
        block("""
            #pragma taas --gpus 2
            import os
            from os import stat
            mkdir("out")
            print("of", os.environ["RANK"], file=write("out/new"))
            rename("out/new", "out/old")
            assert open("out/old").read() == f"of {os.environ['RANK']}\\n", stat("out/old")
            write("out/gone").close()
            calls["remove"]("out/gone")
            found = os.listdir("out")
        """)
    )
    assert notebook.value("[*found, open('out/old').read()]") == "['old', 'of 0\\n']"
    same = (
        "[stat is os.stat, mkdir is os.mkdir, write.func is io.open, calls['remove'] is os.remove]"
    )
    assert notebook.value(same) == "[True, True, True, True]"


def test_the_whole_machine_as_project() -> None:
    """A kernel started in ``/`` runs ranks, which write only where no project files are."""
    written = Path("/written by rank 1 of a test")
    book = Notebook(Path("/"))
    try:
        book.good("%load_ext taas")
        book.good(
            block(f"""
                #pragma taas --gpus 2
                import os, subprocess, tempfile, torch.distributed as dist
                dist.init_process_group()
                if dist.get_rank():
                    subprocess.run(['sh', '-c', 'echo > "$0"', {str(written)!r}])
                    tempfile.TemporaryFile().write(b'x')
                dist.barrier()
            """)
        )
        assert not written.exists() or walls.verdicts()[0].startswith("write rule: diversion")
    finally:
        book.close()
        written.unlink(missing_ok=True)


def test_an_error_of_a_program_that_met_the_wall_has_its_words(notebook: Notebook) -> None:
    """``check=True`` raises with the program's status alone.

    The cell says what the program said, and why.
    """
    ran = notebook.run(
        block("""
            #pragma taas --gpus 2
            import subprocess
            subprocess.run(['cp', '/dev/null', 'result.txt'], check=True, capture_output=True)
        """)
    )
    assert 'returned non-zero exit status 1. "cp: cannot create' in ran.evalue
    assert "only rank 0 writes the project" in ran.evalue
    last = ran.traceback.splitlines()[-1]
    assert last.startswith(
        'CellFailed: rank 1 raised the CalledProcessError above: "cp: cannot create'
    )
