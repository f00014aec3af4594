"""PyTorch Lightning in two rehearsed ranks."""

from __future__ import annotations

import os
import warnings

import lightning as L  # noqa: N812 - its documentation's name
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

RANK = int(os.environ["RANK"])


class Digits(L.LightningModule):
    """A small classifier that keeps its losses."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 10))
        self.losses = []

    def training_step(self, batch, _):
        x, y = batch
        loss = nn.functional.cross_entropy(self.net(x), y)
        self.log("loss", loss, sync_dist=True)
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


def _train(**keywords):
    warnings.simplefilter("ignore")
    digits = load_digits()
    data = TensorDataset(torch.tensor(digits.data / 16, dtype=torch.float32), torch.tensor(digits.target))
    L.seed_everything(0)
    net = Digits()
    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    trainer = L.Trainer(devices=2, max_epochs=2, **keywords, **quiet)
    trainer.fit(net, DataLoader(data, batch_size=64, shuffle=True, pin_memory=True))
    assert (trainer.world_size, trainer.global_rank) == (2, RANK)
    assert trainer.strategy.root_device == torch.device("cuda", RANK)
    assert len(net.losses) == 2 * 15  # half of the 29 batches, rounded up
    assert net.losses[-1] < 0.8 * net.losses[0]
    return net


def gpu_and_ddp():
    """accelerator="gpu", strategy="ddp": the ranks share gradients, so their models agree."""
    net = _train(accelerator="gpu", strategy="ddp")
    weights = [torch.empty_like(net.net[0].weight) for _ in range(2)]
    torch.distributed.all_gather(weights, net.net[0].weight.detach())
    assert torch.equal(*weights)


def auto_with_mixed_precision_and_sync_batch_norm():
    """accelerator="auto" finds the rehearsed GPUs; fp16 and SyncBatchNorm work."""
    _train(accelerator="auto", strategy="ddp", precision="16-mixed", sync_batchnorm=True)


def fsdp():
    """strategy="fsdp" shards."""
    _train(accelerator="gpu", strategy="fsdp")
