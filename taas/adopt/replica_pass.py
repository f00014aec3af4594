"""One forward pass of a divided module: compute the own slice, agree with the others, gather."""

from __future__ import annotations

import builtins
import threading
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from taas.adopt.replica_group import (
    Crossing,
    Inward,
    Outward,
    ReplicaGroup,
    Slices,
    divide,
    leaves,
    map_leaves,
    tensors_of,
)
from taas.errors import CannotAdopt, RanksDisagree
from taas.wording import ranks_in_words, text_of

GRACE_SECONDS = 2.0
STATISTIC_BYTES = 1 << 20
SAMPLED_ELEMENTS = 4096
SAMPLED_ROWS = 64
PLAIN = (bool, int, float, complex, str, bytes, type(None))
SAME_BATCH = (
    "Every rank of a run with nn.DataParallel must load the same batches. Seed what draws them, before the "
    "DataLoader is made (torch.manual_seed(0), and random.seed / numpy.random.seed where they are used), or give "
    "each rank its own share: DistributedDataParallel with a DistributedSampler."
)


class ReplicaOutput(NamedTuple):
    """A tensor of a replica's output, described for the others."""

    shape: tuple[int, ...]
    requires_grad: bool


@dataclass
class PassReport:
    """What one rank tells the others after its part of a pass.

    Attributes:
        place: where in the program it is.
        batches: shapes and checksum of the whole batch, by pass; on a GPU the sum is told one pass later.
        parameters: checksums by name, every so many passes of the module.
        outputs: of the replica's tensors.
        buffers: what replica 0 changed: name, shape, dtype; of no meaning from others.
        failure: the class and the text of an exception.
    """

    place: str
    batches: dict[int, tuple[str, int | None]] = field(default_factory=dict)
    parameters: dict[str, int] = field(default_factory=dict)
    outputs: list[ReplicaOutput] = field(default_factory=list)
    buffers: list[tuple[str, tuple[int, ...], torch.dtype]] = field(default_factory=list)
    failure: tuple[str, str] | None = None


