"""What DataParallel's replicas say to each other: a process group of taas' own.

Not torch's default group, which belongs to the program and may never exist. Metadata and CPU tensors go
through gloo, CUDA tensors through NCCL, or through gloo where two ranks share a GPU, which NCCL refuses.
"""

from __future__ import annotations

import contextlib
import pickle
import socket
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.constants import default_pg_timeout

from taas.adopt.membership import Membership
from taas.errors import RanksDisagree

Backend = Any  # ProcessGroupGloo or ProcessGroupNCCL; torch's stubs lack their collectives

MESSAGE_BYTES = 1024  # what one exchange carries at once; longer messages take a second one
LENGTH_BYTES = 8
BUCKET_BYTES = 64 << 20
LEAVING = "data-parallel/left"


class ReplicaGroup:
    """Collectives over all ranks of the run; every rank must call the same ones in the same order.

    Attributes:
        rank: this rank.
        size: ranks of the run.
    """

    def __init__(self, membership: Membership) -> None:
        self.rank, self.size = membership.rank, membership.world_size
        self._membership = membership
        self._gloo = self._make_gloo()
        self._cuda: Backend | None = None

    def _make_gloo(self) -> Backend:
        store = self._membership.store("data-parallel/gloo")
        return dist.ProcessGroupGloo(store, self.rank, self.size, default_pg_timeout)

    def _backend(self, device: torch.device) -> Backend:
        if device.type == "cpu":
            return self._gloo
        if self._cuda is None:
            mine = socket.gethostname(), str(torch.cuda.get_device_properties(device).uuid)
            shared = len(set(self.exchange(mine))) < self.size
            self._cuda = self._gloo if shared else self._make_nccl()
        return self._cuda

    def _make_nccl(self) -> Backend:
        store = self._membership.store("data-parallel/nccl")
        options = dist.ProcessGroupNCCL.Options()
        return dist.ProcessGroupNCCL(store, self.rank, self.size, options)

    def exchange(self, message: Any) -> list[Any]:
        """Every rank's small picklable message, by rank.

        Pickle is as safe here as in ``all_gather_object``: the ranks are one program. The common message
        fits one collective of fixed size; if any rank's does not, all learn it from the lengths.
        """
        encoded = pickle.dumps(message, protocol=5)
        first = len(encoded).to_bytes(LENGTH_BYTES, "little") + encoded[: MESSAGE_BYTES - LENGTH_BYTES]
        parts = self._all_bytes(first, MESSAGE_BYTES)
        lengths = [int.from_bytes(part[:LENGTH_BYTES], "little") for part in parts]
        parts = [part[LENGTH_BYTES:] for part in parts]
        rest = max(lengths) - (MESSAGE_BYTES - LENGTH_BYTES)
        if rest > 0:
            tails = self._all_bytes(encoded[MESSAGE_BYTES - LENGTH_BYTES :], rest)
            parts = [part + tail for part, tail in zip(parts, tails, strict=True)]
        return [pickle.loads(part[:length]) for part, length in zip(parts, lengths, strict=True)]

    def _all_bytes(self, content: bytes, width: int) -> list[bytes]:
        # On the CPU, whatever default device the program has set.
        mine = torch.from_numpy(np.frombuffer(bytearray(content.ljust(width, b"\0")), dtype=np.uint8))
        every = torch.empty(self.size * width, dtype=torch.uint8, device="cpu")
        try:
            self._gloo._allgather_base(every, mine).wait()
        except RuntimeError as error:  # a connection is cut, and all that gloo knows is the address
            self._explain(error)
            raise
        flat = every.numpy().tobytes()
        return [flat[index * width : (index + 1) * width] for index in range(self.size)]

    def _explain(self, error: RuntimeError) -> None:
        """Raise what is behind an error of a collective, if that is known: a rank has ended its cell, and well."""
        with contextlib.suppress(dist.DistError):  # the store is gone as well
            store = self._membership.store(LEAVING)
            left = [rank for rank in range(self.size) if store.check([str(rank)])]
            if left:
                raise RanksDisagree(
                    f"Rank(s) {', '.join(map(str, left))} had ended the cell when rank {self.rank} called the "
                    "nn.DataParallel module again. Every rank must call it equally often: a loop that ends by the "
                    "clock, or by what only one rank sees, has to ask one rank whether to go on (torch.distributed's "
                    "broadcast_object_list)."
                ) from error

    def gather(self, tensor: Tensor, sizes: Sequence[int], dim: int) -> Tensor:
        """All ranks' tensors, one after another along ``dim``.

        Args:
            tensor: this rank's; equal to the others' in every dimension but ``dim``.
            sizes: each rank's extent along ``dim``.
            dim: where they are joined.
        """
        rows = tensor.detach().movedim(dim, 0)
        rest, most = rows.shape[1:], max(sizes)
        if rows.shape[0] < most:
            rows = torch.cat([rows, rows.new_zeros((most - rows.shape[0], *rest))])
        every = rows.new_empty((self.size, most, *rest))
        if every.numel():
            mine = rows.contiguous()
            self._backend(tensor.device)._allgather_base(
                _bytes(every),
                _bytes(mine),
            ).wait()
        if all(size == most for size in sizes):
            return every.flatten(0, 1).movedim(0, dim)
        return torch.cat([part[:size] for part, size in zip(every, sizes, strict=True)]).movedim(0, dim)

    def sum(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The sum over ranks of each tensor; bitwise the same on every rank."""
        results = list(tensors)
        pending = []
        for bucket in _buckets([torch.view_as_real(t) if t.is_complex() else t for t in tensors]):
            flat = torch.cat([part.reshape(-1) for _, part in bucket])
            pending.append((bucket, flat, self._backend(flat.device).allreduce([flat])))
        for bucket, flat, work in pending:
            work.wait()
            for (index, part), total in zip(bucket, flat.split([p.numel() for _, p in bucket]), strict=True):
                shaped = total.view(part.shape)
                results[index] = torch.view_as_complex(shaped) if tensors[index].is_complex() else shaped
        return results

    def take_from_rank_0(self, tensors: Sequence[Tensor]) -> None:
        """Overwrite the tensors with rank 0's, in place."""
        options = dist.BroadcastOptions()
        options.rootRank = 0
        with torch.no_grad():
            for bucket in _buckets([tensor.detach() for tensor in tensors]):
                flat = torch.cat([part.reshape(-1) for _, part in bucket])
                if flat.numel():
                    self._backend(flat.device).broadcast([_bytes(flat)], options).wait()
                if self.rank == 0:
                    continue
                for (_, part), value in zip(bucket, flat.split([p.numel() for _, p in bucket]), strict=True):
                    part.copy_(value.view(part.shape))

    def object_from_rank_0(self, value: Any) -> Any:
        """Rank 0's picklable object."""
        return self.exchange(value if self.rank == 0 else None)[0]

    def close(self, *, failed: bool = False) -> None:
        """Shut the groups down, so that their threads don't outlive the interpreter.

        Args:
            failed: the cell raised in this rank, which explains more than that it is gone.
        """
        if not failed:
            with contextlib.suppress(dist.DistError):
                self._membership.store(LEAVING).set(str(self.rank), "")
        for backend in {id(b): b for b in (self._cuda, self._gloo) if b is not None}.values():
            backend.shutdown()


def _bytes(tensor: Tensor) -> Tensor:
    """The memory of a contiguous tensor: backends don't carry every dtype."""
    return tensor.view(-1).view(torch.uint8)


def _buckets(tensors: Sequence[Tensor]) -> list[list[tuple[int, Tensor]]]:
    """Indexed tensors grouped by dtype and device, each group no larger than a bucket needs to be."""
    full: list[list[tuple[int, Tensor]]] = []
    filling: dict[tuple[torch.dtype, torch.device], list[tuple[int, Tensor]]] = defaultdict(list)
    sizes: dict[tuple[torch.dtype, torch.device], int] = defaultdict(int)
    for index, tensor in enumerate(tensors):
        kind = tensor.dtype, tensor.device
        filling[kind].append((index, tensor))
        sizes[kind] += tensor.numel() * tensor.element_size()
        if sizes[kind] >= BUCKET_BYTES:
            full.append(filling.pop(kind))
            sizes[kind] = 0
    return full + list(filling.values())
