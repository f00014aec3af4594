"""What an agent does that shares no memory, no disk and no environment with the notebook's machine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import psutil
import zmq

from taas.engines import AgentConfig
from taas.messages import RankOrder

__all__ = ["SupervisorLink", "interface_of", "localized", "run_root"]


def run_root(config: AgentConfig, order: RankOrder) -> Path:
    """Return the folder of a run on this VM; each start of a run has its own."""
    return Path(config.scratch) / f"run-{order.run}-{order.restart_count}"


def localized(order: RankOrder, config: AgentConfig) -> RankOrder:
    """Return an order with the folders and the environment of this VM in place of the notebook's machine's.

    A variable that the notebook set itself holds here, too; one that it inherited holds where this VM has none
    of that name: PATH, HOME and their like are the VM's.
    """
    root = run_root(config, order)
    for folder in ("output", "writes"):
        (root / folder).mkdir(mode=0o700, parents=True, exist_ok=True)
    changed = {name: value for name, value in order.environ.items() if name in order.changed}
    inherited = {name: value for name, value in order.environ.items() if name not in order.changed}
    removed = set(order.changed) - order.environ.keys()
    environ = {**inherited, **config.environ, **changed}
    return msgspec.structs.replace(
        order,
        environ={name: value for name, value in environ.items() if name not in removed},
        log_dir=str(root / "output"),
        scratch=str(root / "writes"),
    )


def interface_of(host: str) -> str | None:
    """Return the name of the network interface that has an address; None if none has."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(address.address.partition("%")[0] == host for address in addresses):
            return str(name)
    return None


class SupervisorLink:
    """Tells when the connection to a supervisor elsewhere is gone, or was never made.

    A connection that broke is not taken up again: messages were lost with it.
    """

    def __init__(self, socket: zmq.Socket[Any]) -> None:
        self._monitor = socket.get_monitor_socket(
            zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_FAILED_AUTH
        )
        self._socket = socket
        self.made = False

    @property
    def source(self) -> zmq.Socket[Any]:
        """What becomes readable when there is something to hear."""
        return self._monitor

    def broken(self) -> bool:
        """Read what happened; returns whether the connection is gone for good."""
        from zmq.utils.monitor import recv_monitor_message

        while self._monitor.poll(0):
            event = recv_monitor_message(self._monitor)["event"]
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self.made = True
            elif self.made or event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
                return True
        return False

    def close(self) -> None:
        """Stop listening."""
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
