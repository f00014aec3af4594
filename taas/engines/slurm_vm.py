"""``python -m taas.engines.slurm_vm``: runs the agent of one node of a Slurm job, to its end.

The process is a task of ``srun``. It reads the job's agents from standard input, and runs the agent
with its own task number. An error is written to standard error, and ends this process and with it
the job.
"""

from __future__ import annotations

import os
import signal
import sys
from multiprocessing.connection import wait
from urllib.parse import urlsplit

import msgspec

from taas.base.linux import remove_tree
from taas.engines.gpus import visible_gpus
from taas.engines.local import LocalMachine
from taas.engines.slurm import JobAgents, address_towards
from taas.protocol.curve import make_short_folder
from taas.protocol.delivery_orders import read_line
from taas.protocol.engines import AgentConfig
from taas.versions import differing_versions, versions

_SLURMS_OWN = ("SLURM_", "SLURMD_", "SRUN_", "PMI_", "PMIX_")
"""With these variables, libraries would take a rank for a task of srun, which it is not."""


def _serve(config: AgentConfig, node: str) -> str:
    """Run the agent to its end; return why it ended unexpectedly, or else an empty string.

    A reason fails the job, so that Slurm frees the node. Otherwise the job would keep an idle node,
    while a cell that starts again waits for another node.
    """
    demand, scratch = config.demand, make_short_folder()
    given = () if demand.rehearse else visible_gpus()[: demand.gpus]
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(given)
    host = address_towards(str(urlsplit(config.endpoint).hostname))
    there = {"scratch": scratch, "environ": dict(os.environ), "host": host, "node": node}
    agent = LocalMachine(msgspec.structs.replace(config, **there))
    wait([agent.fileno()])
    how = agent.how_it_ended()
    remove_tree(scratch)  # a killed agent has left it behind
    return "" if how in ("ended with status 0", "killed by SIGTERM") else f"{node}: its agent {how}"


def main() -> None:
    """Compare versions, and run the agent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Slurm sends it to all processes of a job that it ends; this process has to report the agent's
    # end.
    signal.signal(signal.SIGTERM, lambda *_: None)
    job = msgspec.json.decode(read_line(sys.stdin.fileno()), type=JobAgents)
    task, node = int(os.environ["SLURM_PROCID"]), os.environ["SLURMD_NODENAME"]
    for variable in list(os.environ):
        # an epilog may look for this one
        if variable.startswith(_SLURMS_OWN) and variable != "SLURM_JOB_ID":
            del os.environ[variable]
    if why := differing_versions(versions(), job.versions) or _serve(job.agents[task], node):
        sys.exit(why)


if __name__ == "__main__":
    main()
