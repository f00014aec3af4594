"""The contract between the supervisor and an engine, which supplies VMs.

A VM is a machine (host or node) on which an agent runs. An engine is an :class:`Engine` that
provides :class:`Machine` objects, in a module of this package. A new engine also needs a row in the
table of ``engines/choice.py`` and a word in the error message there; entries in ``config.py``
(``engine.default``, its own keys, the resources that it requests for an instance type),
``notebook/verbs.py`` (usage and Tab), ``notebook/steering.py`` and ``notebook/doctor.py``
(``--check``); and an extra in ``pyproject.toml`` if it imports other packages. The machines of
every kind except ``local`` are on other hosts.

Before an agent is started on another host, the versions on that host are compared with those on
this one (``taas/versions.py``), because objects are pickled on one side and unpickled on the other.
The agent itself reports the properties of its VM (``protocol/agents.AgentUp``). An engine ends an
agent only by closing its standard input, because an agent has many processes to end before it ends
itself. If the process that starts an agent may be killed together with its children, the engine
must not start the agent as its child.

``Fleet`` (``supervisor/fleet.py``) starts machines, releases them and closes the engine.
``Supervisor`` (``supervisor/loop.py``) polls the ``fileno`` of the engine and of each machine, and
calls ``step``. ``Run`` and ``DataSide`` read the state of a machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from taas.protocol.engines import AgentConfig, Demand


class Machine(Protocol):
    """One VM, from the request until it is released.

    Attributes:
        pid: the process id of its agent, if that is a process of this machine; otherwise 0.
        waiting: what it waits for, in words.
        ending: why it will soon be taken away, in words that continue "stopped from …"; empty as
            long as this is not expected.
        error: the name of the class in :mod:`taas.errors` for its end, or for the reason why the
            engine cannot provide it.
    """

    pid: int
    waiting: str
    ending: str
    error: str

    def fileno(self) -> int:
        """Return a descriptor that becomes readable when the VM's agent is gone."""

    def want(self) -> None:
        """Request the VM from the cluster now, if its demand is ``later``; may be called twice."""

    def how_it_ended(self) -> str:
        """Describe how the agent, which is gone, ended, such as ``killed by SIGKILL``."""

    def end(self) -> None:
        """Release the VM; its agent ends the processes it started. May be called twice."""


class Engine(Protocol):
    """Provides VMs and takes them back.

    Attributes:
        remote: whether VMs are, or may be, other hosts.
        here: the address at which VMs reach this machine; empty as long as it is not known.
    """

    remote: bool
    here: str

    def start(
        self, demand: Demand, configs: Sequence[AgentConfig], lost: Sequence[Machine] = ()
    ) -> Sequence[Machine]:
        """Start an agent for each configuration, each on its own VM.

        The VMs replace the ``lost`` ones, if there are any.

        Raises:
            EngineError: the engine cannot provide the VMs.
        """

    def fileno(self) -> int:
        """Return a descriptor that is readable when :meth:`step` has work; -1 if it never has."""

    def step(self) -> None:
        """Handle the events of the requested machines."""

    def pids(self) -> list[int]:
        """Return the process ids of the supervisor's children that the engine needs."""

    def close(self) -> None:
        """Release everything."""
