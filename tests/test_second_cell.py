"""A training over two headed cells trains what one torchrun program with both trains.

Or a line, or a refusal, says why not. The programs are cells of a notebook in a real kernel; all of
them together, without their headers, are the script that torchrun runs in two processes.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from blocks import block
from notebook_harness import Notebook

pytestmark = pytest.mark.slow

TWO = "#pragma taas --gpus 2\n"
KEPT = "#pragma taas --gpus 2 --keep\n"
PRELUDE = """
import os, torch, torch.distributed, taas.rehearsal
taas.rehearsal.install(int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"]))
"""
LEAVE = """
sys.stdout.flush()
os._exit(0)
"""
"""Its processes leave at once: now and then torch aborts in one that ends in the ordinary way, a
thread still running.
"""

IMPORTS = """
import json, os, sys, torch, torch.nn as nn
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, IterableDataset, Sampler, TensorDataset
from torch.utils.data.distributed import DistributedSampler

x = torch.arange(16.0).reshape(16, 1) / 16
data = TensorDataset(x, 3 * x + 1)

def figures(*values):
    print("figures", json.dumps(values))

def meet():
    if not dist.is_initialized():
        dist.init_process_group("nccl")

def epoch(net, opt, loader):
    losses = []
    for batch, target in loader:
        opt.zero_grad()
        loss = ((net(batch) - target) ** 2).mean()
        loss.backward()
        opt.step()
        losses.append(loss.item())
    return losses
"""
"""What all programs have in their first, plain cell."""

NET = """
meet()
torch.manual_seed(0)
net = DDP(nn.Linear(1, 1))
opt = torch.optim.SGD(net.parameters(), lr=0.1)
"""
AGAIN = "meet()\nnet = DDP(getattr(net, 'module', net))\n"
"""In torchrun's program the model has its wrapper still."""


def missing(*names: str) -> str:
    """Return which of some packages is not installed; empty if all are."""
    return next((name for name in names if importlib.util.find_spec(name) is None), "")


def needs(*names: str) -> pytest.MarkDecorator:
    """Skip a row where one of the packages it is about is not installed."""
    return pytest.mark.skipif(bool(missing(*names)), reason=f"{missing(*names)} is not installed")


def figures_of(output: str) -> list[Any]:
    """Return what ``figures`` printed, with four digits of each number."""
    lines = [line for line in output.splitlines() if line.startswith("figures ")]
    return [rounded(json.loads(line.removeprefix("figures "))) for line in lines]


def rounded(value: Any) -> Any:
    if isinstance(value, list):
        return [rounded(item) for item in value]
    return f"{value:.4g}" if isinstance(value, float) else value


def figures_of_torchrun(cells: list[str], folder: Path) -> list[Any]:
    """Return what rank 0 of a torchrun program prints that consists of some cells."""
    folder.mkdir(exist_ok=True)
    lines = [line for line in "\n".join(cells).splitlines() if not line.startswith("#pragma")]
    (folder / "script.py").write_text(PRELUDE + "\n".join(lines) + LEAVE)
    command = [
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=2",
        "--local-ranks-filter=0",
    ]
    done = subprocess.run(
        [sys.executable, *command, "script.py"],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return figures_of(done.stdout)


SHARE = "rank 0's share of 2: in the notebook "

PLAIN_PROGRAMS = {
    "a sampler and a loader": [
        block(
            TWO,
            NET,
            """
                sampler = DistributedSampler(data, shuffle=False)
                loader = DataLoader(data, batch_size=2, sampler=sampler)
                figures(epoch(net, opt, loader))
            """,
        ),
        block(
            TWO,
            AGAIN,
            """
                sampler.set_epoch(1)
                figures(sampler.rank, epoch(net, opt, loader))
            """,
        ),
    ],
    "loaders in a dict, and a scheduler": [
        block(
            TWO,
            NET,
            """
                def divided(rows):
                    return DataLoader(
                        rows, batch_size=2, sampler=DistributedSampler(rows, seed=3)
                    )

                loaders = {
                    "train": divided(data),
                    "valid": divided(TensorDataset(x[:8], x[:8])),
                }
                schedule = torch.optim.lr_scheduler.StepLR(opt, 1, 0.5)
                figures(epoch(net, opt, loaders["train"]))
                schedule.step()
            """,
        ),
        block(
            TWO,
            AGAIN,
            """
                loaders["train"].sampler.set_epoch(1)
                figures(
                    epoch(net, opt, loaders["train"]),
                    len(loaders["valid"]),
                    schedule.get_last_lr(),
                )
            """,
        ),
    ],
    "a sampler of the notebook's": [
        """
            class Every(Sampler):
                def __init__(self, rows, rank, world_size):
                    self.rows, self.rank, self.world_size = rows, rank, world_size

                def __iter__(self):
                    return iter(range(self.rank, len(self.rows), self.world_size))

                def __len__(self):
                    return len(self.rows) // self.world_size
        """,
        block(
            TWO,
            NET,
            """
                sampler = Every(data, dist.get_rank(), dist.get_world_size())
                loader = DataLoader(data, batch_size=2, sampler=sampler)
                figures(epoch(net, opt, loader))
            """,
        ),
        block(TWO, AGAIN, "figures(epoch(net, opt, loader))"),
    ],
    "an iterable dataset that knows its rank": [
        """
            class Stream(IterableDataset):
                def __init__(self, rank, world_size):
                    self._rank, self._world_size = rank, world_size

                def __iter__(self):
                    return (data[i] for i in range(self._rank, 16, self._world_size))
        """,
        block(
            TWO,
            NET,
            """
                loader = DataLoader(
                    Stream(dist.get_rank(), dist.get_world_size()), batch_size=2
                )
                figures(epoch(net, opt, loader))
            """,
        ),
        block(TWO, AGAIN, "figures(epoch(net, opt, loader))"),
    ],
    "arguments that note the rank": [
        """
            import argparse
            args = argparse.Namespace(rank=-1, world_size=-1, batch=2)
        """,
        block(
            TWO,
            NET,
            """
                args.rank, args.world_size = dist.get_rank(), dist.get_world_size()
                figures(epoch(net, opt, [data[args.rank :: args.world_size]]))
            """,
        ),
        block(TWO, AGAIN, "figures(epoch(net, opt, [data[args.rank :: args.world_size]]))"),
    ],
}


@pytest.mark.parametrize("name", PLAIN_PROGRAMS)
def test_a_training_goes_on_in_the_next_cell(name: str, notebook: Notebook, tmp_path: Path) -> None:
    """What divides data is each rank's own in the next cell, too.

    Nothing is said, as the cell wraps again.
    """
    cells = [IMPORTS, *map(block, PLAIN_PROGRAMS[name])]
    ran = [notebook.good(cell) for cell in cells]
    lines = [line for one in ran for line in one.stdout.splitlines() if line.startswith("taas:")]
    assert not [line for line in lines if SHARE not in line]
    found = [numbers for one in ran for numbers in figures_of(one.stdout)]
    assert found == figures_of_torchrun(cells, tmp_path / "torchrun")


# ---------------------------------------------------------------- libraries

ACCELERATE = (
    IMPORTS
    + """
from accelerate import Accelerator, DataLoaderConfiguration

def steps(accelerator, net, opt, loader, schedule):
    losses = []
    for batch, target in loader:
        with accelerator.accumulate(net):
            opt.zero_grad()
            loss = ((net(batch) - target) ** 2).mean()
            accelerator.backward(loss)
            opt.step()
            schedule.step()
        losses += accelerator.gather(loss.detach()).tolist()
    return losses

class Rows(IterableDataset):
    def __iter__(self):
        return iter([data[i] for i in range(16)])
"""
)
PREPARE = """
torch.manual_seed(0)
net = nn.Linear(1, 1)
opt = torch.optim.SGD(net.parameters(), lr=0.1)
schedule = torch.optim.lr_scheduler.StepLR(opt, 4, 0.5)
net, opt, loader, schedule = accelerator.prepare(net, opt, loader, schedule)
figures(steps(accelerator, net, opt, loader, schedule))
"""
TRAINED = block(
    TWO,
    """
        accelerator = Accelerator()
        loader = DataLoader(data, batch_size=2, shuffle=True)
    """,
    PREPARE,
)
TRAINED_IN_HALF = block(
    TWO,
    """
        accelerator = Accelerator(mixed_precision="bf16", gradient_accumulation_steps=2)
        loader = DataLoader(data, batch_size=2)
    """,
    PREPARE,
)
GO_ON_AS_IT_IS = (
    TWO
    + """
figures(steps(accelerator, net, opt, loader, schedule), opt.param_groups[0]["lr"])
other = nn.parallel.DistributedDataParallel(nn.Linear(1, 1))
figures(type(net).__name__, accelerator.num_processes)
"""
)
GO_ON = (
    TWO
    + """
net = accelerator.prepare(net)
figures(steps(accelerator, net, opt, loader, schedule), opt.param_groups[0]["lr"])
figures(accelerator.process_index, accelerator.num_processes)
figures(str(accelerator.device), accelerator.mixed_precision)
"""
)
HUGGING_FACE = """
import json, os, sys, torch
from transformers import BertConfig, BertForSequenceClassification
from transformers import Trainer, TrainingArguments, set_seed

def figures(*values):
    print("figures", json.dumps(values))

class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 24
    def __getitem__(self, i):
        ids = torch.randint(5, 50, (8,), generator=torch.Generator().manual_seed(i))
        mask = torch.ones(8, dtype=torch.long)
        return {"input_ids": ids, "attention_mask": mask, "labels": int(ids.sum() % 2)}

data = Rows()

def losses(trainer):
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
"""
MODEL = """
set_seed(3)
config = BertConfig(
    vocab_size=50,
    hidden_size=16,
    num_hidden_layers=1,
    num_attention_heads=2,
    intermediate_size=16,
    hidden_dropout_prob=0.0,
    attention_probs_dropout_prob=0.0,
)
model = BertForSequenceClassification(config)
args = TrainingArguments(
    "out",
    per_device_train_batch_size=2,
    num_train_epochs=1,
    learning_rate=1e-2,
    logging_steps=1,
    report_to=[],
    save_strategy="epoch",
    disable_tqdm=True,
)
trainer = Trainer(model=model, args=args, train_dataset=data, eval_dataset=data)
"""
TRAIN = "trainer.train()\nfigures(losses(trainer))\n"
EVALUATE = "figures(trainer.evaluate()['eval_loss'])\n"
FABRIC = """
from lightning.fabric import Fabric

def steps(fabric, net, opt, loader):
    losses = []
    for batch, target in loader:
        opt.zero_grad()
        loss = ((net(batch) - target) ** 2).mean()
        fabric.backward(loss)
        opt.step()
        losses += fabric.all_gather(loss.detach()).tolist()
    return losses
"""
SKORCH = """
import numpy as np
from accelerate import Accelerator
from skorch import NeuralNetClassifier
from skorch.hf import AccelerateMixin

class Net(AccelerateMixin, NeuralNetClassifier):
    pass

class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 2)
    def forward(self, rows):
        return self.inner(rows).softmax(-1)

rows = np.random.RandomState(0).rand(32, 4).astype("float32")
kinds = (rows.sum(1) > 2).astype("int64")
"""
FIT = """
torch.manual_seed(0)
net = Net(
    Two,
    accelerator=Accelerator(),
    max_epochs=2,
    lr=0.5,
    batch_size=4,
    train_split=None,
    verbose=0,
    unwrap_after_train={unwraps},
)
net.fit(rows, kinds)
figures(net.history[:, "train_loss"])
"""
FIT_ON = block(
    TWO,
    """
    net.partial_fit(rows, kinds)
    figures(net.history[:, "train_loss"], net.accelerator.process_index)
    """,
)


class Library(NamedTuple):
    """A training by a library, in cells: those with a header have two ranks."""

    packages: tuple[str, ...]
    cells: list[str]


LIBRARIES = {
    "accelerate": Library(packages=("accelerate",), cells=[ACCELERATE, TRAINED, GO_ON, GO_ON]),
    "accelerate, without prepare again": Library(
        packages=("accelerate",), cells=[ACCELERATE, TRAINED, GO_ON_AS_IT_IS, GO_ON_AS_IT_IS]
    ),
    "accelerate, half precision, without prepare again": Library(
        packages=("accelerate",), cells=[ACCELERATE, TRAINED_IN_HALF, GO_ON_AS_IT_IS]
    ),
    "accelerate, half precision, two steps at once": Library(
        packages=("accelerate",), cells=[ACCELERATE, TRAINED_IN_HALF, GO_ON]
    ),
    "accelerate, a stream that rank 0 hands out": Library(
        packages=("accelerate",),
        cells=[
            ACCELERATE,
            block(
                TWO,
                """
                    accelerator = Accelerator()
                    loader = DataLoader(Rows(), batch_size=2)
                """,
                PREPARE,
            ),
            GO_ON,
        ],
    ),
    "accelerate, a stream that each divides": Library(
        packages=("accelerate",),
        cells=[
            ACCELERATE,
            block(
                TWO,
                """
                    accelerator = Accelerator(
                        dataloader_config=DataLoaderConfiguration(dispatch_batches=False)
                    )
                    loader = DataLoader(Rows(), batch_size=2)
                """,
                PREPARE,
            ),
            GO_ON,
        ],
    ),
    "accelerate, made one cell earlier": Library(
        packages=("accelerate",),
        cells=[
            block(
                ACCELERATE,
                """
                    accelerator = Accelerator(mixed_precision="bf16")
                    loader = DataLoader(data, batch_size=2, shuffle=True)
                """,
            ),
            block(TWO, PREPARE),
            GO_ON,
        ],
    ),
    "a Trainer trains, trains on, evaluates": Library(
        packages=("transformers", "accelerate"),
        cells=[HUGGING_FACE, block(TWO, MODEL, TRAIN), block(TWO, TRAIN), block(TWO, EVALUATE)],
    ),
    "a Trainer made one cell earlier": Library(
        packages=("transformers", "accelerate"),
        cells=[
            block(HUGGING_FACE, MODEL),
            block(TWO, TRAIN, "figures(args.world_size, args.process_index, args.should_save)"),
            block(TWO, EVALUATE),
        ],
    ),
    "a Fabric": Library(
        packages=("lightning",),
        cells=[
            block(IMPORTS, FABRIC),
            block(
                TWO,
                """
                    fabric = Fabric(accelerator="cuda", devices=2, strategy="ddp")
                    fabric.launch()
                    torch.manual_seed(0)
                    net = nn.Linear(1, 1)
                    net, opt = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=0.1))
                    loader = fabric.setup_dataloaders(DataLoader(data, batch_size=2, shuffle=True))
                    figures(steps(fabric, net, opt, loader))
                """,
            ),
            block(
                TWO,
                "figures(steps(fabric, net, opt, loader), fabric.global_rank, fabric.world_size)",
            ),
        ],
    ),
    "skorch": Library(
        packages=("skorch", "accelerate"),
        cells=[block(IMPORTS, SKORCH), block(TWO, FIT.format(unwraps=True)), FIT_ON],
    ),
    "skorch, wrapped for good": Library(
        packages=("skorch", "accelerate"),
        cells=[block(IMPORTS, SKORCH), block(TWO, FIT.format(unwraps=False)), FIT_ON, FIT_ON],
    ),
}


@pytest.fixture
def fresh(tmp_path: Path) -> Any:
    """A notebook of its own: what a library keeps of a process is kept for good."""
    folder = tmp_path / "project"
    folder.mkdir()
    book = Notebook(folder)
    try:
        book.good("%load_ext taas")
        yield book
    finally:
        book.close()


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=needs(*row.packages)) for name, row in LIBRARIES.items()]
)
def test_a_librarys_training_goes_on_in_the_next_cell(
    name: str, fresh: Notebook, tmp_path: Path
) -> None:
    """Its objects know the rank they are in, and are wrapped as they were."""
    cells = [block(cell) for cell in LIBRARIES[name].cells]
    ran = [fresh.good(cell, seconds=280) for cell in cells]
    assert not [one.stdout for one in ran if "without its" in one.stdout]
    found = [numbers for one in ran for numbers in figures_of(one.stdout)]
    assert found == figures_of_torchrun(cells, tmp_path / "torchrun")


