"""One forward pass of a divided module: compute the own slice, agree with the others, gather."""

from __future__ import annotations

import builtins
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from taas.adopt import batch
from taas.adopt.replica_group import Crossing, Inward, Outward, ReplicaGroup, Slices
from taas.errors import CannotAdopt, RanksDisagree
from taas.wording import text_of

GRACE_SECONDS = 2.0
STATISTIC_BYTES = 1 << 20
SAME_BATCH = (
    "Every rank of a run with nn.DataParallel must load the same batches. Seed what draws them, before the "
    "DataLoader is made (torch.manual_seed(0), and random.seed / numpy.random.seed where they are used), or give "
    "each rank its own share: DistributedDataParallel with a DistributedSampler."
)


class ReplicaOutput(NamedTuple):
    """A tensor of a replica's output, described for the others."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    def extent(self, dim: int) -> int:
        """How many rows a rank adds; a scalar is one."""
        return self.shape[dim] if self.shape else 1


@dataclass
class PassReport:
    """What one rank tells the others after its part of a pass.

    Attributes:
        passes: count of passes in the program.
        number: of the module.
        training, grad: the mode it ran in.
        batches: shapes and checksum of the whole batch, by pass; on a GPU the sum is told one pass later.
        parameters: checksums by name, every so many passes of the module.
        outputs: of the replica's tensors; None if it had no samples.
        output: rank 0's with a `ReplicaOutput` in the place of each tensor, where a rank has no samples.
        buffers: what replica 0 changed: name, shape, dtype; of no meaning from others.
        failure: the class and the text of an exception.
    """

    passes: int
    number: int
    training: bool
    grad: bool
    batches: dict[int, tuple[str, int | None]] = field(default_factory=dict)
    parameters: dict[str, int] = field(default_factory=dict)
    outputs: list[ReplicaOutput] | None = None
    output: Any = None
    buffers: list[tuple[str, tuple[int, ...], torch.dtype]] = field(default_factory=list)
    failure: tuple[str, str] | None = None

    @property
    def place(self) -> str:
        """Where in the program this rank is."""
        mode = "training" if self.training else "evaluating"
        grad = "" if self.grad else ", without gradients"
        return f"forward pass {self.passes} (module {self.number}, {mode}{grad})"


class ReplicaPass:
    """One pass of one module over one batch, on this rank."""

    def __init__(
        self, group: ReplicaGroup, module: nn.Module, device: torch.device, dim: int, place: tuple[int, int]
    ) -> None:
        self._group, self._module, self._device, self._dim = group, module, device, dim
        self._grad = torch.is_grad_enabled()
        self._report = PassReport(*place, module.training, self._grad)
        self._token: Tensor | None = None
        self._slices: list[Tensor] = []
        self._output: Any = None
        self._error: Exception | None = None

    def compute(self, args: tuple[Any, ...], kwargs: dict[str, Any], *, examined: bool) -> None:
        """Run the module on this rank's slice; an exception is kept until the others know of it.

        With ``examined`` the ranks compare the parameters, too.
        """
        whole = (args, kwargs)
        self._group.samples[self._report.passes] = batch.Sample(whole)
        if examined:
            samples = {name: batch.Sample(parameter) for name, parameter in self._module.named_parameters()}
            self._report.parameters = {name: sample.checksum() for name, sample in samples.items()}
        ways, replicas = batch.divide(whole, self._group.size, self._dim)
        weights = self._enter(batch.tensors(whole), ways)
        if self._group.rank >= replicas:
            return
        slices = iter(self._slices)
        own_args, own_kwargs = batch.map_tensors(whole, lambda _: next(slices))
        before = {name: (b, b._version) for name, b in self._module.named_buffers()}
        if self._group.rank:  # replica 0 alone works on the module's own buffers, as in DataParallel
            weights |= {name: buffer.clone() for name, (buffer, _) in before.items()}
        try:
            self._output = torch.func.functional_call(self._module, weights, own_args, own_kwargs)
            self._describe_output(told=replicas < self._group.size and self._group.rank == 0)
        except Exception as error:  # every rank must hear of it, or the others would wait in the exchange
            self._error, self._report.failure = error, (type(error).__name__, text_of(error))
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
            tensor if index in tracked else self._plain_slice(tensor, way)
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

    def _describe_output(self, told: bool) -> None:
        others = (leaf for leaf in batch.leaves(self._output) if not isinstance(leaf, Tensor | None))
        for strange in others:
            raise CannotAdopt(
                f"{type(self._module).__name__} returned a {type(strange).__name__}; nn.DataParallel gathers "
                "tensors, None, and tuples, lists and dicts of them. Return a tensor instead."
            )
        described = [
            ReplicaOutput(tuple(t.shape), t.dtype, t.requires_grad) for t in batch.tensors(self._output)
        ]
        if told:
            each = iter(described)
            self._report.output = batch.map_tensors(self._output, lambda _: next(each))
        self._report.outputs = described

    def collect(self) -> Any:
        """Agree with the other ranks and gather the output of the whole batch.

        Raises:
            RanksDisagree: ranks are at different places, or have different batches or parameters.
            CannotAdopt: the replicas' outputs don't match.
        """
        passes, samples = self._report.passes, self._group.samples
        for number, sample in list(samples.items()):
            late = number == passes and sample.late is not None
            self._report.batches[number] = sample.shapes, None if late else sample.checksum()
            if not late:
                del samples[number]
        reports: list[PassReport] = self._group.exchange(self._report)
        if self._error is None or not all(report.failure for report in reports):
            check_agreement(reports)
        self._raise_failures(reports)
        check_outputs(reports)
        self._take_buffers(reports[0].buffers)
        return self._gather(reports)

    def _raise_failures(self, reports: Sequence[PassReport]) -> None:
        if self._error is not None:
            raise self._error
        for rank, report in enumerate(reports):
            if report.failure is not None:
                # That rank raises the error itself, with its traceback; it goes first.
                threading.Event().wait(GRACE_SECONDS)
                name, text = report.failure
                raise error_class(name)(f"Caught {name} in replica {rank} of nn.DataParallel: {text}")

    def _take_buffers(self, changed: Sequence[tuple[str, tuple[int, ...], torch.dtype]]) -> None:
        """Give every rank the buffers that replica 0 changed."""
        mine = dict(self._module.named_buffers())
        for name, shape, dtype in changed:
            if name not in mine or (tuple(mine[name].shape), mine[name].dtype) != (shape, dtype):
                owner, _, attribute = name.rpartition(".")
                mine[name] = torch.empty(shape, dtype=dtype, device=self._device)
                setattr(self._module.get_submodule(owner), attribute, mine[name])
        if changed:
            self._group.take_from_rank_0([mine[name] for name, _, _ in changed])

    def _gather(self, reports: Sequence[PassReport]) -> Any:
        """Join the ranks' outputs, those that some rank has a gradient for in one crossing."""
        described = [report.outputs for report in reports if report.outputs is not None]
        joined: list[Tensor] = []
        tracked: dict[int, Slices] = {}
        for index, first in enumerate(described[0]):
            dim = self._dim if first.shape else 0
            extents = (0 if one.outputs is None else one.outputs[index].extent(dim) for one in reports)
            way, rows = Slices(tuple(extents), dim), self._rows(index, first, dim)
            if self._grad and any(outputs[index].requires_grad for outputs in described):
                tracked[index] = way
                joined.append(rows)
            else:
                joined.append(self._group.gather(rows, way.sizes, dim))
        if tracked:
            crossing = Crossing(self._group, tuple(tracked.values()), self._device)
            outer = Outward.apply(crossing, self._linked(), *(joined[index] for index in tracked))
            for index, tensor in zip(tracked, outer, strict=True):
                joined[index] = tensor
        results = iter(joined)
        if self._report.outputs is not None:
            return batch.map_tensors(self._output, lambda _: next(results))
        return batch.map_leaves(reports[0].output, ReplicaOutput, lambda _: next(results))

    def _rows(self, index: int, first: ReplicaOutput, dim: int) -> Tensor:
        """What this rank adds to an output; no rows where it has no samples."""
        if self._report.outputs is not None:
            tensor = batch.tensors(self._output)[index]
            return tensor if first.shape or tensor.dim() else tensor.reshape(1)
        shape = list(first.shape) or [0]
        shape[dim] = 0
        return torch.empty(shape, dtype=first.dtype, device=self._device)

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


