"""Selects a rank's own GPU in all of its threads.

In CUDA each thread has its own current device, and a new thread begins with GPU 0. CUDA performs
any call, even a query whether a stream is idle, on GPU 0, and gives the process a context there:
half a GB of GPU 0 for each rank above 0. Therefore the rank's own GPU is selected in the thread in
which the program first uses CUDA, and made current in threads that taas starts.

Nothing here uses CUDA before the program does, because until then the processes that a cell forks
may use it.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch


@dataclass
class _Own:
    """The GPU of this rank.

    Attributes:
        name: its name in CUDA_VISIBLE_DEVICES; empty if this rank has all GPUs of its VM.
        index: its number in this process, once it is selected.
    """

    name: str
    index: int | None = None


_own: _Own | None = None
"""None in processes without GPUs, such as rehearsed ranks."""


def install(name: str = "") -> None:
    """Let this process, a rank with GPUs, select ``name`` when its program first uses CUDA.

    Without a name it selects none.
    """
    global _own
    _own = _Own(name)
    if name:
        torch.cuda._lazy_call(_select)
        _select_before_pinning()


def _select() -> None:
    """Select the GPU in the thread that uses CUDA first.

    The program may have hidden this GPU, or others, before.
    """
    assert _own is not None
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    if _own.name in visible[: torch.cuda.device_count()]:
        _own.index = visible.index(_own.name)
        torch.cuda.set_device(_own.index)


def _select_before_pinning() -> None:
    """Select the GPU before a program pins memory.

    Pinning uses CUDA from C++, which does not ask Python for the device.

    DataLoaders (``pin_memory=True``) and registered loaders also pin through this method.
    """
    native: Any = torch.Tensor.pin_memory
    rank = os.getpid()

    @functools.wraps(native)
    def pin_memory(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        if os.getpid() == rank:
            torch.cuda.init()
        return native(tensor, *args, **kwargs)

    torch.Tensor.pin_memory = pin_memory  # type: ignore[method-assign, assignment]


def with_contexts() -> list[int]:
    """Return the devices on which this process has a context.

    Any query to another device would create a context there.
    """
    if _own is None or not torch.cuda.is_initialized():
        return []
    return [
        number
        for number in range(torch.cuda.device_count())
        if torch._C._cuda_hasPrimaryContext(number)
    ]


@contextlib.contextmanager
def current() -> Iterator[None]:
    """Make the rank's own GPU current in this thread of taas, if the program uses it."""
    used = with_contexts()
    if not used:
        yield
        return
    assert _own is not None
    with torch.cuda.device(_own.index if _own.index in used else used[0]):
        yield


def give_back_unused() -> int:
    """Return unused memory to the driver; return the bytes that tensors still hold."""
    used = with_contexts()
    if not used:
        return 0
    # after a failed kernel, only the end of the process frees the memory
    with contextlib.suppress(RuntimeError):
        torch.cuda.empty_cache()
    return sum(torch.cuda.memory_reserved(number) for number in used)
