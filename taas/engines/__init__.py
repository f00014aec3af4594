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

import msgspec


class EngineChoice(msgspec.Struct, frozen=True):
    """The engine that gives a run its VMs.

    Attributes:
        address: where the Ray cluster is; empty: this machine is part of it. For Slurm, the options
            of the request.
        wait: the most seconds to wait for VMs.
        idle: seconds that VMs elsewhere stay after a run, for the next one.
    """

    kind: str = "local"
    address: str = ""
    wait: float = 600.0
    idle: float = 60.0


class Demand(msgspec.Struct, frozen=True):
    """The requirements on each VM of a run.

    Attributes:
        instance: its type; None: any machine.
        rehearse: use CPU ranks even if there are GPUs.
        wait: the most seconds to wait for it.
        environ: the notebook's variables that libraries read when they are imported, for VMs on
            other machines.
        changed: names of variables that the notebook itself set, changed or removed.
        later: ask the cluster only after a call of :meth:`Machine.want`, because the run's data are
            prepared first.
    """

    instance: str | None = None
    gpus: int = 0
    rehearse: bool = False
    wait: float = 600.0
    environ: dict[str, str] = {}
    changed: tuple[str, ...] = ()
    later: bool = False

    @property
    def shape(self) -> tuple[str | None, int, bool]:
        """Return what two VMs must have in common to replace each other."""
        return self.instance, self.gpus, self.rehearse


class AgentConfig(msgspec.Struct, frozen=True, tag=True):
    """The configuration that an engine writes to an agent's standard input, as one line of JSON.

    Attributes:
        endpoint: the supervisor's zmq address. An engine with VMs elsewhere fills it in, and also
            ``scratch``, ``environ``, ``host`` and ``node``.
        server_key, public_key, secret_key: CURVE keys in Z85.
        scratch: a folder that the agent may fill; it is removed with the agent.
        idle: no run waits for it yet, so it imports libraries at a low priority until an order
            comes.
        remote: the supervisor may be on another host, so nothing is read through /proc, and
            connections have a heartbeat.
        environ: of a remote VM, the environment that programs have there; CUDA_VISIBLE_DEVICES
            names the GPUs it was given.
        host: the address under which other VMs reach it.
        node: its name, for messages.
        demand: the demand for the VM; a remote one imports libraries before its first run is known.
        supervisor, name: process id of the supervisor, and the agent's name among its agents, for
            the log file.
    """

    endpoint: str
    server_key: str
    public_key: str
    secret_key: str
    scratch: str
    idle: bool = False
    remote: bool = False
    environ: dict[str, str] = {}
    host: str = "127.0.0.1"
    node: str = ""
    demand: Demand = Demand()
    supervisor: int = 0
    name: str = "agent"


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
