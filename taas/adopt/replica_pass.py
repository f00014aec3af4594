"""One forward pass of a divided module: compute the own slice, agree with the others, gather."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from taas.adopt import batch
from taas.adopt.replica_autograd import Crossing, Inward, Outward, Slices
from taas.adopt.replica_group import ReplicaGroup
from taas.adopt.replica_reports import Output, Report, check_agreement, check_outputs, error_class
from taas.errors import CannotAdopt

GRACE_SECONDS = 2.0
STATISTIC_BYTES = 1 << 20
CHECKED_AT_ONCE = 8  # passes whose checksums are read at once on a GPU too; later ones one pass late


@dataclass
class Evidence:
    """Checksums of a pass that may not have been read yet."""

    passes: int
    parameter: str
    inputs: batch.Checksum
    weights: batch.Checksum

    def read(self) -> tuple[int, int, int]:
        """The checksums, and the pass they belong to."""
        return self.passes, self.inputs.read(), self.weights.read()


class ReplicaPass:
    """One pass of one module over one batch, on this rank."""

    def __init__(
        self, group: ReplicaGroup, module: nn.Module, device: torch.device, dim: int, place: tuple[int, int]
    ) -> None:
        self._group, self._module, self._device, self._dim = group, module, device, dim
        self._grad = torch.is_grad_enabled()
        self._report = Report((*place, module.training, self._grad))
        self._token: Tensor | None = None
        self._slices: list[Tensor] = []
        self._output: Any = None
        self._error: Exception | None = None

    def examine(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Evidence:
        """Checksums of the whole batch, and of one parameter: another one each pass, so all in turn."""
        self._report.shapes = batch.describe((args, kwargs))
        passes = self._report.place[0]
        named = list(self._module.named_parameters())
        name, parameter = named[passes % len(named)] if named else ("", None)
        return Evidence(passes, name, batch.Checksum((args, kwargs)), batch.Checksum(parameter))

    def compute(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Run the module on this rank's slice; an exception is kept until the others know of it."""
        ways, replicas = batch.divide((args, kwargs), self._group.size, self._dim)
        weights = self._enter(batch.tensors((args, kwargs)), ways)
        if self._group.rank >= replicas:
            return
        slices = iter(self._slices)
        own_args, own_kwargs = batch.map_tensors((args, kwargs), lambda _: next(slices))
        before = {name: (b, b._version) for name, b in self._module.named_buffers()}
        if self._group.rank:  # replica 0 alone works on the module's own buffers, as in DataParallel
            weights |= {name: buffer.clone() for name, (buffer, _) in before.items()}
        try:
            if weights:
                self._output = torch.func.functional_call(self._module, weights, own_args, own_kwargs)
            else:
                self._output = self._module(*own_args, **own_kwargs)
            self._describe_output(some_rank_is_empty=replicas < self._group.size)
        except Exception as error:  # every rank must hear of it, or the others would wait in the exchange
            self._error, self._report.failure = error, (type(error).__name__, str(error))
        self._report.buffers = [
            (name, tuple(buffer.shape), buffer.dtype)
            for name, buffer in self._module.named_buffers()
            if _may_have_changed(buffer, before.get(name), self._module.training)
        ]

    def _enter(self, tensors: Sequence[Tensor], ways: Sequence[Slices | None]) -> dict[str, Tensor]:
        """Bring batch and parameters across; returns the replica's parameters that have gradients, by name."""
        named = [(n, p) for n, p in self._module.named_parameters() if p.requires_grad] if self._grad else []
        tracked = [index for index, tensor in enumerate(tensors) if self._grad and tensor.requires_grad]
        self._slices = [
            self._plain_slice(tensor, way) if index not in tracked else tensor
            for index, (tensor, way) in enumerate(zip(tensors, ways, strict=True))
        ]
        if not named and not tracked:
            return {}
        crossing = Crossing(self._group, (*(ways[i] for i in tracked), *(None for _ in named)), self._device)
        self._token, *inner = Inward.apply(crossing, *(tensors[i] for i in tracked), *(p for _, p in named))
        for index, tensor in zip(tracked, inner, strict=False):
            self._slices[index] = tensor
        return dict(zip((name for name, _ in named), inner[len(tracked) :], strict=True))

    def _plain_slice(self, tensor: Tensor, way: Slices | None) -> Tensor:
        part = way.of(tensor, self._group.rank) if way is not None else tensor
        # A copy: a module that changes its input in place would change the batch, differently on each rank.
        return part.to(self._device, non_blocking=True, copy=True)

    def _describe_output(self, some_rank_is_empty: bool) -> None:
        strange = batch.ungatherable(self._output)
        if strange is not None:
            raise CannotAdopt(
                f"{type(self._module).__name__} returned a {type(strange).__name__}; nn.DataParallel gathers "
                "tensors, None, and tuples, lists and dicts of them. Return a tensor instead."
            )
        found = batch.tensors(self._output)
        self._report.outputs = [Output(tuple(t.shape), t.dtype, t.requires_grad) for t in found]
        if some_rank_is_empty and self._group.rank == 0:
            self._report.structure = pickle.dumps(
                batch.map_tensors(self._output, lambda t: torch.empty(0, device="cpu"))
            )

    def collect(self, evidence: Evidence) -> Any:
        """Agree with the other ranks and gather the output of the whole batch.

        Args:
            evidence: checksums of this pass, or of the one before.

        Raises:
            RanksDisagree: ranks are at different places, or have different batches or parameters.
            CannotAdopt: the replicas' outputs don't match.
        """
        self._report.checksum, self._report.parameter = evidence.read(), evidence.parameter
        reports: list[Report] = self._group.exchange(self._report)
        if self._error is None or not all(report.failure for report in reports):
            check_agreement(reports)
        self._raise_failures(reports)
        check_outputs(reports)
        self._settle_buffers(reports)
        return self._gather(reports)

    def _raise_failures(self, reports: Sequence[Report]) -> None:
        if self._error is not None:
            raise self._error
        for rank, report in enumerate(reports):
            if report.failure is not None:
                # That rank raises the error itself, with its traceback; it goes first.
                threading.Event().wait(GRACE_SECONDS)
                name, text = report.failure
                raise error_class(name)(f"Caught {name} in replica {rank} of nn.DataParallel: {text}")

    def _settle_buffers(self, reports: Sequence[Report]) -> None:
        """Give every rank the buffers that replica 0 changed."""
        changed = reports[0].buffers
        if not changed:
            return
        mine = dict(self._module.named_buffers())
        for name, shape, dtype in changed:
            if name not in mine or (tuple(mine[name].shape), mine[name].dtype) != (shape, dtype):
                owner, _, attribute = name.rpartition(".")
                mine[name] = torch.empty(shape, dtype=dtype, device=self._device)
                setattr(self._module.get_submodule(owner), attribute, mine[name])
        self._group.take_from_rank_0([mine[name] for name, _, _ in changed])

    def _gather(self, reports: Sequence[Report]) -> Any:
        described = [report.outputs for report in reports]
        first = reports[0].outputs or []
        own = batch.tensors(self._output) if self._report.outputs is not None else list(self._nothing(first))
        joined: list[Tensor | None] = [None] * len(own)
        tracked, ways = [], []
        for index, tensor in enumerate(own):
            scalar = not first[index].shape
            dim = 0 if scalar else self._dim
            way = Slices(tuple(_extent(outputs, index, dim) for outputs in described), dim)
            rows = tensor.reshape(1) if scalar and not tensor.dim() else tensor
            if self._grad and any(
                outputs is not None and outputs[index].requires_grad for outputs in described
            ):
                tracked.append((index, rows))
                ways.append(way)
            else:
                joined[index] = self._group.gather(rows, way.sizes, dim)
        if tracked:
            outer = Outward.apply(self._out(ways), self._linked(), *(rows for _, rows in tracked))
            for (index, _), tensor in zip(tracked, outer, strict=True):
                joined[index] = tensor
        results = iter(joined)
        structure = self._output if self._report.outputs is not None else pickle.loads(reports[0].structure)
        return batch.map_tensors(structure, lambda _: next(results))

    def _nothing(self, outputs: Sequence[Output]) -> Iterator[Tensor]:
        """What a rank without samples adds to each output: no rows."""
        for output in outputs:
            shape = list(output.shape) or [0]
            shape[self._dim if output.shape else 0] = 0
            yield torch.empty(shape, dtype=output.dtype, device=self._device)

    def _out(self, ways: Sequence[Slices]) -> Crossing:
        return Crossing(self._group, tuple(ways), self._device)

    def _linked(self) -> Tensor:
        if self._token is None:
            raise CannotAdopt(
                f"The output of {type(self._module).__name__} depends on parameters that are not its own, so "
                "nn.DataParallel over ranks cannot sum their gradients. Register them in the module."
            )
        return self._token


def _may_have_changed(buffer: Tensor, before: tuple[Tensor, int] | None, training: bool) -> bool:
    """Whether a forward pass may have changed a buffer.

    Batch norm's kernels update running statistics without a new version, so while training small buffers
    count as changed; a large one (a mask, a table of positions) is no statistic.
    """
    if training and buffer.numel() * buffer.element_size() <= STATISTIC_BYTES:
        return True
    return before is None or before[0] is not buffer or before[1] != buffer._version


def _extent(outputs: Sequence[Output] | None, index: int, dim: int) -> int:
    if outputs is None:
        return 0
    return outputs[index].shape[dim] if outputs[index].shape else 1
