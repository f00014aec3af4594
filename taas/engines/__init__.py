"""Where VMs come from: the contract that the supervisor has with an engine.

An engine is an :class:`Engine` that gives :class:`Machine` objects, in a file beside this one. It
is entered as a row of the table in ``engines/chosen.py``, and in its error's text, in ``config.py``
(``engine.default``, keys of its own, what an instance type asks of it), ``notebook/verbs.py``
(usage and Tab), ``notebook/steering.py`` and ``notebook/doctor.py`` (``--check``), and as an extra
of ``pyproject.toml`` if it imports something. Any kind but ``local`` has its machines elsewhere.

Before an agent is started elsewhere, the versions there are compared with those here
(``taas/versions.py``), for what is pickled on one is unpickled on the other. What a VM has its
agent says itself (``wire/agents.AgentUp``). An engine ends an agent by the end of its standard
input, and by nothing else: agents have much to end before they do. Where whoever starts it is
killed with all its children, the engine has to start it as nobody's child.

Who calls it: ``Fleet`` (``supervisor/fleet.py``) starts machines, gives them back and closes the
engine, ``Supervisor`` (``supervisor/loop.py``) polls the ``fileno`` of the engine and of each
machine and calls ``step``; ``Run`` and ``DataSide`` read how a machine stands.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec


class EngineChoice(msgspec.Struct, frozen=True):
    """Which engine gives a run its VMs.

    Attributes:
        address: where the Ray cluster is; empty: the one that this machine is part of. Of Slurm
            what is asked of it.
        wait: seconds that VMs may be waited for.
        idle: seconds that VMs elsewhere stay after a run, for the next one.
    """

    kind: str = "local"
    address: str = ""
    wait: float = 600.0
    idle: float = 60.0


class Demand(msgspec.Struct, frozen=True):
    """What each VM of a run has to have.

    Attributes:
        instance: its type; None: any machine.
        rehearse: CPU ranks in place of GPUs, in any case.
        wait: seconds that it may be waited for.
        environ: the notebook's variables that libraries read when they are imported, for VMs that
            do not have them from the notebook's machine.
        changed: names of variables that the notebook itself set, changed or removed.
        later: a cluster is asked for it when somebody says so (:meth:`Machine.want`): first its
            data are made ready.
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
        """What VMs have in common of which one may stand for another."""
        return self.instance, self.gpus, self.rehearse


class AgentConfig(msgspec.Struct, frozen=True, tag=True):
    """What an engine writes to an agent's standard input, as one line of JSON.

    Attributes:
        endpoint: the supervisor's zmq address; an engine with VMs elsewhere fills it in, with
            ``scratch``, ``environ``, ``host`` and ``node``.
        server_key, public_key, secret_key: CURVE keys in Z85.
        scratch: a folder that the agent may fill; it goes with the agent.
        idle: nobody waits for it yet: libraries are imported at a low priority until there is an
            order.
        remote: the supervisor may be on another host: nothing is read through /proc, and the wire
            beats.
        environ: of a remote VM, the environment that programs have there; CUDA_VISIBLE_DEVICES
            names the GPUs it was given.
        host: the address under which other VMs reach it.
        node: its name, for messages.
        demand: what the VM was asked for: of a remote one, libraries are imported before the first
            run is known.
        supervisor: process id of the supervisor, and ``name``, of the agent among its agents: for
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
    """One VM, from the moment it is asked for until it is given back.

    Attributes:
        pid: its agent's process id, where it is a process of this machine; else 0.
        waiting: what it waits for, in words.
        ending: that it will be taken away soon, and why, in words that go on after "stopped from";
            empty: not that it is known.
        error: the class of :mod:`taas.errors` that tells best why it ended, or could not be had.
    """

    pid: int
    waiting: str
    ending: str
    error: str

    def fileno(self) -> int:
        """Return a descriptor that becomes readable when the VM's agent is gone."""

    def want(self) -> None:
        """Ask for it now, where its demand said ``later``. Twice is harmless."""

    def how_it_ended(self) -> str:
        """Say what became of the agent, such as ``killed by SIGKILL``; it is gone."""

    def end(self) -> None:
        """Give the VM back; its agent ends what it started. Twice is harmless."""


class Engine(Protocol):
    """Gives VMs and takes them back.

    Attributes:
        remote: whether VMs are, or may be, other hosts.
        here: the address under which VMs reach this machine; empty while it is not known.
    """

    remote: bool
    here: str

    def start(
        self, demand: Demand, configs: Sequence[AgentConfig], lost: Sequence[Machine] = ()
    ) -> Sequence[Machine]:
        """Start an agent for each configuration, on a VM each, in the places of ``lost`` ones, if there are any.

        Raises:
            EngineError: they cannot be had.
        """

    def fileno(self) -> int:
        """Return a descriptor that becomes readable when :meth:`step` has something to do; -1: it never has."""

    def step(self) -> None:
        """Take in what became of the machines that were asked for."""

    def pids(self) -> list[int]:
        """Return the supervisor's own children that the engine needs."""

    def close(self) -> None:
        """Give everything back."""
