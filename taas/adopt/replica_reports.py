"""What ranks tell each other about a pass of a divided module, and what must agree in it."""

from __future__ import annotations

import builtins
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from taas.errors import CannotAdopt, RanksDisagree

SAME_BATCH = (
    "Every rank of a run with nn.DataParallel must load the same batches. Seed what draws them, before the "
    "DataLoader is made (torch.manual_seed(0), and random.seed / numpy.random.seed where they are used), or give "
    "each rank its own share: DistributedDataParallel with a DistributedSampler."
)


@dataclass
class Output:
    """A tensor of a replica's output, described for the others."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool


@dataclass
class Report:
    """What one rank tells the others after its part of a pass.

    Attributes:
        place: count of passes in the program, number of the module, and the modes it ran in.
        shapes: of the whole batch, as text.
        checksum: of the whole batch, and of one parameter; with the count of the pass it belongs to.
        parameter: the name of that parameter.
        outputs: of the replica's tensors; ``None`` if it had no samples.
        structure: rank 0's output without its tensors, where some rank has none of its own.
        buffers: what replica 0 changed: name, shape, dtype; of no meaning from others.
        failure: the class and the text of an exception.
    """

    place: tuple[int, int, bool, bool]
    shapes: str = ""
    checksum: tuple[int, int, int] = (0, 0, 0)
    parameter: str = ""
    outputs: list[Output] | None = None
    structure: bytes = b""
    buffers: list[tuple[str, tuple[int, ...], torch.dtype]] = field(default_factory=list)
    failure: tuple[str, str] | None = None


def error_class(name: str) -> type[Exception]:
    """The exception class of that name, for a program that catches it; where in doubt, RuntimeError."""
    found = getattr(torch, name, None) or getattr(builtins, name, None)
    if isinstance(found, type) and issubclass(
        found, (ValueError, TypeError, RuntimeError, ArithmeticError, LookupError)
    ):
        return found
    return RuntimeError


def check_agreement(reports: Sequence[Report]) -> None:
    """Raise ``RanksDisagree`` unless all ranks are at one place, with one batch and the same parameters."""
    first = reports[0]
    moved = [rank for rank, report in enumerate(reports) if report.place != first.place]
    if moved:
        raise RanksDisagree(
            f"Rank(s) {_ranks(moved)} and rank 0 are not at the same place of the program: rank {moved[0]} is at "
            f"{_place(reports[moved[0]])}, rank 0 at {_place(first)}. With nn.DataParallel every rank must call "
            "the model equally often; don't call it under a condition that depends on the rank."
        )
    drew = [
        r
        for r, report in enumerate(reports)
        if (report.shapes, report.checksum[:2]) != (first.shapes, first.checksum[:2])
    ]
    if drew:
        raise RanksDisagree(
            f"Rank(s) {_ranks(drew)} and rank 0 drew different batches at forward pass {first.checksum[0]} of "
            f"nn.DataParallel (rank 0: {first.shapes}; rank {drew[0]}: {reports[drew[0]].shapes}). {SAME_BATCH}"
        )
    apart = [rank for rank, report in enumerate(reports) if report.checksum != first.checksum]
    if apart:
        raise RanksDisagree(
            f"Parameter {first.parameter!r} of the nn.DataParallel module differs between rank 0 and rank(s) "
            f"{_ranks(apart)} at forward pass {first.checksum[0]}. Change parameters in the same way on every "
            "rank, and not by numbers that each rank draws for itself."
        )


def check_outputs(reports: Sequence[Report]) -> None:
    """Raise ``CannotAdopt`` unless all replicas returned as many tensors."""
    counts = {rank: len(report.outputs) for rank, report in enumerate(reports) if report.outputs is not None}
    if len(set(counts.values())) > 1:
        raise CannotAdopt(
            f"The replicas of nn.DataParallel returned different numbers of tensors ({counts}), so they cannot be "
            "gathered. Return the same structure for every slice of the batch."
        )


def _place(report: Report) -> str:
    passes, number, training, grad = report.place
    mode = "training" if training else "evaluating"
    return f"forward pass {passes} (module {number}, {mode}{'' if grad else ', without gradients'})"


def _ranks(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:8]))
    return shown if len(ranks) <= 8 else f"{shown} and {len(ranks) - 8} more"
