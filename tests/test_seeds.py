"""The programs the project was created from run as cells. Their code is read, not kept here."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from notebook_harness import Notebook, Ran

ROOT = Path(__file__).resolve().parents[1]
SEEDS = ROOT.parent / "shared" / "seeds"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not SEEDS.is_dir(), reason="the seeds are not beside this checkout"),
]


def cells(number: str) -> list[str]:
    """The code blocks of a seed, without their indentation."""
    [path] = SEEDS.glob(f"{number}_*.txt")
    blocks = re.findall(
        r"^( *)``` ?(?:python|bash)? *\n(.*?)^ *```", path.read_text(), re.DOTALL | re.MULTILINE
    )
    return [re.sub(rf"^{indent}", "", body, flags=re.MULTILINE) for indent, body in blocks]


@pytest.fixture
def mnist(notebook: Notebook) -> Path:
    """MNIST's files, made of scikit-learn's digits, where the seed looks for them."""
    pytest.importorskip("sklearn")
    data = notebook.folder.parent / "data"
    script = ROOT / "examples" / "offline_mnist.py"
    subprocess.run([sys.executable, str(script), str(data)], check=True, capture_output=True)
    return data


def losses(ran: Ran) -> list[float]:
    """The loss figures a cell printed."""
    return [float(found) for found in re.findall(r"Loss: ([\d.]+)", ran.stdout)]


def test_seed_001_mnist_with_data_parallel(notebook: Notebook, mnist: Path) -> None:
    """The MNIST cells train in 8 rehearsed ranks; rank 0's output is the cell's.

    ``model`` is the trained one.
    """
    del mnist
    code = cells("001")
    [start] = [number for number, block in enumerate(code) if block.startswith("import torch\n")]
    code = code[start:]
    for block in code[:-1]:
        notebook.good(block)
    training = code[-1]
    assert "#pragma taas --gpus 8" in training
    training = training.replace("range(1, 10)", "range(1, 3)").replace(
        "batch_idx % 200", "batch_idx % 10"
    )
    # the data set is small: print oftener
    notebook.good(code[2].replace("batch_idx % 200", "batch_idx % 10"))
    ran = notebook.good(training, seconds=170)
    found = losses(ran)
    assert len(found) >= 4
    assert found[-1] < found[0] / 2
    assert "We have available  8 GPUs!" in ran.stdout
    assert ran.stdout.count("Total time:") == 1
    accuracy = int(re.findall(r"\((\d+)%\)\n", ran.stdout)[-1])
    assert accuracy > 80
    assert notebook.value("type(model).__name__") in ("Net", "DataParallel")
    assert (notebook.folder / "mnist_cnn.pt").exists()
    assert "rank writes" not in ran.stdout
    same = (
        "all(torch.equal(v.cpu(), torch.load('mnist_cnn.pt')['module.' + k]) for k, v in"
        " model.state_dict().items())"
    )
    assert notebook.value(same) == "True"


def test_seed_002_argparse_with_local_rank(notebook: Notebook) -> None:
    """``--local_rank`` arrives as by torch.distributed.launch, and the set-up lines run."""
    [setup] = [block for block in cells("002") if block.startswith("from fastai.distributed")]
    setup = setup.replace("from fastai.distributed import *\n", "import torch\n")
    ran = notebook.good(
        "#pragma taas --gpus 4 --output all\n"
        + setup
        + "print('local rank', args.local_rank, torch.distributed.get_world_size())"
    )
    assert sorted(re.findall(r"local rank (\d) 4", ran.stdout)) == ["0", "1", "2", "3"]


def test_seed_003_init_by_environment_and_reduce(notebook: Notebook) -> None:
    """``init_process_group`` by environment, DataParallel and ``reduce`` run as printed."""
    install, imports, group, wrap, sync = cells("003")
    del install
    notebook.good(
        imports
        + """
class MyModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(3, 1)
    def forward(self, x):
        return self.fc(x)
inputs, labels, criterion = torch.randn(8, 3), torch.randn(8, 1), nn.MSELoss()
device = 'cuda'
"""
    )
    body = (
        group
        + wrap
        + sync.replace(
            "dist.reduce(loss, dst=0)", "total = loss.detach().clone()\ndist.reduce(total, dst=0)"
        )
    )
    ran = notebook.good(
        "#pragma taas --gpus 2\n"
        + body
        + "\nprint(world_size, bool(torch.isclose(total, 2 * loss)))"
    )
    assert ran.own.splitlines()[-1] == "2 True"
