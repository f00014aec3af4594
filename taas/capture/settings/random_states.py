"""The states of random generators: of ``random``, NumPy, torch, and the CUDA device.

CUDA's generator has a state only once CUDA is initialised. Until then, torch queues the calls that
seed the generator or set its state. A received state waits in this queue; as long as no later call
has seeded CUDA, it counts as the state, and is sent on.
"""

from __future__ import annotations

import importlib
import random
import sys
from collections.abc import Callable
from typing import Any

from taas.base.import_hooks import loaded
from taas.capture.describe.memory import view_of

_waiting: list[tuple[Callable[[], None], bytes]] = []
"""The last call with which this process has queued a state for CUDA's generator, and that state, if
any.
"""


def _having(name: str, attribute: str) -> Any:
    module = loaded(name)
    return module if module is not None and hasattr(module, attribute) else None


def _bytes_of(state: Any) -> bytes:
    return bytes(view_of(state.data_ptr(), state.numel()))


def states_of_generators(*, cuda: bool) -> dict[str, Any]:
    """Return the states of the loaded libraries; ``cuda`` is false if CUDA is only simulated."""
    found: dict[str, Any] = {"random": random.getstate()}
    if (numpy := _having("numpy.random", "get_state")) is not None:
        name, keys, position, has_gauss, cached = numpy.get_state()
        found["numpy"] = (name, keys.tobytes(), position, has_gauss, cached)
    if (torch := _having("torch", "get_rng_state")) is not None:
        found["torch"] = _bytes_of(torch.get_rng_state())
        state = _cuda_state(torch) if cuda else None  # the state includes the seed
        found |= {"torch seed": torch.initial_seed()} if state is None else {"cuda": state}
    return found


def _cuda_state(torch: Any) -> bytes | None:
    if torch.cuda.is_initialized():
        return _bytes_of(torch.cuda.get_rng_state().cpu())
    calls = torch.cuda._lazy_seed_tracker.get_calls()
    waits = _waiting and calls and calls[-1] and calls[-1][0] is _waiting[0][0]
    return _waiting[0][1] if waits else None


def set_generators(states: dict[str, Any], *, cuda: bool) -> None:
    """Set the states that are not None; with ``cuda``, including the current CUDA device's."""
    states = {name: state for name, state in states.items() if state is not None}
    if "random" in states:
        random.setstate(states["random"])
    # np.random is loaded at its first use
    if "numpy seed" in states and "numpy" in sys.modules:
        importlib.import_module("numpy.random").seed(states["numpy seed"])
    if "numpy" in states and (numpy := _having("numpy.random", "set_state")) is not None:
        name, keys, *rest = states["numpy"]
        numpy.set_state((name, sys.modules["numpy"].frombuffer(keys, "uint32"), *rest))
    if (torch := _having("torch", "set_rng_state")) is not None:
        if "torch" in states:
            torch.set_rng_state(_byte_tensor(torch, states["torch"]))
        if cuda and "cuda" in states:
            _set_cuda_state(torch, states["cuda"])
        elif cuda and "torch seed" in states:
            torch.cuda.manual_seed_all(states["torch seed"])


def _set_cuda_state(torch: Any, data: bytes) -> None:
    """Set the current device's generator, or have it set when CUDA is initialised."""
    state, seed = _byte_tensor(torch, data), torch.initial_seed()

    def set_own() -> None:
        torch.cuda.default_generators[torch.cuda.current_device()].set_state(state)

    # torch runs this while it holds its initialisation lock. A call into torch must not acquire the
    # lock again; a call by the initialising thread does not.
    def set_all() -> None:
        for generator in torch.cuda.default_generators:
            generator.manual_seed(seed)
        set_own()

    if torch.cuda.is_initialized():
        set_own()
        return
    # torch runs queued seeds after all other queued calls, so set_rng_state alone would be
    # overridden
    torch.cuda._lazy_call(set_all, seed_all=True)
    _waiting[:] = [(set_all, data)]


def _byte_tensor(torch: Any, data: bytes) -> Any:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