# ---------------------------------------------------------------- what is said before a cell starts

MAKE = block(
    TWO,
    NET,
    """
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=2, sampler=sampler)
    """,
)
WITHOUT = (
    "came back without its DistributedDataParallel: wrap it again in this cell, or use --keep."
)
THREE = "#pragma taas --gpus 3\n"
USE = TWO + "meet()\n"
HOLDER = """
class Trainer:
    def __init__(self, net):
        self.net, self.steps = DDP(net), 0
    def step(self):
        self.steps += 1
        return self.net(x).sum().item()
"""


class Line(NamedTuple):
    """Earlier cells, one that uses what they left, and the line that is said before it starts."""

    earlier: list[str]
    cell: str
    line: str


LINES = {
    "a model under its name": Line(
        earlier=[MAKE], cell=block(USE, "net(x)"), line="net " + WITHOUT
    ),
    "a model in a dict": Line(
        earlier=[
            block(
                MAKE,
                """
                    models = {"a": [net]}
                    del net
                """,
            )
        ],
        cell=block(USE, "models"),
        line="models['a'][0] " + WITHOUT,
    ),
    "a model in an object of the notebook's": Line(
        earlier=[HOLDER, block(MAKE, "mine = Trainer(nn.Linear(1, 1))")],
        cell=block(USE, "mine.step()"),
        line="mine " + WITHOUT,
    ),
    "a model in a function": Line(
        earlier=[
            block(
                MAKE,
                """
                    def again():
                        return net(x)
                """,
            )
        ],
        cell=block(USE, "again()"),
        line="net " + WITHOUT,
    ),
    "another module is wrapped": Line(
        earlier=[MAKE],
        cell=block(
            USE,
            """
                DDP(nn.Linear(2, 1))
                net(x)
            """,
        ),
        line="net " + WITHOUT,
    ),
    "another module of a list is wrapped": Line(
        earlier=[block(MAKE, "others = [nn.Linear(1, 1)]")],
        cell=block(
            USE,
            """
                for one in others:
                    DDP(one)
                net(x)
            """,
        ),
        line="net " + WITHOUT,
    ),
    "wrapped by way of a list": Line(
        earlier=[MAKE],
        cell=block(
            USE,
            """
                nets = []
                nets.append(net)
                DDP(nets[0])(x)
                net
            """,
        ),
        line="",
    ),
    "wrapped as a function of the notebook's returns it": Line(
        earlier=[
            block(
                MAKE,
                """
                    def own():
                        return net
                """,
            )
        ],
        cell=block(
            USE,
            """
                DDP(own())(x)
                net
            """,
        ),
        line="",
    ),
    "wrapped by what holds it": Line(
        earlier=[block(MAKE, 'models = {"a": net}')],
        cell=block(
            USE,
            """
                DDP(models["a"])(x)
                net
            """,
        ),
        line="",
    ),
    "wrapped again": Line(
        earlier=[MAKE],
        cell=block(
            USE,
            """
                net = DDP(net)
                net(x)
            """,
        ),
        line="",
    ),
    "wrapped by another name": Line(
        earlier=["Parallel = DDP", MAKE],
        cell=block(
            USE,
            """
                net = Parallel(net)
                net(x)
            """,
        ),
        line="",
    ),
    "wrapped by a function of the notebook's": Line(
        earlier=[
            """
                def wrapped(model):
                    return nn.parallel.DistributedDataParallel(model)
            """,
            MAKE,
        ],
        cell=block(USE, "wrapped(net)(x)"),
        line="",
    ),
    "wrapped by a function of the project's": Line(
        earlier=["import wrapping", MAKE], cell=block(USE, "wrapping.wrapped(net)(x)"), line=""
    ),
    "bound before it is read": Line(
        earlier=[MAKE],
        cell=block(
            USE,
            """
                net = nn.Linear(1, 1)
                net(x)
            """,
        ),
        line="",
    ),
    "another model under its name": Line(
        earlier=[MAKE, "net = nn.Linear(1, 1)"], cell=block(USE, "net(x)"), line=""
    ),
    "one process": Line(
        earlier=[MAKE],
        cell="""
            #pragma taas --gpus 1
            net(x)
        """,
        line="",
    ),
    "a loader of fewer ranks": Line(
        earlier=[MAKE],
        cell=block(
            THREE,
            """
                meet()
                len(loader)
            """,
        ),
        line="loader is rank 0's share of 2, and this cell has 3 ranks: make it in this cell.",
    ),
    "a loader, and its sampler, in one process": Line(
        earlier=[MAKE],
        cell="""
            #pragma taas --gpus 1
            len(loader), len(sampler)
        """,
        line=(
            "loader, sampler are rank 0's share of 2, and this cell has one process: make "
            "them in this cell."
        ),
    ),
    "the rank": Line(
        earlier=[block(MAKE, "rank = dist.get_rank()")],
        cell=block(USE, "rank == 0"),
        line="rank: rank 0's, in every rank.",
    ),
    "a device, and what says who is the first": Line(
        earlier=[
            block(
                MAKE,
                """
                    rank = dist.get_rank()
                    device = torch.device("cuda", rank)
                    first = rank == 0
                """,
            )
        ],
        cell=block(
            USE,
            """
                if first:
                    print(device)
            """,
        ),
        line="device, first: rank 0's, in every rank.",
    ),
    "a device that an object says": Line(
        earlier=[
            block(
                MAKE,
                """
                    class Place:
                        device = torch.device("cuda", dist.get_rank())

                    device = Place.device
                    kind = torch.device
                """,
            )
        ],
        cell=block(USE, "print(device, kind)"),
        line="device: rank 0's, in every rank.",
    ),
    "files that the rank chose": Line(
        earlier=['files = [*"abcd"]', block(MAKE, 'mine = files[int(os.environ["RANK"]) :: 2]')],
        cell=block(USE, "print(mine)"),
        line="mine: rank 0's, in every rank.",
    ),
    "data that the rank chose": Line(
        earlier=[
            block(
                MAKE,
                "own = DataLoader(torch.utils.data.Subset(data, range(dist.get_rank(), 16, 2)))",
            )
        ],
        cell=block(USE, "len(own)"),
        line="own: rank 0's, in every rank.",
    ),
    "a rank that the notebook has bound since": Line(
        earlier=[block(MAKE, "rank = dist.get_rank()"), "rank = 0"],
        cell=block(USE, "rank == 0"),
        line="",
    ),
    "a rank that the cell reads anew": Line(
        earlier=[block(MAKE, "rank = dist.get_rank()")],
        cell=block(
            USE,
            """
                rank = dist.get_rank()
                rank
            """,
        ),
        line="",
    ),
    "losses that a function with the rank returned": Line(
        earlier=[
            block(
                MAKE,
                """
                    def lossy(rank):
                        return [0.5]

                    rank = dist.get_rank()
                    losses = lossy(rank)
                """,
            )
        ],
        cell=block(USE, "losses"),
        line="",
    ),
}


