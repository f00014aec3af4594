"""A rank says where it stands when its agent asks, also while C code holds the GIL, and when a fatal signal ends it.

faulthandler's signal handler writes all threads' frames without running any Python
(https://docs.python.org/3/library/faulthandler.html#faulthandler.register). The file begins with a line of JSON,
the :class:`Preface`; each dump is appended. System calls go on after the signal but for those that the system
never restarts (signal(7)): Python sees to that itself, C code's own ``sleep()`` returns early.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import threading
from pathlib import Path

import msgspec

STACKS = "stacks"
SIGNAL = signal.SIGRTMIN + 11
"""A real-time signal that neither glibc, CUDA nor profilers use."""


class Preface(msgspec.Struct, frozen=True):
    """How to read the dumps.

    Attributes:
        main_thread: its identifier.
        cells: ``In[n]`` of earlier cells, by the file name that frames have.
    """

    main_thread: int
    cells: dict[str, int]


def answer_requests(folder: Path, cells: dict[str, int]) -> None:
    """From now on write this process's stacks into the folder at each signal, and at a fatal one.

    Args:
        folder: the rank's output files.
        cells: see :class:`Preface`.
    """
    fd = os.open(folder / STACKS, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    preface = Preface(threading.main_thread().ident or 0, cells)
    os.write(fd, msgspec.json.encode(preface) + b"\n")
    faulthandler.enable(file=fd, all_threads=True)
    faulthandler.register(SIGNAL, file=fd, all_threads=True, chain=False)
