"""``torch.cuda.comm`` and ``nn.DataParallel`` in one process: several devices, all of them the CPU.

What goes to a device is a copy, or a view that autograd follows. In a run of several ranks ``adopt`` gives
``nn.DataParallel`` its meaning over the ranks; this is the one of a single process that has several GPUs.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import _functions, comm

from taas.rehearsal.devices import CPU, existing
from taas.rehearsal.patches import replace, replace_all


def broadcast(
    tensor: Tensor, devices: Iterable[Any] | None = None, *, out: Sequence[Tensor] | None = None
) -> Any:
    """Copies of a tensor, one a device, or into the tensors given."""
    if (devices is None) == (out is None):
        raise RuntimeError(
            f"Exactly one of 'devices' and 'out' must be specified, but got {devices=} and {out=}"
        )
    if out is not None:
        return tuple(copy.copy_(tensor) for copy in out)
    return tuple(tensor.clone() for device in devices or () if existing(device) >= 0)


def broadcast_coalesced(
    tensors: Iterable[Tensor], devices: Iterable[Any], buffer_size: int = 0
) -> list[list[Tensor]]:
    """Copies of all tensors, a list for each device."""
    sent = list(tensors)
    return [[tensor.clone() for tensor in sent] for device in devices if existing(device) >= 0]


def reduce_add(inputs: Sequence[Tensor], destination: Any = None) -> Tensor:
    """The sum of tensors of one shape."""
    if any(tensor.shape != inputs[0].shape for tensor in inputs):
        raise ValueError(f"input tensors must all have one shape, but got {[tuple(t.shape) for t in inputs]}")
    return torch.stack(list(inputs)).sum(0)


def reduce_add_coalesced(
    inputs: Sequence[Sequence[Tensor]], destination: Any = None, buffer_size: int = 0
) -> tuple[Tensor, ...]:
    """The sums, place by place, of lists of tensors, one list from each device."""
    return tuple(reduce_add(tensors, destination) for tensors in zip(*inputs, strict=True))


def scatter(
    tensor: Tensor,
    devices: Sequence[Any] | None = None,
    chunk_sizes: Sequence[int] | None = None,
    dim: int = 0,
    streams: Any = None,
    *,
    out: Sequence[Tensor] | None = None,
) -> tuple[Tensor, ...]:
    """Slices of a tensor along a dimension, one a device, or into the tensors given."""
    if out is not None:
        pieces = tensor.split([piece.size(dim) for piece in out], dim)
        return tuple(place.copy_(piece) for place, piece in zip(out, pieces, strict=True))
    targets = [existing(device) for device in devices or ()]
    pieces = (
        tensor.split(list(chunk_sizes), dim) if chunk_sizes is not None else tensor.chunk(len(targets), dim)
    )
    return tuple(piece.clone() for piece in pieces)


def gather(
    tensors: Sequence[Tensor], dim: int = 0, destination: Any = None, *, out: Tensor | None = None
) -> Tensor:
    """The tensors joined along a dimension."""
    joined = torch.cat(list(tensors), dim)
    return joined if out is None else out.copy_(joined)


COMM = {
    "broadcast": broadcast,
    "broadcast_coalesced": broadcast_coalesced,
    "gather": gather,
    "reduce_add": reduce_add,
    "reduce_add_coalesced": reduce_add_coalesced,
    "scatter": scatter,
}


def _broadcast_followed(target_gpus: Sequence[Any], *inputs: Tensor) -> tuple[Tensor, ...]:
    """A view of every input for each device, the first device's inputs first; their gradients add up."""
    return tuple(chain.from_iterable([tensor.view_as(tensor) for tensor in inputs] for _ in target_gpus))


def _scatter_followed(
    target_gpus: Sequence[Any], chunk_sizes: Any, dim: int, tensor: Tensor
) -> tuple[Tensor, ...]:
    return scatter(tensor, target_gpus, chunk_sizes, dim)


def _gather_followed(target_device: Any, dim: int, *inputs: Tensor) -> Tensor:
    if dim == 0 and all(tensor.dim() == 0 for tensor in inputs):
        warnings.warn(
            "Was asked to gather along dimension 0, but all input tensors were scalars; "
            "will instead unsqueeze and return a vector.",
            stacklevel=4,
        )
        return torch.stack(inputs)
    return torch.cat(inputs, dim)


def _data_parallel_init(self: Any, *args: Any, **kwargs: Any) -> None:
    _init(self, *args, **kwargs)
    for device in self.device_ids:
        existing(device)
    self.src_device_obj = CPU  # where its parameters are, honestly


_init = nn.DataParallel.__init__


def install() -> None:
    """Replace the copies between devices; ``torch.cuda.comm`` takes its names from ``torch.nn.parallel.comm``."""
    replace_all(comm, COMM)
    _functions.Broadcast.apply = staticmethod(_broadcast_followed)
    _functions.Scatter.apply = staticmethod(_scatter_followed)
    _functions.Gather.apply = staticmethod(_gather_followed)
    replace(nn.DataParallel, "__init__", _data_parallel_init)
