"""Imported first by a forkserver: it, and what it has just forked, ends with its agent.

It gets the parent-death signal (prctl(2), PR_SET_PDEATHSIG), which ends with the thread that asked
for it. Its children have none until they tie themselves (rank/lifeline.py). Who is stopped before
that is sent SIGHUP and SIGCONT by the system when the agent ends: the forkserver leads a process
group of its own, which nobody outside of it is the parent of then (setpgid(2)).

Where nobody waits for it yet, a thread of low priority imports the rest. A thread's niceness is its
own on Linux (nice(2)), so what the main thread forks later has the ordinary one, also where this
user may not raise a niceness again.
"""

import contextlib
import importlib
import os
import signal
import threading

from taas.base import linux


def _import_idly(names: str) -> None:
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)
    for name in names.split(","):
        with contextlib.suppress(ImportError):  # as multiprocessing does: who needs it says so
            importlib.import_module(name)


os.setpgid(0, 0)
linux.set_parent_death_signal(signal.SIGKILL)
linux.share_user_namespace()  # by a fork, which is cheap while nothing is imported
if names := os.environ.pop("TAAS_IMPORT_IDLY", ""):
    thread = threading.Thread(target=_import_idly, args=(names,))
    thread.start()
    thread.join()
