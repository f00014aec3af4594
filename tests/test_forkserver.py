"""The forkserver, and what it forks, ends with its agent; an agent imports nothing for it."""

from __future__ import annotations

import subprocess
import sys

import psutil
import pytest
from notebook_harness import gone, until

STOPPED_AT_ONCE = """
import os, signal
from taas import _linux
from taas.agent.forkserver import Forkserver
from taas.agent.processes import fork

_linux.set_parent_death_signal(signal.SIGKILL)
os.setsid()
server = Forkserver()
server.start()
print(server.pid, fork(signal.raise_signal, signal.SIGSTOP).pid, flush=True)
signal.pause()
"""


@pytest.mark.parametrize("who", ["nobody", "forkserver"])
def test_an_agent_that_is_killed_leaves_nobody_whom_it_has_just_forked(who: str) -> None:
    """Its processes end with it, even if they were stopped before they were tied to it."""
    with subprocess.Popen(
        [sys.executable, "-c", STOPPED_AT_ONCE], stdout=subprocess.PIPE, text=True
    ) as agent:
        assert agent.stdout is not None
        forkserver, forked = map(psutil.Process, map(int, agent.stdout.readline().split()))
        until(lambda: forked.status() == psutil.STATUS_STOPPED)
        if who == "forkserver":
            forkserver.suspend()
        agent.kill()
        assert gone([forkserver, forked])


def test_an_agent_imports_no_library_for_its_ranks() -> None:
    """torch and IPython are in the forkserver alone: an agent that waits costs 30 MB."""
    heavy = ("torch", "numpy", "IPython", "ray", "cloudpickle")
    code = f"import sys, taas.agent.loop; print([name for name in {heavy!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout == "[]\n"
