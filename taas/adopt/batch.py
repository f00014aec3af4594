"""What goes into and out of a replica: nested tensors, their division, their description."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from taas.adopt.replica_group import Slices

SAMPLED_ELEMENTS = 4096
SAMPLED_ROWS = 64
PLAIN = (bool, int, float, complex, str, bytes, type(None))


def map_leaves(value: Any, kind: type, change: Callable[[Any], Any]) -> Any:
    """``value`` with ``change(leaf)`` for each leaf of a class in its tuples, lists and dicts.

    Anything else is passed on as it is, as ``nn.DataParallel`` does.
    """
    if isinstance(value, kind):
        return change(value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(map_leaves(part, kind, change) for part in value))
    if isinstance(value, (list, tuple)):
        return type(value)([map_leaves(part, kind, change) for part in value])
    if isinstance(value, dict):
        return type(value)([(key, map_leaves(part, kind, change)) for key, part in value.items()])
    return value


def leaves(value: Any) -> Iterator[Any]:
    """The tensors and other things in ``value``, in the order of ``map_leaves``."""
    if isinstance(value, (list, tuple)):
        for part in value:
            yield from leaves(part)
    elif isinstance(value, dict):
        for part in value.values():
            yield from leaves(part)
    else:
        yield value


def tensors(value: Any) -> list[Tensor]:
    """The tensors in ``value``, in the order of ``map_leaves``."""
    return [leaf for leaf in leaves(value) if isinstance(leaf, Tensor)]


def divide(batch: Any, ranks: int, dim: int) -> tuple[list[Slices | None], int]:
    """How each tensor of the batch is divided, and how many ranks get a part.

    As ``nn.DataParallel`` divides: by ``torch.chunk``, each tensor on its own, and no more replicas than the
    tensor with the fewest chunks has. Scalars go to every replica. Without any tensor every replica gets
    the same; without any argument one replica runs.
    """
    sizes = [_chunks(t.shape[dim], ranks) if t.dim() else None for t in tensors(batch)]
    counts = [len(chunks) for chunks in sizes if chunks is not None]
    replicas = min(counts) if counts else (ranks if any(True for _ in leaves(batch)) else 1)
    padding = (0,) * (ranks - replicas)
    return [None if c is None else Slices((*c[:replicas], *padding), dim) for c in sizes], replicas


def _chunks(length: int, ranks: int) -> tuple[int, ...]:
    step = max(1, -(-length // ranks))
    return tuple(min(step, length - start) for start in range(0, length, step)) or (0,)


class Sample:
    """Some elements of each tensor of a batch. Those on a GPU are copied by it: it is waited for when they are read.

    Attributes:
        shapes: of the tensors, for a message.
        late: the copies, and what tells that they are done; None where all was in host memory.
    """

    def __init__(self, batch: Any) -> None:
        self.shapes = (
            ", ".join("x".join(map(str, t.shape)) or "scalar" for t in tensors(batch)) or "no tensor"
        )
        plain = [leaf for leaf in leaves(batch) if isinstance(leaf, PLAIN)]
        self._sum = zlib.crc32(repr(([(tuple(t.shape), t.dtype) for t in tensors(batch)], plain)).encode())
        self.late: tuple[list[Tensor], Any] | None = None
        copies = []
        for part in tensors(batch):
            if part.layout == torch.strided and part.is_cuda:
                copies.append(_some(part.detach()).to("cpu", non_blocking=True))
            elif part.layout == torch.strided:
                self._sum = zlib.crc32(_some(part.detach()).numpy().data, self._sum)
        if copies:
            self.late = copies, torch.cuda.current_stream().record_event()

    def checksum(self) -> int:
        """A number that differs, as good as surely, where two ranks' samples differ."""
        if self.late is not None:
            copies, done = self.late
            done.synchronize()
            for part in copies:
                self._sum = zlib.crc32(part.numpy().data, self._sum)
            self.late = None
        return self._sum


def _some(tensor: Tensor) -> Tensor:
    """Bytes of some elements spread over the tensor, as a flat ``uint8`` tensor on its device."""
    # Of some rows only: a transposed tensor is copied.
    rows = tensor[:: max(1, tensor.shape[0] // SAMPLED_ROWS)] if tensor.dim() else tensor
    flat = rows.reshape(-1)
    return flat[:: max(1, flat.numel() // SAMPLED_ELEMENTS)].contiguous().view(torch.uint8)
