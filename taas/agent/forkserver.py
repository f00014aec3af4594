"""The process that ranks are forked from: libraries imported, nothing else done.

Importing torch is safe before a fork; using it is not. One parallel region hangs every child, one
CUDA call poisons it. So the forkserver imports and waits.
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
    "torch._dynamo",  # every optimizer asks for it at its first use, and it takes longer than torch
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
    "ipykernel.zmqshell",  # tqdm.auto draws a widget where this is imported
)
FIRST, LAST = "taas.agent.import_first", "taas.rank.preloaded"
_REHEARSED = "taas.rehearsal.ahead"
_IDLY = "TAAS_IMPORT_IDLY"
"""The variable in which the first finds what it is to import at a low priority."""
_READ_AT_IMPORT = (
    "BLIS_", "CUDA_", "GOMP_", "KMP_", "LD_", "LC_", "LANG", "MALLOC_", "MKL_", "NPY_", "NUMEXPR_",
    "OMP_", "OPENBLAS_", "PYTHON", "PYTORCH_", "TORCH_", "TORCHDYNAMO_", "TORCHINDUCTOR_",
    "TRITON_", "VECLIB_",
)  # fmt: skip


def read_at_import(environ: dict[str, str]) -> dict[str, str]:
    """Return the variables that libraries read at import, which it is too late to set in a rank."""
    return {name: value for name, value in environ.items() if name.startswith(_READ_AT_IMPORT)}


def _ends(pid: int | None, seconds: float) -> bool:
    """Whether a process is gone, or goes within a time; one that cannot be seen is there."""
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
    """Fork a process that calls a function; the agent imports nothing of what it needs.

    Raises:
        OSError, EOFError: the forkserver cannot fork, or was killed in the very moment: the next
            one starts another.
    """
    process = multiprocessing.get_context("forkserver").Process(target=target, args=arguments)
    process.start()
    return process


class _MadeFor(NamedTuple):
    """What a forkserver has at its start, and keeps."""

    environ: dict[str, str]
    rehearsed: bool


class Forkserver:
    """multiprocessing's one forkserver of this process; restarted when gone or out of date."""

    def __init__(self, *, rehearsed: bool = True, idle: bool = False) -> None:
        self._idle = idle
        self._server = _mp._forkserver
        self._made_for = _MadeFor(read_at_import(dict(os.environ)), rehearsed)
        self._run = ""

    @property
    def pid(self) -> int | None:
        """Its process id, once it was started."""
        pid: int | None = self._server._forkserver_pid  # type: ignore[attr-defined]
        return pid

    def outlived(self, *, untold: bool = False) -> bool:
        """Whether it is there; ``untold``: it has not told how one of its processes ended.

        A forkserver that is killed closes the sentinels of its processes a moment before it is
        dead, and they are this process's children.
        """
        return not _ends(self.pid, deadlines.FORKSERVER_DIES if untold else 0.0)

    def start(self) -> None:
        """Start it, if it does not run."""
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
        """Let it import at full speed, as a run waits; where this user may raise a priority."""
        idle, self._idle = self._idle, False
        if idle and self.pid is not None:
            with contextlib.suppress(PermissionError):
                linux.set_priority(self.pid, 0)

    def fit(
        self, run: str, environ: dict[str, str], *, rehearsed: int | None, held: bool = False
    ) -> bool:
        """Make sure that it runs with the notebook's environment, and GPUs or none.

        A restart costs the import of torch, some seconds; it happens only after such a change, and
        before the run's first process: a run keeps the forkserver it began with, as do ranks that
        were kept (``held``). None for ``rehearsed`` leaves that as it is. Returns whether it was
        ended for that, and with it all that was forked from it.
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
        """SIGKILL it, and so what it forked: its pipe's end never comes, as each fork holds it."""
        if self.pid is not None:
            logger.info("forkserver %d is ended: another environment is asked for", self.pid)
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
        self._server._stop()  # type: ignore[attr-defined]
