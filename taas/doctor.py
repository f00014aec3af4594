"""What this machine has, what it lacks, and what to do about it; found by trying."""

from __future__ import annotations

import html
import importlib.metadata
import json
import os
import platform
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import psutil
from jupyter_core.paths import jupyter_runtime_dir

from taas.devices import visible_gpus
from taas.status import Shown

__all__ = ["Finding", "examine", "report"]

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
    looks: tuple[Callable[[], Iterable[Finding]], ...] = (
        _python,
        _packages,
        _torch,
        _processor_and_memory,
        _shared_memory,
        _write_rule,
        _ports,
        _runtime_folder,
        _ray,
    )
    findings: list[Finding] = []
    for look in looks:
        findings += look()
    return findings


def _python() -> Iterable[Finding]:
    version = platform.python_version()
    if not sys.platform.startswith("linux"):
        yield Finding("bad", "Python", f"{version} on {sys.platform}", "run the kernel on Linux")
    else:
        yield Finding("ok", "Python", f"{version} on Linux {platform.release()}, {sys.executable}")


def _packages() -> Iterable[Finding]:
    found = []
    for name in ("jupyter-taas", "ipython", "ipykernel", "pyzmq", "msgspec", "cloudpickle", "psutil"):
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
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
        yield Finding(
            "bad",
            "GPUs",
            f"the driver shows {len(present)}, torch sees none",
            "compare `nvidia-smi` with torch's CUDA version; install a torch build for this driver",
        )
    elif present:
        names = ", ".join(f"{said['gpus'].count(name)} × {name}" for name in dict.fromkeys(said["gpus"]))
        yield Finding("ok", "GPUs", names)
    else:
        yield Finding(
            "note",
            "GPUs",
            "none here: cells are rehearsed on CPU ranks",
            "nothing, or run where there are GPUs",
        )
    if not said["gloo"]:
        yield Finding("bad", "gloo", "torch was built without it", "install torch from PyPI")
    elif said["nccl"]:
        yield Finding("ok", "NCCL", f"{said['nccl version']}; gloo is there too")
    elif present:
        yield Finding("bad", "NCCL", "torch was built without it", "install torch's CUDA build")
    else:
        yield Finding("ok", "gloo", "there; NCCL is not, and not needed without GPUs")


def _processor_and_memory() -> Iterable[Finding]:
    cores = len(os.sched_getaffinity(0))
    memory = psutil.virtual_memory()
    fact = f"{cores} cores, {memory.available / _GIB:.1f} of {memory.total / _GIB:.1f} GiB memory free"
    if memory.available < _GIB:
        yield Finding("note", "machine", fact, "a rank needs about 0.2 GiB, and its model: close something")
    else:
        yield Finding("ok", "machine", fact)


def _shared_memory() -> Iterable[Finding]:
    usage = shutil.disk_usage("/dev/shm")  # noqa: S108  it is what is asked about
    fact = f"{usage.free / _GIB:.2f} of {usage.total / _GIB:.2f} GiB free in /dev/shm"
    if usage.free < 256 << 20:
        yield Finding(
            "note",
            "shared memory",
            fact,
            "DataLoader workers and delivery need more: start the container with --shm-size=8g",
        )
    else:
        yield Finding("ok", "shared memory", fact)


def _write_rule() -> Iterable[Finding]:
    from taas import rank_storage

    first, *rest = rank_storage.doctor()
    fact = first.removeprefix("write rule: ")
    details = "; ".join(line.strip() for line in rest)
    fact = f"{fact}; {details}" if details else fact
    if fact.startswith("none"):
        yield Finding("bad", "write rule", fact, "use Linux 5.13 or newer, or allow user namespaces")
    elif fact.startswith("mount"):
        yield Finding("ok", "write rule", fact)
    else:
        yield Finding(
            "note", "write rule", fact, "as root, or with user namespaces allowed, ranks get a mount"
        )


def _ports() -> Iterable[Finding]:
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            address = server.getsockname()
            with socket.create_connection(address, 5), server.accept()[0]:
                pass
    except OSError as error:
        yield Finding("bad", "ports", f"loopback connections fail: {error}", "allow TCP on 127.0.0.1")
        return
    name = socket.gethostname()
    try:
        where = socket.gethostbyname(name)
    except OSError:
        yield Finding(
            "note",
            "ports",
            f"loopback works; the host's name {name} has no address",
            f"add `127.0.1.1 {name}` to /etc/hosts if gloo cannot connect",
        )
    else:
        yield Finding("ok", "ports", f"loopback works; {name} is {where}")


def _runtime_folder() -> Iterable[Finding]:
    folder = Path(jupyter_runtime_dir())
    folder.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(folder).free
    fact = f"{free / _GIB:.1f} GiB free in {folder}"
    if not os.access(folder, os.W_OK):
        yield Finding("bad", "run folders", f"{folder} cannot be written", "set JUPYTER_RUNTIME_DIR")
    elif free < _GIB:
        yield Finding("note", "run folders", fact, "output of runs is kept there: make room")
    else:
        yield Finding("ok", "run folders", fact)


def _ray() -> Iterable[Finding]:
    try:
        yield Finding("ok", "Ray", f"{importlib.metadata.version('ray')} (only needed for many machines)")
    except importlib.metadata.PackageNotFoundError:
        yield Finding(
            "ok", "Ray", "not installed, and only needed for many machines: pip install jupyter-taas[ray]"
        )


def report(findings: Iterable[Finding]) -> Shown:
    """Show findings, a line each, with what to do below those that ask for it."""
    marks = {"ok": "✓", "note": "!", "bad": "✗"}
    everything = list(findings)
    width = max(len(finding.what) for finding in everything)
    text: list[str] = []
    rows: list[str] = []
    for finding in everything:
        mark = marks[finding.verdict]
        text.append(f"{mark} {finding.what:<{width}}  {finding.fact}")
        if finding.advice:
            text.append(f"  {'':<{width}}  -> {finding.advice}")
        cells = (mark, finding.what, finding.fact, finding.advice)
        rows.append(
            "<tr>"
            + "".join(f'<td style="text-align:left">{html.escape(cell)}</td>' for cell in cells)
            + "</tr>"
        )
    bad = sum(finding.verdict == "bad" for finding in everything)
    verdict = f"{bad} thing{'s' if bad != 1 else ''} to do before runs work" if bad else "runs work here"
    return Shown("\n".join([*text, verdict]), f"<table>{''.join(rows)}</table><div>{verdict}</div>")
