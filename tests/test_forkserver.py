"""When the forkserver starts anew: for a package installed meanwhile, or killed, but never under a run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from notebook_harness import gone, until

PROGRAM = """
import os, pathlib, sys
from taas.agent.forkserver import Forkserver

installed = pathlib.Path(sys.argv[1], "site-packages")
installed.mkdir()
sys.path.append(str(installed))
server = Forkserver(data=True)
began = []
for run in ("fox", "fox", "owl"):
    (installed / f"package {len(began)}").mkdir()
    server.fit(run, dict(os.environ), rehearsed=None)
    began.append(server.pid)
print(began[0] == began[1], began[1] == began[2])
server._end()
"""

STOPPED_AT_ONCE = """
import os, signal
from taas import _linux
from taas.agent.forkserver import Forkserver
from taas.agent.processes import fork

_linux.set_parent_death_signal(signal.SIGKILL)
os.setsid()
server = Forkserver(data=True)
server.start()
print(server.pid, fork(signal.raise_signal, signal.SIGSTOP).pid, flush=True)
signal.pause()
"""


def test_a_package_installed_while_a_run_starts(tmp_path: Path) -> None:
    """The run keeps the forkserver it began with; the next one finds the package."""
    done = subprocess.run([sys.executable, "-c", PROGRAM, str(tmp_path)], capture_output=True, text=True)
    assert (done.stdout, done.returncode) == ("True False\n", 0), done.stderr


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
