"""Launchers run their function in the ranks that are there."""

from __future__ import annotations

import os
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from ranks_harness import DEADLINE, launch, run_ranks
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

pytestmark = [pytest.mark.usefixtures("warm"), pytest.mark.slow]
SEEN: list = []


def _note(index, *args):
    SEEN.append((index, os.getpid(), args))


def _spawn_noting(processes, function=_note):
    SEEN.clear()
    result = mp.spawn(function, args=("a", 2), nprocs=processes, join=True)
    return result, SEEN, os.getpid()


def _train_in_group(index, world):
    os.environ["MASTER_ADDR"] = "localhost"
    os.environ["MASTER_PORT"] = "12355"
    dist.init_process_group("nccl", rank=index, world_size=world, timeout=timedelta(seconds=60))
    total = torch.ones(1).cuda(index)
    dist.all_reduce(total)
    SEEN.append((dist.get_rank(), dist.get_world_size(), total.item()))


def _twice_without_destroy(processes):
    SEEN.clear()
    for _ in range(2):
        mp.spawn(_train_in_group, args=(processes,), nprocs=processes)
    return SEEN, dist.is_initialized(), os.environ["WORLD_SIZE"]


def _fail_on_1(index, *args):
    if index == 1:
        raise ValueError("rank 1 is ill")


def _nested(index):
    mp.spawn(_note, nprocs=1)


def _queue():
    mp.spawn(_note, args=(mp.get_context("spawn").SimpleQueue(),), nprocs=2)


def _elastic():
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    config = LaunchConfig(
        min_nodes=1, max_nodes=1, nproc_per_node=2, rdzv_endpoint="localhost:0", rdzv_backend="c10d"
    )
    elastic_launch(config, _note)(0)


def test_function_runs_once_in_each_rank():
    """``mp.spawn`` gives None and starts nothing; each rank is the process of its number."""
    results = run_ranks(_spawn_noting, 3, 3)
    assert [
        (None, [(rank, pid, ("a", 2))], pid) for rank, (_, _, pid) in enumerate(results)
    ] == results


def test_fewer_processes_use_the_first_ranks():
    """Two processes in three ranks: the third waits."""
    outcomes = launch(_spawn_noting, 3, 2)
    assert [len(o.value[1]) for o in outcomes] == [1, 1, 0]


def test_more_processes_are_refused():
    """The message names both numbers and the option."""
    outcome = run_ranks(_spawn_noting, 2, 8, fails=True, grace=DEADLINE)[0]
    assert outcome.error == "CannotAdopt"
    assert "8 processes" in outcome.text
    assert "--gpus 8" in outcome.text


def test_group_is_gone_when_the_function_returns():
    """A function that never destroys its group can be spawned again, by fewer ranks.

    The same holds on two VMs.
    """
    seen = [[(rank, 2, 2.0)] * 2 for rank in range(2)] + [[]]
    assert [(one, False, "3") for one in seen] == run_ranks(_twice_without_destroy, 3, 2)
    seen = [[(rank, 4, 4.0)] * 2 for rank in range(4)]
    assert [(one, False, "4") for one in seen] == run_ranks(_twice_without_destroy, 4, 2, vms=2)


def test_failing_rank_speaks_first():
    """The error is the function's own.

    The other rank reports it only after the run should have ended.
    """
    first, second = run_ranks(_spawn_noting, 2, 2, _fail_on_1, fails=True, grace=1.0)
    assert (second.error, second.text) == ("ValueError", "rank 1 is ill")
    assert first.error == "killed"


def _spawn_nested():
    mp.spawn(_nested, nprocs=2)


@pytest.mark.parametrize(
    ("program", "words"),
    [
        (_spawn_nested, "inside mp.spawn"),
        (
            _queue,
            "a SimpleQueue that processes share (args[0]), of which each rank would have its own",
        ),
        (_elastic, "torchrun"),
    ],
)
def test_what_cannot_be_adopted_is_refused_by_name(program, words):
    """Launchers within launchers, what processes share, torchrun from Python."""
    for outcome in run_ranks(program, 2, fails=True, grace=DEADLINE):
        assert outcome.error == "CannotAdopt", outcome.trace
        assert words in outcome.text


# ------------------------------- Lightning and accelerate, without a word about them in the program


def _data():
    source = torch.Generator().manual_seed(0)
    inputs = torch.randn(64, 4, generator=source)
    return TensorDataset(inputs, inputs.sum(1, keepdim=True))


def _lightning():
    import lightning.pytorch as pl

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
        max_epochs=2,
        accelerator="cpu",
        devices=int(os.environ["LOCAL_WORLD_SIZE"]),
        strategy="ddp_notebook",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        log_every_n_steps=1,
    )
    trainer.fit(module, DataLoader(_data(), batch_size=4))
    return (
        trainer.world_size,
        trainer.num_nodes,
        len(module.losses),
        module.layer.weight.tolist(),
        module.losses[-1] < module.losses[0],
    )


def test_lightning_trains_in_the_ranks():
    """A strategy that forks uses the ranks that are there, on two VMs.

    ``num_nodes`` is supplied, and all end with one model.
    """
    first, second = run_ranks(_lightning, 2, vms=2, rehearsed=False)
    assert first[:3] == second[:3] == (2, 2, 16)
    assert first[3] == second[3]
    assert first[4]
