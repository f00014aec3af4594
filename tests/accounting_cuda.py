"""Programs that use CUDA where there is none.

torch runs on top of ``accounting_cuda.c``, which keeps account of its calls.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from taas.base import linux

SECONDS = 120
needs_it = pytest.mark.skipif(
    not (torch.version.cuda or "").startswith("13.") or shutil.which("cc") is None,
    reason=(
        "needs a torch that is built for CUDA 13, whose runtime is stood in for, and a C compiler"
    ),
)
STICK = """
import ctypes, threading
account = ctypes.CDLL(None)
def in_a_thread(function):
    said = []
    thread = threading.Thread(target=lambda: said.append(function()), daemon=True)
    thread.start()
    thread.join(60)
    return said
"""
"""For programs: what is stuck, by ``account.account_stick(device, 1)``, and what a new thread
returns within a minute.
"""


class Call(NamedTuple):
    """What a thread did on a device."""

    thread: int
    what: str
    device: int


@cache
def _library() -> Path:
    """Build it; it has the name by which torch's libraries want the driver."""
    folder = Path(tempfile.mkdtemp(prefix="accounting-"))
    library = folder / "libcuda.so.1"
    source = Path(__file__).with_name("accounting_cuda.c")
    command = [
        "cc",
        "-shared",
        "-fPIC",
        "-O1",
        "-w",
        f"-Wl,-soname,{library.name}",
        "-o",
        library,
        source,
    ]
    subprocess.run(command, check=True)
    return library


_EACH = """
import os, sys, {imports}
for name, program in {programs!r}.items():
    os.environ["ACCOUNT"] = os.path.join({folder!r}, name)
    if (pid := os.fork()) == 0:
        sys.stdout = open(os.environ["ACCOUNT"] + ".lines", "w")
        exec(program, {{"__name__": "__main__"}})
        sys.stdout.close()
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0, name
"""


def accounts_of(
    programs: Mapping[str, str], folder: Path, *, imports: str = "torch"
) -> dict[str, tuple[list[str], list[Call]]]:
    """Run programs in forks of a fresh interpreter that sees four GPUs.

    Returns the lines of each, and its account.
    """
    environ = {**os.environ, "LD_PRELOAD": str(_library()), "ACCOUNT": str(folder / "unused")}
    whole = _EACH.format(imports=imports, programs={**programs}, folder=str(folder))
    ran = subprocess.run(
        [sys.executable, "-c", whole],
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
        env=environ,
        cwd=folder,
    )
    assert ran.returncode == 0, ran.stderr
    found = {}
    for name in programs:
        account = folder / name
        calls = (
            [line.split() for line in account.read_text().splitlines()] if account.exists() else []
        )
        lines = Path(f"{account}.lines").read_text().splitlines()
        found[name] = (
            lines,
            [Call(int(thread), what, int(device)) for thread, what, device in calls],
        )
    return found


def contexts(calls: list[Call]) -> list[int]:
    """Return the devices on which contexts were made, in order."""
    return [call.device for call in calls if call.what == "context"]


def show_gpus(count: int) -> None:
    """Let this process, and all that it starts, see device files of so many GPUs.

    They lie in a private ``/dev``, which root can make.
    """
    linux.unshare(linux.CLONE_NEWNS)
    linux.mount(None, "/", linux.MS_REC | linux.MS_PRIVATE)
    made = Path(tempfile.mkdtemp(prefix="dev-"))
    subprocess.run(["mount", "-t", "tmpfs", "dev", made], check=True)
    for name in ("null", "zero", "full", "random", "urandom", "tty", "ptmx"):
        (made / name).touch()
        linux.mount(f"/dev/{name}", str(made / name), linux.MS_BIND)
    for name in ("shm", "pts"):
        (made / name).mkdir()
        linux.mount(f"/dev/{name}", str(made / name), linux.MS_BIND)
    (made / "fd").symlink_to("/proc/self/fd")
    for number in range(count):
        (made / f"nvidia{number}").touch()
    (made / "nvidia-uvm").touch()
    subprocess.run(["mount", "--move", made, "/dev"], check=True)
    made.rmdir()


def environ_of_cuda(account: Path) -> dict[str, str]:
    """Return the variables with which a kernel, and what it starts, runs on this CUDA."""
    return {"LD_PRELOAD": str(_library()), "ACCOUNT": str(account)}
