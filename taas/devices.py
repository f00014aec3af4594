"""Which GPUs a process may use, found without CUDA: asking CUDA would cost a context, or poison a fork."""

from __future__ import annotations

import os
import re
from pathlib import Path


def present_gpus() -> int:
    """Count this machine's NVIDIA GPUs: the driver makes a device file for each."""
    return sum(re.fullmatch(r"nvidia\d+", path.name) is not None for path in Path("/dev").glob("nvidia*"))


def visible_gpus() -> tuple[str, ...]:
    """Return this machine's NVIDIA GPUs as CUDA_VISIBLE_DEVICES names them.

    ``CUDA_VISIBLE_DEVICES``, where it is set, chooses among those that are present
    (https://docs.nvidia.com/cuda/cuda-c-programming-guide/#env-vars). An entry that is no GPU ends its list.
    """
    present = present_gpus()
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is None or not present:
        return tuple(str(number) for number in range(present))
    visible: list[str] = []
    for entry in (part.strip() for part in chosen.split(",")):
        known = entry.startswith(("GPU-", "MIG-")) or (entry.isdigit() and int(entry) < present)
        if not known or entry in visible:
            break
        visible.append(entry)
    return tuple(visible)
