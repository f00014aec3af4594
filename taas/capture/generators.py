"""The states of the process-wide random number generators: of ``random``, NumPy, torch, and the rank's CUDA device.

CUDA's is a state only once CUDA is initialised. Until then torch keeps a queue of what to do to its generators;
a state that came from elsewhere waits in it, is the state as long as nobody has seeded CUDA since, and travels on.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

from taas.capture.memory import view_of

__all__ = ["set_generators", "states_of_generators"]


class _Waiting(NamedTuple):
    """A state of CUDA's generator that is set when CUDA is initialised."""

    call: Callable[[], None]
    state: bytes


_waiting: list[_Waiting] = []
"""The last one that this process has queued, if any."""


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
        found["torch seed"] = torch.initial_seed()
        state = _cuda_state(torch) if cuda else None
        if state is not None:
            found["cuda"] = state
    return found


def _cuda_state(torch: Any) -> bytes | None:
    if torch.cuda.is_initialized():
        return _bytes_of(torch.cuda.get_rng_state().cpu())
    calls = torch.cuda._lazy_seed_tracker.get_calls()
    if _waiting and calls and calls[-1] and calls[-1][0] is _waiting[0].call:
        return _waiting[0].state
    return None


def set_generators(states: dict[str, Any], *, device: int | None) -> None:
    """Set those that are given.

    Args:
        states: as :func:`states_of_generators` returns them.
        device: number of the CUDA device whose state it is; None for a process without.
    """
    if "random" in states:
        random.setstate(states["random"])
    if "numpy" in states and (numpy := _loaded("numpy.random", "set_state")) is not None:
        name, keys, *rest = states["numpy"]
        numpy.set_state((name, sys.modules["numpy"].frombuffer(keys, "uint32"), *rest))
    if (torch := _loaded("torch", "set_rng_state")) is None:
        return
    if "torch" in states:
        torch.set_rng_state(_byte_tensor(torch, states["torch"]))
    if device is not None and "cuda" in states:
        _set_cuda_state(torch, states["cuda"], device)
    elif device is not None and "torch seed" in states:
        torch.cuda.manual_seed_all(states["torch seed"])


def _set_cuda_state(torch: Any, data: bytes, device: int) -> None:
    """Set a device's generator; where CUDA isn't initialised, when the user does that."""
    state = _byte_tensor(torch, data)
    if torch.cuda.is_initialized():
        torch.cuda.set_rng_state(state, device)
        return
    seed = torch.initial_seed()

    def set_all() -> None:  # called inside torch's lock: nothing in here may ask for it again
        for generator in torch.cuda.default_generators:
            generator.manual_seed(seed)
        torch.cuda.default_generators[device].set_state(state)

    # torch runs queued seeds after all other queued calls, so set_rng_state by itself would be overridden
    torch.cuda._lazy_call(set_all, seed_all=True)
    _waiting[:] = [_Waiting(set_all, data)]


def _byte_tensor(torch: Any, data: bytes) -> Any:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
