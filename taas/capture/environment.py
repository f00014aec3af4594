"""Environment variables: those that cells change are sent; those about a process stay with it.

Three kinds stay:

* variables that describe a rank, such as torchrun's;
* variables that a library sets in the process that uses it, without a request by the user (a
  compiler's default cache);
* variables that refer to a process or a socket of the rank, such as wandb's ``WANDB_SERVICE``,
  which are useless once the rank has ended.
"""

from __future__ import annotations

import os
import re
import socket
import stat
import time
from pathlib import Path
from types import ModuleType

import psutil

from taas.base.import_hooks import absolute_import_path

_A_RANKS_OWN = {
    "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE",
    "MASTER_ADDR", "MASTER_PORT", "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "MPLBACKEND",
    "NODE_RANK", "PWD", "OLDPWD", "SHLVL", "_",
}  # fmt: skip
_A_RANKS_OWN_PREFIXES = ("ROLE_", "TORCHELASTIC_", "TAAS_", "JPY_", "TORCH_NCCL_")
_LEFT_BY_LIBRARIES = {
    "CUDA_MODULE_LOADING": re.compile("LAZY"),  # torch up to 2.8, when CUDA is initialised
    "TORCHINDUCTOR_CACHE_DIR": re.compile(r".*/torchinductor_[^/]*"),  # torch.compile
    # torch.compile; the number is the rank's device
    "TRITON_CACHE_DIR": re.compile(r".*/triton/\d+"),
    # wandb's service, which a process starts for itself
    "WANDB_SERVICE": re.compile(r"\d+-\d+-(unix|tcp)-.*"),
}
"""Variables that libraries set themselves. Each process sets them again, and a value set by the
user does not match the pattern.
"""
_COARSE_CLOCK = 5
"""CLOCK_REALTIME_COARSE (clock_gettime(2)), the clock of file times; Python has no name for it."""


def inherited_variables() -> dict[str, str]:
    """Return the environment with which this process was started."""
    entries = os.fsdecode(Path("/proc/self/environ").read_bytes()).split("\0")
    return dict(entry.split("=", 1) for entry in entries if "=" in entry)


def changed_variables() -> tuple[str, ...]:
    """Return the variables that this process has set, changed or removed since it started."""
    inherited = inherited_variables()
    names = inherited.keys() | os.environ.keys()
    return tuple(sorted(name for name in names if inherited.get(name) != os.environ.get(name)))


def sendable_variables() -> tuple[dict[str, str], list[str]]:
    """Return the environment that a message can contain, and the names that are never sent.

    Variables that the notebook itself has set are sent with its Python variables, whatever their
    bytes. Variables that a library has set for this process are neither sent nor reported.
    """
    changed = changed_variables()
    of_here = {name for name in changed if _is_of_library(name, os.environ.get(name, ""))}
    environ = {
        n: value for n, value in os.environ.items() if is_utf8(n + value) and n not in of_here
    }
    # the forkserver, which reads the environment, has another working directory
    if text := environ.get("PYTHONPATH"):
        environ["PYTHONPATH"] = absolute_import_path(text)
    left_out = os.environ.keys() - environ.keys() - {*changed}
    return environ, [ascii(name)[1:-1] for name in os.environ if name in left_out]


def is_utf8(text: str) -> bool:
    """Tell whether a string from the system is UTF-8; Python uses surrogates for other bytes."""
    return text.encode(errors="ignore").decode() == text


def is_a_ranks_own(name: str, value: str) -> bool:
    """Tell whether a variable stays: it describes a rank, or a library set it for its process."""
    describes = name in _A_RANKS_OWN or name.startswith(_A_RANKS_OWN_PREFIXES)
    return describes or _is_of_library(name, value)


def _is_of_library(name: str, value: str) -> bool:
    """Tell whether a library set a variable for the process that uses the library."""
    left = _LEFT_BY_LIBRARIES.get(name)
    return left is not None and left.fullmatch(value) is not None


# ------------------------------------------------------ variables that refer to a process


def file_time() -> int:
    """Return the time in nanoseconds that a file created now would have."""
    return time.clock_gettime_ns(_COARSE_CLOCK)


def take_out_of_processes(told: dict[str, str | None], since: int) -> list[str]:
    """Remove the variables that refer to this process, a child or a socket; return the reasons.

    A socket counts if it was created after ``since`` (:func:`file_time`), or if no process serves
    it.
    """
    reasons = {
        name: why for name, value in told.items() if value and (why := _process_in(value, since))
    }
    for name in reasons:
        del told[name]
    return [f"the variable {name}: it names {why}" for name, why in reasons.items()]


def _process_in(value: str, since: int) -> str:
    """Return a description of the process or socket to which a value refers; empty if none."""
    for path in re.findall(r"/[^\s:;,'\"]+", value):
        if _is_of_rank(path, since):
            return f"the socket {path}, which no process serves once the ranks have ended"
    numbers = {int(digits) for digits in re.findall(r"(?<![\d.])\d{2,8}(?![\d.])", value)}
    if not numbers:
        return ""
    own = {os.getpid(), *(child.pid for child in psutil.Process().children(recursive=True))}
    found = numbers & own
    return f"process {min(found)}, which is rank 0's own" if found else ""


def _is_of_rank(path: str, since: int) -> bool:
    try:
        there = Path(path).stat()
    except (OSError, ValueError):
        return False
    if not stat.S_ISSOCK(there.st_mode):
        return False
    if there.st_ctime_ns >= since:
        return True
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) as visit:
        try:
            visit.connect(path)
        except ConnectionRefusedError:  # its process has ended
            return True
        except OSError:
            # A process serves it: it uses another protocol, is busy, or does not admit this user.
            return False
    return False


# ----------------------------------------------------------- setting variables


def put_variables(_: ModuleType, told: dict[str, str | None]) -> None:
    """Set environment variables, and remove those that are None."""
    os.environ.update({name: value for name, value in told.items() if value is not None})
    for name in [name for name, value in told.items() if value is None]:
        os.environ.pop(name, None)
