"""The contract between the supervisor and an engine, which supplies VMs.

An engine is an :class:`Engine` that gives :class:`Machine` objects, in a file beside this one. A
new one also needs a row of the table in ``engines/choice.py`` and a word in the error's text there,
entries in ``config.py`` (``engine.default``, its own keys, the resources that it requests for an
instance type), ``notebook/verbs.py`` (usage and Tab), ``notebook/steering.py`` and
``notebook/doctor.py`` (``--check``), and an extra in ``pyproject.toml`` if it imports something.
Every kind except ``local`` has its machines elsewhere.

Before an agent is started elsewhere, the versions there are compared with those here
(``taas/versions.py``), because objects are pickled on one side and unpickled on the other. The
agent itself says what its VM has (``protocol/agents.AgentUp``). An engine ends an agent only by
closing its standard input, because agents have much to end before they end themselves. If the
process that starts an agent may be killed together with its children, the engine must not start the
agent as its child.

``Fleet`` (``supervisor/fleet.py``) starts machines, gives them back and closes the engine.
``Supervisor`` (``supervisor/loop.py``) polls the ``fileno`` of the engine and of each machine, and
calls ``step``. ``Run`` and ``DataSide`` read the state of a machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from taas.protocol.engines import AgentConfig, Demand


class Machine(Protocol):
    """One VM, from the request until it is given back.

    Attributes:
        pid: its agent's process id, if that is a process of this machine; else 0.
        waiting: what it waits for, in words.
        ending: why it will soon be taken away, in words that continue "stopped from …"; empty if it
            will not, as far as is known.
        error: the class of :mod:`taas.errors` for its end, or for why the engine cannot give it.
    """

    pid: int
    waiting: str
    ending: str
    error: str

    def fileno(self) -> int:
        """Return a descriptor that becomes readable when the VM's agent is gone."""

    def want(self) -> None:
        """Ask the cluster for it now, if its demand said ``later``. Twice is harmless."""

    def how_it_ended(self) -> str:
        """Say how the agent ended, such as ``killed by SIGKILL``; it is gone."""

    def end(self) -> None:
        """Give the VM back; its agent ends what it started. Twice is harmless."""


class Engine(Protocol):
    """Gives VMs and takes them back.

    Attributes:
        remote: whether VMs are, or may be, other hosts.
        here: the address under which VMs reach this machine; empty as long as it is not known.
    """

    remote: bool
    here: str

    def start(
        self, demand: Demand, configs: Sequence[AgentConfig], lost: Sequence[Machine] = ()
    ) -> Sequence[Machine]:
        """Start an agent for each configuration, each on its own VM.

        The VMs replace ``lost`` ones, if there are any.

        Raises:
            EngineError: the engine cannot give them.
        """

    def fileno(self) -> int:
        """Return a descriptor that is readable when :meth:`step` has work; -1: it never has."""

    def step(self) -> None:
        """Handle the events of the requested machines."""

    def pids(self) -> list[int]:
        """Return the supervisor's own children that the engine needs."""

    def close(self) -> None:
        """Give everything back."""
