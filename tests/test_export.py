"""`%taas export` writes a program that torchrun runs with the same numbers, without taas."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from notebook_harness import Notebook, terminal

pytestmark = pytest.mark.slow
EXAMPLES = Path(__file__).parents[1] / "examples"
_REFUSES = """
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "taas":
            raise ModuleNotFoundError("taas is not installed here")
sys.meta_path.insert(0, Refuse())
"""
IMPORTS = """
import functools, math, os
import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler
"""
NETWORK = """
WIDTH = 16
class Block(nn.Module):
    width = WIDTH
    def __init__(self, features):
        super().__init__()
        self.layer = nn.Linear(features, self.width)
    def forward(self, x):
        return torch.tanh(self.layer(x)) * scale(len(x))

class Net(nn.Sequential):
    def __init__(self):
        super().__init__(Block(4), nn.Dropout(0.1), nn.Linear(WIDTH, 2))

@functools.lru_cache
def scale(count):
    return math.sqrt(count) / factor

def schedule(warmup):
    def at(step):
        return min(1.0, (step + 1) / warmup)
    return at
"""
DATA = """
torch.manual_seed(3)
factor = 3.0
best, pace = float('-inf'), np.float64(0.05)
data = TensorDataset(torch.randn(64, 4), torch.randint(0, 2, (64,)))
rate = schedule(5)
model = Net()
"""
TRAIN = """
%matplotlib inline
dist.init_process_group("gloo")
net = DDP(model)
display('begins')
optimizer = torch.optim.Adam(net.parameters(), lr=float(pace))
steps = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
LOADER
for epoch in range(2):
    for x, y in loader:
        loss = nn.functional.cross_entropy(net(x), y)
        best = max(best, -loss.item())
        optimizer.zero_grad(); loss.backward(); optimizer.step(); steps.step()
        print(f"rank {dist.get_rank()} loss {loss.item():.6f}")
dist.destroy_process_group()
"""
OWN = "loader = DataLoader(data, batch_size=8, sampler=DistributedSampler(data, seed=1))"
REGISTERED = """
import taas
loader = DataLoader(data, batch_size=8, shuffle=True, generator=torch.Generator().manual_seed(7))
taas.register(loader)
"""


def _losses(text: str) -> set[str]:
    return set(re.findall(r"rank \d loss [\d.]+", text))


def _run(project: Path, folder: str, site: Path) -> str:
    """Run an exported program by torchrun, where nobody can import taas."""
    site.mkdir(exist_ok=True)
    (site / "sitecustomize.py").write_text(_REFUSES)
    environ = {name: value for name, value in os.environ.items() if not name.startswith("TAAS")}
    ranks = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*ranks, f"{folder}/train.py"],
        cwd=project,
        env={**environ, "PYTHONPATH": str(site), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def _cells(path: Path) -> list[str]:
    """The code of an example, for ranks that have no GPU and are not rehearsed."""
    cells = json.loads(path.read_text())["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    changes = {
        "#!g2.8\n": "",
        "--gpus 8": "--gpus 2",
        '"cuda", local_rank': '"cpu"',
        '"nccl"': '"gloo"',
    }
    changes |= {
        "torch.cuda.set_device(device)\n": "",
        ", device_ids=[local_rank]": "",
        "range(960)": "range(96)",
    }
    for old, new in changes.items():
        code = [text.replace(old, new) for text in code]
    return code


def test_a_project_that_was_moved_is_named(tmp_path: Path) -> None:
    """Its modules are needed, so the program is refused, and nothing is written."""
    project = tmp_path / "project"
    project.mkdir()
    book = Notebook(project)
    try:
        book.good("%load_ext taas")
        book.good("#pragma taas --gpus 1 --name moved\nx = 1")
        project.rename(tmp_path / "elsewhere")
        said = terminal("export", "moved", "--to", str(tmp_path / "program"))
    finally:
        book.close()
    assert said.returncode == 1
    assert "the folder of moved" in said.stderr
    assert "is not there any more" in said.stderr
    assert not (tmp_path / "program").exists()


def test_the_example_as_a_program(tmp_path: Path) -> None:
    """MNIST's DistributedDataParallel cell, with torchvision's dataset and project modules."""
    project = tmp_path / "project"
    shutil.copytree(EXAMPLES, project, ignore=shutil.ignore_patterns("data", "artefacts"))
    code = _cells(project / "mnist_ddp.ipynb")
    distributed = next(n for n, text in enumerate(code) if "DistributedDataParallel" in text)
    book = Notebook(project)
    try:
        for text in code[:4]:
            book.good(text, seconds=120)
        expected = re.findall("epoch .*", book.good(code[distributed], seconds=300).stdout)
        book.good("%taas export --to program", seconds=120)
    finally:
        book.close()
    assert len(expected) == 3
    assert re.findall("epoch .*", _run(project, "program", tmp_path / "site")) == expected


@pytest.mark.parametrize(
    ("before", "loader", "options"),
    [("", OWN, ""), (REGISTERED, "", " --cpus 1")],
    ids=["own", "registered"],
)
def test_torchrun_prints_the_same(tmp_path: Path, before: str, loader: str, options: str) -> None:
    """Classes, closures, a decorated function and data that they need.

    The second time the loader is registered.
    """
    project = tmp_path / "project"
    project.mkdir()
    book = Notebook(project)
    try:
        for cell in ("%load_ext taas", IMPORTS, NETWORK, DATA, *filter(None, [before])):
            book.good(cell)
        header = f"#pragma taas --gpus 2 --output all{options}\n"
        ran = book.good(header + TRAIN.replace("LOADER", loader), seconds=300)
        book.good("factor = 0.0; model = None")  # the program has what the cell was given
        told = book.good("%taas export --to program", seconds=120).stdout
    finally:
        book.close()
    assert "%matplotlib inline: not exported" in told
    expected = _losses(ran.stdout)
    assert len(expected) == 16
    assert _losses(_run(project, "program", tmp_path / "site")) == expected
    text = (project / "program" / "train.py").read_text()
    assert "taas" not in re.sub(r"taas export r\d+[\w-]*|taas is not needed", "", text)
    assert "class Block" in text
    assert "WIDTH = 16" in text
