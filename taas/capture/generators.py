"""The states of the process-wide random number generators: of ``random``, NumPy, torch, and the rank's CUDA device.

CUDA's is a state only once CUDA is initialised. Until then torch keeps a queue of what to do to its generators;
a state that came from elsewhere waits in it, is the state as long as nobody has seeded CUDA since, and travels on.
"""

from __future__ import annotations

import importlib
import os
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from taas.capture.memory import view_of

_waiting: list[tuple[Callable[[], None], bytes]] = []
"""The last call that this process has queued to set a state of CUDA's generator, and the state, if any."""


def _loaded(name: str, attribute: str) -> Any:
    module = sys.modules.get(name)
    return module if module is not None and hasattr(module, attribute) else None


def _bytes_of(state: Any) -> bytes:
    return bytes(view_of(state.data_ptr(), state.numel()))


def states_of_generators(*, cuda: bool) -> dict[str, Any]:
    """Return the states in this process, of what is loaded.

    Args:
        cuda: whether this process may have CUDA; False for rehearsed ranks, which only pretend.
    """
    found: dict[str, Any] = {"random": random.getstate()}
    if (numpy := _loaded("numpy.random", "get_state")) is not None:
        name, keys, position, has_gauss, cached = numpy.get_state()
        found["numpy"] = (name, keys.tobytes(), position, has_gauss, cached)
    if (torch := _loaded("torch", "get_rng_state")) is not None:
        found["torch"] = _bytes_of(torch.get_rng_state())
        state = _cuda_state(torch) if cuda else None  # a seed is part of it
        found |= {"torch seed": torch.initial_seed()} if state is None else {"cuda": state}
    return found


def _cuda_state(torch: Any) -> bytes | None:
    if torch.cuda.is_initialized():
        return _bytes_of(torch.cuda.get_rng_state().cpu())
    calls = torch.cuda._lazy_seed_tracker.get_calls()
    if _waiting and calls and calls[-1] and calls[-1][0] is _waiting[0][0]:
        return _waiting[0][1]
    return None


def fresh_seed(states: dict[str, Any]) -> dict[str, int]:
    """Return a seed for ranks of a notebook that has no NumPy: forks of one process must not all draw the same."""
    return {} if "numpy" in states else {"numpy seed": int.from_bytes(os.urandom(4), "little")}


def set_generators(states: dict[str, Any], *, cuda: bool) -> None:
    """Set those that are given.

    Args:
        states: as :func:`states_of_generators` returns them; None for one that is gone.
        cuda: whether this process may have CUDA; its current device's is set.
    """
    states = {name: state for name, state in states.items() if state is not None}
    if "random" in states:
        random.setstate(states["random"])
    if "numpy seed" in states and "numpy" in sys.modules:  # its random part is loaded at the first use
        importlib.import_module("numpy.random").seed(states["numpy seed"])
    if "numpy" in states and (numpy := _loaded("numpy.random", "set_state")) is not None:
        name, keys, *rest = states["numpy"]
        numpy.set_state((name, sys.modules["numpy"].frombuffer(keys, "uint32"), *rest))
    if (torch := _loaded("torch", "set_rng_state")) is not None:
        if "torch" in states:
            torch.set_rng_state(_byte_tensor(torch, states["torch"]))
        if cuda and "cuda" in states:
            _set_cuda_state(torch, states["cuda"])
        elif cuda and "torch seed" in states:
            torch.cuda.manual_seed_all(states["torch seed"])


_undrawing: list[bool] = []


@contextmanager
def undrawn() -> Iterator[None]:
    """Let nothing be drawn from the generators in host memory: what is, is put back."""
    if _undrawing:
        yield
        return
    before = states_of_generators(cuda=False)
    _undrawing.append(True)
    try:
        yield
    finally:
        _undrawing.clear()
        set_generators(before, cuda=False)


def _set_cuda_state(torch: Any, data: bytes) -> None:
    """Set the current device's generator; where CUDA isn't initialised, when the user does that."""
    state, seed = _byte_tensor(torch, data), torch.initial_seed()

    def set_own() -> None:
        torch.cuda.default_generators[torch.cuda.current_device()].set_state(state)

    def set_all() -> (
        None
    ):  # called inside torch's lock: nothing in here may ask for it again; who initialises does not
        for generator in torch.cuda.default_generators:
            generator.manual_seed(seed)
        set_own()

    if torch.cuda.is_initialized():
        set_own()
        return
    # torch runs queued seeds after all other queued calls, so set_rng_state by itself would be overridden
    torch.cuda._lazy_call(set_all, seed_all=True)
    _waiting[:] = [(set_all, data)]


def _byte_tensor(torch: Any, data: bytes) -> Any:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