class ReplicaPass:
    """One pass of one module over one batch, on this rank."""

    def __init__(
        self, group: ReplicaGroup, module: nn.Module, device: torch.device, dim: int, place: tuple[int, int]
    ) -> None:
        self._group, self._module, self._device, self._dim = group, module, device, dim
        self._grad = torch.is_grad_enabled()
        self._number, module_number = place
        mode = (
            f"{'training' if module.training else 'evaluating'}{'' if self._grad else ', without gradients'}"
        )
        self._report = PassReport(f"forward pass {self._number} (module {module_number}, {mode})")
        self._replicas = 0
        self._token: Tensor | None = None
        self._output: Any = None
        self._error: Exception | None = None

    @property
    def _idle(self) -> bool:
        """Whether no sample is left for this rank."""
        return self._group.rank >= self._replicas

    def compute(self, args: tuple[Any, ...], kwargs: dict[str, Any], *, examined: bool) -> None:
        """Run the module on this rank's slice; an exception is kept until the others know of it.

        A rank for which no sample is left runs it on replica 0's, and gives nothing of it: so all have one structure, and
        one graph. With ``examined`` the ranks compare the parameters, too.
        """
        whole = (args, kwargs)
        self._group.samples[self._number] = Sample(whole)
        if examined:
            samples = {name: Sample(parameter) for name, parameter in self._module.named_parameters()}
            self._report.parameters = {name: sample.checksum() for name, sample in samples.items()}
        ways, self._replicas = divide(whole, self._group.size, self._dim)
        slices, weights = self._enter(tensors_of(whole), ways)
        own_args, own_kwargs = map_leaves(whole, Tensor, lambda _: slices.pop(0))
        before = {name: (b, b._version) for name, b in self._module.named_buffers()}
        if self._group.rank:  # replica 0 alone works on the module's own buffers, as in DataParallel
            weights |= {name: buffer.clone() for name, (buffer, _) in before.items()}
        try:
            self._output = torch.func.functional_call(self._module, weights, own_args, own_kwargs)
            self._describe_output()
        except Exception as error:  # every rank must hear of it, or the others would wait in the exchange
            self._error, self._report.failure = error, (type(error).__name__, text_of(error))
        self._report.buffers = [
            (name, tuple(buffer.shape), buffer.dtype)
            for name, buffer in self._module.named_buffers()
            if _may_have_changed(buffer, before.get(name), self._module.training)
        ]

    def _enter(
        self, tensors: Sequence[Tensor], ways: Sequence[Slices | None]
    ) -> tuple[list[Tensor], dict[str, Tensor]]:
        """Bring batch and parameters across; returns the replica's inputs, and its parameters that have gradients, by name."""
        named = [(n, p) for n, p in self._module.named_parameters() if p.requires_grad] if self._grad else []
        tracked = [index for index, tensor in enumerate(tensors) if self._grad and tensor.requires_grad]
        slices = [self._own_slice(tensor, way) for tensor, way in zip(tensors, ways, strict=True)]
        if not named and not tracked:
            return slices, {}
        crossing = Crossing(self._group, (*(ways[i] for i in tracked), *(None for _ in named)), self._device)
        self._token, *inner = Inward.apply(crossing, *(tensors[i] for i in tracked), *(p for _, p in named))
        for index in tracked:
            part = inner.pop(0)
            slices[index] = slices[index].requires_grad_() if self._idle else part
        return slices, dict(zip((name for name, _ in named), inner, strict=True))

    def _own_slice(self, tensor: Tensor, way: Slices | None) -> Tensor:
        part = tensor if way is None else way.of(tensor, 0 if self._idle else self._group.rank)
        # A copy: a module that changes its input in place would change the batch, differently on each rank.
        return part.detach().to(self._device, non_blocking=True, copy=True)

    def _describe_output(self) -> None:
        for strange in (leaf for leaf in leaves(self._output) if not isinstance(leaf, Tensor | None)):
            raise CannotAdopt(
                f"{type(self._module).__name__} returned a {type(strange).__name__}; nn.DataParallel gathers "
                "tensors, None, and tuples, lists and dicts of them. Return a tensor instead."
            )
        self._report.outputs = [
            ReplicaOutput(tuple(t.shape), t.requires_grad) for t in tensors_of(self._output)
        ]

    def collect(self) -> Any:
        """Agree with the other ranks and gather the output of the whole batch.

        Raises:
            RanksDisagree: ranks are at different places, or have different batches or parameters.
            CannotAdopt: the replicas' outputs don't match.
        """
        samples = self._group.samples
        for number, sample in list(samples.items()):
            late = number == self._number and sample.late is not None
            self._report.batches[number] = sample.shapes, None if late else sample.checksum()
            if not late:
                del samples[number]
        reports: list[PassReport] = self._group.exchange(self._report)
        if self._error is None or not all(report.failure for report in reports):
            check_agreement(reports)
        self._raise_failures(reports)
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
        described = [report.outputs for report in reports]
        if len(counts := {len(outputs) for outputs in described}) > 1:
            raise CannotAdopt(
                f"The replicas of nn.DataParallel returned different numbers of tensors ({counts}), so they cannot be "
                "gathered. Return the same structure for every slice of the batch."
            )
        every = list(zip(*described, strict=True))
        ways = [self._way(outputs) for outputs in every]
        joined = [
            self._given(tensor, way) for tensor, way in zip(tensors_of(self._output), ways, strict=True)
        ]
        tracked = []
        for index, way in enumerate(ways):
            if self._grad and any(output.requires_grad for output in every[index]):
                tracked.append(index)
            else:
                joined[index] = self._group.gather(joined[index], way.sizes, way.dim)
        if tracked:
            outer = self._crossed([ways[index] for index in tracked], [joined[index] for index in tracked])
            for index, tensor in zip(tracked, outer, strict=True):
                joined[index] = tensor
        results = iter(joined)
        return map_leaves(self._output, Tensor, lambda _: next(results))

    def _way(self, outputs: Sequence[ReplicaOutput]) -> Slices:
        """How an output is divided over the ranks; each adds its rows, or a scalar, which is one."""
        dim = self._dim if outputs[0].shape else 0
        rows = [output.shape[dim] if output.shape else 1 for output in outputs[: self._replicas]]
        return Slices((*rows, *(0,) * (len(outputs) - self._replicas)), dim)

    def _crossed(self, ways: Sequence[Slices], rows: Sequence[Tensor]) -> Sequence[Tensor]:
        if self._token is None:
            raise CannotAdopt(
                f"The output of {type(self._module).__name__} depends on parameters that are not its own, so "
                "nn.DataParallel over ranks cannot sum their gradients. Register them in the module."
            )
        crossing = Crossing(self._group, tuple(ways), self._device)
        outer: Sequence[Tensor] = Outward.apply(crossing, self._token, *rows)
        return outer

    def _given(self, tensor: Tensor, way: Slices) -> Tensor:
        rows = tensor if tensor.dim() else tensor.reshape(1)
        return rows.narrow(way.dim, 0, 0) if self._idle else rows


