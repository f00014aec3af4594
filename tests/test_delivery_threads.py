"""Threads of a rank: its sockets are one thread's, and memory is pinned by another one."""

from __future__ import annotations

import gc
import threading
from typing import Any, ClassVar

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
    """Leave loops, and let another thread find their iterators; returns who sent, what came, and what was closed."""
    connection = rank_side._connection
    assert connection is not None
    senders, closed, send = set(), [], connection._control.send

    def noting(message: Any) -> None:
        senders.add(threading.get_ident())
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
    return senders == {threading.get_ident()}, came, len(set(closed))


def test_iterators_are_given_up_by_the_thread_that_has_the_sockets() -> None:
    """Whichever thread collects garbage, and whenever: nothing is sent from there, and nothing is lost or left open."""
    with DeliveryRun({"left": numbers(40), "d": numbers()}) as run:
        [(alone, came, closed)] = run.ranks(_left_to_the_collector)
    assert came == 3 * [*range(200)]
    assert alone
    assert closed == 8 + 100 + 3


class Batch:
    """What a ``collate_fn`` may return: it knows how it is pinned, and notes by whom."""

    pinned_by: ClassVar[dict[int, str]] = {}
    pinned = threading.Event()

    def __init__(self, items: list[Any]) -> None:
        self.value = int(items[0])

    def pin_memory(self) -> Batch:
        if self.value == 13:
            raise ValueError("not this one")
        self.pinned_by[self.value] = threading.current_thread().name
        if self.value == 1:
            self.pinned.set()
        return self


def _pinned(rank: int, loaders: dict[str, Any]) -> Any:
    rehearsal.install(0, 1)
    connection = rank_side._connection
    assert connection is not None
    steps = iter(loaders["d"])
    while connection.upcoming(steps._plan, 1) is None:
        connection._wait()
    came = [next(steps).value]
    ahead = Batch.pinned.wait(SECONDS)  # while this rank computes with element 0
    try:
        for batch in steps:
            came.append(batch.value)
    except ValueError as error:
        came.append(str(error))
    threads = set(Batch.pinned_by.values())
    left = iter(loaders["d"])
    next(left)
    del left, steps  # what was pinned ahead is given back
    return came, ahead, threads, [batch.value for batch, _ in zip(loaders["d"], range(5), strict=False)]


def test_memory_is_pinned_by_a_thread_while_the_rank_computes() -> None:
    """As torch's DataLoader has it: an element ahead, in order; what pinning raises is raised at its own step."""
    loader = DataLoader(torch.arange(30), batch_size=1, collate_fn=Batch, pin_memory=True)
    with DeliveryRun({"d": loader}) as run:
        [(came, ahead, threads, again)] = run.ranks(_pinned)
    assert came == [*range(13), "not this one"]
    assert ahead
    assert threads == {"taas-pin_0"}
    assert again == [*range(5)]
