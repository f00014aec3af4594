"""``nn.SyncBatchNorm`` on the CPU: torch's own protocol between the ranks, with the five kernels it lacks there.

The statistics are per channel (dimension 1), in fp32 for half-precision inputs, as the CUDA kernels keep them
(aten/src/ATen/native/cuda/Normalization.cuh).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.modules._functions import SyncBatchNorm as _Exchange
from torch.nn.modules.batchnorm import _BatchNorm

from taas.rehearsal.patches import replace_all


def _other_dims(x: Tensor) -> list[int]:
    return [dim for dim in range(x.dim()) if dim != 1]


def _per_channel(values: Tensor, x: Tensor) -> Tensor:
    return values.view(1, -1, *[1] * (x.dim() - 2))


def batch_norm_stats(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Mean and 1/sqrt(var + eps) of the local batch, each of shape (C,)."""
    var, mean = torch.var_mean(x.float() if x.dtype.itemsize < 4 else x, _other_dims(x), correction=0)
    return mean, torch.rsqrt(var + eps)


def batch_norm_gather_stats_with_counts(
    x: Tensor,
    mean: Tensor,
    invstd: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    momentum: float,
    eps: float,
    counts: Tensor,
) -> tuple[Tensor, Tensor]:
    """Statistics of the whole batch from those of the ranks (R, C) and their sizes (R,); moves the running ones."""
    share = (counts / counts.sum()).to(mean.dtype).unsqueeze(1)
    overall = (share * mean).sum(0)
    var = (share * (invstd.reciprocal().square() - eps + (mean - overall).square())).sum(0)
    total = float(counts.sum())
    if running_mean is not None:
        running_mean.lerp_(overall.to(running_mean.dtype), momentum)
    if running_var is not None:
        running_var.lerp_((var * total / max(total - 1, 1)).to(running_var.dtype), momentum)
    return overall, torch.rsqrt(var + eps)


def batch_norm_elemt(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, invstd: Tensor, eps: float
) -> Tensor:
    """The normalised input, in its own dtype."""
    normalised = (x - _per_channel(mean, x)) * _per_channel(invstd, x)
    if weight is not None:
        normalised = normalised * _per_channel(weight, x)
    if bias is not None:
        normalised = normalised + _per_channel(bias, x)
    return normalised.to(x.dtype)


def batch_norm_backward_reduce(
    grad: Tensor,
    x: Tensor,
    mean: Tensor,
    invstd: Tensor,
    weight: Tensor | None,
    input_g: bool,
    weight_g: bool,
    bias_g: bool,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Local sums of dy and dy * (x - mean), which the ranks add up, and the gradients of weight and bias."""
    grad = grad.to(mean.dtype)
    sum_dy = grad.sum(_other_dims(x))
    sum_dy_xmu = (grad * (x - _per_channel(mean, x))).sum(_other_dims(x))
    dtype = mean.dtype if weight is None else weight.dtype
    return (
        sum_dy,
        sum_dy_xmu,
        (sum_dy_xmu * invstd).to(dtype) if weight_g else None,
        sum_dy.to(dtype) if bias_g else None,
    )


def batch_norm_backward_elemt(
    grad: Tensor,
    x: Tensor,
    mean: Tensor,
    invstd: Tensor,
    weight: Tensor | None,
    sum_dy: Tensor,
    sum_dy_xmu: Tensor,
    counts: Tensor,
) -> Tensor:
    """The gradient of the input, from sums over all ranks."""
    total = counts.sum()
    centred = x - _per_channel(mean, x)
    slope = _per_channel(invstd.square() * sum_dy_xmu / total, x)
    scale = invstd if weight is None else invstd * weight
    return ((grad - _per_channel(sum_dy / total, x) - centred * slope) * _per_channel(scale, x)).to(x.dtype)


KERNELS = {
    "batch_norm_backward_elemt": batch_norm_backward_elemt,
    "batch_norm_backward_reduce": batch_norm_backward_reduce,
    "batch_norm_elemt": batch_norm_elemt,
    "batch_norm_gather_stats_with_counts": batch_norm_gather_stats_with_counts,
    "batch_norm_stats": batch_norm_stats,
}


def _forward(self: nn.SyncBatchNorm, input: Tensor) -> Tensor:  # noqa: A002 - torch's name
    self._check_input_dim(input)
    self._check_non_zero_input_channels(input)
    group, world_size = None, 1
    if self.training and torch.distributed.is_initialized():
        group = self.process_group or torch.distributed.group.WORLD
        world_size = torch.distributed.get_world_size(group)
    if world_size == 1:
        return _BatchNorm.forward(self, input)
    momentum = 0.0 if self.momentum is None else self.momentum
    if self.track_running_stats and self.num_batches_tracked is not None:
        self.num_batches_tracked.add_(1)
        if self.momentum is None:  # a cumulative average
            momentum = 1.0 / float(self.num_batches_tracked)
    normalised: Tensor = _Exchange.apply(
        input,
        self.weight,
        self.bias,
        self.running_mean,
        self.running_var,
        self.eps,
        momentum,
        group,
        world_size,
    )
    return normalised


def install() -> None:
    """Give torch the kernels, and take out what keeps its class, and DDP, from CPU tensors."""
    replace_all(torch, KERNELS)
    replace_all(nn.SyncBatchNorm, {"forward": _forward})
    replace_all(
        nn.parallel.DistributedDataParallel, {"_passing_sync_batchnorm_handle": lambda self, module: None}
    )
