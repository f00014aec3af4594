"""Versions on a VM, which an engine compares with those here before it starts an agent there.

It needs nothing but the standard library, so that it can be sent to a machine without taas, which then can say so.
"""

from __future__ import annotations

import importlib.metadata
import platform

_COMPARED = ("jupyter-taas", "torch", "cloudpickle", "numpy", "msgspec", "pyzmq")
_PARTS = {"python": 2, "torch": 3, "cloudpickle": 2, "jupyter-taas": 9}


def versions() -> dict[str, str]:
    """Return the versions here: of Python, and of what is compared; empty for what is not installed."""
    found = {"python": platform.python_version()}
    for name in _COMPARED:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = ""
    return found


def differing_versions(there: dict[str, str], here: dict[str, str]) -> str:
    """Say what differs between a VM and the notebook's machine in a way that matters; empty if nothing does.

    Python has to agree in its minor version, taas, torch and cloudpickle as they are, the others in their major one.
    """
    for name, ours in here.items():
        theirs, count = there.get(name, ""), _PARTS.get(name, 1)
        if _series(theirs, count) != _series(ours, count):
            install = "" if name == "python" else f'; run `pip install "{name}=={ours.split("+")[0]}"` there'
            return f"the notebook has {name} {ours or 'not'}, the VM {theirs or 'not'}{install}"
    return ""


def _series(version: str, parts: int) -> tuple[str, ...]:
    return tuple(version.split("+")[0].split(".")[:parts])
