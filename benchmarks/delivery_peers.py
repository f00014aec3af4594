"""Other loaders that ``benchmarks/delivery.py`` compares with, where they are installed.

SPDL is read through its process-backed loader for PyTorch datasets, which takes the same dataset,
samplers and collate function. Ray Data makes batches of the same size from a range; only the time
to its first batch is taken.
"""

from __future__ import annotations

import importlib.metadata
import logging
import os
import pickle
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import psutil
import torch
from torch.utils.data import default_collate

HOW = "pip install -r benchmarks/requirements-delivery.txt"


def version(package: str) -> str:
    """Return the version of an installed package, or ""."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def spdl_loader(arguments: dict[str, Any], workers: int) -> tuple[Any, Callable[[], list[int]]]:
    """Return SPDL's loader for a DataLoader's arguments, and the processes that work for it."""
    from spdl.dataloader import get_pytorch_dataloader

    options = {"batch_size": None, "collate_fn": default_collate, **arguments}
    loader = get_pytorch_dataloader(**options, num_workers=workers, multiprocessing_context="fork")
    return loader, lambda: [
        os.getpid(),
        *(child.pid for child in psutil.Process().children(recursive=True)),
    ]


def in_child(measure: Callable[[], Any]) -> Any:
    """Return what ``measure`` returns in a forked child: what it imports and starts stays there.

    Raises:
        RuntimeError: it failed; its traceback is on stderr.
    """
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reader)
        # an OpenMP pool of the parent's is not there after a fork; asked, it hangs
        torch.set_num_threads(1)
        with os.fdopen(writer, "wb") as file:
            file.write(pickle.dumps(measure()))
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as file:
        data = file.read()
    os.waitpid(pid, 0)
    if not data:
        raise RuntimeError("a peer could not be measured")
    return pickle.loads(data)


def ray_first_batches(rounds: int, floats: int, size: int, workers: int) -> list[float]:
    """Return the seconds from making a Ray Dataset to its first batch, of each round.

    Ray itself is up before.
    """
    import ray

    ray.init(
        num_cpus=workers, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR
    )
    ray.data.DataContext.get_current().enable_progress_bars = False

    def samples(batch: dict[str, Any]) -> dict[str, Any]:
        return {
            "x": np.stack([np.full(floats, number, np.float32) for number in batch["id"].tolist()])
        }

    seconds = []
    for _ in range(rounds):
        start = time.perf_counter()
        made = ray.data.range(50 * size, override_num_blocks=50).map_batches(
            samples, batch_size=size
        )
        next(iter(made.iter_torch_batches(batch_size=size)))
        seconds.append(time.perf_counter() - start)
    ray.shutdown()
    return seconds
