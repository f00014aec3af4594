"""Imported by a forkserver that nobody waits for yet: it imports what a forkserver needs in a thread of low priority.

A thread's niceness is its own on Linux (nice(2)), so what the main thread forks later has the ordinary one, also
where this user may not raise a niceness again.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import threading

MODULES = "TAAS_IMPORT_IDLY"
"""The variable that names the modules; it is gone when they are imported."""
_NICE = 10


def _import(names: str) -> None:
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
    for name in names.split(","):
        with contextlib.suppress(ImportError):  # as multiprocessing does: who needs it says so
            importlib.import_module(name)


if names := os.environ.pop(MODULES, ""):
    thread = threading.Thread(target=_import, args=(names,))
    thread.start()
    thread.join()
