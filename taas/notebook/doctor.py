"""Checks what this machine, or a Slurm cluster, supports; reports problems and how to fix them."""

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
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from jupyter_core.paths import jupyter_runtime_dir

from taas.base.memory_limits import memory_left
from taas.base.wording import counted, size_in_words
from taas.engines.gpus import lacks_uvm, present_gpus, unseen_gpu, visible_gpus
from taas.engines.slurm import Settings, own_address, slurm
from taas.errors import EngineError
from taas.notebook.view.shown import Shown
from taas.notebook.view.tables import plain, table
from taas.project.wall import walls
from taas.versions import differing_versions, versions

_TORCH_SECONDS, _SLURM_SECONDS = 120, 60
_GIB = 1 << 30
_TORCH = """
import json, torch, torch.distributed as dist
cuda = torch.version.cuda
count = torch.cuda.device_count() if cuda else 0
print(json.dumps({
    "torch": torch.__version__,
    "cuda": cuda,
    "gloo": dist.is_gloo_available(),
    "nccl": dist.is_nccl_available(),
    "gpus": [torch.cuda.get_device_name(n) for n in range(count)],
}))
"""
_MARKS = {"ok": "✓", "note": "!", "bad": "✗"}
_WIDTH = len("shared memory")
_ON_A_NODE = """
import json, os, socket, sys
from taas.versions import versions
try:
    socket.create_connection((sys.argv[1], int(sys.argv[2])), 5).close()
    why = ""
except OSError as error:
    why = str(error)
print(json.dumps([os.environ["SLURMD_NODENAME"], versions(), why]))
"""


class Finding(NamedTuple):
    """One line of the report.

    The verdict is ``ok``, ``note`` (it works, with a limitation) or ``bad`` (it must be fixed
    first).
    """

    verdict: str
    what: str
    fact: str
    advice: str = ""


def examine() -> Iterator[Finding]:
    """Check everything that a run needs on this machine.

    This takes some seconds, because torch is imported in a separate process.
    """
    for look in (_packages, _torch, _monitoring, _machine, _write_rule):
        yield from look()


def as_text(findings: Iterable[Finding]) -> Iterator[str]:
    """Yield a report for a terminal, each line as soon as it is available."""
    known = list[Finding]()
    for finding in findings:
        known.append(finding)
        yield f"{_MARKS[finding.verdict]}  {finding.what:<{_WIDTH}}  {finding.fact}"
        if finding.advice:
            yield f"    -> {finding.advice}"
    yield _verdict(known)


def report(findings: Sequence[Finding], *, goes_on: bool = False) -> Shown:
    """Show findings, one per line, with advice below; ``goes_on``: more will follow."""
    rows = [(_MARKS[finding.verdict], finding.what, finding.fact) for finding in findings]
    remarks = [finding.advice and f"-> {finding.advice}" for finding in findings]
    below = plain("looking on …" if goes_on else _verdict(findings))
    return table(("", "looked at", "found"), rows, remarks) + below


def _verdict(findings: Sequence[Finding]) -> str:
    bad = sum(finding.verdict == "bad" for finding in findings)
    return f"{counted(bad, 'thing')} to do before runs work" if bad else "runs work here"


def _packages() -> Iterable[Finding]:
    found = [f"Python {platform.python_version()} on Linux {platform.release()}, {sys.executable}"]
    needed = ("jupyter-taas", "ipython", "ipykernel", "pyzmq", "msgspec", "cloudpickle", "psutil")
    only_for_some = ("ray", _NVML)  # for clusters, and for NVIDIA GPUs
    for name in (*needed, *only_for_some):
        if version := _version(name):
            found.append(f"{name} {version}")
    yield Finding("ok", "packages", ", ".join(found))


_NVML = "nvidia-ml-py"


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _monitoring(root: Path = Path("/")) -> Iterable[Finding]:
    """Check whether the load of the GPUs, if there are any, can be read."""
    if not present_gpus(root):
        return
    if version := _version(_NVML):
        yield Finding("ok", _NVML, f"{version}: a run's rows show what its GPUs do")
    else:
        fact = (
            "not installed: a run's rows do not show how busy its GPUs are, nor the memory that is"
            " used there"
        )
        yield Finding("note", _NVML, fact, f"pip install {_NVML}")


def _torch() -> Iterable[Finding]:
    command = [sys.executable, "-c", _TORCH]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_TORCH_SECONDS, check=True
        )
    except subprocess.SubprocessError as error:
        said = error.stderr if isinstance(error, subprocess.CalledProcessError) else str(error)
        last = (said.strip().splitlines() or ["it ended without a word"])[-1]
        yield Finding("bad", "torch", last, "pip install --upgrade torch torchvision")
        return
    said = json.loads(done.stdout.splitlines()[-1])
    wanted = ("gloo", "nccl") if visible_gpus() else ("gloo",)
    lacks = [backend for backend in wanted if not said[backend]]
    build = f"CUDA {said['cuda']}" if said["cuda"] else "CPU build"
    fact = (
        f"{said['torch']} ({build}, {'without' if lacks else 'with'}"
        f" {' and '.join(lacks or wanted)})"
    )
    yield Finding(
        "bad" if lacks else "ok", "torch", fact, "install torch from PyPI" if lacks else ""
    )
    yield _gpus(said["gpus"])


