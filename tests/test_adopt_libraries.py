"""Lightning and accelerate in ranks, without a word about them in the program."""

from __future__ import annotations

import os

import cloudpickle
import pytest
import torch
import torch.multiprocessing as mp
from ranks_harness import DEADLINE, launch, run_ranks, warm  # noqa: F401
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

pytestmark = [pytest.mark.usefixtures("warm"), pytest.mark.slow]


def _data():
    source = torch.Generator().manual_seed(0)
    inputs = torch.randn(64, 4, generator=source)
    return TensorDataset(inputs, inputs.sum(1, keepdim=True))


def _lightning(package, strategy):
    import importlib

    pl = importlib.import_module(package)

    class Module(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.layer, self.losses = nn.Linear(4, 1), []

        def training_step(self, batch, index):
            loss = nn.functional.mse_loss(self.layer(batch[0]), batch[1])
            self.losses.append(loss.item())
            return loss

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    pl.seed_everything(1, verbose=False)
    module = Module()
    trainer = pl.Trainer(
        max_epochs=2, accelerator="cpu", devices=int(os.environ["LOCAL_WORLD_SIZE"]), strategy=strategy, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, log_every_n_steps=1,
    )  # fmt: skip
    trainer.fit(module, DataLoader(_data(), batch_size=4))
    return (
        trainer.world_size,
        trainer.num_nodes,
        len(module.losses),
        module.layer.weight.tolist(),
        module.losses[-1] < module.losses[0],
    )


def _accelerate_train(scale, log):
    from accelerate import Accelerator

    accelerator = Accelerator()
    torch.manual_seed(0)
    model, loader = nn.Linear(4, 1), DataLoader(_data(), batch_size=4)
    model, optimizer, loader = accelerator.prepare(
        model, torch.optim.SGD(model.parameters(), lr=scale), loader
    )
    for x, y in loader:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        accelerator.backward(loss)
        optimizer.step()
        log.append(loss.item())
    log.append((accelerator.num_processes, accelerator.mixed_precision, len(loader)))


def _accelerate(processes, **how):
    from accelerate import notebook_launcher

    log: list = []
    notebook_launcher(_accelerate_train, args=(0.1, log), num_processes=processes, **how)
    return log


def _twice(precisions):
    return [_accelerate(2, mixed_precision=precision)[-1] for precision in precisions]


def _names():
    from accelerate import debug_launcher, notebook_launcher
    from torch.multiprocessing.spawn import start_processes

    adopted = [notebook_launcher, debug_launcher, mp.spawn, start_processes, nn.parallel.data_parallel]
    return [cloudpickle.loads(cloudpickle.dumps(each)) is each for each in adopted]


@pytest.mark.parametrize(
    ("package", "strategy"),
    [
        ("lightning.pytorch", "ddp"),
        ("lightning.pytorch", "ddp_notebook"),
        ("lightning.pytorch", "ddp_spawn"),
        ("pytorch_lightning", "ddp_spawn"),
    ],
)
def test_lightning_trains_in_the_ranks(package, strategy):
    """Strategies that fork or spawn use the ranks that are there; all of them end with one model."""
    first, second = run_ranks(_lightning, 2, package, strategy, rehearsed=False)
    assert first[:3] == second[:3] == (2, 1, 16)
    assert first[3] == second[3]
    assert first[4]


def test_lightning_knows_the_number_of_vms():
    """Two VMs of one rank: ``num_nodes`` is supplied."""
    first, second = run_ranks(_lightning, 2, "lightning.pytorch", "ddp", vms=2, rehearsed=False)
    assert first[:3] == second[:3] == (2, 2, 16)
    assert first[3] == second[3]


@pytest.mark.parametrize("processes", [2, None])
def test_accelerate_notebook_launcher_runs_in_the_ranks(processes):
    """Each rank is one process of it; the loader is divided."""
    for log in run_ranks(_accelerate, 2, processes):
        assert log[-1] == (2, "no", 8)
        assert log[-2] < log[0]


def test_accelerate_is_launched_again_with_another_precision():
    """What the first function's Accelerator was is forgotten with it, as it ends with a process."""
    expected = [(2, "no", 8), (2, "bf16", 8), (2, "no", 8)]
    assert run_ranks(_twice, 2, ["no", "bf16", "no"]) == [expected] * 2


def test_accelerate_refuses_more_processes_than_ranks():
    """As mp.spawn does, by its own name."""
    for outcome in launch(_accelerate, 2, 4, grace=DEADLINE):
        assert outcome.error == "CannotAdopt", outcome.trace
        assert "notebook_launcher asks for 4 processes" in outcome.text


def test_adopted_functions_go_by_name():
    """A cell that imports one has its name in the notebook afterwards: it is the library's own there."""
    assert run_ranks(_names, 2) == [[True] * 5] * 2
