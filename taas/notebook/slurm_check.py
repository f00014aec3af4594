"""``taas engine slurm --check``: whether this machine, Slurm and one of its nodes have what cells on Slurm need."""

from __future__ import annotations

import contextlib
import json
import shutil
import socket
from collections.abc import Iterable

from taas.engines.slurm import COMMANDS, Settings
from taas.engines.slurm_queue import own_address, slurm
from taas.engines.versions import differing_versions, versions
from taas.errors import EngineError
from taas.notebook.doctor import Finding

_SECONDS = 60
_LOOK = """
import json, os, socket, sys
from taas.engines.versions import versions
try:
    socket.create_connection((sys.argv[1], int(sys.argv[2])), 5).close()
    why = ""
except OSError as error:
    why = str(error)
print(json.dumps([os.environ["SLURMD_NODENAME"], versions(), why]))
"""


def examine(settings: Settings) -> list[Finding]:
    """Look at commands, partitions, and, by a job of one node, what is on it. Takes as long as that job waits, a minute at most."""
    return [*_look(settings)]


def _look(settings: Settings) -> Iterable[Finding]:
    missing = [command for command in (*COMMANDS, "srun") if shutil.which(command) is None]
    if missing:
        advice = "run this on a login node, perhaps after `module load slurm`"
        yield Finding("bad", "commands", f"{', '.join(missing)} cannot be found in PATH", advice)
        return
    try:
        yield Finding("ok", "Slurm", slurm("sbatch", "--version").strip())
        yield from _partitions(settings)
        yield from _node(settings, own_address(settings))
    except EngineError as error:
        yield Finding("bad", "Slurm", str(error), "`scontrol ping` tells whether its controller is there")


def _partitions(settings: Settings) -> Iterable[Finding]:
    rows = [line.split() for line in slurm("sinfo", "--noheader", "--format=%R %D %G %l %a").splitlines()]
    for name, nodes, gres, limit, state in rows:
        fact = f"{nodes} nodes, GRES {gres}, time limit {limit}, {state}"
        yield Finding("ok" if state == "up" else "note", f"partition {name}", fact)
    for option in ("partition", "cpu-partition"):
        wanted = settings.get(option)
        if wanted and wanted not in {name for name, *_ in rows}:
            yield Finding("bad", f"--{option}", f"there is no partition {wanted}", "choose one of the above")


def _node(settings: Settings, host: str) -> Iterable[Finding]:
    asked = [f"--{name}={value}" for name in ("partition", "account") if (value := settings.get(name))]
    with contextlib.closing(socket.create_server((host, 0))) as server:
        port = str(server.getsockname()[1])
        look = (settings.python, "-P", "-c", _LOOK, host, port)
        command = ("srun", "--quiet", "--nodes=1", "--ntasks=1", "--time=1", f"--immediate={_SECONDS // 2}")
        try:
            name, there, why = json.loads(slurm(*command, *asked, *look, seconds=_SECONDS))
        except EngineError as error:
            advice = "give --python, and install taas there; or try again when a node is free"
            yield Finding("bad", "a node", str(error), advice)
            return
    yield Finding("ok", "a node", f"{name}, Python {there['python']}, torch {there['torch'] or 'missing'}")
    if differing := differing_versions(there, versions()):
        yield Finding("bad", "versions", differing, "most simply both use one environment: --python")
    if why:
        advice = "a firewall between them? Or give --host another address of this machine"
        yield Finding("bad", "way back", f"{name} does not reach this machine at {host}: {why}", advice)
    else:
        yield Finding("ok", "way back", f"{name} reaches this machine at {host}")
