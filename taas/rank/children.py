"""Processes that a cell starts itself with ``multiprocessing``.

A forked child has everything that its rank has. ``spawn`` and ``forkserver`` start a fresh Python
and send it the ``Process`` object as a pickle, in which a function defined in a script is a
reference to a name in its file. A notebook has no file. Functions and classes defined in cells are
therefore pickled by value here and placed in the child's ``__main__``, together with the variables
that they use.
"""

from __future__ import annotations

import collections
import copyreg
import io
import linecache
import os
import pickle
import sys
import types
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import ForkingPickler
from typing import Any

import cloudpickle

from taas.base.import_hooks import after_import

_NAMESPACE = "globals of the notebook"
_membership: Any = None
"""The rank's membership when a child starts: a later run of this rank may use another store."""


def install(membership: Any) -> None:
    """Give children the notebook's variables, and the rank's membership if they import torch."""
    global _membership
    _membership = membership
    BaseProcess.__reduce__ = _reduce  # type: ignore[method-assign, assignment]
    if membership.rehearsed:
        os.register_at_fork(after_in_child=_compute_in_one_thread)


def _compute_in_one_thread() -> None:
    """Compute in one thread in a rehearsed child: OpenMP's threads exist only in its parent."""
    sys.modules["torch"].set_num_threads(1)


class _Pickler(cloudpickle.Pickler):
    """cloudpickle, plus what ``multiprocessing`` can send: queues, locks, shared tensors."""

    def __init__(self, file: io.BytesIO) -> None:
        extra: Any = ForkingPickler
        # Set before the constructor of pickle's class, which reads it.
        self.dispatch_table = collections.ChainMap(
            extra._extra_reducers, cloudpickle.Pickler.dispatch_table
        )
        super().__init__(file, protocol=5)
        self.namespace = vars(sys.modules["__main__"])
        self.globals_ref[id(self.namespace)] = self.namespace
        self.named: dict[str, Any] = {}
        self.cells: dict[str, Any] = {}

    def persistent_id(self, value: Any) -> str | None:
        # The child has its own globals; functions bring the variables that they use.
        return _NAMESPACE if value is self.namespace else None

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, BaseProcess):
            state = value.__getstate__()
            return copyreg.__newobj__, (type(value),), state  # type: ignore[attr-defined]
        if isinstance(value, types.CodeType):
            if text := linecache.cache.get(value.co_filename):
                self.cells[value.co_filename] = text
        elif isinstance(value, (type, types.FunctionType)):
            name = str(value.__name__)
            if self.namespace.get(name) is value:
                self.named[name] = value
        return super().reducer_override(value)


class _Unpickler(pickle.Unpickler):
    def persistent_load(self, pid: Any) -> Any:
        assert pid == _NAMESPACE
        return sys.modules["__main__"].__dict__


def _reduce(process: BaseProcess) -> tuple[Any, ...]:
    file = io.BytesIO()
    pickler = _Pickler(file)
    pickler.dump(process)
    pickler.dump(pickler.named)
    pickler.dump(pickler.cells)
    return _arrive, (pickle.dumps(_membership), file.getvalue())


def _arrive(membership: bytes, packed: bytes) -> BaseProcess:
    """In the child: become one of the rank's children, and unpack the process."""
    # The cell shows each line as soon as it is printed.
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    after_import("torch", lambda _: _join_run(membership))
    unpickler = _Unpickler(io.BytesIO(packed))
    process: BaseProcess = unpickler.load()
    vars(sys.modules["__main__"]).update(unpickler.load())
    linecache.cache.update(unpickler.load())  # tracebacks show the cells' lines
    return process


def _join_run(membership: bytes) -> None:
    """Install in a child what the rank has for its program's own children and process groups."""
    from taas import rehearsal
    from taas.adopt import rendezvous, waits
    from taas.rank import warned_lines

    warned_lines.install()
    known = pickle.loads(membership)
    if known.rehearsed:
        rehearsal.install(known.local_rank, known.rehearsed)
    install(known)
    waits.register_backends()
    rendezvous.install(known)
    if known.rehearsed:
        _compute_in_one_thread()
