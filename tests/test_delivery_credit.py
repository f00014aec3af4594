"""Credit: whatever is open, unasked for or too large, nobody waits for what will never come."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from delivery_run import DeliveryRun
from torch.utils.data import DataLoader, Dataset, IterableDataset

from taas.delivery.reports import Failed, Note, Prebuffered


class Numbers(Dataset):
    """Element i is ``nbytes`` of memory that begin with i."""

    def __init__(self, length: int, nbytes: int) -> None:
        self.length, self.nbytes = length, nbytes

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((self.nbytes // 8,), index)


class Stream(IterableDataset):
    """The same as a stream."""

    def __init__(self, length: int, nbytes: int) -> None:
        self.numbers = Numbers(length, nbytes)

    def __iter__(self) -> Any:
        return (self.numbers[index] for index in range(len(self.numbers)))


def firsts(batches: Any) -> list[int]:
    return [int(batch[0, 0]) for batch in batches]


def zipped(loader: Any) -> Any:
    return [(int(a[0, 0]), int(b[0, 0])) for a, b in zip(loader, loader, strict=True)]


def nested(loader: Any) -> Any:
    outer = zip(range(2), loader, strict=False)
    return [(int(a[0, 0]), firsts(loader)) for _, a in outer]


def kept_open(loader: Any) -> Any:
    iterator = iter(loader)
    return int(next(iterator)[0, 0]), firsts(loader), firsts(iterator)


@pytest.mark.parametrize("body", [zipped, nested, kept_open])
@pytest.mark.parametrize("nbytes", [1 << 10, 1 << 18])
def test_iterations_that_are_open_together_hold_up_none(body: Callable[[Any], Any], nbytes: int) -> None:
    """The usual ``next(iter(loader))`` before the loop among them: every iteration is whole."""

    def loader() -> DataLoader:
        return DataLoader(Numbers(300, nbytes), batch_size=1)

    with DeliveryRun({"d": loader()}, processes=2, slab=4 << 20) as run:
        assert run.ranks(lambda _, loaders: body(loaders["d"])) == [body(loader())]


def test_units_are_used_up_beside_an_open_iteration() -> None:
    """300 units over 200 elements: one in an iterator that stays open, all others in the loops after it."""

    def body(_rank: int, loaders: dict[str, Any]) -> Any:
        iterator = iter(loaders["d"])
        return [firsts([next(iterator)]), firsts(loaders["d"]), firsts(loaders["d"]), firsts(iterator)]

    loader = DataLoader(Numbers(200, 1 << 12), batch_size=1)
    with DeliveryRun({"d": loader}, processes=2, units={"d": 300}) as run:
        [got] = run.ranks(body)
    assert got == [[0], list(range(200)), list(range(99)), []]


def until(steps: int) -> Callable[[int, dict[str, Any]], list[int]]:
    """Rank 0 takes all, the others so many steps; none at all of 0."""

    def body(rank: int, loaders: dict[str, Any]) -> list[int]:
        if rank == 0:
            return firsts(loaders["d"])
        return firsts(first_of(loaders["d"], steps)) if steps else []

    return body


@pytest.mark.parametrize("steps", [0, 3])
@pytest.mark.parametrize("nbytes", [1 << 10, 1 << 18])
def test_a_stream_goes_on_without_ranks_that_leave_it(steps: int, nbytes: int) -> None:
    """One rank leaves its loop early, or never begins it: the other one gets all that is its own."""
    loader = DataLoader(Stream(200, nbytes), batch_size=1)
    with DeliveryRun({"d": loader}, ranks=2, processes=2, slab=64 << 20) as run:
        got = run.ranks(until(steps))
    assert got == [list(range(0, 200, 2)), list(range(1, 2 * steps, 2))]


def test_a_rank_that_keeps_a_stream_from_the_others_is_named() -> None:
    """More than a buffer full would have to be held for it: said, and nothing is lost when it begins."""

    def body(rank: int, loaders: dict[str, Any]) -> list[int]:
        if rank == 1:
            loaders["barrier"].wait()
        return firsts(loaders["d"])

    barrier = torch.multiprocessing.get_context("fork").Event()
    loader = DataLoader(Stream(400, 1 << 18), batch_size=1)
    with DeliveryRun({"d": loader}, ranks=2, processes=2, slab=8 << 20) as run:
        ranks = run.start_ranks(lambda rank, loaders: body(rank, loaders | {"barrier": barrier}))
        note = run.wait_for(Note)
        assert isinstance(note, Note)
        assert "'d' is one stream" in note.text
        barrier.set()
        assert run.results(ranks) == [list(range(0, 400, 2)), list(range(1, 400, 2))]


@pytest.mark.parametrize(("prebuffer", "nbytes"), [(64, 1 << 20), (3000, 1 << 10)])
def test_prebuffering_more_than_there_is_room_for(prebuffer: int, nbytes: int) -> None:
    """The ranks start with what the buffer holds, or with as many small elements as they asked for."""
    loader = DataLoader(Numbers(6000, nbytes), batch_size=1)
    with DeliveryRun(
        {"d": loader}, ranks=2, processes=2, slab=8 << 20, prebuffer=prebuffer, wait=False
    ) as run:
        assert isinstance(run.wait_for((Prebuffered, Failed)), Prebuffered)
        told = [report.text for report in run.reports if isinstance(report, Note)]
        assert len(told) == (nbytes == 1 << 20)
        got = run.ranks(lambda _, loaders: firsts(first_of(loaders["d"], 100)))
    assert got == [list(range(0, 200, 2)), list(range(1, 200, 2))]


def first_of(loader: Any, count: int) -> Any:
    return (batch for _, batch in zip(range(count), loader, strict=False))
