"""The process from which ranks are forked; it imports libraries, and does nothing else.

It is safe to import torch before a fork, but not to use it: a single parallel region would hang
every child, and a single CUDA call would make CUDA unusable in it. Therefore the forkserver only
imports modules and waits.
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import signal
from collections.abc import Callable
from multiprocessing import forkserver as _mp
from multiprocessing.connection import wait
from typing import Any, NamedTuple

from taas.base import linux
from taas.base.poll_loop import give_limit
from taas.protocol import deadlines

logger = logging.getLogger(__name__)

PRELOAD = (
    "torch",
    "torch.utils.data",
    # every optimizer imports it at its first use, and this takes longer than importing torch
    "torch._dynamo",
    "numpy.random",
    "multiprocessing.popen_fork",
    "multiprocessing.queues",
    "taas.rank.entry",
    "taas.capture",
    "taas.adopt",
    "taas.rehearsal.cuda_module",
    "taas.rehearsal.distributed",
    "taas.rehearsal.operators",
    "taas.rehearsal.refused",
    "taas.rehearsal.tensors",
    "IPython.core.application",
    "IPython.core.completer",
    "IPython.core.completerlib",
    "IPython.core.crashhandler",
    "IPython.core.logger",
    "IPython.core.magics",
    "IPython.core.oinspect",
    "IPython.utils.generics",
    "IPython.utils.wildcard",
    "ipykernel.zmqshell",  # tqdm.auto displays a widget if this is imported
)
FIRST, LAST = "taas.agent.import_first", "taas.rank.preloaded"
_REHEARSED = "taas.rehearsal.ahead"
_IDLY = "TAAS_IMPORT_IDLY"
"""Environment variable with the names of the modules that are to be imported at a low priority."""
_READ_AT_IMPORT = (
    "BLIS_", "CUDA_", "GOMP_", "KMP_", "LD_", "LC_", "LANG", "MALLOC_", "MKL_", "NPY_", "NUMEXPR_",
    "OMP_", "OPENBLAS_", "PYTHON", "PYTORCH_", "TORCH_", "TORCHDYNAMO_", "TORCHINDUCTOR_",
    "TRITON_", "VECLIB_",
)  # fmt: skip


def read_at_import(environ: dict[str, str]) -> dict[str, str]:
    """Return the variables that libraries read when they are imported.

    It is too late to set these variables in a rank, which is forked after the import.
    """
    return {name: value for name, value in environ.items() if name.startswith(_READ_AT_IMPORT)}


def _ends(pid: int | None, seconds: float) -> bool:
    """Return whether a process is gone, or ends within ``seconds``.

    A process that cannot be inspected counts as alive.
    """
    if pid is None:
        return True
    try:
        handle = os.pidfd_open(pid)
    except OSError as error:
        return isinstance(error, ProcessLookupError)
    try:
        return bool(wait([handle], seconds))
    finally:
        os.close(handle)


def fork(target: Callable[..., None], *arguments: Any) -> Any:
    """Fork a process that calls ``target``; the agent does not import what the process needs.

    Raises:
        OSError, EOFError: the forkserver cannot fork, or was killed at this very moment; the next
            call starts another forkserver.
    """
    process = multiprocessing.get_context("forkserver").Process(target=target, args=arguments)
    process.start()
    return process


class _MadeFor(NamedTuple):
    """The properties that a forkserver gets when it starts, and that cannot change later."""

    environ: dict[str, str]
    rehearsed: bool


class Forkserver:
    """The forkserver of multiprocessing in this process; restarted if it is gone or out of date."""

    def __init__(self, *, rehearsed: bool = True, idle: bool = False) -> None:
        self._idle = idle
        self._server = _mp._forkserver
        self._made_for = _MadeFor(read_at_import(dict(os.environ)), rehearsed)
        self._run = ""

    @property
    def pid(self) -> int | None:
        """The process id, once the forkserver has been started."""
        pid: int | None = self._server._forkserver_pid  # type: ignore[attr-defined]
        return pid

    def outlived(self, *, untold: bool = False) -> bool:
        """Return whether the forkserver is alive.

        ``untold``: it has not reported the exit status of one of its processes. A forkserver that
        is killed closes the sentinels of its processes a moment before it is dead itself; in this
        case, the method waits for that moment. The processes of a dead forkserver are children of
        this process.
        """
        return not _ends(self.pid, deadlines.FORKSERVER_DIES if untold else 0.0)

    def start(self) -> None:
        """Start the forkserver, if it is not running."""
        ahead = (_REHEARSED,) if self._made_for.rehearsed else ()
        preload = [*PRELOAD, *ahead, LAST]
        os.environ[_IDLY] = ",".join(preload) if self._idle else ""
        self._server.set_forkserver_preload([FIRST, *preload])
        before = self.pid
        self._server.ensure_running()
        assert self.pid is not None
        give_limit(self.pid)  # before it forks anything
        if self.pid != before:
            logger.info("forkserver %s starts", self.pid)
        del os.environ[_IDLY]

    def _hurry(self) -> None:
        """Let it import at full speed, as a run waits, if this user may raise its priority."""
        idle, self._idle = self._idle, False
        if idle and self.pid is not None:
            with contextlib.suppress(PermissionError):
                linux.set_priority(self.pid, 0)

    def fit(
        self, run: str, environ: dict[str, str], *, rehearsed: int | None, held: bool = False
    ) -> bool:
        """Make sure that the forkserver has the notebook's environment, and simulates GPUs or not.

        ``rehearsed`` tells whether GPUs are simulated; with None, this stays as it is. A restart
        costs some seconds, the import of torch. A restart happens only if the environment or
        ``rehearsed`` has changed, and only before the run's first process: a run uses one
        forkserver throughout, as do ranks that were kept (``held``). Return whether the forkserver
        was ended for this, and with it all processes forked from it.
        """
        self._hurry()
        keep = held or (run and run == self._run)
        self._run = run
        rehearsed = self._made_for.rehearsed if rehearsed is None else bool(rehearsed)
        wanted = _MadeFor(read_at_import(environ), rehearsed)
        changed = not keep and wanted != self._made_for
        if changed:
            for name in self._made_for.environ.keys() - wanted.environ.keys():
                os.environ.pop(name, None)
            os.environ.update(wanted.environ)
            self._end()
            self._made_for = wanted
        self.start()
        return changed

    def _end(self) -> None:
        """Send SIGKILL to the forkserver, which also ends the processes that it forked.

        Closing its pipe would not end it: every process that it forked holds a copy of the write
        end.
        """
        if self.pid is not None:
            logger.info("forkserver %d is ended: another environment is asked for", self.pid)
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
        self._server._stop()  # type: ignore[attr-defined]
