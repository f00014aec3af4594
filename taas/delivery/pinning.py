"""Elements in page-locked memory, from which a GPU copies beside the program (``DataLoader(pin_memory=True)``).

While the program works with an element, a thread copies the next one, if that is here. The pinned
buffers are torch's, which keeps them for later elements, and knows which of them a GPU still reads.
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
    """Return a copy of all tensors of an element in page-locked memory, as a DataLoader makes it."""
    return _utils.pin_memory.pin_memory(value)


@dataclass
class _Pinned:
    """What the thread makes of an element; ``error`` is what that raised, for who asks for the element."""

    ahead: Ahead
    done: threading.Event = field(default_factory=threading.Event)
    value: Any = None
    error: BaseException | None = None


class PinAhead:
    """Pins one element ahead for one loop, until :meth:`end`."""

    def __init__(self) -> None:
        self._next: _Pinned | None = None
        self._asked: queue.SimpleQueue[_Pinned | None] = queue.SimpleQueue()
        threading.Thread(target=self._pin, name="taas-pins", daemon=True).start()

    def begin(self, ahead: Ahead) -> None:
        """Let the thread pin an element that is here, and was not taken yet."""
        self._next = _Pinned(ahead)
        self._asked.put(self._next)

    def take(self, element: Element) -> Any:
        """Return what was pinned of this element, None where another one was, or none; raises what pinning it has raised."""
        pinned, self._next = self._next, None
        if pinned is None or pinned.ahead.element is not element:
            return None
        pinned.done.wait()
        pinned.ahead.taken()
        if pinned.error is not None:
            raise pinned.error
        return pinned.value

    def end(self) -> None:
        """Let the thread end when it has done what it was asked."""
        self._asked.put(None)

    def _pin(self) -> None:
        while (pinned := self._asked.get()) is not None:
            try:
                with own_gpu.current():
                    pinned.value = pin(pinned.ahead.build())
            except BaseException as error:
                pinned.error = error
            pinned.done.set()
            del pinned  # it would keep the element while this thread waits
