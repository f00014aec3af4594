"""Processes that a cell starts itself with ``multiprocessing``.

A forked child has all that its rank has. ``spawn`` and ``forkserver`` start a fresh Python and send it the ``Process``
object as a pickle, in which a function of a script is a name of its file. A notebook has no file: functions and
classes of the cells go by value here, into the child's ``__main__``, with the names that they use.

A program that never asks how a child ended does not learn that it died. The cell says it.
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

from taas.import_hooks import after_import
from taas.wording import killed_by

_NAMESPACE = "globals of the notebook"
_WITH_TRACEBACK = 1
"""multiprocessing's status of a child that raised."""

_started: dict[int, tuple[str, Any]] = {}
"""Children by process id, with their name; what the program learned the end of is no longer in it."""
_rank = 0
_membership = b""


def install(membership: Any) -> None:
    """Let children know the notebook's names, and note which are started.

    Args:
        membership: where this rank stands in its run; children that import torch take it over, as no members.
    """
    global _rank, _membership
    _rank, _membership = membership.rank, pickle.dumps(membership)
    native_start, native_exitcode = BaseProcess.start, BaseProcess.exitcode

    def start(self: BaseProcess) -> None:
        name = _name_of(self)
        native_start(self)
        _forget_the_well_ended()
        _started[self.pid or 0] = name, self._popen  # type: ignore[attr-defined]

    def exitcode(self: Any) -> int | None:
        code: int | None = native_exitcode.__get__(self)
        if code is not None:
            _started.pop(self.pid or 0, None)
        return code

    BaseProcess.start = start  # type: ignore[method-assign]
    BaseProcess.exitcode = property(exitcode)  # type: ignore[assignment, method-assign]
    for name in ("terminate", "kill"):  # who ends a child knows how it ends
        setattr(BaseProcess, name, _forgetting(getattr(BaseProcess, name)))
    BaseProcess.__reduce__ = _reduce  # type: ignore[method-assign, assignment]
    os.register_at_fork(after_in_child=_started.clear)
    if membership.rehearsed:
        os.register_at_fork(after_in_child=_compute_in_one_thread)


def _compute_in_one_thread() -> None:
    """In a rehearsed child, which computes for a GPU: OpenMP's threads are its parent's, and waiting for them hangs."""
    sys.modules["torch"].set_num_threads(1)


def unnoticed_deaths() -> tuple[str, ...]:
    """Say which children died so far without the program having asked how they ended."""
    said = []
    for name, popen in list(_started.values()):
        code = popen.poll()
        if code:
            said.append(
                f"rank {_rank}: {name} died ({_cause(code)}), and the cell went on. What it wrote is in %taas logs "
                f"--rank {_rank}. To fail with it, look at its exitcode after join(), or start it by mp.spawn()."
            )
    _started.clear()
    return tuple(said)


def _cause(code: int) -> str:
    if code < 0:
        return killed_by(code)
    return "an exception" if code == _WITH_TRACEBACK else f"exit code {code}"


def _name_of(process: BaseProcess) -> str:
    target = getattr(getattr(process, "_target", None), "__name__", "")
    return f"the process {process.name}{target and f', which ran {target}(),'}"


def _forget_the_well_ended() -> None:
    for pid, (_, popen) in list(_started.items()):
        if popen.returncode == 0:
            del _started[pid]


def _forgetting(native: Any) -> Any:
    def end(self: BaseProcess) -> None:
        _started.pop(self.pid or 0, None)
        native(self)

    return end


# ---------------------------------------------------------------- names


class _Pickler(cloudpickle.Pickler):
    """cloudpickle with what ``multiprocessing`` can send besides: queues, locks, connections, shared tensors."""

    def __init__(self, file: io.BytesIO) -> None:
        extra: Any = ForkingPickler
        # before pickle's own constructor, which reads it
        self.dispatch_table = collections.ChainMap(extra._extra_reducers, cloudpickle.Pickler.dispatch_table)
        super().__init__(file, protocol=5)
        self.namespace = vars(sys.modules["__main__"])
        self.globals_ref[id(self.namespace)] = self.namespace
        self.named: dict[str, Any] = {}
        self.cells: dict[str, Any] = {}

    def persistent_id(self, value: Any) -> str | None:
        """The notebook's globals are the child's own; functions bring what they use of them."""
        return _NAMESPACE if value is self.namespace else None

    def reducer_override(self, value: Any) -> Any:
        """Called by pickle for whatever is no plain value."""
        if isinstance(value, BaseProcess):
            return copyreg.__newobj__, (type(value),), value.__getstate__()  # type: ignore[attr-defined]
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
    return _arrive, (_membership, file.getvalue())


def _arrive(membership: bytes, packed: bytes) -> BaseProcess:
    """In the child: become one of the rank's, and unpack the process."""
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # the cell shows it as it happens
    after_import("torch", lambda _: _join_run(membership))
    unpickler = _Unpickler(io.BytesIO(packed))
    process: BaseProcess = unpickler.load()
    vars(sys.modules["__main__"]).update(unpickler.load())
    linecache.cache.update(unpickler.load())  # tracebacks show the cells' lines
    return process


def _join_run(membership: bytes) -> None:
    """Do in a child what the rank does around its program's own children and groups."""
    from taas.adopt import rendezvous

    known = pickle.loads(membership)
    install(known)
    rendezvous.install(known)
    if known.rehearsed:
        _compute_in_one_thread()
