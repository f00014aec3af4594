"""fastai in two rehearsed ranks."""

from __future__ import annotations

import os
import warnings

import torch
from sklearn.datasets import load_digits
from torch import nn

warnings.simplefilter("ignore")  # fastai scripts functions at import, which torch deprecates

from fastai.distributed import *  # noqa: E402, F403 - its documentation's way
from fastai.vision.all import (  # noqa: E402
    CrossEntropyLossFlat,
    DataLoaders,
    Learner,
    accuracy,
    default_device,
)

RANK = int(os.environ["RANK"])


def _learner():
    digits = load_digits()
    images = torch.tensor(digits.images / 16, dtype=torch.float32)[:, None]
    items = list(zip(images, torch.tensor(digits.target), strict=True))
    loaders = DataLoaders.from_dsets(
        items[:1500], items[1500:], bs=50, device=default_device(), num_workers=0
    )
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(1, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Flatten(), nn.Linear(16 * 36, 10)
    )
    return Learner(loaders, net, loss_func=CrossEntropyLossFlat(), metrics=accuracy)


def _assert_learned(learn):
    losses = [float(loss) for loss in learn.recorder.losses]
    assert len(losses) == 15  # half of the 30 batches
    assert losses[-1] < 0.9 * losses[0]
    assert torch.distributed.get_world_size() == 2


def distributed_context():
    """learn.distrib_ctx() trains on both ranks' halves of the batches, with its default of SyncBatchNorm."""
    assert default_device() == torch.device("cuda", RANK)
    learn = _learner()
    with learn.distrib_ctx(), learn.no_bar():
        learn.fit_one_cycle(1, 3e-2)
        _assert_learned(learn)


def half_precision():
    """to_fp16() works inside."""
    learn = _learner().to_fp16()
    with learn.distrib_ctx(sync_bn=False), learn.no_bar():
        learn.fit_one_cycle(1, 3e-2)
        _assert_learned(learn)


def to_distributed():
    """The shape of fastai's tutorial: set the device, make the group, learn.to_distributed()."""
    torch.cuda.set_device(RANK)
    if not torch.distributed.is_initialized():  # the programs before this one made it
        torch.distributed.init_process_group(backend="nccl", init_method="env://")
    learn = _learner().to_distributed()
    with learn.no_bar():
        learn.fit_one_cycle(1, 3e-2)
    _assert_learned(learn)
