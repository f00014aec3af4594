"""Memory that the notebook's kernel uses on the GPUs of a run, in addition to the ranks'."""

from __future__ import annotations

from collections.abc import Sequence

from taas.base.import_hooks import loaded
from taas.base.wording import size_in_words
from taas.protocol.clients import Gpu

_MUCH = 1 << 30


def kernel_memory_lines(visible: Sequence[Gpu], of_run: Sequence[str]) -> list[str]:
    """Return a line for each GPU of a run on which this kernel's torch has reserved over 1 GiB.

    This queries torch only, never CUDA.

    Args:
        visible: the kernel's GPUs, in CUDA's order.
        of_run: the run's GPUs, as ``Gpu.device``.
    """
    torch = loaded("torch")
    if torch is None or not hasattr(torch, "cuda") or not torch.cuda.is_initialized():
        return []
    lines = []
    for number, gpu in enumerate(visible[: torch.cuda.device_count()]):
        held = torch.cuda.memory_reserved(number)
        if gpu.device in of_run and held > _MUCH:
            lines.append(
                f"this notebook's kernel holds {size_in_words(held)} of cuda:{number}, a GPU of"
                " this run: what the cell takes from there is on it twice. If that is too much,"
                " type `net.cpu()` or `del net` for what is there, then"
                " `torch.cuda.empty_cache()`, in a cell of its own before this one"
            )
    return lines