# ---------------------------------------------------------------- what must agree


def error_class(name: str) -> type[Exception]:
    """The exception class of that name, for a program that catches it; where in doubt, RuntimeError."""
    found = getattr(torch, name, None) or getattr(builtins, name, None)
    known = (ValueError, TypeError, RuntimeError, ArithmeticError, LookupError)
    return found if isinstance(found, type) and issubclass(found, known) else RuntimeError


def check_agreement(reports: Sequence[PassReport]) -> None:
    """Raise ``RanksDisagree`` unless all ranks are at one place, with one batch and the same parameter."""
    first = reports[0]
    moved = [rank for rank, report in enumerate(reports) if report.place != first.place]
    if moved:
        raise RanksDisagree(
            f"Rank(s) {_ranks(moved)} and rank 0 are not at the same place of the program: rank {moved[0]} is at "
            f"{reports[moved[0]].place}, rank 0 at {first.place}. With nn.DataParallel every rank must call "
            "the model equally often; don't call it under a condition that depends on the rank."
        )
    for number, (shapes, told) in first.batches.items():
        drew = [rank for rank, report in enumerate(reports) if report.batches[number] != (shapes, told)]
        if drew:
            raise RanksDisagree(
                f"Rank(s) {_ranks(drew)} and rank 0 drew different batches at forward pass {number} of nn.DataParallel "
                f"(rank 0: {shapes}; rank {drew[0]}: {reports[drew[0]].batches[number][0]}). {SAME_BATCH}"
            )
    for name, value in first.parameters.items():
        apart = [rank for rank, report in enumerate(reports) if report.parameters.get(name) != value]
        if apart:
            raise RanksDisagree(
                f"Parameter {name!r} of the nn.DataParallel module differs between rank 0 and rank(s) "
                f"{_ranks(apart)} at forward pass {first.passes}. Change parameters in the same way on every "
                "rank, and not by numbers that each rank draws for itself."
            )


def check_outputs(reports: Sequence[PassReport]) -> None:
    """Raise ``CannotAdopt`` unless all replicas returned as many tensors."""
    counts = {rank: len(report.outputs) for rank, report in enumerate(reports) if report.outputs is not None}
    if len(set(counts.values())) > 1:
        raise CannotAdopt(
            f"The replicas of nn.DataParallel returned different numbers of tensors ({counts}), so they cannot be "
            "gathered. Return the same structure for every slice of the batch."
        )


def _ranks(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:8]))
    return shown if len(ranks) <= 8 else f"{shown} and {len(ranks) - 8} more"
