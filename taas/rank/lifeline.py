"""Nobody lives longer than who needs him, whatever he is doing: the chain of kernel, supervisor, agent and rank.

Two ties, both held by the operating system, so that they work while C code holds the GIL, and on processes that are
stopped: the parent-death signal where the other one is the parent (prctl(2), PR_SET_PDEATHSIG), else a SIGKILL on
end-of-file of a pipe whose writing end only the other one has (fcntl(2), F_SETSIG). Children that leave a rank's session
stay in the process tree of agent and supervisor, and are found there (agent/processes.py). So a supervisor is not killed at
the end of its kernel: it is told to go on, should it be stopped, and ends all that there is.

And what ``ps`` and ``top`` call those that are not ranks yet (proc_pid_comm(5)).
"""

from __future__ import annotations

import fcntl
import multiprocessing
import os
import signal
from multiprocessing.connection import wait
from pathlib import Path

from taas import _linux

_F_SETOWN, _F_SETSIG = 8, 10
_COMM = Path("/proc/self/comm")
FORKSERVER_NAME, SPARE_NAME = "taas-forkserver", "taas-spare"
OWN_NAME = _COMM.read_text().rstrip("\n")
"""The name this process began with; in a rank it is the one that any Python process has."""


def name_process(name: str) -> None:
    """Give this process's main thread a name of up to 15 characters."""
    _COMM.write_text(name)


def tie_to_agent() -> None:
    """Make this process the leader of a session that ends with its agent or its forkserver."""
    forkserver = os.getppid()
    os.setsid()
    _linux.set_parent_death_signal(signal.SIGKILL)
    agent = multiprocessing.parent_process()
    assert agent is not None, "a rank is started by an agent"
    signal_at_end(int(agent.sentinel), -os.getpid(), signal.SIGKILL)
    if os.getppid() != forkserver or wait([agent.sentinel], 0):  # it was gone before the tie held
        os.kill(os.getpid(), signal.SIGKILL)


def signal_at_end(pipe: int, owner: int, number: signal.Signals) -> None:
    """Have the system signal a process, or minus a session's leader the session, at a pipe's end-of-file."""
    fcntl.fcntl(pipe, _F_SETOWN, owner)
    fcntl.fcntl(pipe, _F_SETSIG, number)
    fcntl.fcntl(pipe, fcntl.F_SETFL, fcntl.fcntl(pipe, fcntl.F_GETFL) | os.O_ASYNC)