def _gpus(of_torch: Sequence[str], root: Path = Path("/")) -> Finding:
    present, unseen = visible_gpus(root), None if present_gpus(root) else unseen_gpu(root)
    if present and lacks_uvm(root):
        fact = (
            f"the driver shows {len(present)}, and /dev/nvidia-uvm, which CUDA needs, is not there"
        )
        advice = (
            "run `nvidia-modprobe -u -c=0`, as root where it asks for that: the file is made by the"
            " first program that uses CUDA after the machine was booted; in a container, start that"
            " with --gpus all"
        )
        return Finding("bad", "GPUs", fact, advice)
    if present and not of_torch:
        fact = f"the driver shows {len(present)}, torch sees none"
        return Finding(
            "bad", "GPUs", fact, "install a torch build for the driver that `nvidia-smi` shows"
        )
    if present:
        return Finding("ok", "GPUs", ", ".join(of_torch))
    where, advice = unseen or ("", "nothing, or run where there are GPUs")
    fact = f"{where} is here, but no GPU to use" if where else "none here"
    return Finding("note", "GPUs", f"{fact}: cells are rehearsed on CPU ranks", advice)


def _limit_finding(what: str, fact: str, limited: bool, advice: str) -> Finding:
    return Finding("note", what, fact, advice) if limited else Finding("ok", what, fact)


def _machine() -> Iterable[Finding]:
    free, cores = memory_left().free, len(os.sched_getaffinity(0))
    advice = "a rank needs about 0.2 GB, and its model: close something"
    yield _limit_finding(
        "machine", f"{cores} cores, {size_in_words(free)} memory free", free < _GIB, advice
    )
    advice = "DataLoader workers and delivery need more: start the container with --shm-size=8g"
    yield _room("shared memory", Path("/dev/shm"), advice)  # noqa: S108  it is what is asked about
    folder = Path(jupyter_runtime_dir())
    folder.mkdir(parents=True, exist_ok=True)
    yield _room(
        "run folders", folder, "output of runs is kept there: make room, or set JUPYTER_RUNTIME_DIR"
    )


def _room(what: str, folder: Path, advice: str) -> Finding:
    free = shutil.disk_usage(folder).free if os.access(folder, os.W_OK) else 0
    return _limit_finding(
        what, f"{size_in_words(free)} to be written in {folder}", free < _GIB // 4, advice
    )


def _write_rule() -> Iterable[Finding]:
    fact = "; ".join(line.strip() for line in walls.verdicts()).removeprefix("write rule: ")
    advice = (
        "as root, or with user namespaces, ranks get a mount; Linux 5.13 or newer may have Landlock"
    )
    yield _limit_finding("write rule", fact, not fact.startswith("mount"), advice)


# ---------------------------------------------------------------- taas engine slurm --check


def examine_slurm(settings: Settings) -> Iterable[Finding]:
    """Check commands, partitions and one node, with a job that waits for at most a minute."""
    try:
        yield Finding("ok", "Slurm", slurm("sbatch", "--version").strip())
        for line in slurm("sinfo", "--noheader", "--format=%R %D %G %l %a").splitlines():
            name, nodes, gres, limit, state = line.split()
            fact = f"{nodes} nodes, GRES {gres}, time limit {limit}, {state}"
            yield _limit_finding(f"partition {name}", fact, state != "up", "choose another one")
        yield from _node(settings, own_address(settings))
    except EngineError as error:
        advice = (
            "on a login node, perhaps after `module load slurm`, `scontrol ping` tells whether it"
            " is there"
        )
        yield Finding("bad", "Slurm", str(error), advice)


def _node(settings: Settings, host: str) -> Iterable[Finding]:
    asked = [
        f"--{name}={value}" for name in ("partition", "account") if (value := settings.get(name))
    ]
    command = (
        "srun",
        "--quiet",
        "--nodes=1",
        "--ntasks=1",
        "--time=1",
        f"--immediate={_SLURM_SECONDS // 2}",
    )
    with contextlib.closing(socket.create_server((host, 0))) as server:
        look = (settings.python, "-P", "-c", _ON_A_NODE, host, str(server.getsockname()[1]))
        try:
            name, there, why = json.loads(slurm(*command, *asked, *look, seconds=_SLURM_SECONDS))
        except EngineError as error:
            advice = "give --python, and install taas there; or try again when a node is free"
            yield Finding("bad", "a node", str(error), advice)
            return
    yield Finding(
        "ok", "a node", f"{name}, Python {there['python']}, torch {there['torch'] or 'missing'}"
    )
    if differing := differing_versions(there, versions()):
        yield Finding(
            "bad", "versions", differing, "most simply both use one environment: --python"
        )
    way = f"{name} {'does not reach' if why else 'reaches'} this machine at {host}"
    advice = "a firewall between them? Or give --host another address of this machine"
    yield (
        Finding("bad", "way back", f"{way}: {why}", advice)
        if why
        else Finding("ok", "way back", way)
    )
