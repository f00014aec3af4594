"""``nn.DataParallel`` over ranks has DataParallel's own meaning."""

from __future__ import annotations

import copy
import os
import pickle
import random
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from adopt_programs import PROGRAMS, Inner, Reference, batch, mlp, two_layers
from ranks_harness import DEADLINE, run_ranks
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  # its usual name
from torch.utils.data import DataLoader, TensorDataset

pytestmark = pytest.mark.usefixtures("warm")
CLOSE = {"rtol": 1e-5, "atol": 1e-6}


def _flat(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return [tensor for part in value for tensor in _flat(part)]


def _run_programs(names: list[str]) -> dict[str, Any]:
    results = {}
    for name in names:
        try:
            results[name] = [tensor.numpy() for tensor in _flat(PROGRAMS[name](nn.DataParallel))]
        # the others may wait for this rank now: no program after it counts
        except Exception as error:
            raise RuntimeError(f"program {name}") from error
    return results


@pytest.fixture(autouse=True)
def one_thread():
    """The reference adds up in the order of a rank, which has one thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def everywhere(warm):
    """The results of all programs, from each of the ranks."""
    return run_ranks(_run_programs, 3, list(PROGRAMS))


@pytest.mark.parametrize("name", PROGRAMS)
def test_program_gives_what_data_parallel_gives(everywhere, name):
    """Numbers as computed slice after slice in one process, and bitwise the same on every rank."""
    results = [rank[name] for rank in everywhere]
    expected = _flat(PROGRAMS[name](lambda module, dim=0: Reference(module, len(everywhere), dim)))
    for mine, reference in zip(results[0], expected, strict=True):
        torch.testing.assert_close(torch.from_numpy(mine), reference.detach(), **CLOSE)
    for other in results[1:]:
        for mine, theirs in zip(results[0], other, strict=True):
            assert np.array_equal(mine, theirs)


def _identity():
    model = mlp()
    wrapped = nn.DataParallel(model, device_ids=[0, 1], output_device=0)
    restored = pickle.loads(pickle.dumps(nn.DataParallel(mlp())))
    twin = copy.deepcopy(wrapped)
    x = batch(4)[0]
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    return (
        isinstance(wrapped, nn.DataParallel) and type(wrapped) is nn.parallel.DataParallel,
        wrapped.module is model,
        sorted(wrapped.state_dict()) == sorted("module." + name for name in model.state_dict()),
        all(
            a is b
            for a, b in zip(optimizer.param_groups[0]["params"], model.parameters(), strict=True)
        ),
        nn.DataParallel.__taas_unwrap__,
        torch.equal(twin(x), wrapped(x)),
        restored(x).shape == (4, 3),
        wrapped.device_ids == [0, 1] and wrapped.dim == 0,
    )


def test_class_and_attributes_are_those_programs_expect():
    """isinstance, ``module``, ``state_dict`` keys, deepcopy, pickle.

    Parameters are the model's own objects.
    """
    assert run_ranks(_identity, 2) == [(True,) * 8] * 2


def _work():
    rows, grads = [], []

    def forward(m, x):
        rows.append(len(x))
        hidden = m.a(x)
        hidden.register_hook(lambda grad: grads.append(len(grad)))
        return m.b(hidden)

    model = nn.DataParallel(two_layers(forward))
    for count in (12, 7, 1):
        model(batch(count)[0]).sum().backward()
    return rows, grads


def test_each_rank_computes_its_share_only():
    """Forward and backward of a rank see its slice.

    That is a third of the batch, and replica 0's again where none is left.
    """
    assert run_ranks(_work, 3) == [
        ([4, 3, 1], [4, 3, 1]),
        ([4, 3, 1], [4, 3, 1]),
        ([4, 1, 1], [4, 1, 1]),
    ]


def _differs_at_the_wrap():
    rank = int(os.environ["RANK"])
    torch.manual_seed(rank)
    random.seed(rank)
    np.random.seed(rank)
    model = mlp(nn.BatchNorm1d(16))
    model[1].running_mean.add_(rank)
    model = nn.DataParallel(model)
    drawn = torch.rand(1).item(), random.random(), float(np.random.rand())
    return drawn, [t.tolist() for t in model.state_dict().values()]


def test_everything_is_rank_0s_at_the_wrap():
    """Parameters, buffers and the random streams of torch, Python and NumPy."""
    first, second = run_ranks(_differs_at_the_wrap, 2)
    assert first == second


def _shuffle_with_dropout():
    torch.manual_seed(0)
    model = nn.DataParallel(nn.Sequential(nn.Linear(6, 16), nn.Dropout(0.5), nn.Linear(16, 3)))
    masks = Inner(lambda m, x: F.dropout(torch.ones_like(x), 0.5), a=nn.Linear(1, 1))
    loader = DataLoader(TensorDataset(*batch(10)), batch_size=3, shuffle=True)
    losses = []
    for _ in range(3):
        for x, y in loader:
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            losses.append(loss.item())
    mask = nn.DataParallel(masks)(torch.ones(2, 64))
    return losses, torch.rand(1).item(), mask[0].tolist(), mask[1].tolist()


def test_dropout_leaves_the_shuffling_stream_alone():
    """Slices of different size draw differently.

    The batches stay the same, and replicas' masks differ.
    """
    results = run_ranks(_shuffle_with_dropout, 2)
    again = run_ranks(_shuffle_with_dropout, 2)
    assert results[0] == results[1] == again[0]
    assert results[0][2] != results[0][3]


def _different_batches():
    torch.manual_seed(0)
    model, rank = nn.DataParallel(mlp()), int(os.environ["RANK"])
    for step in range(4):
        odd = rank == 2 and step == 3
        model(batch(6, 100 if odd else step)[0])


def test_ranks_with_different_batches_are_named():
    """Every rank gets the error; it names the odd rank and both ways out."""
    outcomes = run_ranks(_different_batches, 3, fails=True, grace=DEADLINE)
    [told] = outcomes[0].notices  # once, and on rank 0 alone, that there is a faster way
    assert "DistributedSampler" in told and "taas.register()" in told and not outcomes[1].notices
    for outcome in outcomes:
        assert outcome.error == "RanksDisagree", outcome.trace
        assert "Rank 0 and rank 2 drew different batches at forward pass 4" in outcome.text
        assert "torch.manual_seed(0)" in outcome.text
        assert "DistributedSampler" in outcome.text


def _one_replica_fails():
    def forward(m, x):
        if float(x[0, 0]) == 5.0:
            raise ValueError("sample 5 is ill")
        return m.a(x)

    model, caught = nn.DataParallel(Inner(forward, a=nn.Linear(1, 1))), []
    for start in (0.0, 3.0, 6.0):
        try:
            model(torch.arange(start, start + 4).reshape(4, 1))
        except ValueError as error:
            caught.append(str(error))
    return caught


def test_exception_in_one_replica_reaches_all_ranks():
    """A program that skips such a batch does so on every rank, and goes on."""
    first, second = run_ranks(_one_replica_fails, 2)
    assert first == ["sample 5 is ill"] or second == ["sample 5 is ill"]
    assert len(first) == len(second) == 1
    assert all("sample 5 is ill" in text for text in first + second)


class _Balanced(nn.DataParallel):
    def scatter(self, inputs, kwargs, device_ids):
        return super().scatter(inputs, kwargs, device_ids)


def _subclass():
    _Balanced(mlp())(batch(4)[0])


def _strange_output():
    nn.DataParallel(Inner(lambda m, x: {"loss": 1.5}, a=nn.Linear(1, 1)))(torch.ones(4, 1))


def _foreign_parameter():
    weight = torch.ones(1, requires_grad=True)
    nn.DataParallel(Inner(lambda m, x: x * weight))(torch.ones(4, 1))


@pytest.mark.parametrize(
    ("case", "words"),
    [
        (_subclass, "_Balanced changes scatter"),
        (_strange_output, "returned a float"),
        (_foreign_parameter, "not its own"),
    ],
)
def test_what_ranks_cannot_divide_is_refused_by_name(case, words):
    """Before the first step, with what to do instead."""
    for outcome in run_ranks(case, 2, fails=True, grace=DEADLINE):
        assert outcome.error == "CannotAdopt", outcome.trace
        assert words in outcome.text


# ---------------------------------------------------------------- the group of the replicas


def _replicas_of_two_runs():
    """Rank 1 has another key, as a stranger would who takes its place in the group."""
    from taas import adopt

    assert adopt._meeting is not None
    membership = adopt._meeting.membership
    if membership.rank == 1:
        membership.address = msgspec.structs.replace(membership.address, secret=bytes(32))
    torch.nn.DataParallel(torch.nn.Linear(2, 1))(torch.ones(4, 2))


def test_what_replicas_say_to_each_other_is_sealed():
    """gloo takes any peer; DataParallel unpickles nothing of one that has not the run's key."""
    for outcome in run_ranks(_replicas_of_two_runs, 2, fails=True, grace=60):
        assert outcome.error == "RanksDisagree", outcome
        assert "not of this run" in outcome.text
