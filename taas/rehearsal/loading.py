"""Checkpoints saved on GPUs, or loaded onto them, land on the CPU.

``torch.load`` sends every form of ``map_location`` through the deserialisers of
``torch.serialization.register_package``; ours comes first. A callable that calls ``storage.cuda()`` finds that in
``tensors``.
"""

from __future__ import annotations

from typing import Any

import torch

from taas.rehearsal.devices import machine

_BEFORE_TORCHS_OWN = 5  # torch's for the CPU has 10, for CUDA 20


def _deserialize(storage: Any, location: str) -> Any:
    if not location.startswith("cuda"):
        return None
    index = torch.device(location).index
    if index is not None and index >= machine.device_count:
        raise RuntimeError(
            f"Attempting to deserialize object on CUDA device {index} but torch.cuda.device_count() is "
            f"{machine.device_count}. Please use torch.load with map_location to map your storages to an existing device."
        )
    return storage


def install() -> None:
    """Register the deserialiser for CUDA locations."""
    torch.serialization.register_package(_BEFORE_TORCHS_OWN, lambda storage: None, _deserialize)
