"""Copies batches into page-locked memory (``DataLoader(pin_memory=True)``).

A GPU copies from such memory while the program runs on. While the program works with a batch, a
thread copies the next one, if it has arrived. torch owns the pinned buffers; it reuses them for
later batches, and tracks which ones a GPU still reads.
"""

from __future__ import annotations

import queue
import threading
from dataclasses import dataclass, field
from typing import Any

from torch.utils.data import _utils

from taas.adopt import own_gpu
from taas.delivery.connection import Ahead, Element


def pin(value: Any) -> Any:
    """Return a copy of a batch with all tensors in page-locked memory, as a DataLoader does."""
    return _utils.pin_memory.pin_memory(value)


@dataclass
class _Pinned:
    """The thread's result for a batch.

    ``error`` is the exception that pinning raised; the loop raises it when it requests the
    batch.
    """

    ahead: Ahead
    done: threading.Event = field(default_factory=threading.Event)
    value: Any = None
    error: BaseException | None = None


class PinAhead:
    """Pins one batch ahead for one loop, until :meth:`end`."""

    def __init__(self) -> None:
        self._next: _Pinned | None = None
        self._asked: queue.SimpleQueue[_Pinned | None] = queue.SimpleQueue()
        threading.Thread(target=self._pin, name="taas-pins", daemon=True).start()

    def begin(self, ahead: Ahead) -> None:
        """Let the thread pin a batch that has arrived and that the loop has not taken."""
        self._next = _Pinned(ahead)
        self._asked.put(self._next)

    def take(self, element: Element) -> Any:
        """Return the pinned copy of this batch, or None if another one was pinned.

        Raises the exception that pinning raised.
        """
        pinned, self._next = self._next, None
        if pinned is None or pinned.ahead.element is not element:
            return None
        pinned.ahead.taken()  # first, so that an interrupted wait releases its slot as well
        pinned.done.wait()
        if pinned.error is not None:
            raise pinned.error
        return pinned.value

    def end(self) -> None:
        """Let the thread end after its current work."""
        self._asked.put(None)

    def _pin(self) -> None:
        while (pinned := self._asked.get()) is not None:
            try:
                with own_gpu.current():
                    pinned.value = pin(pinned.ahead.build())
            except BaseException as error:
                pinned.error = error
            pinned.done.set()
            del pinned  # otherwise the batch would stay alive while this thread waits
