"""Objects that a rehearsed cell made for devices: the cell says where they work, and they do."""

from __future__ import annotations

from pathlib import Path

import pytest
from notebook_harness import Notebook

RANKS = "#pragma taas --gpus 2\n"
MADE = "taas: made for cuda devices, which this machine lacks: "


@pytest.fixture
def notebook(tmp_path: Path) -> Notebook:
    """A notebook with a small data set."""
    book = Notebook(tmp_path)
    book.good("%load_ext taas\nimport torch\nfrom torch import nn\nfrom torch.utils.data import DataLoader")
    book.good("x, y = torch.randn(32, 4), torch.randint(0, 2, (32,))\nnet = nn.Linear(4, 2)")
    yield book
    book.close()


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


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_trainer(notebook: Notebook) -> None:
    """It works again in the next cell with a header, and its model in a plain one."""
    pytest.importorskip("transformers", reason="transformers is not installed")
    notebook.good(
        "from transformers import Trainer, TrainingArguments\n"
        "class Classifier(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.layer = nn.Linear(4, 2)\n"
        "    def forward(self, inputs, labels=None):\n"
        "        logits = self.layer(inputs)\n"
        "        return {'loss': nn.functional.cross_entropy(logits, labels), 'logits': logits}\n"
        "rows = [{'inputs': a, 'labels': b} for a, b in zip(x, y)]\nnet = Classifier()"
    )
    ran = notebook.good(
        RANKS
        + "arguments = TrainingArguments('out', num_train_epochs=1, save_strategy='no', report_to='none')\n"
        "trainer = Trainer(net, arguments, train_dataset=rows)\nended = trainer.train()",
        200,
    )
    [line] = said(ran.stdout)
    assert line.startswith("arguments, trainer. ")
    notebook.good(RANKS + "loss = trainer.evaluate(rows[:8])['eval_loss']", 200)
    assert notebook.value("loss > 0, net.layer(x).shape") == "True torch.Size([32, 2])"
