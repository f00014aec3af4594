"""What this machine, or a Slurm cluster, has, what it lacks, and what to do about it; found by trying."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import platform
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import psutil
from jupyter_core.paths import jupyter_runtime_dir

from taas.engines.local import present_gpus, unseen_gpu, visible_gpus
from taas.engines.slurm import COMMANDS, Settings, own_address, slurm
from taas.engines.versions import differing_versions, versions
from taas.errors import EngineError
from taas.notebook.tables import Shown, plain, table
from taas.storage import walls
from taas.wording import counted, size_in_words

_TORCH_SECONDS, _SLURM_SECONDS = 120, 60
_GIB = 1 << 30
_TORCH = """
import json, torch, torch.distributed as dist
cuda = torch.version.cuda
print(json.dumps({
    "torch": torch.__version__, "cuda": cuda, "gloo": dist.is_gloo_available(), "nccl": dist.is_nccl_available(),
    "nccl version": ".".join(map(str, torch.cuda.nccl.version())) if cuda and dist.is_nccl_available() else "",
    "gpus": [torch.cuda.get_device_name(n) for n in range(torch.cuda.device_count())] if cuda else [],
}))
"""
_ON_A_NODE = """
import json, os, socket, sys
from taas.engines.versions import versions
try:
    socket.create_connection((sys.argv[1], int(sys.argv[2])), 5).close()
    why = ""
except OSError as error:
    why = str(error)
