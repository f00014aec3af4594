"""Environment variables: those that cells change travel, those that describe a rank do not."""

from __future__ import annotations

import os
from pathlib import Path
from types import ModuleType

_A_RANKS_OWN = {
    "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE",
    "MASTER_ADDR", "MASTER_PORT", "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "MPLBACKEND",
    "NODE_RANK", "PWD", "OLDPWD", "SHLVL", "_",
}  # fmt: skip
_A_RANKS_OWN_PREFIXES = ("ROLE_", "TORCHELASTIC_", "TAAS_", "JPY_", "TORCH_NCCL_", "TORCHDYNAMO_")


def inherited_variables() -> dict[str, str]:
    """Return the environment that this process was started with."""
    entries = os.fsdecode(Path("/proc/self/environ").read_bytes()).split("\0")
    return dict(entry.split("=", 1) for entry in entries if "=" in entry)


def changed_variables() -> tuple[str, ...]:
    """Return the names of environment variables that this process has set, changed or removed since it began."""
    inherited = inherited_variables()
    names = inherited.keys() | os.environ.keys()
    return tuple(sorted(name for name in names if inherited.get(name) != os.environ.get(name)))


def sendable_variables() -> tuple[dict[str, str], list[str]]:
    """Return the environment that a message can carry, and the names of what is left out for good.

    What the notebook itself set travels with its names, in whatever bytes.
    """
    environ = {name: value for name, value in os.environ.items() if is_utf8(name + value)}
    changed = changed_variables()
    return environ, [ascii(name)[1:-1] for name in os.environ if name not in environ and name not in changed]


def is_utf8(text: str) -> bool:
    """Whether a text of the system's is what it should be; bytes that are not come as lone surrogates."""
    return text.encode(errors="ignore").decode() == text


def is_a_ranks_own(name: str) -> bool:
    """Tell whether a variable describes a rank, and so never travels."""
    return name in _A_RANKS_OWN or name.startswith(_A_RANKS_OWN_PREFIXES)


def put_variables(_: ModuleType, told: dict[str, str | None]) -> None:
    """Set variables, and remove those that are None."""
    os.environ.update({name: value for name, value in told.items() if value is not None})
    for name in [name for name, value in told.items() if value is None]:
        os.environ.pop(name, None)
