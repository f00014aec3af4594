"""Hugging Face accelerate in two rehearsed ranks."""

from __future__ import annotations

import os

import torch
from accelerate import Accelerator, DistributedType
from accelerate.state import AcceleratorState
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

RANK = int(os.environ["RANK"])


def _train(**keywords):
    digits = load_digits()
    data = TensorDataset(torch.tensor(digits.data / 16, dtype=torch.float32), torch.tensor(digits.target))
    AcceleratorState._reset_state()  # the programs of this file share a process
    accelerator = Accelerator(**keywords)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.AdamW(net.parameters(), lr=3e-3)
    net, optimizer, loader = accelerator.prepare(
        net, optimizer, DataLoader(data, batch_size=64, shuffle=True)
    )
    losses = []
    for _ in range(2):
        for x, y in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(net(x), y)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step()
            losses.append(accelerator.gather(loss.detach()).mean().item())
    accelerator.wait_for_everyone()
    assert (accelerator.num_processes, accelerator.process_index) == (2, RANK)
    assert accelerator.distributed_type is DistributedType.MULTI_GPU
    assert accelerator.device == torch.device("cuda", RANK)
    assert len(losses) == 2 * 15
    assert losses[-1] < 0.8 * losses[0]
    assert accelerator.gather_for_metrics(torch.tensor([RANK], device=accelerator.device)).tolist() == [0, 1]
    assert isinstance(accelerator.unwrap_model(net), nn.Sequential)


def sees_two_gpus_and_trains():
    """It finds the world, its device and DDP by itself."""
    _train()


def trains_in_half_precision():
    """mixed_precision="fp16" scales gradients."""
    _train(mixed_precision="fp16")
