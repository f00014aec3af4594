"""What this machine has, what it lacks, and what to do about it; found by trying."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import psutil
from jupyter_core.paths import jupyter_runtime_dir

from taas.engines.local import present_gpus, unseen_gpu, visible_gpus
from taas.notebook.tables import Shown, plain, table
from taas.storage import walls
from taas.wording import counted, size_in_words

_SECONDS = 120
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


@dataclass(frozen=True)
class Finding:
    """One line of the report.

    Attributes:
        verdict: ``ok``; ``note``: it works, with a limit; ``bad``: runs fail until something is done.
        what: what was looked at.
        fact: what was found.
        advice: what to do; empty where there is nothing.
    """

    verdict: Literal["ok", "note", "bad"]
    what: str
    fact: str
    advice: str = ""


def examine() -> list[Finding]:
    """Look at everything a run needs on this machine. Takes some seconds: torch is asked in a process of its own."""
    looks = (_packages, _torch, _memory, _write_rule, _host_name, _runtime_folder)
    return [finding for look in looks for finding in look()]


def _limited(what: str, fact: str, limited: bool, advice: str) -> Finding:
    return Finding("note", what, fact, advice) if limited else Finding("ok", what, fact)


def _packages() -> Iterable[Finding]:
    yield Finding(
        "ok", "Python", f"{platform.python_version()} on Linux {platform.release()}, {sys.executable}"
    )
    found = []
    for name in ("jupyter-taas", "ipython", "ipykernel", "pyzmq", "msgspec", "cloudpickle", "psutil", "ray"):
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            if name != "ray":  # only needed for many machines
                yield Finding("bad", name, "not installed", "pip install jupyter-taas")
    yield Finding("ok", "packages", ", ".join(found))


def _torch() -> Iterable[Finding]:
    try:
        done = subprocess.run(
            [sys.executable, "-c", _TORCH], capture_output=True, text=True, timeout=_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        yield Finding("bad", "torch", f"its import took more than {_SECONDS} s", "look at the disk it is on")
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
        yield Finding(
            "note",
            "GPUs",
            f"{unseen[0]} is here, but no GPU to use: cells are rehearsed on CPU ranks",
            unseen[1],
        )
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
    first, *rest = walls.verdicts()
    fact = first.removeprefix("write rule: ")
    details = "; ".join(line.strip() for line in rest)
    fact = f"{fact}; {details}" if details else fact
    if fact.startswith("none"):
        yield Finding("bad", "write rule", fact, "use Linux 5.13 or newer, or allow user namespaces")
    else:
        advice = "as root, or with user namespaces allowed, ranks get a mount"
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


def report(findings: Sequence[Finding]) -> Shown:
    """Show findings, a line each, with what to do below those that ask for it."""
    marks = {"ok": "✓", "note": "!", "bad": "✗"}
    rows = [(marks[finding.verdict], finding.what, finding.fact) for finding in findings]
    bad = sum(finding.verdict == "bad" for finding in findings)
    verdict = f"{counted(bad, 'thing')} to do before runs work" if bad else "runs work here"
    remarks = [finding.advice and f"-> {finding.advice}" for finding in findings]
    return table(("", "looked at", "found"), rows, remarks) + plain(verdict)
