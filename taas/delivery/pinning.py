"""Elements are copied into page-locked memory by a thread, as torch's DataLoader has it, while the rank computes.

Slabs themselves are not page-locked: a copy from them to a GPU is over when the call returns, so that a slot may be given
back at any time. What is pinned is torch's own memory, which torch keeps until the copies from it are over.
"""

from __future__ import annotations

import threading
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any

import torch
from torch.utils.data import _utils


class Pinning:
    """The thread, for the device that is current where it is made."""

    def __init__(self) -> None:
        self._todo: SimpleQueue[tuple[Future[Any], Any] | None] = SimpleQueue()
        # No daemon's end is waited for at the end of a cell.
        threading.Thread(
            target=self._run, args=(torch.cuda.current_device(),), name="taas-pin", daemon=True
        ).start()

    def pin(self, done: Future[Any], data: Any) -> None:
        """Let a future have the pinned copy of an element, or what pinning it raises."""
        self._todo.put((done, data))

    def close(self) -> None:
        """Let the thread end when it has done what was asked."""
        self._todo.put(None)

    def _run(self, device: int) -> None:
        torch.set_num_threads(1)  # this thread's: a copy is not to take all processors
        torch.cuda.set_device(device)
        while (asked := self._todo.get()) is not None:
            done, data = asked
            try:
                done.set_result(_utils.pin_memory.pin_memory(data))
            except BaseException as error:
                done.set_exception(error)
            del asked, done, data  # nothing is held until the next one
