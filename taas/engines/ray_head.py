"""Whether the head of a Ray cluster is there: before a driver connects, and as long as it is connected.

Ray itself is not needed here.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable

__all__ = ["SILENCE_SECONDS", "reach", "watch"]

SILENCE_SECONDS = 9.0
"""How long a head may be silent before it is given up."""
_ASK_EVERY_SECONDS, _ANSWER_SECONDS = 1.5, 3.0
_ATTEMPT_SECONDS, _PAUSE_SECONDS = 3.0, 0.5


def reach(address: str, patience: float) -> None:
    """Wait until something listens where the head is; Ray's own attempt takes a minute, or ends the process.

    Args:
        address: ``HOST:PORT``; anything else is for Ray to find.
        patience: seconds; it is tried once in any case.

    Raises:
        OSError: nothing listens there.
    """
    host, _, port = address.rpartition(":")
    if not host:
        return
    deadline = time.monotonic() + patience
    while True:
        try:
            socket.create_connection((host.strip("[]"), int(port)), _ATTEMPT_SECONDS).close()
            return
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(_PAUSE_SECONDS)


def watch(ask: Callable[[float], bool | None], silence: float, over: threading.Event) -> str:
    """Ask the head for signs of life until it shows none; returns in words what became of it.

    Args:
        ask: asks once, and returns within so many seconds: True, this driver's node belongs to the cluster;
            False, it does not; None, there was no answer.
        silence: seconds without an answer after which the head is given up.
        over: nobody wants to know any more; an empty text is returned then.
    """
    heard = time.monotonic()
    while not over.wait(_ASK_EVERY_SECONDS):
        left = heard + silence - time.monotonic()
        belongs = ask(min(_ANSWER_SECONDS, max(left, 0.1)))
        if belongs is False:
            return "was started anew, or counts this machine as lost"
        if belongs:
            heard = time.monotonic()
        elif time.monotonic() > heard + silence:
            return f"has not answered for {silence:g} s"
    return ""
