"""Imported first by a forkserver: it ends with its agent, stopped or not (prctl(2), PR_SET_PDEATHSIG)."""

import signal

from taas import _linux

_linux.set_parent_death_signal(signal.SIGKILL)
