"""What the forkserver does once for all ranks, beyond importing: looking things up, nothing that starts a thread.

The forkserver imports this last, when all libraries are there.
"""

import atexit
import gc
import logging
import multiprocessing.util
import weakref
from typing import Any

import torch.distributed as dist
from threadpoolctl import ThreadpoolController

from taas import rank_storage
from taas.rank import copied_pages, process_names

THREAD_POOLS = ThreadpoolController()
"""The thread pools of BLAS and OpenMP in this process, found once: looking costs 15 ms."""


def _forget_exit_functions() -> None:
    """Drop what the imports want done at exit, a second of tidying up memory; ranks run what they register themselves.

    Kept are those through which a rank's own wishes go: finalizers, log handlers, child processes.
    """
    finalize: Any = weakref.finalize
    children: Any = multiprocessing.util
    for finalizer in tuple(finalize._registry):
        finalizer.atexit = False
    atexit._clear()
    for function in (finalize._exitfunc, logging.shutdown, children._exit_function):
        atexit.register(function)


def _register_backends() -> None:
    """Register torch's backends for process groups, as torch does when one is first used.

    It finds them by looking through all installed packages, which takes each rank 20 ms.
    """
    register = getattr(dist.Backend, "_ensure_backend_registered", None)
    if register is not None:  # before 2.13 they need none
        for name in (dist.Backend.GLOO, dist.Backend.NCCL):
            register(name)


process_names.call(process_names.FORKSERVER)
_forget_exit_functions()
_register_backends()
rank_storage.prepare()
gc.collect()
gc.freeze()  # ranks' collections leave alone what all of them share: a touched page is a copied page
copied_pages.note_memory()
