"""What a rehearsed cell made for a device remembers it, where the notebook has none: a loader of accelerate's, a Trainer.

In a plain cell such an object sends tensors there, which raises. So the cell that made it says what to do.
"""

from __future__ import annotations

import gc
from collections.abc import Mapping
from types import FunctionType, ModuleType
from typing import Any

import torch

from taas.rehearsal.streams import Event, Stream
from taas.wording import shown

_CLOSED = (torch.Tensor, type, ModuleType, FunctionType, Stream, Event)
"""What is not looked into, as it belongs to all, or sends nothing anywhere."""
_MOST = 10_000
"""So many parts of an object are looked at, the nearest first."""


def remembered(names: Mapping[str, Any]) -> tuple[str, ...]:
    """Say which objects remember a CUDA device, and where they can be used; nothing if there are none."""
    found = [
        name for name, value in names.items() if not isinstance(value, torch.device) and _remembers(value)
    ]
    if not found:
        return ()
    said = (
        f"made for cuda devices, which this machine lacks: {shown(', '.join(found), 200)}. They work in cells with a header; in a "
        "plain cell, what they send to a device raises (no NVIDIA driver): make them anew there, and bring models and "
        "tensors with .cpu()."
    )
    if any(type(names[name]).__module__.startswith("accelerate.") for name in found):
        said += (
            " accelerate's state has ended with the ranks: a later cell begins with `accelerator = Accelerator()`; "
            "a prepared loader has a rank's share of the data."
        )
    return (said,)


def _remembers(value: Any) -> bool:
    parts, seen = [value], {id(value)}
    for part in parts:  # it grows meanwhile
        if isinstance(part, torch.device):
            if part.type == "cuda":
                return True
        elif len(parts) < _MOST and not isinstance(part, _CLOSED) and not _is_long(part):
            new = [inner for inner in gc.get_referents(part) if id(inner) not in seen]
            parts += new[: _MOST - len(parts)]
            seen.update(map(id, new))
    return False


def _is_long(part: Any) -> bool:
    return isinstance(part, (list, tuple, dict, set)) and len(part) > _MOST
