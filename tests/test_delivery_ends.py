"""What a sampler may do to its planner, and to the end of a run whose ranks are done."""

from __future__ import annotations

import os
import pickle
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from delivery_run import DeliveryRun
from torch.utils.data import DataLoader, Sampler

from taas.dataloader_registry import apply_final
from taas.delivery.messages import Draw, FinishPlans, OpenPlan
from taas.delivery.parts import take_apart
from taas.delivery.planner import Planner
from taas.delivery.reports import Note
from taas.delivery.sampling import LoaderPlans, RngStates

FAR = 5000
"""An index that is drawn only to find out where an iteration that was left early would have ended."""


class Late(Sampler[int]):
    """Indices in order; what happens far in them is told by its subclass."""

    def __init__(self, happens: Callable[[], None]) -> None:
        self.happens = happens

    def __len__(self) -> int:
        return 2 * FAR

    def __iter__(self) -> Iterator[int]:
        for index in range(len(self)):
            if index == FAR:
                self.happens()
            yield index


def raising() -> None:
    raise ValueError("no such index file")


def loader(happens: Callable[[], None]) -> DataLoader:
    return DataLoader(range(2 * FAR), sampler=Late(happens), batch_size=None)


def left_open(_rank: int, loaders: dict[str, Any]) -> None:
    """The cell ends while an iterator of its loader is still there."""
    iterator = iter(loaders["late"])
    next(iterator)
    _left_open.append(iterator)


_left_open: list[Any] = []


def notes(run: DeliveryRun) -> list[str]:
    return [report.text for report in run.reports if isinstance(report, Note)]


def test_a_sampler_that_raises_after_the_cell_leaves_the_other_loaders_their_states() -> None:
    """It is named with what it raised; the planner goes on."""
    parts = {"late": loader(raising), "well": loader(lambda: None)}
    plans = [LoaderPlans(name, take_apart(it), RngStates.now(), 1) for name, it in parts.items()]
    planner = Planner(list(plans))
    for index in range(2):
        planner.answer(OpenPlan(index, index, 0, None))
    final = planner.answer(FinishPlans([(0, 0, None), (1, 0, None)]))
    assert list(pickle.loads(final.states)) == ["well"]
    assert final.unknown == {"late": "its sampler raised ValueError: no such index file"}


def test_an_index_that_cannot_be_pickled_fails_at_its_place() -> None:
    """Those before it are planned; one that cloudpickle can take is none of them."""

    class Key(NamedTuple):
        number: int

    keys = [Key(0), Key(1), threading.Lock(), Key(3)]
    keyed = DataLoader(range(4), sampler=keys, batch_size=None)
    planner = Planner([LoaderPlans("d", take_apart(keyed), RngStates.now(), 1)])
    planner.answer(OpenPlan(0, 0, 0, None))
    first, second = (planner.answer(Draw(0, 100)) for _ in range(2))
    assert ([pickle.loads(index) for index in first.indices], first.ended) == ([(0,), (1,)], False)
    assert (second.indices, second.ended) == ([], True)
    error, text = pickle.loads(second.failure)
    assert "cannot pickle '_thread.lock' object" in str(error)
    assert "cannot pickle '_thread.lock' object" in text


@pytest.mark.slow
def test_a_cell_ends_whose_sampler_raises_after_it() -> None:
    """The cell had what it asked for: its end is no failure, and says what is not known."""
    with DeliveryRun({"late": loader(raising)}) as run:
        run.ranks(left_open)
        final = run.finish()
    apply_final(final.states, run.registrations)
    [said] = notes(run)
    assert "'late'" in said
    assert "its sampler raised ValueError: no such index file" in said


@pytest.mark.slow
@pytest.mark.parametrize("how", ["killed", "stuck"])
def test_a_cell_ends_whose_planner_does_not(how: str, tmp_path: Path) -> None:
    """It is killed in the user's sampler, where it looks for an iteration's end; or it never comes back from there."""
    door = tmp_path / "door"
    os.mkfifo(door)

    def never_back() -> None:
        door.open("w").close()
        signal.pause()

    with DeliveryRun({"late": loader(never_back)}, patience=1e6 if how == "killed" else 0.1) as run:
        run.ranks(left_open)
        run.ask_for_final()
        door.open().close()  # it is there now
        if how == "killed":
            os.kill(run.children[0].pid, signal.SIGKILL)
        final = run.heard_final()
    assert final.states == b""
    [said] = notes(run)
    assert "'late'" in said
    assert {"killed": "has died", "stuck": "has not answered for 0.1 s"}[how] in said
