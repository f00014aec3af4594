"""Random numbers inside a replica, kept apart from those of the program around it."""

from __future__ import annotations

import contextlib
import random
import sys
import zlib
from collections.abc import Iterator
from typing import Any

import torch


def states(cuda: bool) -> dict[str, Any]:
    """The states of the generators that programs draw from, by name."""
    found: dict[str, Any] = {"torch": torch.get_rng_state(), "python": random.getstate()}
    if "numpy" in sys.modules:
        found["numpy"] = sys.modules["numpy"].random.get_state()
    if cuda:
        found["cuda"] = torch.cuda.get_rng_state()
    return found


def restore(found: dict[str, Any]) -> None:
    """Put the generators back into these states."""
    torch.set_rng_state(found["torch"])
    random.setstate(found["python"])
    if "numpy" in found:
        import numpy as np

        np.random.set_state(found["numpy"])
    if "cuda" in found:
        torch.cuda.set_rng_state(found["cuda"])


class ReplicaRandom:
    """Gives each replica's forward pass its own random stream.

    Dropout draws as many numbers as the slice has elements, and slices differ; drawn from the program's own
    stream (the one that shuffles, on CPU) they would lead the ranks to different batches. The stream inside
    follows from the program's state, the rank, and the count of passes since that state changed: the same
    seed gives the same run again.
    """

    def __init__(self, rank: int) -> None:
        self._rank, self._last, self._passes = rank, -1, 0

    @contextlib.contextmanager
    def stream(self, cuda: bool) -> Iterator[None]:
        """Draw from this rank's own stream inside, and leave the program's as it was."""
        outside = states(cuda)
        origin = zlib.crc32(outside["torch"].numpy())
        self._passes = self._passes + 1 if origin == self._last else 0
        self._last = origin
        seed = zlib.crc32(f"{origin}/{self._passes}/{self._rank}".encode())
        torch.default_generator.manual_seed(seed)
        random.seed(seed)
        if "numpy" in outside:
            sys.modules["numpy"].random.seed(seed)
        if cuda:
            torch.cuda.manual_seed(seed)
        try:
            yield
        finally:
            restore(outside)