@pytest.mark.parametrize("name", LINES)
def test_what_is_rank_0s_is_said_before_the_cell_starts(name: str, notebook: Notebook) -> None:
    """A line names it, with what to do; there is none where the cell does that already."""
    earlier, cell, line = LINES[name]
    (notebook.folder / "wrapping.py").write_text(
        block("""
            from torch.nn.parallel import DistributedDataParallel

            def wrapped(net):
                return DistributedDataParallel(net)
        """)
    )
    for each in [IMPORTS, *earlier]:
        notebook.good(block(each))
    ran = notebook.run(block(cell))
    said = [
        one.removeprefix("taas: ") for one in ran.stdout.splitlines() if one.startswith("taas: ")
    ]
    assert len(said) == bool(line), ran.stdout
    assert all(one.startswith(line) for one in said)


LIGHTNING = """
import json, torch, torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset

def figures(*values):
    print("figures", json.dumps(values))

x = torch.arange(16.0).reshape(16, 1) / 16
loader = DataLoader(TensorDataset(x, 3 * x + 1), batch_size=2)
"""
LIGHTNING_MODEL = """
class Lit(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(1, 1)
    def training_step(self, batch, _):
        return ((self.inner(batch[0]) - batch[1]) ** 2).mean()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)

def a_trainer(**more):
    shown = dict(logger=False, enable_progress_bar=False, enable_model_summary=False)
    return L.Trainer(max_epochs=2, enable_checkpointing=False, **shown, **more)

class Job:
    def __init__(self, trainer):
        self.trainer = trainer
    def run(self):
        self.trainer.fit(lit, loader)

lit = Lit()
"""
BY_LIGHTNING = LIGHTNING + "import lightning as L\n" + LIGHTNING_MODEL
BY_PYTORCH_LIGHTNING = LIGHTNING + "import pytorch_lightning as L\n" + LIGHTNING_MODEL
LONE = "is a Trainer for one process, and this cell has 2 ranks: "


