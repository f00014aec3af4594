"""A rank lives no longer than its agent and its forkserver, whatever it is doing.

Two ties, both held by the operating system, so that they work while C code holds the GIL: the parent-death
signal for the forkserver (prctl(2), PR_SET_PDEATHSIG), and for the agent, which is no parent, a SIGKILL to the
rank's session on end-of-file of the pipe whose writing end only the agent has (fcntl(2), F_SETSIG). Children
that leave the session stay in the agent's process tree and are found there (agent/endings.py).
"""

from __future__ import annotations

import fcntl
import multiprocessing
import os
import select
import signal

from taas import _linux

_F_SETOWN, _F_SETSIG = 8, 10


def tie_to_agent() -> None:
    """Make this process the leader of a session that ends with its agent or its forkserver."""
    forkserver = os.getppid()
    os.setsid()
    _linux.set_parent_death_signal(signal.SIGKILL)
    agent = multiprocessing.parent_process()
    assert agent is not None, "a rank is started by an agent"
    pipe = int(agent.sentinel)
    fcntl.fcntl(pipe, _F_SETOWN, -os.getpid())
    fcntl.fcntl(pipe, _F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(pipe, fcntl.F_SETFL, fcntl.fcntl(pipe, fcntl.F_GETFL) | os.O_ASYNC)
    poll = select.poll()
    poll.register(pipe, select.POLLIN)
    if poll.poll(0) or os.getppid() != forkserver:  # they were gone before the ties held
        os.kill(os.getpid(), signal.SIGKILL)
