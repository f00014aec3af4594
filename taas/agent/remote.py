"""What an agent does that shares no memory, no disk and no environment with the notebook's machine."""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec
import psutil
import zmq

from taas.engines import AgentConfig
from taas.messages.ranks import RankOrder

__all__ = ["SupervisorLink", "environment", "interface_of", "localized", "run_root"]


_CONNECT_SECONDS = 60.0


def run_root(config: AgentConfig, order: RankOrder) -> Path:
    """Return the folder of a run on this VM; each start of a run has its own."""
    return Path(config.scratch) / f"run-{order.run}-{order.restart_count}"


def localized(order: RankOrder, config: AgentConfig) -> RankOrder:
    """Return an order with the folders and the environment of this VM in place of the notebook's machine's."""
    root = run_root(config, order)
    for folder in ("output", "writes"):
        (root / folder).mkdir(mode=0o700, parents=True, exist_ok=True)
    return msgspec.structs.replace(
        order,
        environ=environment(order.environ, order.changed, config),
        log_dir=str(root / "output"),
        scratch=str(root / "writes"),
    )


def environment(notebook: dict[str, str], changed: Iterable[str], config: AgentConfig) -> dict[str, str]:
    """Return the environment that ranks have on this VM.

    A variable that the notebook set itself holds here, too; one that it inherited holds where this VM has none
    of that name: PATH, HOME and their like are the VM's.

    Args:
        notebook: the notebook's environment, or a part of it.
        changed: names of variables that the notebook set, changed or removed.
        config: the agent's.
    """
    own = {name: value for name, value in config.environ.items() if name not in changed}
    return {**notebook, **own}


def interface_of(host: str) -> str | None:
    """Return the name of the network interface that has an address; None if none has."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(address.address.partition("%")[0] == host for address in addresses):
            return str(name)
    return None


class SupervisorLink:
    """Tells when the connection to a supervisor elsewhere is gone, or was never made.

    A connection that broke is not taken up again: messages were lost with it.

    Args:
        socket: not connected yet.
        endpoint: what it will be connected to.
    """

    def __init__(self, socket: zmq.Socket[Any], endpoint: str) -> None:
        self._monitor = socket.get_monitor_socket(
            zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_FAILED_AUTH
        )
        self._socket, self._endpoint = socket, endpoint
        self._made = False
        self._until = time.monotonic() + _CONNECT_SECONDS

    @property
    def source(self) -> zmq.Socket[Any]:
        """What becomes readable when there is something to hear."""
        return self._monitor

    def wait(self) -> float | None:
        """Seconds until a connection that was not made is given up; None once it was made."""
        return None if self._made else max(0.0, self._until - time.monotonic())

    def gone(self) -> str:
        """Read what happened; returns why the supervisor is gone for good, or nothing."""
        from zmq.utils.monitor import recv_monitor_message

        while self._monitor.poll(0):
            event = recv_monitor_message(self._monitor)["event"]
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._made = True
            elif self._made or event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
                return "the connection to the notebook's machine broke"
        if not self._made and time.monotonic() > self._until:
            return (
                f"the notebook's machine could not be reached at {self._endpoint} within "
                f"{_CONNECT_SECONDS:.0f} s: a firewall between them?"
            )
        return ""

    def close(self) -> None:
        """Stop listening."""
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
