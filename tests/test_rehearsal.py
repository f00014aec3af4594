"""What programs written for GPUs do in rehearsed ranks.

* Programs of one rank stand in ``rehearsal_programs.py``, of two ranks in ``rehearsal_programs_ranks.py``.
* Every line of the table in docs/rehearsal.md is executed.
* That frameworks train shows the gallery (``test_gallery.py``).
* Objects that a rehearsed cell made for devices: the cell says where they work, and they do.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import rehearsal_ranks
import rehearsal_table
from notebook_harness import Notebook

from taas.engines.local import visible_gpus

ONE, TWO = "rehearsal_programs", "rehearsal_programs_ranks"
AS_ON_GPUS = ("what_goes_to_the_gpu_is_a_copy", "what_is_on_the_gpu_stays", "forked_children_have_no_cuda")
LINES = rehearsal_table.lines()
RANKS = "#pragma taas --gpus 2\n"
MADE = "taas: made for cuda devices, which this machine lacks: "


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The verdicts of all programs for one rank."""
    return rehearsal_ranks.run(ONE, tmp_path_factory.mktemp("rehearsal"))


@pytest.fixture(scope="module")
def together(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The verdicts of all programs for two ranks."""
    return rehearsal_ranks.run(TWO, tmp_path_factory.mktemp("rehearsal"), ranks=2)


@pytest.mark.parametrize("program", rehearsal_ranks.programs(ONE))
def test_one_rank(program: str, alone: dict[str, str]) -> None:
    """A program of one GPU finds what it relies on."""
    assert alone[program] == rehearsal_ranks.OK, alone[program]


@pytest.mark.gpu
@pytest.mark.skipif(not visible_gpus(), reason="no CUDA device on this machine")
@pytest.mark.parametrize("program", AS_ON_GPUS)
def test_a_gpu_gives_the_same_answer(program: str, tmp_path: Path) -> None:
    """What the rehearsal says of copies and of forks is what CUDA does."""
    verdict = rehearsal_ranks.run(ONE, tmp_path, devices=0, names=[program])[program]
    assert verdict == rehearsal_ranks.OK, verdict


@pytest.mark.parametrize("program", rehearsal_ranks.programs(TWO))
def test_two_ranks(program: str, together: dict[str, str]) -> None:
    """A program of several GPUs finds what it relies on."""
    assert together[program] == rehearsal_ranks.OK, together[program]


# ---------------------------------------------------------------- the table of docs/rehearsal.md


@pytest.fixture(scope="module")
def of_the_table(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The verdicts of all lines, executed in order in one rank with two devices."""
    names = [f"line_{number}" for number in range(len(LINES))]
    return rehearsal_ranks.run(
        "rehearsal_table", tmp_path_factory.mktemp("rehearsal"), devices=2, names=names
    )


@pytest.mark.parametrize("number", range(len(LINES)), ids=[line.code for line in LINES])
def test_line_of_the_table(number: int, of_the_table: dict[str, str]) -> None:
    """The call does what the table says."""
    assert of_the_table[f"line_{number}"] == rehearsal_ranks.OK, of_the_table[f"line_{number}"]


def test_table_is_read_whole() -> None:
    """Every line of the table was understood, and at least twenty of its calls are from tutorials."""
    text = rehearsal_table.DOCUMENT.read_text().split("## Calls")[1].split("\n## ")[0]
    assert len(LINES) == sum(line.startswith("| `") for line in text.splitlines())
    assert sum("torch.cuda" in line.code and bool(line.seen_in) for line in LINES) >= 20


# ---------------------------------------------------------------- what remembers a device afterwards


@pytest.fixture(scope="module")
def notebook(notebook: Notebook) -> Notebook:
    """A notebook with a small data set."""
    notebook.good("import torch\nfrom torch import nn\nfrom torch.utils.data import DataLoader")
    notebook.good("x, y, net = torch.randn(32, 4), torch.randint(0, 2, (32,)), nn.Linear(4, 2)")
    return notebook


def said(text: str) -> list[str]:
    """What a cell said of objects made for devices."""
    return [line.removeprefix(MADE) for line in text.splitlines() if line.startswith(MADE)]


@pytest.mark.slow
def test_objects_that_remember_a_device_are_named(notebook: Notebook) -> None:
    """Once, in the cell that made them; models, tensors, devices and events are not."""
    notebook.good(
        "class Agent:\n"
        "    def __init__(self, device):\n"
        "        self.options = {'device': device}\n"
        "    def act(self, x):\n"
        "        return x.to(self.options['device'])"
    )
    ran = notebook.good(
        RANKS + "device = torch.device('cuda')\nagent, other = Agent(device), Agent('cpu')\nnet.to(device)\n"
        "begun, rows = torch.cuda.Event(enable_timing=True), [[n] for n in range(20_000)]\nz = x.to(device)\n"
        "model, loader = nn.Linear(4, 2).to(device), DataLoader(x, pin_memory=True)"
    )
    [line] = said(ran.stdout)
    assert line.startswith("agent. They work in cells with a header")
    assert said(notebook.good(RANKS + "w = agent.act(x)").stdout) == []
    assert said(notebook.good(RANKS + "w = agent.act(x)\nmore = [agent]").stdout)[0].startswith("more. ")
    assert said(notebook.good(RANKS.strip() + " --return w\nw, last = 1, Agent(device)").stdout) == []


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_what_accelerate_prepared(notebook: Notebook) -> None:
    """The cell says with which line a later cell uses a shuffled loader; with it, it does."""
    pytest.importorskip("accelerate", reason="accelerate is not installed")
    notebook.good("from accelerate import Accelerator\ndata = torch.utils.data.TensorDataset(x, y)")
    ran = notebook.good(
        RANKS + "accelerator = Accelerator()\n"
        "loader = accelerator.prepare(DataLoader(data, batch_size=4, shuffle=True))\nlen(list(loader))"
    )
    [line] = said(ran.stdout)
    assert line.startswith("accelerator, loader. ")
    assert "a later cell begins with `accelerator = Accelerator()`" in line
    notebook.good(RANKS + "accelerator = Accelerator()\nseen = len(list(loader))")
    assert notebook.value("seen") == "4"
    assert "NVIDIA" in notebook.run("Accelerator()\nlist(loader)").evalue
    assert notebook.value("len(list(DataLoader(loader.dataset, batch_size=4)))") == "8"
