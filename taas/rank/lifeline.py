"""No process outlives the one that needs it, along the chain kernel, supervisor, agent, rank.

There are two mechanisms. The operating system provides both, so that they work while C code holds
the GIL, and on processes that are stopped. If the other process is the parent, it is the
parent-death signal (prctl(2), PR_SET_PDEATHSIG); otherwise, it is a SIGKILL at end-of-file of a
pipe whose writing end only the other process has (fcntl(2), F_SETSIG).

Children that leave a rank's session stay in the process tree of agent and supervisor, which find
and end them there (agent/processes.py). A supervisor is therefore not killed when its kernel ends:
it is continued if it was stopped, and it ends all its processes. Only a supervisor that does not
react is killed, some seconds later.

This module also sets the names under which ``ps`` and ``top`` show processes that are not ranks
yet (proc_pid_comm(5)).
"""

from __future__ import annotations

import fcntl
import multiprocessing
import os
import signal
from multiprocessing.connection import wait
from pathlib import Path

from taas.base import linux

_F_SETOWN, _F_SETSIG = 8, 10
_SECONDS_TO_NOTICE = 3
"""How long a supervisor has to react to the end of its kernel before the system ends it."""
_STARTS_ALARM = signal.Signals(_SECONDS_TO_NOTICE)
"""The signal that starts a timer of that many seconds: SIGQUIT, as its number is 3.

Its handler has to be a C function, because Python's handlers do not run while C code holds the
GIL. The handler is alarm(2) itself. C calls a handler with one argument, the signal's number, and
alarm takes one argument, the number of seconds after which it sends SIGALRM, which ends the
process. So the number of the signal is the number of seconds.
"""
_COMM = Path("/proc/self/comm")
FORKSERVER_NAME, SPARE_NAME = "taas-forkserver", "taas-spare"
OWN_NAME = _COMM.read_text().rstrip("\n")
"""The name that this process began with; in a rank, the one that any Python process has."""


def name_process(name: str) -> None:
    """Give this process's main thread a name of up to 15 characters."""
    _COMM.write_text(name)


def tie_to_agent() -> None:
    """Make this process the leader of a session that ends with its agent or its forkserver."""
    forkserver = os.getppid()
    os.setsid()
    linux.set_parent_death_signal(signal.SIGKILL)
    agent = multiprocessing.parent_process()
    assert agent is not None, "a rank is started by an agent"
    signal_at_end(int(agent.sentinel), -os.getpid(), signal.SIGKILL)
    if os.getppid() != forkserver or wait([agent.sentinel], 0):  # one of them had ended before this
        os.kill(os.getpid(), signal.SIGKILL)


def signal_at_end(pipe: int, owner: int, number: signal.Signals) -> None:
    """Let the system signal a process at a pipe's end-of-file; ``-owner``: its process group."""
    fcntl.fcntl(pipe, _F_SETOWN, owner)
    fcntl.fcntl(pipe, _F_SETSIG, number)
    fcntl.fcntl(pipe, fcntl.F_SETFL, fcntl.fcntl(pipe, fcntl.F_GETFL) | os.O_ASYNC)


class KernelTie:
    """A supervisor's tie to its kernel's process, even if other processes inherit the writing end.

    At least one of its ``sources``, the life pipe's reading end and a pidfd of the kernel, becomes
    readable when the kernel is gone. At the pipe's end-of-file the system also sends two signals,
    one for each of two descriptors of its reading end: SIGCONT, which continues a stopped
    supervisor, and, unless it is disarmed, the signal that starts the alarm.

    Raises:
        ProcessLookupError: the kernel is gone already.
    """

    def __init__(self, kernel: int, life: int) -> None:
        self.sources = life, os.pidfd_open(kernel)
        signal_at_end(life, os.getpid(), signal.SIGCONT)
        # Opened again, since a duplicate would share its signal with the first descriptor.
        self._second = os.open(f"/proc/self/fd/{life}", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        self.arm()

    def arm(self) -> None:
        """Let the pipe's end-of-file start the alarm, which ends this process if not disarmed."""
        linux.libc.signal(_STARTS_ALARM, linux.libc.alarm)
        signal_at_end(self._second, os.getpid(), _STARTS_ALARM)

    def disarm(self) -> None:
        """Let the pipe's end-of-file start no alarm any more, and stop one that it has started.

        In this order: an alarm that starts before the first line takes effect is stopped by the
        second.
        """
        signal_at_end(self._second, os.getpid(), signal.SIGCONT)
        signal.alarm(0)