class Refusal(NamedTuple):
    """Earlier cells, a use of what they left in two ranks, and why it is refused."""

    packages: tuple[str, ...]
    earlier: list[str]
    use: str
    why: str


REFUSED = {
    "a model that accelerate wrapped, in a dict": Refusal(
        packages=("accelerate",),
        earlier=[
            ACCELERATE,
            block(
                TWO,
                """
                    accelerator = Accelerator()
                    loader = DataLoader(data, batch_size=2)
                """,
                PREPARE,
                """
                    models = {"a": net}
                    del net
                """,
            ),
        ],
        use="accelerator.backward(models['a'](x).sum())",
        why="models['a'] " + WITHOUT,
    ),
    "a Trainer of Lightning of a plain cell": Refusal(
        packages=("lightning",),
        earlier=[block(BY_LIGHTNING, "trainer = a_trainer()")],
        use="trainer.fit(lit, loader)",
        why=f"trainer {LONE}make it in this cell.",
    ),
    "a Trainer of pytorch_lightning, ddp_notebook of one device": Refusal(
        packages=("pytorch_lightning",),
        earlier=[
            block(
                BY_PYTORCH_LIGHTNING,
                'trainer = a_trainer(strategy="ddp_notebook", accelerator="cpu", devices=1)',
            )
        ],
        use="trainer.fit(lit, loader)",
        why=f"trainer {LONE}make it in this cell.",
    ),
    "a Trainer in an object": Refusal(
        packages=("lightning",),
        earlier=[block(BY_LIGHTNING, "job = Job(a_trainer())")],
        use="job.run()",
        why=f"job.trainer {LONE}make it in this cell.",
    ),
    "a Trainer of a cell of one rank": Refusal(
        packages=("lightning",),
        earlier=[
            BY_LIGHTNING,
            """
                #pragma taas --gpus 1
                trainer = a_trainer()
            """,
        ],
        use="trainer.fit(lit, loader)",
        why=f"trainer {LONE}make it in this cell.",
    ),
    "a loader that accelerate prepared in a plain cell": Refusal(
        packages=("accelerate",),
        earlier=[
            block(
                ACCELERATE,
                """
                    accelerator = Accelerator()
                    loader = accelerator.prepare(DataLoader(data))
                """,
            )
        ],
        use="len(loader)",
        why=(
            "loader was prepared by accelerate for one process, and this cell has 2 ranks: "
            "call prepare again in this cell."
        ),
    ),
    "a Fabric of one process": Refusal(
        packages=("lightning",),
        earlier=[block(IMPORTS, FABRIC, 'fabric = Fabric(accelerator="cpu", devices=1)')],
        use="fabric.global_rank",
        why="fabric is a Fabric for one process, and this cell has 2 ranks: make it in this cell.",
    ),
    "a Fabric of another number": Refusal(
        packages=("lightning",),
        earlier=[
            block(IMPORTS, FABRIC),
            block(
                THREE,
                """
                    fabric = Fabric(accelerator="cuda", devices=3, strategy="ddp")
                    fabric.launch()
                """,
            ),
        ],
        use="fabric.global_rank",
        why="fabric is a Fabric for 3 processes, and this cell has 2 ranks: make it in this cell.",
    ),
    "an Accelerator with a mesh of its own": Refusal(
        packages=("accelerate",),
        earlier=[
            block(
                ACCELERATE,
                """
                    from accelerate.utils import ParallelismConfig
                    accelerator = Accelerator(parallelism_config=ParallelismConfig())
                """,
            )
        ],
        use="accelerator.process_index",
        why=(
            "accelerator has a ParallelismConfig, which is its process's, and this cell has "
            "2 ranks: make it in this cell."
        ),
    ),
}


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=needs(*row.packages)) for name, row in REFUSED.items()]
)
def test_what_was_made_for_another_number_is_refused(name: str, fresh: Notebook) -> None:
    """By name, before anything starts; where a function uses it perhaps, the same is a line."""
    _, earlier, use, why = REFUSED[name]
    for each in earlier:
        fresh.good(block(each))
    ran = fresh.run(TWO + use)
    assert (ran.ename, ran.evalue) == ("CaptureError", why + " Nothing was started.")
    ran = fresh.good(TWO + f"def later():\n    return {use}\nprint(later.__name__)")
    assert f"taas: {why}\n" in ran.stdout


