"""Imported first by a forkserver: it ends with its agent, stopped or not, and so do those it has just forked.

It gets the parent-death signal (prctl(2), PR_SET_PDEATHSIG). Its children have none until they tie themselves
(rank/lifeline.py). Who is stopped before that is sent SIGHUP and SIGCONT by the system when the agent ends: the forkserver
leads a process group of its own, which nobody outside of it is the parent of then (setpgid(2)).
"""

import os
import signal

from taas import _linux

os.setpgid(0, 0)
_linux.set_parent_death_signal(signal.SIGKILL)
_linux.share_user_namespace()  # by a fork, which is cheap while nothing is imported
