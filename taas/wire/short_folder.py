"""One folder for all sockets of a process and of those it starts: nobody else can enter it, and its path is short.

A path of a UNIX socket has 107 bytes at most (unix(7)). A TMPDIR may be longer than that alone: Slurm's and pytest's are.
Beside the standard library nothing is needed here: the module travels to VMs by value.
"""

from __future__ import annotations

import os
import tempfile

PREFIX = "taas-"

LONGEST_BASE = 45
"""Below the folder lie those of agents, and in them multiprocessing's: ``taas-…/agent-12/pymp-…/listener-…``."""
_INSTEAD = ("/tmp", "/dev/shm")  # noqa: S108  a folder of our own is made there


def make_short_folder() -> str:
    """Make the folder: in TMPDIR, unless that is too long.

    Raises:
        OSError: nowhere can one be made; the text says where it was tried.
    """
    refused = []
    for base in dict.fromkeys((tempfile.gettempdir(), *_INSTEAD)):
        if len(os.fsencode(base)) > LONGEST_BASE:
            refused.append(f"{base} is too long for the path of a socket")
            continue
        try:
            return tempfile.mkdtemp(prefix=PREFIX, dir=base)
        except OSError as error:
            refused.append(f"{base}: {error.strerror}")
    raise OSError(
        f"no folder for sockets can be made ({'; '.join(refused)}). Set TMPDIR to a folder that you can write, with a "
        f"path of {LONGEST_BASE} bytes at most"
    )
