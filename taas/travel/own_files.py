"""Names for files that taas needs in a project for a moment, which anybody can see are nobody's work."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import time

import psutil

__all__ = ["is_own", "new_name", "sweep"]

_NAME = re.compile(rb"\.taas-[a-z]+-(\d+)-(\d+)-\d+")
_ABANDONED_SECONDS = 3600.0
_numbers = itertools.count()


def new_name(what: str) -> bytes:
    """Return a name that no other process of this machine uses."""
    born = int(psutil.Process().create_time())
    return f".taas-{what}-{os.getpid()}-{born}-{next(_numbers)}".encode()


def is_own(name: bytes) -> bool:
    """Whether a file's name says that it is taas' own."""
    return _NAME.fullmatch(name) is not None


def sweep(directory: int) -> None:
    """Remove what a killed process left in an open directory.

    Processes of other machines cannot be looked up, so it has to be an hour old, too.
    """
    with os.scandir(directory) as entries:
        names = [os.fsencode(entry.name) for entry in entries]
    for name in names:
        match = _NAME.fullmatch(name)
        if match and not _lives(int(match[1]), int(match[2])):
            with contextlib.suppress(OSError):
                if time.time() - os.lstat(name, dir_fd=directory).st_ctime > _ABANDONED_SECONDS:
                    os.unlink(name, dir_fd=directory)


def _lives(pid: int, born: int) -> bool:
    try:
        return bool(abs(psutil.Process(pid).create_time() - born) < 2)
    except psutil.NoSuchProcess:
        return False