@needs("lightning")
@pytest.mark.timeout(300)
def test_a_trainer_that_a_function_reads_is_refused(fresh: Notebook) -> None:
    """Where the cell calls the function, or one that calls it.

    Where nothing is trained, a line says it.
    """
    uses = """
        trainer = a_trainer()
        def train():
            trainer.fit(lit, loader)
        def all_of_it():
            train()
    """
    fresh.good(block(BY_LIGHTNING, uses))
    for call in ("train()", "all_of_it()"):
        ran = fresh.run(TWO + call)
        assert ran.evalue == f"trainer {LONE}make it in this cell. Nothing was started."
    ran = fresh.good(TWO + "print(len(trainer.callback_metrics))")
    assert ran.own == "0\n"
    assert f"taas: trainer {LONE}each works alone with it. Make it in this cell.\n" in ran.stdout


@needs("lightning")
@pytest.mark.timeout(300)
def test_a_trainer_of_as_many_processes_trains_in_all_ranks(fresh: Notebook) -> None:
    """One of a plain cell that was told so, and one of a cell with ranks.

    In the notebook it is read.
    """
    fresh.good(
        BY_LIGHTNING + "trainer = a_trainer(accelerator='cpu', devices=2, strategy='ddp_notebook')"
    )
    ran = fresh.good(
        TWO + "trainer.fit(lit, loader)\nfigures(trainer.global_step, trainer.world_size)"
    )
    assert figures_of(ran.stdout) == [[8, 2]]
    fresh.good(TWO + "trainer = a_trainer()\ntrainer.fit(lit, loader)")
    assert fresh.value("trainer.global_step") == "8"
    ran = fresh.good(
        TWO
        + "trainer.fit_loop.max_epochs = 3\ntrainer.fit(lit, loader)\nfigures(trainer.global_step)"
    )
    assert "for one process" not in ran.stdout
    assert figures_of(ran.stdout) == [[12]]


