"""Where VMs come from: the contract that the supervisor has with an engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec


class AgentConfig(msgspec.Struct, frozen=True):
    """What an engine writes to an agent's standard input, as one line of JSON.

    Attributes:
        endpoint: the supervisor's zmq address.
        server_key, public_key, secret_key: CURVE keys in Z85.
        scratch: a folder that the agent may fill; it goes with the agent.
        data: a data VM: data workers run there, and no ranks.
    """

    endpoint: str
    server_key: str
    public_key: str
    secret_key: str
    scratch: str
    data: bool = False


class Machine(Protocol):
    """One VM, from the moment it is asked for until it is given back.

    Attributes:
        host: the address under which other VMs reach it.
        pid: its agent's process id, where it is a process of this machine; else 0.
    """

    host: str
    pid: int

    def fileno(self) -> int:
        """Return a descriptor that becomes readable when the VM's agent is gone."""

    def how_it_ended(self) -> str:
        """Say what became of the agent, such as ``killed by SIGKILL``; it is gone."""

    def end(self) -> None:
        """Give the VM back; its agent ends what it started. Twice is harmless."""


class Engine(Protocol):
    """Gives VMs and takes them back.

    Attributes:
        keeps_warm: whether a VM may stay for the next run of the same kernel.
    """

    keeps_warm: bool

    def start(self, instance: str | None, configs: Sequence[AgentConfig]) -> Sequence[Machine]:
        """Start one agent for each configuration, on a VM each; they report to the supervisor when they are up.

        Raises:
            EngineError: they cannot be had.
        """

    def close(self) -> None:
        """Give everything back."""
