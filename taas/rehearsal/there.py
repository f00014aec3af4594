"""Which tensors are on a device by now: what is sent where it is stays the same tensor, all else becomes a copy.

A tensor tells the truth, and says that it is on the CPU. So its storage knows: views of what was sent are there as well.
What an operator has computed is not known to be there.
"""

from __future__ import annotations

from typing import Any, TypeVar

import torch

_Sent = TypeVar("_Sent")
_NO_STORAGE = NotImplementedError, RuntimeError
"""What sparse tensors raise, and those inside of ``vmap``."""


def put(sent: _Sent, device: int) -> _Sent:
    """Note that a tensor or an untyped storage is on a device; return it."""
    try:
        storage: Any = sent.untyped_storage() if isinstance(sent, torch.Tensor) else sent
    except _NO_STORAGE:
        return sent
    storage._taas_device = device
    return sent


def is_there(tensor: torch.Tensor, device: int) -> bool:
    """Whether a tensor sent to a device stays itself.

    So do those that require a gradient, as a leaf must stay the leaf that an optimizer has, and those whose memory is
    not one storage.
    """
    if tensor.requires_grad:
        return True
    try:
        return getattr(tensor.untyped_storage(), "_taas_device", None) == device
    except _NO_STORAGE:
        return True


def send(tensor: torch.Tensor, device: int) -> torch.Tensor:
    """Send a tensor to a device: itself if it is there, else a dense copy."""
    return put(tensor if is_there(tensor, device) else tensor.clone(), device)
