"""Waits on GPUs: which groups have them, and how they are made to fail, in every torch from 2.6 on.

* ``ProcessGroupNCCL`` is ``nccl`` up to torch 2.14, and ``nccl-legacy`` since: its ``abort()`` returns. Its watchdog may
  still end the process, when it sees the abort of another rank before its own (``TORCH_NCCL_ASYNC_ERROR_HANDLING``).
* ``ProcessGroupNCCL2`` is ``nccl`` from torch 2.15 on. Its ``abort()`` and ``shutdown()`` while something waits, and its
  watchdog at a time-out, end the process with SIGABRT before any ``finally`` (pytorch's pull requests 191948 and 192105).
  So ranks get the old one by that name, unless the notebook's environment has ``TORCH_DIST_USE_NCCL2``; and a group of
  this kind is never aborted: what waits in it waits until the rank is ended.

From torch's sources, and its library's texts; tests/test_adopt_gpu.py waits for GPUs.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist

ABORT_SECONDS = 10.0


def prefer_abortable() -> None:
    """Let ``nccl`` be the backend that can be aborted; torch asks for the variable when a group first uses that name."""
    os.environ.setdefault("TORCH_DIST_USE_NCCL2", "0")


def backends() -> list[Any]:
    """Return the NCCL backends of this process: of all torch's groups, whatever they were asked for."""
    found: list[Any] = []
    for group in [*dist.distributed_c10d._world.pg_names]:
        with contextlib.suppress(
            RuntimeError, AttributeError
        ):  # it has none for GPUs; this rank is not in it
            found.append(group._get_backend(torch.device("cuda")))
    bare = [getattr(backend, "wrapped_pg", backend) for backend in found]
    return [*{id(backend): backend for backend in bare if "NCCL" in type(backend).__name__}.values()]


def abort(found: Iterable[Any]) -> None:
    """Let all that waits in these backends fail, if it can.

    Each has a thread of its own: an abort may wait for that of another rank, which has begun with another group. After
    :data:`ABORT_SECONDS` they are left to themselves.
    """
    threads = [
        threading.Thread(target=backend.abort, name="taas-aborts", daemon=True)
        for backend in found
        if type(backend).__name__ == "ProcessGroupNCCL"
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(ABORT_SECONDS)


def is_busy() -> bool:
    """Whether the GPU has not done what it was asked: a collective may wait, and the main thread for it, at full speed."""
    try:
        return torch.cuda.is_initialized() and not torch.cuda.default_stream().query()
    except RuntimeError:  # it has failed
        return True


@contextlib.contextmanager
def beside_its_work() -> Iterator[None]:
    """Let copies from the GPU in this thread not wait for what it was asked before, which may never be done."""
    with torch.cuda.stream(torch.cuda.Stream()) if torch.cuda.is_initialized() else contextlib.nullcontext():
        yield
