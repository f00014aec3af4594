"""A launcher that a rehearsed cell starts as a command is refused in a line that says what to type.

Other commands run.
"""

from __future__ import annotations

import pytest
from blocks import block
from notebook_harness import Notebook

REFUSED = {
    "torchrun with an exclamation mark": ("!torchrun --nproc-per-node 2 train.py", "torchrun", 2),
    "accelerate, by subprocess": (
        block("""
            import subprocess
            subprocess.run(['accelerate', 'launch', '--num_processes=3', 'train.py'])
        """),
        "accelerate launch",
        3,
    ),
    "mpirun, behind other commands": (
        "import os; os.system('cd . && X=1 mpirun -np 4 python train.py')",
        "mpirun",
        4,
    ),
    "a module of torch, by this Python": (
        block("""
            import subprocess, sys
            subprocess.check_call([sys.executable, '-m', 'torch.distributed.run', 'train.py'])
        """),
        "-m torch.distributed.run",
        2,
    ),
    "what a cell takes the output of": ("out = !torchrun train.py", "torchrun", 2),
}


@pytest.mark.parametrize(("line", "called", "gpus"), REFUSED.values(), ids=REFUSED)
def test_a_launchers_command_is_refused_by_name(
    notebook: Notebook, line: str, called: str, gpus: int
) -> None:
    """The error names it and the header to write; it was not started."""
    notebook.good("%load_ext taas")
    (notebook.folder / "train.py").write_text("open('started', 'w')")
    ran = notebook.run(f"#pragma taas --gpus 2\n{line}")
    assert ran.ename == "CellFailed"
    assert f"{called} cannot be rehearsed: a command sees this machine as it is" in ran.evalue
    assert f"Write #pragma taas --gpus {gpus} above the training code itself" in ran.evalue
    assert not (notebook.folder / "started").exists()


def test_other_commands_run(notebook: Notebook) -> None:
    """Also those that only speak of a launcher, ask it something, or want no GPU."""
    notebook.good("%load_ext taas")
    ran = notebook.good("""#pragma taas --gpus 2
import os, subprocess, sys
!echo torchrun train.py
asks = [sys.executable, "-m", "torch.distributed.run", "--help"]
plain = {**os.environ, "NO_COLOR": "1"}
said = subprocess.run(asks, capture_output=True, text=True, env=plain).stdout[:6]
status = os.system("echo 'mpirun; deepspeed' > note.txt")""")
    assert "torchrun train.py" in ran.stdout
    assert notebook.value("said.split(':')[0], status") == "usage 0"
