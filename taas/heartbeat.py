"""Signs of life between hosts: a connection whose peer shows none is closed."""

from __future__ import annotations

from typing import Any

import zmq

BEAT_SECONDS, SILENCE_SECONDS = 1.5, 6.0
"""How often a sign of life is asked for, and how long it may take to come."""
LAST_WORD_SECONDS = 2.0
"""How long a connection that is gone waits for the engine, which may know why."""


def set_heartbeat(socket: zmq.Socket[Any]) -> None:
    """Have zmq close connections of this socket, those made from now on, whose peer is silent.

    zmq's own thread asks and answers (https://rfc.zeromq.org/spec/37/), whatever the process is busy with.
    """
    socket.set(zmq.HEARTBEAT_IVL, int(BEAT_SECONDS * 1000))
    socket.set(zmq.HEARTBEAT_TIMEOUT, int(SILENCE_SECONDS * 1000))
