"""The planner process: it answers the coordinator with the indices that the user's samplers draw.

An agent calls ``main`` in a process forked from its forkserver, where torch is imported already. A sampler may be
slow, raise, or crash: the coordinator goes on, and the failure reaches the ranks at its place in the order.
"""

from __future__ import annotations

import os
import pickle
import time
import traceback
from typing import Any

import cloudpickle

from taas.delivery.config import DataOrder
from taas.delivery.encoding import pack_failure
from taas.delivery.making import load_loaders, rngs_now
from taas.delivery.messages import (
    PLANNER,
    Cancel,
    Draw,
    Final,
    FinishPlans,
    Hello,
    LoaderFacts,
    Planned,
    ToPlanner,
)
from taas.delivery.sampling import Iteration, LoaderPlans
from taas.delivery.transport import connected
from taas.wire.framing import Leave, pack

_SLICE = 0.02
"""Seconds after which a slow sampler's indices are sent, even if more were asked for."""


class Planner:
    """Answers the coordinator; one plan is one iteration of one loader."""

    def __init__(self, loaders: list[LoaderPlans | LoaderFacts]) -> None:
        self._loaders = loaders
        self._open: dict[int, tuple[LoaderPlans, Iteration]] = {}

    def facts(self) -> tuple[LoaderFacts, ...]:
        """Return what only the unpickled loaders tell."""
        return tuple(plans if isinstance(plans, LoaderFacts) else plans.facts for plans in self._loaders)

    def answer(self, message: Any) -> Any:
        """Return the reply to a message, or None."""
        if isinstance(message, Draw):
            return self._draw(message)
        if isinstance(message, FinishPlans):
            return self._finish(message)
        assert isinstance(message, Cancel)
        if message.plan in self._open:
            plans, opened = self._open.pop(message.plan)
            plans.drop(opened)
        return None

    def _draw(self, message: Draw) -> Planned:
        if message.plan not in self._open:
            plans = self._loaders[message.loader]
            assert isinstance(plans, LoaderPlans)
            opened = plans.open(message.iteration, message.epoch, repeats=message.repeats)
            self._open[message.plan] = plans, opened
        plans, opened = self._open[message.plan]
        packed = plans.draw(opened, message.count, time.monotonic() + _SLICE, _pack_index)
        if opened.error is None:
            return Planned(message.plan, opened.base_seed, packed, opened.ended)
        if packed:  # the next answer tells of the error, after the indices before it
            return Planned(message.plan, opened.base_seed, packed, False)
        text = "".join(traceback.format_exception(opened.error))
        return Planned(message.plan, 0, [], True, pack_failure(opened.error, text))

    def _finish(self, message: FinishPlans) -> Final:
        states, unknown = {}, {}
        for index, iteration, epoch in message.begun:
            plans = self._loaders[index]
            if isinstance(plans, LoaderPlans):
                drawn = (it for of, it in self._open.values() if of is plans and it.number == iteration)
                try:
                    states[plans.name] = plans.final_states(iteration, epoch, next(drawn, None))
                except BaseException as error:
                    unknown[plans.name] = f"its sampler raised {type(error).__name__}: {error}"
        return Final(pack(states), unknown)


def _pack_index(index: Any) -> bytes:
    """Pickle an index; one of a class of the notebook's by value."""
    try:
        return pickle.dumps(index, 5)
    except (pickle.PicklingError, TypeError, AttributeError):
        by_value: bytes = cloudpickle.dumps(index, 5)
        return by_value


def _load(config: DataOrder) -> Planner:
    parts_of = load_loaders(config.payload)
    rngs = rngs_now()  # the notebook's, and this process's where it has none
    loaders: list[LoaderPlans | LoaderFacts] = []
    for name, parts in parts_of:
        try:
            loaders.append(LoaderPlans(name, parts, rngs, config.common.ranks))
        except BaseException as error:
            reason = f"the sampler of '{name}' cannot be planned ahead: {type(error).__name__}: {error}"
            loaders.append(LoaderFacts(name, error=reason))
    return Planner(loaders)


def main(config: DataOrder) -> None:
    """Serve until told to quit."""
    with connected(config.common, PLANNER, ToPlanner) as control:
        try:
            planner = _load(config)
            hello = Hello(os.getpid(), loaders=planner.facts())
        except BaseException:
            planner = Planner([])
            hello = Hello(os.getpid(), traceback.format_exc())
        control.send(hello)
        while not isinstance(message := control.receive(), Leave):
            reply = planner.answer(message)
            if reply is not None:
                control.send(reply)
