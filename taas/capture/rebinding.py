"""An answer into a notebook other than the one the run was started from: nothing to change in place, names rebound."""

from __future__ import annotations

import contextlib
import importlib
import linecache
import sys
import types
from typing import Any

from taas.capture.applying import Applied, OwnMemory, apply_answer
from taas.capture.memory import read_at
from taas.capture.payload import FileMemory, Patch, check_versions, read_pickle, read_preface
from taas.capture.quiet import no_collection
from taas.capture.returning import Arrival

__all__ = ["rebind_answer"]

_UNCHANGEABLE = (
    type(None), bool, int, float, complex, str, bytes, range,
    types.ModuleType, types.FunctionType, types.BuiltinFunctionType, type,
)  # fmt: skip


class _ArrivedMemory(OwnMemory):
    """The memory of a payload that was unpacked here."""

    def __init__(self, memory: FileMemory) -> None:
        self._memory = memory

    def on_device(self) -> bool:
        """Tell whether any of it is on a CUDA device here."""
        return bool(self._memory.on_device())

    def storage(self, *where: int) -> Any:
        """Return the storage over a part of it."""
        return self._memory.storage(*where)

    def buffer(self, *where: int) -> memoryview:
        """Return a part of it, writable."""
        return self._memory.buffer(*where)

    def patch(self, patch: Patch, fd: int) -> str | None:
        """Write changed bytes into it."""
        read_at(fd, self._memory.buffer(patch.region, patch.start, patch.nbytes), patch.offset)
        return None


def rebind_answer(payload_fd: int, answer_fd: int, namespace: dict[str, Any]) -> Applied:
    """Bring a run's names into a notebook that did not start it.

    The names the cell was given are unpacked first, as in a rank, and changed as rank 0 changed them. What the
    notebook has under the same name stays if the cell could not have changed it: numbers, text, functions,
    classes, modules that the cell did not rebind.

    Args:
        payload_fd: the names the cell was given.
        answer_fd: rank 0's answer.
        namespace: the notebook's names.

    Raises:
        VersionMismatch: versions differ; nothing was unpickled.
        CaptureError: an object cannot be rebuilt here.
    """
    memory = FileMemory(payload_fd, device=None)
    check_versions(memory.header)
    preface = read_preface(payload_fd)
    for entry in (preface["project"], *preface["surroundings"]["path"]):
        if entry not in sys.path:
            sys.path.append(entry)
    for name, (size, lines) in preface["sources"].items():
        linecache.cache[name] = (size, None, lines, name)
    for name in preface["submodules"]:
        with contextlib.suppress(ImportError):  # it is named where it is used
            importlib.import_module(name)
    before = {name: namespace[name] for name in memory.header.names if name in namespace}
    arrival = Arrival(payload_fd, namespace, memory, preface)
    try:
        with no_collection():
            arrival._load(read_pickle(payload_fd))
        applied = apply_answer(answer_fd, namespace, lambda: arrival._objects, _ArrivedMemory(memory))
    except BaseException:
        for name in memory.header.names:
            namespace.pop(name, None)
        namespace.update(before)
        raise
    finally:
        arrival.close()
    for name, value in before.items():
        if name not in applied.rebound and isinstance(namespace.get(name), _UNCHANGEABLE):
            namespace[name] = value
    gone = set(applied.deleted)
    brought = [n for n in memory.header.names if n not in gone and namespace.get(n) is not before.get(n)]
    applied.rebound = list(dict.fromkeys([*applied.rebound, *brought]))
    return applied
