"""What NCCL has and the gloo of older torch lacks: averages, and collectives over lists of tensors.

An average is a sum and a division; a list is one flat tensor.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from taas.rehearsal.patches import replace_everywhere

COMPLETE = (2, 15)  # the oldest torch whose gloo was seen to have all of it
AVERAGING = {  # the collective, and the argument that holds its result
    "all_reduce": "tensor",
    "reduce": "tensor",
    "reduce_scatter": "output",
    "reduce_scatter_tensor": "output",
}


class _Later:
    """Work under way whose result needs a last step, taken when somebody waits for it."""

    def __init__(self, work: Any, finish: Callable[[], object]) -> None:
        self._work = work
        self._finish: Callable[[], object] | None = finish

    def wait(self, *args: Any, **kwargs: Any) -> Any:
        """Wait for the work, and finish it at the first call."""
        done = self._work.wait(*args, **kwargs)
        if self._finish is not None:
            self._finish()
            self._finish = None
        return done

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)


def _then(work: Any, finish: Callable[[], object]) -> Any:
    if work is not None:
        return _Later(work, finish)
    finish()
    return None


def _averaging(original: Callable[..., Any], result: str) -> Callable[..., Any]:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def collective(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        if bound.arguments.get("op") != dist.ReduceOp.AVG:
            return original(*args, **kwargs)
        bound.arguments["op"] = dist.ReduceOp.SUM
        tensor, size = bound.arguments[result].detach(), dist.get_world_size(bound.arguments.get("group"))
        return _then(original(*bound.args, **bound.kwargs), lambda: tensor.copy_(tensor / size))

    return collective


def _reduce_scatter(
    output: Tensor,
    input_list: Sequence[Tensor],
    op: Any = dist.ReduceOp.SUM,
    group: Any = None,
    async_op: bool = False,
) -> Any:
    flat = torch.cat([tensor.reshape(-1) for tensor in input_list])
    place = output.new_empty(output.numel())
    work = dist.reduce_scatter_tensor(place, flat, op, group, async_op)
    return _then(work, lambda: output.detach().copy_(place.view_as(output)))


def _all_to_all(
    output_tensor_list: Sequence[Tensor],
    input_tensor_list: Sequence[Tensor],
    group: Any = None,
    async_op: bool = False,
) -> Any:
    flat = torch.cat([tensor.reshape(-1) for tensor in input_tensor_list])
    counts = [tensor.numel() for tensor in output_tensor_list]
    place = flat.new_empty(sum(counts))
    sent = [tensor.numel() for tensor in input_tensor_list]
    work = dist.all_to_all_single(place, flat, counts, sent, group, async_op)

    def hand_out() -> None:
        for output, piece in zip(output_tensor_list, place.split(counts), strict=True):
            output.detach().copy_(piece.view_as(output))

    return _then(work, hand_out)


def install() -> None:
    """Fill in what this torch's gloo lacks."""
    if torch.__version__ >= COMPLETE:  # type: ignore[operator]  # TorchVersion compares with tuples
        return
    replace_everywhere(dist, "reduce_scatter", _reduce_scatter)
    replace_everywhere(dist, "all_to_all", _all_to_all)
    for name, result in AVERAGING.items():
        replace_everywhere(dist, name, _averaging(getattr(dist, name), result))
