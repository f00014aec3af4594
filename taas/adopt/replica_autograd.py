"""The two crossings between a program's tensors and a replica's, as autograd sees them.

Outside the wrapped module every rank computes the same: parameters, batch, outputs, loss. Inside, each has
its own slice. A tensor crosses inward as a copy for each replica (a parameter) or as the replica's slice (an
input); outward as the replicas' sum or as their slices joined (an output). Copy and sum are each other's
derivative, and so are slice and join; hence two functions, each the other's backward, differentiable as
often as one likes. They are torch's ``Broadcast``/``ReduceAddCoalesced`` and ``Scatter``/``Gather`` with the
replicas in processes.

Gradients come out as those of the whole batch, once: the loss outside is computed by every rank, so a join
passes back the rank's own slice without a sum; a penalty on the parameters themselves never crosses.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from taas.adopt.replica_group import ReplicaGroup
from taas.errors import CannotAdopt


@dataclass(frozen=True)
class Slices:
    """How a tensor is divided over the ranks.

    Attributes:
        sizes: each rank's extent along ``dim``; 0 for ranks that compute nothing.
        dim: the dimension that is divided.
    """

    sizes: tuple[int, ...]
    dim: int

    def of(self, tensor: Tensor, rank: int) -> Tensor:
        """The part of ``rank``, as a view."""
        return tensor.narrow(self.dim, sum(self.sizes[:rank]), self.sizes[rank])


@dataclass(frozen=True)
class Crossing:
    """How the tensors of one crossing travel: divided, or (``None``) as a whole.

    Attributes:
        group: the ranks.
        ways: one entry for each tensor.
        device: where this rank computes.
    """

    group: ReplicaGroup
    ways: tuple[Slices | None, ...]
    device: torch.device


class Inward(torch.autograd.Function):
    """Replicate or slice. Outputs a token first: see ``Outward``."""

    @staticmethod
    def forward(ctx: Any, crossing: Crossing, *outer: Tensor) -> tuple[Tensor, ...]:
        """Compute this rank's tensors from those that every rank has."""
        ctx.crossing, ctx.outer_devices = crossing, [tensor.device for tensor in outer]
        token = torch.zeros((), device=crossing.device)
        ctx.save_for_backward(token)
        return token, *(
            _inward(crossing, way, tensor) for way, tensor in zip(crossing.ways, outer, strict=True)
        )

    @staticmethod
    def backward(ctx: Any, token_grad: Tensor, *inner_grads: Tensor) -> tuple[Tensor | None, ...]:
        """Sum or join the ranks' gradients; tensors that a replica did not use arrive as zeros."""
        (token,) = ctx.saved_tensors
        # Both tokens: second derivatives on a rank without samples have no other way back to this node.
        outer_grads = Outward.apply(ctx.crossing, token + token_grad, *inner_grads)
        return None, *(grad.to(device) for grad, device in zip(outer_grads, ctx.outer_devices, strict=True))


class Outward(torch.autograd.Function):
    """Sum or join.

    Takes the token of the inward crossing, so that every rank's graph leads back there: a rank without
    samples has no other link, and the ranks' collectives would not match.
    """

    @staticmethod
    def forward(ctx: Any, crossing: Crossing, token: Tensor, *inner: Tensor) -> tuple[Tensor, ...]:
        """Compute from all ranks' tensors what every rank has."""
        ctx.crossing = crossing
        return _outward(crossing, inner)

    @staticmethod
    def backward(ctx: Any, *outer_grads: Tensor) -> tuple[Tensor | None, ...]:
        """Replicate or slice the gradient, which every rank has."""
        return None, *Inward.apply(ctx.crossing, *outer_grads)


def _inward(crossing: Crossing, way: Slices | None, tensor: Tensor) -> Tensor:
    if way is None:
        return tensor.view_as(tensor).to(crossing.device)
    # A copy: the module may change its input in place, which autograd forbids for a view.
    return way.of(tensor, crossing.group.rank).to(crossing.device, copy=True)


def _outward(crossing: Crossing, inner: Sequence[Tensor]) -> tuple[Tensor, ...]:
    if any(tensor.is_sparse for tensor in inner):
        raise CannotAdopt(
            "nn.DataParallel over ranks cannot add up sparse gradients. Make the embedding with sparse=False, "
            "or wrap the model in DistributedDataParallel."
        )
    whole = [index for index, way in enumerate(crossing.ways) if way is None]
    outer = list(inner)
    for index, total in zip(whole, crossing.group.sum([inner[index] for index in whole]), strict=True):
        outer[index] = total
    for index, way in enumerate(crossing.ways):
        if way is not None:
            outer[index] = crossing.group.gather(inner[index], way.sizes, way.dim)
    return tuple(outer)
