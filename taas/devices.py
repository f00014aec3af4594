"""Which GPUs a process may use, found without CUDA: asking CUDA would cost a context, or poison a fork."""

from __future__ import annotations

import os
import re
from pathlib import Path


def visible_gpus() -> tuple[str, ...]:
    """Return this machine's NVIDIA GPUs as CUDA_VISIBLE_DEVICES names them.

    The driver makes a device file for each GPU; ``CUDA_VISIBLE_DEVICES``, where it is set, chooses among them
    (https://docs.nvidia.com/cuda/cuda-c-programming-guide/#env-vars). An entry that is no GPU ends its list.
    """
    present = sorted(
        int(match[1])
        for path in Path("/dev").glob("nvidia*")
        if (match := re.fullmatch(r"nvidia(\d+)", path.name))
    )
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is None or not present:
        return tuple(str(number) for number in range(len(present)))
    visible: list[str] = []
    for entry in (part.strip() for part in chosen.split(",")):
        known = entry.startswith(("GPU-", "MIG-")) or (entry.isdigit() and int(entry) < len(present))
        if not known or entry in visible:
            break
        visible.append(entry)
    return tuple(visible)