@needs("accelerate")
def test_what_accelerate_prepared_in_a_plain_cell_is_prepared_again(fresh: Notebook) -> None:
    """Then the model has its wrapper, and each rank its share.

    The optimizer is the one that there was.
    """
    fresh.good(
        ACCELERATE
        + block("""
            accelerator = Accelerator(mixed_precision='bf16')
            net = nn.Linear(1, 1)
            opt = torch.optim.SGD(net.parameters(), 0.1)
            net, opt, loader = accelerator.prepare(net, opt, DataLoader(data, 2))
        """)
    )
    assert "net was prepared by accelerate for one process" in fresh.good(TWO + "net(x)").stdout
    ran = fresh.good(
        TWO.rstrip()
        + """ --output all
net, loader = accelerator.prepare(net, loader)
same = type(net.module).forward is net.module._original_forward.__func__
trained = opt.param_groups[0]['params'][0] is net.module.weight
print(type(net).__name__, same, len(loader), loader.device, trained)
"""
    )
    seen = "DistributedDataParallel True 4 cuda:{} True\n"
    assert sorted(ran.own.splitlines(True)) == sorted(
        ["[rank 0] " + seen.format(0), "[rank 1] " + seen.format(1)]
    )


@needs("accelerate")
def test_a_cell_that_does_not_train_has_the_model_as_it_came(fresh: Notebook) -> None:
    """Its methods and attributes are those that the notebook sees.

    A line says that it has no wrapper.
    """
    fresh.good(ACCELERATE)
    fresh.good(
        TWO + "accelerator = Accelerator()\nloader = DataLoader(data, batch_size=2)" + PREPARE
    )
    ran = fresh.good(TWO + "print(net.weight.shape[0], accelerator.num_processes)")
    assert ran.own == "1 2\n"
    assert "net " + WITHOUT in ran.stdout


