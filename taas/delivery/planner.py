"""The planner process: the user's samplers, iterated outside of everything that must not stop.

An agent calls ``main`` in a process forked from its forkserver, where torch is imported already. A sampler may be
slow, raise, or crash: the coordinator goes on, and the failure reaches the ranks at its place in the order.
"""

from __future__ import annotations

import os
import pickle
import sys
import time
import traceback
from typing import Any

import cloudpickle
import torch

from taas.delivery.config import PlannerConfig
from taas.delivery.encoding import pack_failure
from taas.delivery.messages import (
    Decoder,
    Draw,
    DropPlan,
    FinalStates,
    FinishPlans,
    LoaderFacts,
    OpenPlan,
    Planned,
    PlannerHello,
    Quit,
    ToPlanner,
    encode,
)
from taas.delivery.payload import load_payload
from taas.delivery.sampling import LoaderPlans, RngStates
from taas.delivery.transport import connect_control, new_context

__all__ = ["Planner", "main"]

_SLICE = 0.02
"""Seconds after which a slow sampler's indices are sent, even if more were asked for."""


class Planner:
    """Answers the coordinator; one plan is one iteration of one loader."""

    def __init__(self, loaders: list[LoaderPlans | LoaderFacts]) -> None:
        self._loaders = loaders
        self._plans: dict[int, LoaderPlans] = {}
        self._broken: dict[int, bytes] = {}

    def facts(self) -> list[LoaderFacts]:
        """Return what only the unpickled loaders tell."""
        return [plans if isinstance(plans, LoaderFacts) else plans.facts for plans in self._loaders]

    def answer(self, message: Any) -> Any:
        """Return the reply to a message, or None."""
        if isinstance(message, OpenPlan):
            return self._open(message)
        if isinstance(message, Draw):
            return self._draw(message)
        if isinstance(message, DropPlan):
            dropped = self._plans.pop(message.plan, None)
            if dropped is not None:
                dropped.drop(message.plan)
            self._broken.pop(message.plan, None)
            return None
        assert isinstance(message, FinishPlans)
        return self._finish(message)

    def _open(self, message: OpenPlan) -> Planned | None:
        plans = self._loaders[message.loader]
        assert isinstance(plans, LoaderPlans)
        self._plans[message.plan] = plans
        try:
            if message.repeat:
                plans.repeat(message.iteration, message.epoch)
            base_seed = plans.open(message.plan, message.iteration, message.epoch)
        except Exception as error:
            self._broken[message.plan] = pack_failure(error, traceback.format_exc())
            return Planned(message.plan, 0, [], True, self._broken[message.plan])
        return Planned(message.plan, base_seed, [], False) if plans.parts.streams else None

    def _draw(self, message: Draw) -> Planned:
        if message.plan in self._broken:
            return Planned(message.plan, 0, [], True, self._broken[message.plan])
        plans = self._plans[message.plan]
        until = time.monotonic() + _SLICE
        packed: list[bytes] = []
        try:
            indices, ended, base_seed = plans.draw(message.plan, message.count, until, time.monotonic)
            for index in indices:
                packed.append(_pack_index(index))
        except Exception as error:
            self._broken[message.plan] = pack_failure(error, traceback.format_exc())
            if not packed:
                return Planned(message.plan, 0, [], True, self._broken[message.plan])
            ended = False  # the next answer tells of it, after the indices before it
        return Planned(message.plan, base_seed, packed, ended)

    def _finish(self, message: FinishPlans) -> FinalStates:
        states, unknown = {}, {}
        for index, iteration, epoch in message.begun:
            plans = self._loaders[index]
            if isinstance(plans, LoaderPlans):
                try:
                    states[plans.name] = plans.final_states(iteration, epoch)
                except Exception as error:
                    unknown[plans.name] = f"its sampler raised {type(error).__name__}: {error}"
        return FinalStates(pickle.dumps(states), unknown)


def _pack_index(index: Any) -> bytes:
    """Pickle an index; one of a class of the notebook's by value."""
    try:
        return pickle.dumps(index, 5)
    except (pickle.PicklingError, TypeError, AttributeError):
        by_value: bytes = cloudpickle.dumps(index, 5)
        return by_value


def _load(config: PlannerConfig) -> Planner:
    payload = load_payload(config.payload)
    loaders: list[LoaderPlans | LoaderFacts] = []
    for name, parts in payload["loaders"]:
        try:
            loaders.append(LoaderPlans(name, parts, RngStates.of_notebook(payload["rngs"]), config.ranks))
        except Exception as error:
            reason = f"the sampler of '{name}' cannot be planned ahead: {type(error).__name__}: {error}"
            loaders.append(LoaderFacts(name, error=reason))
    return Planner(loaders)


def main(config: PlannerConfig) -> None:
    """Serve until told to quit."""
    torch.set_num_threads(1)
    if config.cwd:
        os.chdir(config.cwd)
    sys.path[:0] = [path for path in config.sys_path if path not in sys.path]
    context = new_context()
    control = connect_control(context, config.endpoint, config.keys, "p")
    decode = Decoder(ToPlanner)
    try:
        planner = _load(config)
        hello = PlannerHello(os.getpid(), planner.facts())
    except Exception:
        planner = Planner([])
        hello = PlannerHello(os.getpid(), [LoaderFacts("", error=traceback.format_exc())])
    control.send(encode(hello))
    while True:
        message = decode(control.recv())
        if isinstance(message, Quit):
            break
        reply = planner.answer(message)
        if reply is not None:
            control.send(encode(reply))
    control.close()
    context.term()
