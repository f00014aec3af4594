"""Threads of a rank: whichever leaves a loop, its sockets are used by one at a time; and memory is pinned."""

from __future__ import annotations

import gc
import threading
from typing import Any

import pytest
import torch
from delivery_run import DeliveryRun
from torch.utils.data import DataLoader

from taas import rehearsal
from taas.delivery import loader as rank_side

pytestmark = pytest.mark.slow
SECONDS = 60.0


def numbers(length: int = 200, **options: Any) -> DataLoader:
    return DataLoader(torch.arange(length), batch_size=2, **options)


def _left_to_the_collector(rank: int, loaders: dict[str, Any]) -> Any:
    """Leave loops, and let another thread find their iterators; returns what came, and how many were closed."""
    connection = rank_side._connection
    assert connection is not None
    closed, send = [], connection._control.send

    def noting(message: Any) -> None:
        closed.extend(plan.plan for plan in getattr(message, "plans", ()) if plan.closed)
        send(message)

    connection._control.send = noting  # type: ignore[method-assign]
    begun = [iter(loaders["left"]) for _ in range(8)]
    assert [next(one).tolist() for one in begun] == 8 * [[0, 1]]
    collector = threading.Thread(target=begun.clear)
    came = []
    for count, batch in enumerate(loaders["d"]):
        came += batch.tolist()
        if count == 10:
            collector.start()
        if count == 50:
            collector.join()
    threshold = gc.get_threshold()
    gc.set_threshold(1)  # from now on the collector strikes in the middle of everything
    try:
        for batch in loaders["d"]:
            left = [iter(loaders["left"])]
            left.append(left)  # type: ignore[arg-type]
            next(left[0])
            del left
            came += batch.tolist()
    finally:
        gc.set_threshold(*threshold)
    gc.collect()
    came += [x for batch in loaders["d"] for x in batch.tolist()]
    return came, len(set(closed))


def test_iterators_are_given_up_by_any_thread() -> None:
    """Whichever thread collects garbage, and whenever: nothing is lost or left open."""
    with DeliveryRun({"left": numbers(40), "d": numbers()}) as run:
        [(came, closed)] = run.ranks(_left_to_the_collector)
    assert came == 3 * [*range(200)]
    assert closed == 8 + 100 + 3


class Batch:
    """What a ``collate_fn`` may return: it knows how it is pinned."""

    def __init__(self, items: list[Any]) -> None:
        self.value, self.pinned = int(items[0]), False

    def pin_memory(self) -> Batch:
        if self.value == 13:
            raise ValueError("not this one")
        self.pinned = True
        return self


def _pinned(rank: int, loaders: dict[str, Any]) -> Any:
    rehearsal.install(0, 1)
    came: list[Any] = []
    try:
        for batch in loaders["d"]:
            came.append((batch.value, batch.pinned))
    except ValueError as error:
        came.append(str(error))
    return came, [batch.value for batch, _ in zip(loaders["d"], range(5), strict=False)]


def test_memory_is_pinned() -> None:
    """As torch's DataLoader has it, in order; what pinning raises is raised at its own step."""
    loader = DataLoader(torch.arange(30), batch_size=1, collate_fn=Batch, pin_memory=True)
    with DeliveryRun({"d": loader}) as run:
        [(came, again)] = run.ranks(_pinned)
    assert came == [*((value, True) for value in range(13)), "not this one"]
    assert again == [*range(5)]
