"""Cells in a real notebook on two GPUs that compute nothing.

They show which GPU who uses, and what stays on it.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest
from accounting_cuda import needs_it
from privileges import no_mounts

pytestmark = [
    needs_it,
    pytest.mark.slow,
    pytest.mark.skipif(bool(no_mounts()), reason="needs root, for a /dev of its own"),
]

CELLS = [
    "%load_ext taas",
    """#pragma taas --gpus 2 --output all
import os, torch
pinned = torch.ones(4).pin_memory()
contexts = [torch._C._cuda_hasPrimaryContext(n) for n in (0, 1)]
print("said", os.environ["RANK"], torch.cuda.device_count(), torch.cuda.current_device(), contexts)
""",
    """#pragma taas --gpus 2 --output all
import os, wrapping
print("said", os.environ["RANK"], os.environ["CUDA_VISIBLE_DEVICES"])
""",
    """#pragma taas --gpus 1 --keep
import torch
held, host = torch.empty(1 << 20, device="cuda"), torch.ones(1 << 20)
where = held.data_ptr(), host.data_ptr()
unused = torch.empty(1 << 28, device="cuda")
del unused
""",
    """#pragma taas --gpus 1 --keep
same = where == (held.data_ptr(), host.data_ptr())
print("said", held.device, same, torch.cuda.memory_reserved() < 1 << 28)
""",
    """#pragma taas --gpus 1 --keep
held2 = held
print("said", held.device, where == (held.data_ptr(), host.data_ptr()))
""",
    """%taas release
print("said", held.device)
""",
    "kernel = torch.empty(3 << 28, device='cuda')",
    "#pragma taas --gpus 1\nprint('said')",
    "#pragma taas --gpus 3\npass",
    "#pragma taas --gpus 2 --keep\npass",
    """import taas, time
def one(): return 1
run = taas.submit(one, gpus=1, name="waits")
while "waiting" not in repr(run): time.sleep(0.02)
print("said", repr(run).splitlines()[1])
""",
    "%taas release\nprint('said', run.result(100))",
]
WRAPPING = """
from torch import nn
def wrap(net):
    return nn.DataParallel(net)
"""
PROGRAM = f"""
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from accounting_cuda import environ_of_cuda, show_gpus
show_gpus(2)
from notebook_harness import Notebook
folder = Path(sys.argv[2])
(folder / "wrapping.py").write_text({WRAPPING!r})
# ranks write where the account is: outside the project
book = Notebook(folder, environ=environ_of_cuda(Path(sys.argv[3])))
try:
    for cell in {CELLS!r}:
        ran = book.run(cell)
        lines = ran.stdout.splitlines()
        own = sorted(line[line.index("said"):] for line in lines if "said" in line)
        print([own, [line for line in lines if line.startswith("taas")], ran.ename, ran.evalue])
finally:
    book.close()
"""


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[list[str], list[str], str, str]]:
    """What each cell said: its own lines, those of taas, and its error."""
    project = tmp_path_factory.mktemp("project")
    account = tmp_path_factory.mktemp("account") / "account"
    command = [
        sys.executable,
        "-c",
        PROGRAM,
        str(Path(__file__).parent),
        str(project),
        str(account),
    ]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)
    assert ran.returncode == 0, ran.stderr
    return [ast.literal_eval(line) for line in ran.stdout.splitlines() if line.startswith("[")]


def test_each_rank_uses_its_own_gpu(said: list[tuple[list[str], list[str], str, str]]) -> None:
    """It sees both, and has a context on its own alone, whatever uses CUDA first."""
    assert said[1][0] == ["said 0 2 0 [True, False]", "said 1 2 1 [False, True]"]


def test_a_wrapper_in_a_project_s_module_makes_the_first_gpu_each_ranks_own(
    said: list[tuple[list[str], list[str], str, str]],
) -> None:
    """Programs for DataParallel call ``cuda:0`` theirs."""
    assert said[2][0] == ["said 0 0,1", "said 1 1,0"]


def test_kept_ranks_keep_what_they_have_on_their_gpu(
    said: list[tuple[list[str], list[str], str, str]],
) -> None:
    """It came to the notebook's host memory, and has not changed there.

    Memory without a tensor is given back.
    """
    assert said[4][0] == ["said cuda:0 True True"]
    assert said[5][0] == ["said cuda:0 True"]
    assert said[6][0] == ["said cpu"]


def test_the_cell_says_what_the_kernel_holds_and_what_there_is(
    said: list[tuple[list[str], list[str], str, str]],
) -> None:
    """Beside a rank on the same GPU; more GPUs than there are are refused with their number."""
    [line] = said[8][1]
    assert line.startswith("taas: this notebook's kernel holds 3.2 GB of cuda:0, a GPU of this run")
    assert said[9][2] == "NotEnoughDevices"
    assert said[9][3].startswith("3 GPUs asked for, and this machine has 2.")


def test_a_submitted_run_says_that_kept_ranks_hold_the_gpus(
    said: list[tuple[list[str], list[str], str, str]],
) -> None:
    """They would hold them for half an hour: its line has what ends them, and then it begins."""
    [line] = said[-2][0]
    assert "1 GPU, which other runs or ranks that this notebook keeps" in line
    assert "%taas release ends these" in line
    assert said[-1][0] == ["said 1"]
