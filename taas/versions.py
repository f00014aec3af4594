"""Compare the versions of Python and of libraries between machines.

They are compared before an agent starts on a VM, and before a rank unpickles variables.

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
    """Return the versions of Python and of some libraries in this process.

    The version of a library is that of the imported module or, if it is not imported, that of the
    installed package; it is empty if the library is missing.
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
    """Return ``__version__`` from the namespace of an imported library.

    This does not use ``getattr``, which would make a lazy module import itself.
    """
    try:
        return object.__getattribute__(sys.modules.get(name), "__dict__").get("__version__")
    except AttributeError:  # not imported, or ``sys.modules`` has an object without ``__dict__``
        return None


def differing_versions(there: dict[str, str], here: dict[str, str]) -> str:
    """Describe a version that differs between a VM and the notebook's machine; empty if none does.

    taas and torch have to be the same release, Python and cloudpickle the same minor version, and
    all other libraries the same major version. Builds of one release count as equal
    (``2.9.1+cu126`` and ``2.9.1``).
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
