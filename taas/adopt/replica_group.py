"""The exchange between DataParallel's replicas: messages, and tensors that autograd follows.

The process group is not torch's default one, which belongs to the program and may never exist. But
it is created and registered like torch's own groups: torch chooses its backends, and code that
ends or aborts all groups finds it. Messages and CPU tensors go through gloo, CUDA tensors through
NCCL, or through gloo if ranks share a GPU, which NCCL rejects.

Outside the wrapped module every rank computes the same: parameters, batch, outputs, loss. Inside,
each rank has its own slice of the batch. The graph that autograd sees in one rank::

                ┌────────┐ copies ┌────────┐ rows of this rank ┌─────────┐
    parameters ►│        ├───────►│ module ├──────────────────►│         │ rows of all ranks
    inputs ────►│ Inward │ slices └────────┘                   │ Outward ├──────────────────► loss
                │        ├──────────── token ─────────────────►│         │
                └────────┘                                     └─────────┘

Forward, ``Inward`` copies a parameter, or takes this rank's slice of an input; ``Outward`` joins
the ranks' slices of an output. Backward, ``Outward`` takes this rank's slice of the output's
gradient, and ``Inward`` sums the ranks' gradients of a parameter, or joins their slices of an
input's gradient. Copy and sum are each other's derivative, and so are slice and join: each of the
two functions is the other's backward, and both can be differentiated again. A join passes the
rank's own slice back, without a sum over ranks, because every rank computes the loss: gradients
come out as those of the whole batch, once.

**The token** is a scalar 0 without a meaning of its own. Both functions have collectives in their
backward, in which all ranks must meet. In a rank that has no samples (fewer samples than ranks)
the module runs on a detached copy of replica 0's slice, and its output is dropped. If, for
example, the module has no parameters, no other edge leads from ``Outward`` to ``Inward``: autograd
would not call Inward's backward there, and the other ranks would wait in its collective forever.
The edge of the token exists in every rank.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch._utils import _reorder_tensors_as, _take_tensors, _unflatten_dense_tensors
from torch.distributed.constants import default_pg_timeout

from taas.adopt.rendezvous import Membership
from taas.errors import RanksDisagree
from taas.protocol.framing import SEAL_BYTES, authenticate, seal

MESSAGE_BYTES = 1024  # of one exchange; a longer message needs a second one
LENGTH_BYTES = 8
PICKLE_AT = LENGTH_BYTES + SEAL_BYTES
BUCKET_BYTES = 64 << 20
TORCHS: Any = dist.distributed_c10d


class ReplicaGroup:
    """Collectives over all ranks of the run.

    Every rank must call the same ones in the same order.
    """

    def __init__(self, membership: Membership, *, cuda: bool) -> None:
        self.rank, self.size = membership.rank, membership.world_size
        self._membership, self._exchanges = membership, 0
        self._name = membership.next_prefix("data-parallel")
        with_nccl = cuda and torch.cuda.device_count() >= membership.local_world_size
        self._group, _ = TORCHS._new_process_group_helper(
            self.size,
            self.rank,
            [],
            "cpu:gloo,cuda:nccl" if with_nccl else "gloo",
            membership.store(self._name),
            f"taas/{self._name}",
            timeout=default_pg_timeout,
            device_id=torch.device("cuda", torch.cuda.current_device()) if with_nccl else None,
        )
        TORCHS._world.pg_group_ranks[self._group] = {rank: rank for rank in range(self.size)}
        self._carried: list[Tensor] = []
        """The tensors of the last collective.

        The thread that frees a tensor needs the GIL. If gloo's thread freed one while the group is
        destroyed, it would wait for this thread, which waits for gloo's.
        """

    @property
    def ended(self) -> bool:
        """Return whether the program has destroyed all groups since this one was created."""
        return self._group not in TORCHS._world.pg_map

    def exchange(self, message: Any) -> list[Any]:
        """Exchange a small picklable message with all ranks; return all messages by rank.

        Messages are sealed, because gloo accepts any peer that connects. Most messages fit into
        one collective of fixed size. If any rank's message does not, all ranks learn it from the
        lengths.

        Raises:
            RanksDisagree: a message does not come from the rank at whose position it was received.
        """
        self._exchanges += 1
        # a seal is only valid for one rank's message of this exchange
        key, title = (
            self._membership.address.secret,
            f"{self._name}: exchange {self._exchanges}, replica ",
        )
        pickled = pickle.dumps(message, protocol=5)
        sealed = seal(key, f"{title}{self.rank}".encode(), pickled) + pickled
        mine = len(sealed).to_bytes(LENGTH_BYTES, "little") + sealed
        parts = self._all_bytes(mine[:MESSAGE_BYTES], MESSAGE_BYTES)
        ends = [LENGTH_BYTES + int.from_bytes(part[:LENGTH_BYTES], "little") for part in parts]
        if max(ends) > MESSAGE_BYTES:
            tails = self._all_bytes(mine[MESSAGE_BYTES:], max(ends) - MESSAGE_BYTES)
            parts = [part + tail for part, tail in zip(parts, tails, strict=True)]
        messages = []
        for rank, (part, end) in enumerate(zip(parts, ends, strict=True)):
            frame, pickled = part[LENGTH_BYTES:PICKLE_AT], part[PICKLE_AT:end]
            if authenticate(key, frame + f"{title}{rank}".encode(), pickled) is None:
                raise RanksDisagree(
                    f"What nn.DataParallel got as rank {rank}'s is not what that rank said: ranks"
                    " called the module in another order, or a process that is not of this run has"
                    " connected to it (docs/security.md)."
                )
            messages.append(pickle.loads(pickled))
        return messages

    def _all_bytes(self, content: bytes, width: int) -> list[bytes]:
        # on the CPU, whatever default device the program has set
        mine = torch.from_numpy(
            np.frombuffer(bytearray(content.ljust(width, b"\0")), dtype=np.uint8)
        )
        every = torch.empty(self.size * width, dtype=torch.uint8, device="cpu")
        self._carried = [every, mine]
        self._group._allgather_base(every, mine).wait()
        return [part.tobytes() for part in every.numpy().reshape(self.size, width)]

    def gather(self, tensor: Tensor, way: Slices) -> Tensor:
        """Join all ranks' tensors along the dimension of ``way``, by each rank's extent."""
        rows = tensor.detach().movedim(way.dim, 0)
        rest, most = rows.shape[1:], max(way.sizes)
        if rows.shape[0] < most:
            rows = torch.cat([rows, rows.new_zeros((most - rows.shape[0], *rest))])
        every = rows.new_empty((self.size, most, *rest))
        if every.numel():
            self._carried = [_bytes(every), _bytes(rows.contiguous())]
            self._group._allgather_base(*self._carried).wait()
        parts = [part[:size] for part, size in zip(every, way.sizes, strict=True)]
        joined = every.flatten(0, 1) if min(way.sizes) == most else torch.cat(parts)
        return joined.movedim(0, way.dim)

    def sum(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return the sum over ranks of each tensor, bitwise the same on every rank."""
        buckets = list(_take_tensors(tensors, BUCKET_BYTES))
        flat = [_flat(bucket) for bucket in buckets]
        pending = [dist.all_reduce(one, group=self._group, async_op=True) for one in flat]
        self._carried, totals = flat or self._carried, []
        for bucket, one, work in zip(buckets, flat, pending, strict=True):
            work.wait()
            totals += _unflatten_dense_tensors(one, bucket)
        return list(_reorder_tensors_as(totals, tensors))

    def take_from_rank_0(self, tensors: Sequence[Tensor]) -> None:
        """Overwrite the tensors with rank 0's, in place."""
        with torch.no_grad():
            for bucket in _take_tensors([tensor.detach() for tensor in tensors], BUCKET_BYTES):
                flat = _flat(bucket)
                if flat.numel():
                    self._carried = [_bytes(flat)]
                    dist.broadcast(self._carried[0], 0, group=self._group)
                if self.rank:
                    for part, value in zip(
                        bucket, _unflatten_dense_tensors(flat, bucket), strict=True
                    ):
                        part.copy_(value)

    def close(self) -> None:
        """Shut the group down, so that its threads don't outlive the interpreter."""
        if not self.ended:
            dist.destroy_process_group(self._group)


