"""What the forkserver does once for all ranks after its imports; it starts no thread.

The forkserver imports this module last, after all libraries.
"""

import atexit
import gc
import logging
import multiprocessing.util
import os
import weakref
from typing import Any

from threadpoolctl import ThreadpoolController

from taas.adopt import waits
from taas.base import linux
from taas.capture.describe import holders
from taas.project.wall import diversion
from taas.rank import lifeline, warned_lines

THREAD_POOLS = ThreadpoolController()
"""The thread pools of BLAS and OpenMP in this process, found once: the search costs 15 ms."""


def _forget_exit_functions() -> None:
    """Drop the exit functions of the imports, a second of work.

    Ranks run those that they register.

    Three stay, because a rank's own exit work goes through them: finalizers, log handlers, child
    processes.
    """
    finalize: Any = weakref.finalize
    children: Any = multiprocessing.util
    for finalizer in tuple(finalize._registry):
        finalizer.atexit = False
    atexit._clear()
    for function in (finalize._exitfunc, logging.shutdown, children._exit_function):
        atexit.register(function)


def _keep_freed_memory() -> None:
    """Keep freed memory: some forked heaps release and fault in 2,000 pages in each step.

    By default malloc releases the top of a heap above 64 MiB, which the next step allocates again.
    Measured with a small convolutional network, this costs 0.5 to 5 ms of system time in a step of
    14 ms, varying from run to run. If the user has configured malloc, it stays as it is.
    """
    if not any(name.startswith("MALLOC_") or name == "GLIBC_TUNABLES" for name in os.environ):
        linux.keep_freed_memory(256 << 20, map_from=32 << 20)


lifeline.name_process(lifeline.FORKSERVER_NAME)
_keep_freed_memory()
_forget_exit_functions()
waits.register_backends()
warned_lines.install()
diversion.survey()
holders.survey()
gc.collect()
# Garbage collections in ranks skip the objects that all ranks share: writing to a page copies it.
gc.freeze()
