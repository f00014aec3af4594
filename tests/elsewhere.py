"""VMs elsewhere without a cluster.

Their engine's agents are told that they are on other hosts, and are on this one.

All that crosses hosts crosses here: the supervisor listens on TCP, and memories come in chunks.
The project is seen there, unless it is hidden.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from taas.engines import Machine
from taas.protocol.engines import AgentConfig, Demand, EngineChoice

ENVIRON = {"TAAS_ENGINE": "ray 127.0.0.1:1"}
"""For a notebook whose cells run there."""
_HIDDEN = "TAAS_TESTS_HIDDEN"
_HIDE = 'mount -t tmpfs none "$0" && exec "$@"'
_SITE = f"""
import sys
if "taas.supervisor" in sys.orig_argv:
    sys.path.append({str(Path(__file__).parent)!r})
    import elsewhere
    from taas.engines import choice
    choice.start_engine = elsewhere.Engine
"""


def install(folder: Path, hidden: str = "") -> dict[str, str]:
    """Write into a folder what lets a notebook's Ray engine be this one.

    Returns the variables that the notebook needs.

    What is in the folder ``hidden`` is not seen there.
    """
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(_SITE)
    (folder / "ray.py").touch()  # it is asked for
    path = os.pathsep.join((str(folder), os.environ.get("PYTHONPATH", "")))
    return {"PYTHONPATH": path, _HIDDEN: hidden, **ENVIRON}


class Vm:
    """An agent that is said to be on another host."""

    pid = 0
    waiting = ending = ""
    error = "RunLost"

    def __init__(self, config: AgentConfig) -> None:
        Path(config.scratch).mkdir(mode=0o700, parents=True)
        self._gone, self._signal = os.pipe2(os.O_CLOEXEC)
        hidden = os.environ[_HIDDEN]
        command = ["unshare", "--mount", "sh", "-c", _HIDE, hidden] if hidden else []
        command += [sys.executable, "-P", "-m", "taas.agent"]
        with Path(config.scratch, "agent.log").open("wb") as log:
            self.agent = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=log, stderr=log)
        assert self.agent.stdin is not None
        self.agent.stdin.write(msgspec.json.encode(config) + b"\n")
        self.agent.stdin.flush()

    def fileno(self) -> int:
        """Nobody says when it is gone."""
        return self._gone

    def want(self) -> None:
        """It was started at once."""

    def how_it_ended(self) -> str:
        """Nothing is known."""
        return "lost"

    def end(self) -> None:
        """Close the agent's standard input."""
        if self._signal >= 0:
            assert self.agent.stdin is not None
            self.agent.stdin.close()
            self.agent.wait()
            os.close(self._signal)
            os.close(self._gone)
            self._signal = -1


class Engine:
    """Gives such VMs, as many as are asked for."""

    remote, here = True, "127.0.0.1"

    def __init__(self, choice: EngineChoice, listen: Callable[[str], str], scratch: Path) -> None:
        self._listen = listen
        self._vms: list[Vm] = []

    def start(
        self, demand: Demand, configs: Sequence[AgentConfig], lost: Sequence[Machine] = ()
    ) -> Sequence[Vm]:
        """Start them."""
        there = {"endpoint": self._listen(self.here), "environ": dict(os.environ)}
        started = [Vm(msgspec.structs.replace(config, **there)) for config in configs]
        self._vms += started
        return started

    def fileno(self) -> int:
        """It never has anything to do."""
        return -1

    def step(self) -> None:
        """Do nothing."""

    def pids(self) -> list[int]:
        """Return the agents' process ids."""
        return [vm.agent.pid for vm in self._vms if vm.agent.poll() is None]

    def close(self) -> None:
        """Give all back."""
        for vm in self._vms:
            vm.end()