def _may_have_changed(buffer: Tensor, before: tuple[Tensor, int] | None, training: bool) -> bool:
    """Whether a forward pass may have changed a buffer.

    Batch norm's kernels update running statistics without a new version, so while training small buffers
    count as changed; a large one (a mask, a table of positions) is no statistic.
    """
    if training and buffer.numel() * buffer.element_size() <= STATISTIC_BYTES:
        return True
    return before is None or before[0] is not buffer or before[1] != buffer._version


# ---------------------------------------------------------------- what must agree


class Sample:
    """Some elements of each tensor of a batch. Those on a GPU are copied by it: it is waited for when they are read.

    Attributes:
        shapes: of the tensors, for a message.
        late: the copies, and what tells that they are done; None where all was in host memory.
    """

    def __init__(self, batch: Any) -> None:
        self.shapes = (
            ", ".join("x".join(map(str, t.shape)) or "scalar" for t in tensors_of(batch)) or "no tensor"
        )
        plain = [leaf for leaf in leaves(batch) if isinstance(leaf, PLAIN)]
        self._sum = zlib.crc32(repr(([(tuple(t.shape), t.dtype) for t in tensors_of(batch)], plain)).encode())
        self.late: tuple[list[Tensor], Any] | None = None
        copies = []
        for part in tensors_of(batch):
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


def error_class(name: str) -> type[Exception]:
    """The exception class of that name, for a program that catches it; where in doubt, RuntimeError."""
    found = getattr(torch, name, None) or getattr(builtins, name, None)
    known = (ValueError, TypeError, RuntimeError, ArithmeticError, LookupError)
    return found if isinstance(found, type) and issubclass(found, known) else RuntimeError


def check_agreement(reports: Sequence[PassReport]) -> None:
    """Raise ``RanksDisagree`` unless all ranks are at one place, with one batch and the same parameter."""
    first = reports[0]
    if moved := [rank for rank, report in enumerate(reports) if report.place != first.place]:
        raise RanksDisagree(
            f"Rank 0 and {ranks_in_words(moved)} are not at the same place of the program: rank {moved[0]} is at "
            f"{reports[moved[0]].place}, rank 0 at {first.place}. With nn.DataParallel every rank must call "
            "the model equally often; don't call it under a condition that depends on the rank."
        )
    for number, drawn in first.batches.items():
        if drew := [rank for rank, report in enumerate(reports) if report.batches[number] != drawn]:
            raise RanksDisagree(
                f"Rank 0 and {ranks_in_words(drew)} drew different batches at forward pass {number} of nn.DataParallel "
                f"(rank 0: {drawn[0]}; rank {drew[0]}: {reports[drew[0]].batches[number][0]}). {SAME_BATCH}"
            )
    for name, value in first.parameters.items():
        if apart := [rank for rank, report in enumerate(reports) if report.parameters.get(name) != value]:
            raise RanksDisagree(
                f"Parameter {name!r} of the nn.DataParallel module differs between rank 0 and "
                f"{ranks_in_words(apart)} at {first.place}. Change parameters in the same way on every "
                "rank, and not by numbers that each rank draws for itself."
            )
