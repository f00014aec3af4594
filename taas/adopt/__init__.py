"""Runs programs that were written for other launchers in ranks that exist already.

Each rank calls ``install`` once, before it unpickles any of the user's objects, and ``finish`` when
the cell has ended. Nothing here starts a process, opens a connection or imports a library until the
program needs it.

* ``rendezvous``: the rank's position and the run's store, which replace the meeting point and the
  backend of a program.
* ``launchers`` run their function in the ranks instead of new processes; rich's bars become
  displays.
* ``data_parallel``: ``nn.DataParallel`` splits the batch over the ranks.
* ``downloads``: one rank downloads, and the others find the files.
* ``own_gpu`` selects this rank's GPU in all of its threads.
* ``waits`` knows in which collective a rank waits, and breaks off its waits in C code.
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

    If ``taas.rehearsal`` stands in for the GPUs, install it first. ``backend`` is used whatever the
    program asks for.
    """
    if backend is not None:
        rendezvous.choose_backend(backend)
    global _meeting
    waits.register_backends()  # the forkserver, if there is one, has done it
    _meeting = rendezvous.install(membership)
    membership.waits.install()
    launchers.install(membership, _meeting)
    if membership.world_size > 1:
        data_parallel.install(membership)
        downloads.install(membership)


def begin_run(address: StoreAddress) -> None:
    """Begin the next run of kept ranks.

    If its store is not the last run's, that run has broken groups off.
    """
    if _meeting is not None and _meeting.membership.begin_run(address):
        data_parallel.close()
        _meeting.remake_group()


def join(address: StoreAddress) -> None:
    """Join the first run of a rank that was made ahead: it has no process group to renew."""
    if _meeting is not None:
        _meeting.membership.begin_run(address)


def explain(error: BaseException) -> str | None:
    """Explain an error by what only taas knows; return None for other errors."""
    return None if _meeting is None else _meeting.explain(error)


def break_off() -> None:
    """Let this rank's waits for other ranks fail, because it has to end.

    A thread that does not wait calls this.
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