def _flat(bucket: Sequence[Tensor]) -> Tensor:
    """Return a flat copy of tensors of one type."""
    return torch.cat([part.reshape(-1) for part in bucket])


def _bytes(tensor: Tensor) -> Tensor:
    """Return the memory of a contiguous tensor as bytes, as backends don't support every dtype."""
    return tensor.view(-1).view(torch.uint8)


# ------------------------------------------------------ batches: nested tensors, and their division


class Slices(NamedTuple):
    """How a tensor is divided over the ranks."""

    sizes: tuple[int, ...]  # each rank's extent along ``dim``; 0 for ranks that compute nothing
    dim: int

    def of(self, tensor: Tensor, rank: int) -> Tensor:
        """Return the part of ``rank``, as a view."""
        return tensor.narrow(self.dim, sum(self.sizes[:rank]), self.sizes[rank])


def map_tensors(value: Any, change: Callable[[Tensor], Any]) -> Any:
    """Change each tensor in the tuples, lists and dicts of ``value``.

    Other objects stay as they are, as in ``nn.DataParallel``.
    """
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(map_tensors(part, change) for part in value))
    if isinstance(value, (list, tuple)):
        return type(value)([map_tensors(part, change) for part in value])
    if isinstance(value, dict):
        return type(value)([(key, map_tensors(part, change)) for key, part in value.items()])
    return value


