"""A run that is started again goes on where its ranks were, if the cell asks for that."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from delivery_run import DeliveryRun, wait_for_delivery
from test_delivery_order import MAKERS, Squares, expected, merged, plain
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

import taas
from taas.delivery.config import Place
from taas.errors import DeliveryError, RanksDisagree, UnitsExhausted

_left_behind: list[Any] = []


def stopping(iterations: int, steps: Callable[[int], int]) -> Callable[..., Any]:
    """A body that runs so many iterations whole, and takes ``steps(rank)`` of the next one; the last is not done.

    Rank 0 leaves its loop, as an interrupted one; the others end as killed ones do, without a word.
    """

    def body(rank: int, loaders: dict[str, Any]) -> Any:
        for loader in loaders.values():
            for _ in range(iterations):
                list(loader)
            iterator = iter(loader)
            for _ in range(steps(rank)):
                next(iterator)
            if rank:
                _left_behind.append(iterator)

    return body


def going_on(_rank: int, loaders: dict[str, Any]) -> Any:
    resumed = taas.resume()
    places = {name: tuple(resumed[loader]) for name, loader in loaders.items()}
    return places, {name: [[plain(e) for e in loader] for _ in range(2)] for name, loader in loaders.items()}


@pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")
@pytest.mark.parametrize(
    "name", ["plain", "shuffled", "global_rng", "persistent", "own_sampler", "stream", "streams", "stateful"]
)
def test_a_second_start_goes_on_at_the_lowest_step_not_done_by_all(name: str) -> None:
    """Ranks are lost in their second iteration, at different steps: the rest of it, and the next, are unchanged."""
    torch.manual_seed(11)
    with DeliveryRun({name: MAKERS[name]()}, ranks=2, slab=4 << 20) as first:
        first.ranks(stopping(1, lambda rank: 3 + rank))
        steps = len(expected(name)[0]) // 2
        wait_for_delivery(first, 2 * steps + 6)
    assert first.places == {name: Place(1, 2, steps)}
    torch.manual_seed(11)
    with DeliveryRun({name: MAKERS[name]()}, ranks=2, vms=2, slab=4 << 20, places=first.places) as second:
        results = second.ranks(going_on)
    assert [places for places, _ in results] == 2 * [{name: (1, 2)}]
    for at, wanted in ((0, expected(name)[1][4:]), (1, expected(name)[2])):
        got = merged([epochs[name][at] for _, epochs in results])
        assert wanted[: len(wanted) // 2 * 2] == got, f"iteration {at + 1}"


def test_a_second_start_that_does_not_resume_begins_at_the_start() -> None:
    """And what it then loses is counted from there."""
    with DeliveryRun({"d": MAKERS["shuffled"]()}, ranks=2, places={"d": Place(1, 2, 6)}, slab=4 << 20) as run:
        results = run.ranks(lambda _, loaders: [plain(e) for e in loaders["d"]])
        wait_for_delivery(run, 12)
    assert merged(results) == expected("shuffled")[0][:12]
    assert run.places == {"d": Place(1, 0, 6)}


def test_a_loss_between_two_iterations_goes_on_with_the_next() -> None:
    """A rank that has begun the next iteration waits for one that has not ended this one."""

    def body(rank: int, loaders: dict[str, Any]) -> Any:
        iterator = iter(loaders["d"])
        for _ in range(5 + rank):
            next(iterator)
        if rank == 1:
            assert next(iterator, None) is None
            iterator = iter(loaders["d"])
            next(iterator)
        _left_behind.append(iterator)

    with DeliveryRun({"d": MAKERS["plain"]()}, ranks=2, slab=4 << 20) as run:
        run.ranks(body)
        wait_for_delivery(run, 10)
    assert run.places == {"d": Place(0, 4, 0)}
    with DeliveryRun({"d": MAKERS["plain"]()}, slab=4 << 20) as run:
        run.ranks(lambda _, loaders: [list(loaders["d"]) for _ in range(2)])
        wait_for_delivery(run, 26)
    assert run.places == {"d": Place(2, 0, 26)}


def test_a_resumed_start_that_is_lost_again_forgets_nothing() -> None:
    """The second loss comes before every rank has begun: the place of the first one stands."""

    def body(rank: int, loaders: dict[str, Any]) -> Any:
        taas.resume()
        if rank == 0:
            iterator = iter(loaders["d"])
            next(iterator), next(iterator)
            _left_behind.append(iterator)

    with DeliveryRun({"d": MAKERS["shuffled"]()}, ranks=2, places={"d": Place(1, 2, 6)}) as run:
        run.ranks(body)
        wait_for_delivery(run, 17)
    assert run.places == {"d": Place(1, 2, 6)}


def test_a_distributed_sampler_goes_on_in_the_epoch_that_is_set() -> None:
    """Each rank gets the rest of its own stream."""

    def loader(ranks: int, rank: int) -> DataLoader:
        sampler = DistributedSampler(Squares(), num_replicas=ranks, rank=rank, seed=5)
        return DataLoader(Squares(), batch_size=4, sampler=sampler)

    def body(_rank: int, loaders: dict[str, Any]) -> Any:
        place = taas.resume()[loaders["d"]]
        loaders["d"].sampler.set_epoch(place.iteration)
        return [plain(e) for e in loaders["d"]]

    with DeliveryRun({"d": loader(2, 0)}, ranks=2, places={"d": Place(3, 2, 21)}) as run:
        results = run.ranks(body)
    for rank, got in enumerate(results):
        own = loader(2, rank)
        own.sampler.set_epoch(3)
        assert [plain(e) for e in own][2:] == got


def test_units_of_both_starts_are_added_up() -> None:
    """Of 30 units in two ranks, 10 steps were taken: 5 are left."""

    def body(_rank: int, loaders: dict[str, Any]) -> Any:
        taas.resume()
        steps = [len(list(loaders["d"])) for _ in range(2)]
        with pytest.raises(UnitsExhausted):
            iter(loaders["d"])
        return steps

    places = {"d": Place(1, 4, 6)}
    with DeliveryRun({"d": MAKERS["plain"]()}, ranks=2, places=places, units={"*": 30}, slab=4 << 20) as run:
        assert run.ranks(body) == [[2, 3], [2, 3]]


@pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")
@pytest.mark.parametrize(
    ("name", "units"), [("shuffled", 8), ("streams", 8), ("shuffled", 12), ("stream", 10)], ids=str
)
def test_used_up_units_leave_an_empty_loop_before_the_save(name: str, units: int) -> None:
    """The loss comes after the loop that the units ended, in the middle of its epoch or at its very end.

    The cell finds that loop at its end, then no other one; its generators end where they would have.
    """

    def training(_rank: int, loaders: dict[str, Any]) -> Any:
        place = taas.resume()[loaders["d"]]
        taken = len(list(loaders["d"]))
        with pytest.raises(UnitsExhausted):
            iter(loaders["d"])
        return tuple(place), taken

    where: dict[str, Place] = {}
    ends = []
    for _ in range(3):
        torch.manual_seed(11)
        with DeliveryRun(
            {"d": MAKERS[name]()}, ranks=2, places=where, units={"d": units}, slab=4 << 20
        ) as run:
            taken = 0 if where else units // 2
            assert run.ranks(training) == 2 * [((0, units // 2 - taken), taken)]
            ends.append(states(run.finish().states))
        where = run.places
        assert where == {"d": Place(0, units // 2, 0)}
    assert ends == 3 * [ends[0]]


def states(final: bytes) -> dict[str, Any]:
    return {path: value.tolist() for path, value in pickle.loads(final)["d"].items()}


def test_a_checkpoint_may_say_where_to_go_on() -> None:
    """``taas.resume(d=(iteration, step))`` begins there, also in a first start; ranks have to agree."""

    def body(rank: int, loaders: dict[str, Any]) -> Any:
        assert taas.resume(d=(1, 3)).restart == 0
        return [plain(e) for e in loaders["d"]]

    def differing(rank: int, loaders: dict[str, Any]) -> Any:
        taas.resume(d=(0, rank))
        try:
            return len(list(loaders["d"]))
        except RanksDisagree as error:
            return str(error)

    loader = MAKERS["shuffled"]
    with DeliveryRun({"d": loader()}, ranks=2, slab=4 << 20) as run:
        assert merged(run.ranks(body)) == expected("shuffled")[1][6:12]
    with DeliveryRun({"d": loader()}, ranks=2, slab=4 << 20) as run:
        results = run.ranks(differing)
    [told] = [result for result in results if isinstance(result, str)]
    assert "Call taas.resume() in every rank, with the same places" in told


def test_mistakes_are_told() -> None:
    """Too late, no such loader, no such place, nothing to resume with."""

    def body(_rank: int, loaders: dict[str, Any]) -> Any:
        told = []
        for places in ({"e": (0, 1)}, {"d": (0, -1)}):
            with pytest.raises(DeliveryError) as caught:
                taas.resume(**places)
            told.append(str(caught.value))
        next(iter(loaders["d"]))
        with pytest.raises(DeliveryError) as caught:
            taas.resume()
        return [*told, str(caught.value)]

    with DeliveryRun({"d": MAKERS["plain"]()}, slab=4 << 20) as run:
        [[unknown, negative, late]] = run.ranks(body)
    assert "'e' is not a loader of this run. Its loaders are d" in unknown
    assert "an iteration and a step from 0 on" in negative
    assert "Call it before the first one" in late
    assert taas.resume()["d"] == (0, 0)
    with pytest.raises(DeliveryError, match="has no data workers"):
        taas.resume(d=(0, 1))
