"""The first import of a forkserver; it makes sure that the forkserver ends with its agent.

The forkserver sets the parent-death signal (prctl(2), PR_SET_PDEATHSIG), which is sent when the
thread that started the forkserver ends. A process that it has just forked has no such signal until
it sets its own (rank/lifeline.py). If such a process is stopped before that, the system sends it
SIGHUP and SIGCONT when the agent ends: the forkserver leads its own process group, which is
orphaned then, since no process outside of it is a parent of its members (setpgid(2)).

If no run is waiting for the forkserver yet, a thread of low priority imports the other modules. On
Linux each thread has its own nice value (nice(2)), so processes that the main thread forks later
have the ordinary priority, even if this user may not lower a nice value again.
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
        # as in multiprocessing; the module that needs it will report the error
        with contextlib.suppress(ImportError):
            importlib.import_module(name)


os.setpgid(0, 0)
linux.set_parent_death_signal(signal.SIGKILL)
linux.share_user_namespace()  # by a fork, which is cheap as long as nothing is imported
if names := os.environ.pop("TAAS_IMPORT_IDLY", ""):
    thread = threading.Thread(target=_import_idly, args=(names,))
    thread.start()
    thread.join()
