"""What ``ps`` and ``top`` call the processes that are not ranks yet (proc_pid_comm(5))."""

from __future__ import annotations

from pathlib import Path

FORKSERVER = "taas-forkserver"
SPARE = "taas-spare"
_COMM = Path("/proc/self/comm")
OWN = _COMM.read_text().rstrip("\n")
"""The name this process began with; in a rank it is the one that any Python process has."""


def call(name: str) -> None:
    """Give this process's main thread a name of up to 15 characters."""
    _COMM.write_text(name)
