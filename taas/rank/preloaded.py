"""What the forkserver does once for all ranks after its imports; it starts no thread.

The forkserver imports this last, when all libraries are there.
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
"""The thread pools of BLAS and OpenMP in this process, found once: looking costs 15 ms."""


def _forget_exit_functions() -> None:
    """Drop exit functions of the imports, a second of work; ranks run what they register.

    Kept are those through which a rank's own wishes go: finalizers, log handlers, child processes.
    """
    finalize: Any = weakref.finalize
    children: Any = multiprocessing.util
    for finalizer in tuple(finalize._registry):
        finalizer.atexit = False
    atexit._clear()
    for function in (finalize._exitfunc, logging.shutdown, children._exit_function):
        atexit.register(function)


def _keep_freed_memory() -> None:
    """Keep freed memory: some forked heaps give back, and fault in again, 2,000 pages a step.

    By itself malloc gives back the top of a heap above 64 MiB, which the next step asks for again:
    measured with a small convolutional network, 0.5 to 5 ms of system time a step of 14 ms, run by
    run. Who has set malloc keeps it.
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
# ranks' collections leave alone what all of them share: a touched page is a copied page
gc.freeze()