def leaves(value: Any) -> list[Any]:
    """Return the tensors and other objects in ``value``, in the order of ``map_tensors``."""
    if isinstance(value, (list, tuple, dict)):
        parts = value.values() if isinstance(value, dict) else value
        return [leaf for part in parts for leaf in leaves(part)]
    return [value]


def tensors_of(value: Any) -> list[Tensor]:
    """Return the tensors in ``value``, in the order of ``map_tensors``."""
    return [leaf for leaf in leaves(value) if isinstance(leaf, Tensor)]


def divide(batch: Any, ranks: int, dim: int) -> tuple[list[Slices | None], int]:
    """Return how each tensor of the batch is divided, and how many ranks get a part.

    The division is that of ``nn.DataParallel``: by ``torch.chunk``, each tensor separately, with
    no more replicas than the tensor with the fewest chunks has. Scalars go to every replica.
    Without any tensor every replica gets the same; without any argument one replica runs.
    """
    sizes = [_chunks(t.shape[dim], ranks) if t.dim() else None for t in tensors_of(batch)]
    counts = [len(chunks) for chunks in sizes if chunks is not None]
    replicas = min(counts) if counts else (ranks if leaves(batch) else 1)
    padding = (0,) * (ranks - replicas)
    return [None if c is None else Slices((*c[:replicas], *padding), dim) for c in sizes], replicas


def _chunks(length: int, ranks: int) -> tuple[int, ...]:
    step = max(1, -(-length // ranks))
    return tuple(min(step, length - start) for start in range(0, length, step)) or (0,)


# ---------------------------------------------------------------- crossings


class Crossing(NamedTuple):
    """How the tensors of one crossing are divided and exchanged."""

    group: ReplicaGroup
    ways: tuple[Slices | None, ...]  # how each tensor is divided; None: it is sent whole
    device: torch.device  # where this rank computes


class Inward(torch.autograd.Function):
    """Replicates or slices; its first output is the token."""

    @staticmethod
    def forward(ctx: Any, crossing: Crossing, *outer: Tensor) -> tuple[Tensor, ...]:
        """Compute this rank's tensors from those that every rank has."""
        ctx.crossing, ctx.outer_devices = crossing, [tensor.device for tensor in outer]
        token = torch.zeros((), device=crossing.device)
        ctx.save_for_backward(token)
        rank, inner = crossing.group.rank, []
        for way, tensor in zip(crossing.ways, outer, strict=True):
            # A slice is a copy: the module may change its input in place, which autograd forbids
            # for a view.
            mine = tensor.view_as(tensor) if way is None else way.of(tensor, rank)
            inner.append(mine.to(crossing.device, copy=way is not None))
        return token, *inner

    @staticmethod
    def backward(ctx: Any, token_grad: Tensor, *inner_grads: Tensor) -> tuple[Tensor | None, ...]:
        """Sum or join the ranks' gradients; tensors that a replica did not use arrive as zeros."""
        (token,) = ctx.saved_tensors
        # The token takes part because, for second derivatives as well, a rank without samples may
        # have no other edge to this node.
        outer_grads = Outward.apply(ctx.crossing, token + token_grad, *inner_grads)
        return None, *(
            grad.to(device) for grad, device in zip(outer_grads, ctx.outer_devices, strict=True)
        )


class Outward(torch.autograd.Function):
    """Sums or joins.

    It takes the token of the inward crossing, so that every rank's graph leads back there.
    """

    @staticmethod
    def forward(ctx: Any, crossing: Crossing, token: Tensor, *inner: Tensor) -> tuple[Tensor, ...]:
        """Compute what every rank has from all ranks' tensors."""
        ctx.crossing, group = crossing, crossing.group
        ways = list(zip(inner, crossing.ways, strict=True))
        totals = iter(group.sum([tensor for tensor, way in ways if way is None]))
        return tuple(
            next(totals) if way is None else group.gather(tensor, way) for tensor, way in ways
        )

    @staticmethod
    def backward(ctx: Any, *outer_grads: Tensor) -> tuple[Tensor | None, ...]:
        """Replicate or slice the gradient, which every rank has."""
        return None, *Inward.apply(ctx.crossing, *outer_grads)