print(json.dumps([os.environ["SLURMD_NODENAME"], versions(), why]))
"""


class Finding(NamedTuple):
    """One line of the report: the verdict is ``ok``; ``note``: it works, with a limit; ``bad``: first something is to be done."""

    verdict: str
    what: str
    fact: str
    advice: str = ""


def examine() -> list[Finding]:
    """Look at everything a run needs on this machine. Takes some seconds: torch is asked in a process of its own."""
    looks = (_packages, _torch, _memory, _write_rule, _host_name, _runtime_folder)
    return [finding for look in looks for finding in look()]


def report(findings: Sequence[Finding]) -> Shown:
    """Show findings, a line each, with what to do below those that ask for it."""
    marks = {"ok": "✓", "note": "!", "bad": "✗"}
    rows = [(marks[finding.verdict], finding.what, finding.fact) for finding in findings]
    bad = sum(finding.verdict == "bad" for finding in findings)
    verdict = f"{counted(bad, 'thing')} to do before runs work" if bad else "runs work here"
    remarks = [finding.advice and f"-> {finding.advice}" for finding in findings]
    return table(("", "looked at", "found"), rows, remarks) + plain(verdict)


def _limited(what: str, fact: str, limited: bool, advice: str) -> Finding:
    return Finding("note", what, fact, advice) if limited else Finding("ok", what, fact)


def _packages() -> Iterable[Finding]:
    yield Finding(
        "ok", "Python", f"{platform.python_version()} on Linux {platform.release()}, {sys.executable}"
    )
    found = []
    for name in ("jupyter-taas", "ipython", "ipykernel", "pyzmq", "msgspec", "cloudpickle", "psutil", "ray"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):  # Ray is for many machines alone
            found.append(f"{name} {importlib.metadata.version(name)}")
    yield Finding("ok", "packages", ", ".join(found))


def _torch() -> Iterable[Finding]:
    command = [sys.executable, "-c", _TORCH]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TORCH_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        fact = f"its import took more than {_TORCH_SECONDS} s"
        yield Finding("bad", "torch", fact, "look at the disk it is on")
        return
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["it ended without a word"])[-1]
        yield Finding("bad", "torch", last, "pip install --upgrade torch torchvision")
        return
    said = json.loads(done.stdout.splitlines()[-1])
    build = f"CUDA {said['cuda']}" if said["cuda"] else "CPU build"
    yield Finding("ok", "torch", f"{said['torch']} ({build})")
    present = visible_gpus()
    if present and not said["gpus"]:
        fact = f"the driver shows {len(present)}, torch sees none"
        advice = "compare `nvidia-smi` with torch's CUDA version; install a torch build for this driver"
        yield Finding("bad", "GPUs", fact, advice)
    elif present:
        names = ", ".join(f"{said['gpus'].count(name)} × {name}" for name in dict.fromkeys(said["gpus"]))
        yield Finding("ok", "GPUs", names)
    elif (unseen := unseen_gpu()) is not None and not present_gpus():
        fact = f"{unseen[0]} is here, but no GPU to use: cells are rehearsed on CPU ranks"
        yield Finding("note", "GPUs", fact, unseen[1])
    else:
        fact = "none here: cells are rehearsed on CPU ranks"
        yield Finding("note", "GPUs", fact, "nothing, or run where there are GPUs")
    if not said["gloo"]:
        yield Finding("bad", "gloo", "torch was built without it", "install torch from PyPI")
    elif said["nccl"]:
        yield Finding("ok", "NCCL", f"{said['nccl version']}; gloo is there too")
    elif present:
        yield Finding("bad", "NCCL", "torch was built without it", "install torch's CUDA build")
    else:
        yield Finding("ok", "gloo", "there; NCCL is not, and not needed without GPUs")


def _memory() -> Iterable[Finding]:
    memory, shared = psutil.virtual_memory(), shutil.disk_usage("/dev/shm")  # noqa: S108  it is what is asked about
    fact = f"{len(os.sched_getaffinity(0))} cores, {_free(memory.available, memory.total)} memory free"
    advice = "a rank needs about 0.2 GB, and its model: close something"
    yield _limited("machine", fact, memory.available < _GIB, advice)
    advice = "DataLoader workers and delivery need more: start the container with --shm-size=8g"
    fact = f"{_free(shared.free, shared.total)} free in /dev/shm"
    yield _limited("shared memory", fact, shared.free < 256 << 20, advice)


def _free(free: int, total: int) -> str:
    return f"{size_in_words(free)} of {size_in_words(total)}"


def _write_rule() -> Iterable[Finding]:
    fact = "; ".join(line.strip() for line in walls.verdicts()).removeprefix("write rule: ")
    advice = "as root, or with user namespaces, ranks get a mount; Linux 5.13 or newer may have Landlock"
    yield _limited("write rule", fact, not fact.startswith("mount"), advice)


def _host_name() -> Iterable[Finding]:
    name = socket.gethostname()
    try:
        yield Finding("ok", "host name", f"{name} is {socket.gethostbyname(name)}")
    except OSError:
        advice = f"add `127.0.1.1 {name}` to /etc/hosts if gloo cannot connect"
        yield Finding("note", "host name", f"{name} has no address", advice)


def _runtime_folder() -> Iterable[Finding]:
    folder = Path(jupyter_runtime_dir())
    folder.mkdir(parents=True, exist_ok=True)
    if not os.access(folder, os.W_OK):
        yield Finding("bad", "run folders", f"{folder} cannot be written", "set JUPYTER_RUNTIME_DIR")
        return
    free = shutil.disk_usage(folder).free
    fact = f"{size_in_words(free)} free in {folder}"
    yield _limited("run folders", fact, free < _GIB, "output of runs is kept there: make room")


# ---------------------------------------------------------------- taas engine slurm --check


def examine_slurm(settings: Settings) -> Iterable[Finding]:
    """Look at commands, partitions, and what is on a node, by a job that waits a minute at most."""
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
        look = (settings.python, "-P", "-c", _ON_A_NODE, host, str(server.getsockname()[1]))
        command = (
            "srun",
            "--quiet",
            "--nodes=1",
            "--ntasks=1",
            "--time=1",
            f"--immediate={_SLURM_SECONDS // 2}",
        )
        try:
            name, there, why = json.loads(slurm(*command, *asked, *look, seconds=_SLURM_SECONDS))
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
