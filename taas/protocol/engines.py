"""What is asked of engines, and what an engine tells an agent when it starts it."""

from __future__ import annotations

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