@needs("transformers", "accelerate")
def test_objects_of_a_plain_cell_know_their_rank(fresh: Notebook) -> None:
    """Arguments, states and an Accelerator of one process.

    In the notebook they are that of one process again.
    """
    fresh.good(
        HUGGING_FACE
        + block("""
            from accelerate import Accelerator, PartialState
            args = TrainingArguments('out', report_to=[])
            state = PartialState()
            accelerator = Accelerator(gradient_accumulation_steps=3)
            same = accelerator.state
            def standing():
                return [
                    args.world_size,
                    args.process_index,
                    args.should_save,
                    args.n_gpu,
                    str(args.device),
                    state.process_index,
                    state.is_main_process,
                    accelerator.num_processes,
                    accelerator.gradient_accumulation_steps,
                    same is accelerator.state,
                    PartialState().__dict__ is state.__dict__,
                ]
        """)
    )
    alone = "[1, 0, True, {}, 'cpu', 0, True, 1, 3, True, True]\n"
    before = fresh.good("print(standing())").own
    assert before in (alone.format(0), alone.format(1))
    ran = fresh.good(TWO.rstrip() + " --output all\nprint(standing())")
    assert sorted(ran.own.splitlines(True)) == [
        "[rank 0] [2, 0, True, 1, 'cuda:0', 0, True, 2, 3, True, True]\n",
        "[rank 1] [2, 1, False, 1, 'cuda:1', 1, False, 2, 3, True, True]\n",
    ]
    assert fresh.good("print(standing())").own == before


@needs("accelerate")
def test_what_ranks_made_is_of_one_process_in_the_notebook(fresh: Notebook) -> None:
    """Its settings are there, its batches on the notebook's device, its data rank 0's share."""
    fresh.good(ACCELERATE)
    fresh.good(
        TWO
        + block("""
            accelerator = Accelerator(mixed_precision='bf16', gradient_accumulation_steps=2)
            loader = accelerator.prepare(DataLoader(data, batch_size=2))
        """)
    )
    fresh.good("of = accelerator")
    assert fresh.value("of.num_processes, of.device.type, of.mixed_precision") == "1 cpu bf16"
    assert (
        fresh.value("of.gradient_accumulation_steps, sum(len(batch) for batch, _ in loader)")
        == "2 8"
    )


SHARES = {
    "a sampler and its loader": (MAKE, f"sampler, loader are {SHARE}they yield 1/2 of the data."),
    "a loader alone": (block(MAKE, "del sampler"), f"loader is {SHARE}it yields 1/2 of the data."),
    "a loader of one process": (block(TWO, "loader = DataLoader(data)"), ""),
    "arguments with the rank": (
        block(
            TWO,
            """
                class Args:
                    pass
                args = Args()
                args.rank, args.world_size = 0, 2
            """,
        ),
        "",
    ),
}


