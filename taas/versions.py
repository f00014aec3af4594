"""Compares versions of Python and libraries between machines.

An agent does so before it starts on a VM, a rank before it unpickles names.

This module imports only the standard library, so that it can run on a machine without taas and say
that taas is missing.
"""

from __future__ import annotations

import importlib.metadata
import platform
import sys
from collections.abc import Iterable

COMPARED = ("jupyter-taas", "torch", "cloudpickle", "numpy", "msgspec", "pyzmq")
_PARTS = {"python": 2, "torch": 3, "cloudpickle": 2, "jupyter-taas": 9}


def versions(names: Iterable[str] = COMPARED) -> dict[str, str]:
    """Return this process's versions of Python and of some libraries.

    They are those of imported libraries, else of installed ones; empty for a missing one.
    """
    found = {"python": platform.python_version()}
    for name in names:
        try:
            known = found.get(name) or _imported_version(name)
            found[name] = str(known or importlib.metadata.version(name))
        except importlib.metadata.PackageNotFoundError:
            found[name] = ""
    return found


def _imported_version(name: str) -> object:
    """Return the version in an imported library's namespace.

    It is not asked as an attribute: a lazy module would import itself.
    """
    try:
        return object.__getattribute__(sys.modules.get(name), "__dict__").get("__version__")
    except AttributeError:  # it is not imported, or an object without attributes stands for it
        return None


def differing_versions(there: dict[str, str], here: dict[str, str]) -> str:
    """Say which version differs between a VM and the notebook's machine; empty if none does.

    Python has to agree in its minor version, taas, torch and cloudpickle as they are, the others in
    their major one. Builds of one release agree (``2.9.1+cu126`` and ``2.9.1``).
    """
    for name, ours in here.items():
        theirs, count = there.get(name, ""), _PARTS.get(name, 1)
        if _series(theirs, count) != _series(ours, count):
            install = (
                ""
                if name == "python"
                else f'; run `pip install "{name}=={ours.split("+")[0]}"` there'
            )
            return f"the notebook has {name} {ours or 'not'}, the VM {theirs or 'not'}{install}"
    return ""


def _series(version: str, parts: int) -> tuple[str, ...]:
    return tuple(version.split("+")[0].split(".")[:parts])
