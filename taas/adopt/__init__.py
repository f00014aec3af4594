"""Programs as people have them, in ranks that are there already.

``install`` is called once in each rank, before anything of the user's is unpickled, and ``finish`` when the
cell has ended. Nothing here starts a process, opens a connection or imports a library until the program
needs it.

* ``backend``: the header may choose another one than the program.
* ``rendezvous``: whatever meeting point a program brings, the run's own holds.
* ``spawn``, ``notebook_launchers``: launchers run their function in the ranks instead of new processes.
* ``data_parallel``: ``nn.DataParallel`` splits the batch over the ranks.
* ``downloads``: one rank downloads, the others find it there.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from taas.adopt.membership import Membership

from . import backend as chosen_backend
from . import data_parallel, downloads, notebook_launchers, rendezvous, spawn

__all__ = ["finish", "install"]

_meeting: rendezvous.Rendezvous | None = None


def _to_stderr(text: str) -> None:
    sys.stderr.write(f"taas: {text}\n")
    sys.stderr.flush()


def install(
    rank: int,
    world_size: int,
    local_rank: int,
    local_world_size: int,
    store_addr: str,
    store_port: int,
    rehearsed: bool,
    *,
    notice: Callable[[str], None] = _to_stderr,
    project: Path | None = None,
    backend: str | None = None,
) -> None:
    """Make this process a rank in which programs written for other launchers run.

    Args:
        rank: global rank.
        world_size: ranks of the run.
        local_rank: rank on this VM.
        local_world_size: ranks on this VM.
        store_addr: host of the ``TCPStore`` that an agent serves for this run.
        store_port: its port.
        rehearsed: whether ``taas.rehearsal`` stands in for the GPUs; it is installed first.
        notice: shows the user one line; called in rank 0 only, each text once.
        project: the directory tree that only rank 0 writes; the working directory if not given.
        backend: the torch.distributed backend to use, whatever the program asks for.
    """
    membership = Membership(
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        local_world_size=local_world_size,
        store_addr=store_addr,
        store_port=store_port,
        rehearsed=rehearsed,
        notice=notice,
        project=project or Path.cwd(),
    )
    if backend is not None:
        chosen_backend.install(backend)
    global _meeting
    _meeting = rendezvous.install(membership)
    adopter = spawn.install(membership, _meeting)
    notebook_launchers.install(membership, adopter)
    if world_size > 1:
        data_parallel.install(membership)
        downloads.install(membership)


def finish(*, failed: bool = False) -> None:
    """Close what the program left open; bounded, whatever state the other ranks are in.

    Args:
        failed: the cell raised in this rank, so there is no reason to wait for the others.
    """
    if _meeting is not None and failed:
        _meeting.part_alone()
    elif _meeting is not None:
        _meeting.part()
    data_parallel.close(failed=failed)
    rendezvous.close_default_group()