@pytest.mark.parametrize("name", SHARES)
def test_a_share_of_data_that_comes_to_the_notebook_is_named_once(
    name: str, notebook: Notebook
) -> None:
    """At the end of the cell that brought it, not of a later one that reads it."""
    cell, line = SHARES[name]
    notebook.good(IMPORTS)
    ran = notebook.good(cell)
    said = [one.removeprefix("taas: ") for one in ran.stdout.splitlines() if SHARE in one]
    assert said == [line] * bool(line)
    if line:
        assert SHARE not in notebook.good(TWO + "meet()\nlen(loader)").stdout


# -------------------------------------------- state of the process, ranks that stay, data processes

LIBRARY = """
class State:
    shared = {}
    def __init__(self, colour=None):
        self.__dict__ = self.shared
        if colour:
            self.colour = colour

class Child(State):
    pass

class Own:
    kinds = {}
    def __init__(self):
        self.colour = "own"
"""


def test_instances_that_share_a_dict_of_their_class_go_on_sharing_it(
    notebook: Notebook, tmp_path: Path
) -> None:
    """There and back, with what is in it.

    That of a class with dicts that no instance shares is its own.
    """
    installed = tmp_path / "site-packages"
    installed.mkdir()
    (installed / "a_library.py").write_text(LIBRARY)
    notebook.good(
        block(f"""
            import sys
            sys.path.append({str(installed)!r})
            from a_library import Child, Own, State
            one, other, child, own = State('red'), State(), Child(), Own()
        """)
    )
    ran = notebook.good(
        TWO
        + block("""
            new = State()
            print(one.colour, new.colour, child.colour, own.colour, one.__dict__ is State.shared)
            new.colour = 'blue'
            own.colour = 'green'
            print(other.colour, child.colour)
            newer = Child()
        """)
    )
    assert ran.own == "red red red own True\nblue blue\n"
    seen = "one.colour, other.colour, child.colour, newer.colour, own.colour, State().colour"
    assert notebook.value(seen) == "blue blue blue blue green blue"
    assert (
        notebook.value("one.__dict__ is State.shared is newer.__dict__, own.__dict__ is Own.kinds")
        == "True False"
    )


def test_ranks_that_stay_have_their_own(notebook: Notebook) -> None:
    """Sampler, wrapper and rank are each rank's in the next cell.

    What travels to them anew is each rank's, too.
    """
    notebook.good(IMPORTS)
    notebook.good(KEPT + NET + "sampler = DistributedSampler(data)\nrank = dist.get_rank()")
    ran = notebook.good(
        KEPT.rstrip() + " --output all\nprint(sampler.rank, rank, type(net).__name__)"
    )
    seen = ["[rank 0] 0 0 DistributedDataParallel", "[rank 1] 1 1 DistributedDataParallel"]
    assert sorted(ran.stdout.splitlines()) == seen
    notebook.good("sampler.epoch = 5")
    ran = notebook.good(KEPT.rstrip() + " --output all\nprint(sampler.rank, sampler.epoch)")
    assert sorted(ran.own.splitlines()) == ["[rank 0] 0 5", "[rank 1] 1 5"]
    notebook.good("%taas release")


def test_a_cell_whose_ranks_stay_is_told_what_helps_there(fresh: Notebook) -> None:
    """It has ``--keep`` already: what it makes of a model or of the rank, its ranks keep."""
    fresh.good(IMPORTS)
    fresh.good(MAKE + "\nrank = dist.get_rank()\nmodels = {'a': net}")
    ran = fresh.good(KEPT + "meet()\nnet(x), models, rank")
    said = [line for line in ran.stdout.splitlines() if line.startswith("taas: ")]
    wrap = "came back without its DistributedDataParallel: wrap it again in this cell, and these"
    assert said == [
        f"taas: net {wrap} ranks keep it wrapped.",
        "taas: rank: rank 0's, in every rank. Make it in this cell, and each of these ranks keeps"
        " its own.",
    ]
    fresh.good("%taas release")
    ran = fresh.good(KEPT + "meet()\nnet(x)")
    assert [line for line in ran.stdout.splitlines() if line.startswith("taas: ")] == [
        "taas: the ranks that this notebook kept are gone (%taas release, or %unload_ext taas,"
        " ended them); all names that the cell needs travel",
        f"taas: net {wrap} ranks keep it wrapped.",
    ]
    fresh.good("%taas release")


def test_a_registered_loader_of_rank_0_is_delivered_to_all(notebook: Notebook) -> None:
    """Data processes have a stream for each rank; of the sampler nothing is said."""
    notebook.good(IMPORTS + "import taas")
    notebook.good(
        TWO
        + block("""
            meet()
            loader = DataLoader(data, batch_size=2, sampler=DistributedSampler(data, shuffle=False))
        """)
    )
    notebook.good("taas.register(loader)")
    ran = notebook.good(
        TWO.rstrip() + " --cpus 1 --output all\nprint([int(16 * b[0, 0]) for b, _ in loader])"
    )
    assert sorted(ran.stdout.splitlines()) == ["[rank 0] [0, 4, 8, 12]", "[rank 1] [1, 5, 9, 13]"]
    ran = notebook.good(THREE.rstrip() + " --cpus 1\nprint([int(16 * b[0, 0]) for b, _ in loader])")
    assert (ran.own, "rank 0's share" in ran.stdout) == ("[0, 6, 12]\n", False)
    notebook.good("taas.unregister(loader)")
