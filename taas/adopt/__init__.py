"""Runs programs that were written for other launchers in the existing ranks.

Each rank calls ``install`` once, before it unpickles any of the user's objects, and ``finish``
when the cell has ended. Nothing here starts a process, opens a connection or imports a library
until the program needs it.

* ``rendezvous``: the rank's position in the run and the run's store, which replace a program's own
  rendezvous and backend.
* ``launchers`` run their function in the ranks instead of new processes; rich's bars become
  displays.
* ``data_parallel``: ``nn.DataParallel`` splits the batch over the ranks.
* ``downloads``: one rank downloads, and the others find the files.
* ``own_gpu`` selects this rank's GPU in all of its threads.
* ``waits`` finds out in which collective a rank waits, and aborts its waits in C code.
"""

from __future__ import annotations

from taas.adopt.rendezvous import Membership
from taas.adopt.waits import pending_collective, waits_at_full_speed, waits_on_gpus
from taas.protocol.framing import StoreAddress

from . import data_parallel, downloads, launchers, own_gpu, rendezvous, waits

__all__ = [
    "Membership",
    "begin_run",
    "break_off",
    "explain",
    "finish",
    "install",
    "join",
    "own_gpu",
    "pending_collective",
    "waits",
    "waits_at_full_speed",
    "waits_on_gpus",
]

_meeting: rendezvous.Rendezvous | None = None


def install(membership: Membership, backend: str | None = None) -> None:
    """Make this process a rank in which programs written for other launchers run.

    If ``taas.rehearsal`` replaces the GPUs, install it first. ``backend`` overrides the backend
    that the program asks for.
    """
    if backend is not None:
        rendezvous.choose_backend(backend)
    global _meeting
    waits.register_backends()  # the forkserver, if there is one, has done so already
    _meeting = rendezvous.install(membership)
    membership.waits.install()
    launchers.install(membership, _meeting)
    if membership.world_size > 1:
        data_parallel.install(membership)
        downloads.install(membership)


def begin_run(address: StoreAddress) -> None:
    """Begin the next run of kept ranks.

    If its store is not that of the last run, the groups of the last run were aborted.
    """
    if _meeting is not None and _meeting.membership.begin_run(address):
        data_parallel.close()
        _meeting.remake_group()


def join(address: StoreAddress) -> None:
    """Join the first run of a rank that was prepared in advance; there is no group to recreate."""
    if _meeting is not None:
        _meeting.membership.begin_run(address)


def explain(error: BaseException) -> str | None:
    """Explain an error that only taas can explain; return None for other errors."""
    return None if _meeting is None else _meeting.explain(error)


def break_off() -> None:
    """Make this rank's waits for other ranks fail, because it has to end.

    Called by a thread that does not wait itself.
    """
    if _meeting is not None:
        me = _meeting.membership
        me.waits.break_off(me.address, me.leave_store())


def finish(*, failed: bool = False) -> None:
    """Close what the program left open, in bounded time, whatever state the other ranks are in.

    A rank whose cell has ``failed`` does not wait for the others.
    """
    if _meeting is not None:
        _meeting.part(alone=failed)
    data_parallel.close()
    rendezvous.close_default_group()
