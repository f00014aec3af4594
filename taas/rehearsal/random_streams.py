"""A random stream for each rehearsed GPU, apart from the CPU's, as GPUs have their own.

So ``torch.cuda.manual_seed`` does not reseed the CPU, and ``torch.rand(3, device="cuda")`` repeats after
``torch.cuda.manual_seed(0)``. What draws inside an operator (dropout) has a CPU tensor and draws from the CPU's
stream; the numbers are a CPU generator's, never the GPU's.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from taas.rehearsal.devices import as_cpu, existing, machine
from taas.rehearsal.patches import replace_all

_RealGenerator = torch.Generator
_GPU_STATE_BYTES = 16  # of a CUDA generator: seed and offset, int64 each


class DeviceGenerators(Sequence[torch.Generator]):
    """``torch.cuda.default_generators``.

    Made at first use, from the seed the CPU has then: names that travelled, and their seeds, come after install.
    """

    def __init__(self) -> None:
        self._made: dict[int, torch.Generator] = {}

    def __len__(self) -> int:
        return machine.device_count

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        if not 0 <= index < len(self):
            raise IndexError(f"cuda:{index} is not among the {len(self)} devices of this run")
        if index not in self._made:
            self._made[index] = _RealGenerator().manual_seed(torch.initial_seed())
        return self._made[index]


generators = DeviceGenerators()


class _MakesGenerators(type):
    def __call__(cls, device: Any = "cpu") -> torch.Generator:
        return _RealGenerator(as_cpu(device))

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, _RealGenerator)

    def __subclasscheck__(cls, subclass: type) -> bool:
        return issubclass(subclass, _RealGenerator)


class Generator(metaclass=_MakesGenerators):
    """``torch.Generator``, which cannot be patched in place: takes CUDA devices, makes and recognises real ones."""


def manual_seed(seed: int) -> None:
    """Seed the current device's stream, and no other."""
    generators[machine.current].manual_seed(int(seed))


def manual_seed_all(seed: int) -> None:
    """Seed the streams of all devices; ``torch.manual_seed`` calls this."""
    for generator in generators:
        generator.manual_seed(int(seed))


def seed() -> None:
    """Seed the current device's stream from the system."""
    generators[machine.current].seed()


def seed_all() -> None:
    """Seed the streams of all devices from the system."""
    for generator in generators:
        generator.seed()


def initial_seed() -> int:
    """The seed of the current device's stream."""
    seed: int = generators[machine.current].initial_seed()
    return seed


def get_rng_state(device: Any = "cuda") -> torch.Tensor:
    """The state of one device's stream: 5056 bytes, where a GPU's has 16."""
    state: torch.Tensor = generators[existing(device)].get_state()
    return state


def get_rng_state_all() -> list[torch.Tensor]:
    """The state of every device's stream."""
    return [generator.get_state() for generator in generators]


def set_rng_state(new_state: torch.Tensor, device: Any = "cuda") -> None:
    """Set one device's stream; a state that a GPU saved sets its seed."""
    generator = generators[existing(device)]
    if new_state.numel() == _GPU_STATE_BYTES:
        generator.manual_seed(int(new_state[:8].view(torch.int64).item()))
    else:
        generator.set_state(new_state)


def set_rng_state_all(new_states: Iterable[torch.Tensor]) -> None:
    """Set the streams of the devices, in order."""
    for index, state in enumerate(new_states):
        set_rng_state(state, index)


FACE = {
    "default_generators": generators,
    "get_rng_state": get_rng_state,
    "get_rng_state_all": get_rng_state_all,
    "initial_seed": initial_seed,
    "manual_seed": manual_seed,
    "manual_seed_all": manual_seed_all,
    "seed": seed,
    "seed_all": seed_all,
    "set_rng_state": set_rng_state,
    "set_rng_state_all": set_rng_state_all,
}


def install() -> None:
    """Replace ``torch.Generator`` and the random part of ``torch.cuda``."""
    Generator.__module__, Generator.__qualname__ = "torch", "Generator"
    torch.Generator = Generator  # type: ignore[assignment, misc]
    replace_all(torch.cuda, FACE)
    replace_all(torch.cuda.random, {name: new for name, new in FACE.items() if name != "default_generators"})
