"""The demands on an engine, and the configuration that an engine passes to an agent."""

from __future__ import annotations

import msgspec


class EngineChoice(msgspec.Struct, frozen=True):
    """The engine that provides the VMs of a run.

    Attributes:
        address: the address of the Ray cluster; empty if this machine is part of it. For Slurm, the
            options of the request.
        wait: the maximum time to wait for VMs, in seconds.
        idle: the time that VMs on other hosts stay after a run, for the next one, in seconds.
    """

    kind: str = "local"
    address: str = ""
    wait: float = 600.0
    idle: float = 60.0


class Demand(msgspec.Struct, frozen=True):
    """The requirements on each VM of a run.

    Attributes:
        instance: its instance type; None for any machine.
        rehearse: whether to use CPU ranks even if there are GPUs.
        wait: the maximum time to wait for it, in seconds.
        environ: the environment variables of the notebook that libraries read when they are
            imported, for VMs on other machines.
        changed: names of the environment variables that the notebook itself set, changed or
            removed.
        later: whether to request the VM from the cluster only after a call of :meth:`Machine.want`,
            because the run's data are prepared first.
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
        """Return the properties that two VMs must have in common to replace each other."""
        return self.instance, self.gpus, self.rehearse


class AgentConfig(msgspec.Struct, frozen=True, tag=True):
    """The configuration that an engine writes to an agent's standard input, as one line of JSON.

    Attributes:
        endpoint: the supervisor's zmq address. An engine with VMs on other hosts fills it in, as
            well as ``scratch``, ``environ``, ``host`` and ``node``.
        server_key, public_key, secret_key: CURVE keys in Z85.
        scratch: a folder for the agent's files; it is removed with the agent.
        idle: whether no run waits for the agent yet; it then imports libraries at a low priority
            until a job comes.
        remote: whether the supervisor may be on another host, so that nothing is read through
            /proc, and connections have a heartbeat.
        environ: for a remote VM, the environment of programs on it; CUDA_VISIBLE_DEVICES lists the
            GPUs that were assigned to it.
        host: the address at which other VMs reach it.
        node: its name, for messages.
        demand: the demand for the VM; a remote agent imports libraries before its first run is
            known.
        supervisor, name: the process id of the supervisor, and the agent's name among its agents,
            for the log file.
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
