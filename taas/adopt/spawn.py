"""``mp.spawn`` in ranks that are there already.

A program written for one process per GPU starts these processes itself. In a rank that would give N times N
of them. Here the ranks are the processes: each runs ``fn(local_rank, *args)`` and then waits, as the parent
does, until all have run it. A run of one rank, a process that sees all GPUs of its type, starts real children.

What is different from real children, and cannot be hidden: ``args`` are not copied, so ``fn`` may change
them; and a spawn that doesn't train (a pool that prepares data) looks like one that does. What processes would share (a
queue, a tensor in shared memory, an event) is refused by name. ``multiprocessing.Process``, ``Pool`` and DataLoader workers are
never touched, and a launcher started as a command of its own (``!torchrun``) is not seen.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing import managers, queues, synchronize
from multiprocessing.sharedctypes import SynchronizedBase
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.multiprocessing import ProcessContext, ProcessRaisedException

from taas.adopt.membership import Membership
from taas.adopt.rendezvous import Rendezvous, close_default_group
from taas.errors import CannotAdopt
from taas.wording import text_of

spawn_module = sys.modules["torch.multiprocessing.spawn"]  # the package's attribute is the function

GRACE_SECONDS = 5.0
ENDED = "all-ended"
TORCHRUN_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class Adopter:
    """Runs a function that a program wants in N new processes, in the ranks of the run."""

    def __init__(self, membership: Membership, rendezvous: Rendezvous) -> None:
        self.membership = membership
        self.rendezvous = rendezvous
        self._inside = ""

    def run(self, what: str, processes: int, body: Callable[[int], object], args: Sequence[Any] = ()) -> None:
        """Call ``body(local_rank)`` in the first ``processes`` ranks of each VM; return when all have ended.

        Args:
            what: the launcher's name, for messages.
            processes: how many the program asked for, on one machine.
            body: the program's function, with all but its first argument.
            args: those arguments.

        Raises:
            CannotAdopt: more processes than ranks on a VM, one launcher inside another, or an argument that processes share.
            ProcessRaisedException: another rank's ``body`` failed (its own error is the one to read).
        """
        self._refuse(what, processes, args)
        prefix, had_group = self.membership.numbered("spawn"), dist.is_initialized()
        store, all_of_them = self.membership.store(prefix), processes * self.membership.nodes
        if self.membership.local_rank < processes:
            try:
                with self._as_process_of(what, processes):
                    body(self.membership.local_rank)
            except BaseException as error:
                store.set(ENDED, f"{self.membership.rank} {type(error).__name__}: {text_of(error)}"[:2000])
                raise
            if store.add("count", 1) == all_of_them:
                store.set(ENDED, "")
        self._wait_for_all(what, prefix)
        if not had_group:  # a group made in a process goes with it
            close_default_group()

    def _refuse(self, what: str, processes: int, args: Sequence[Any]) -> None:
        me = self.membership
        for index, arg in enumerate(args if processes * me.nodes > 1 else ()):
            if (refused := _refused(arg)) is not None:
                raise CannotAdopt(f"{what} was given {refused[0]} (args[{index}]), {refused[1]}")
        if self._inside:
            raise CannotAdopt(
                f"{what} was called inside {self._inside}, which already runs in the ranks of this cell. "
                "Call one of them only."
            )
        if processes > me.local_world_size:
            where = f" on each of its {me.nodes} VMs" if me.nodes > 1 else ""
            raise CannotAdopt(
                f"{what} asks for {processes} processes on a machine, but this run has "
                f"{me.local_world_size} rank(s){where}, one per GPU. Ask for torch.cuda.device_count() "
                f"processes, or start the cell with --gpus {processes}."
            )
        if processes < me.local_world_size:
            me.tell(
                f"{what} asks for {processes} process(es); this run has {me.local_world_size} ranks"
                f"{' per VM' if me.nodes > 1 else ''}, and the others stay idle meanwhile."
            )

    @contextlib.contextmanager
    def _as_process_of(self, what: str, processes: int) -> Iterator[None]:
        """Be one of ``processes`` per VM: the environment and the process group have that size."""
        me = self.membership
        place = {
            "RANK": str(me.node * processes + me.local_rank),
            "WORLD_SIZE": str(me.nodes * processes),
            "LOCAL_WORLD_SIZE": str(processes),
        }
        self._inside, self.rendezvous.span = what, processes
        try:
            with _environment(place):
                yield
        except SystemExit as leaving:  # a child may end so, and the parent goes on
            if leaving.code not in (None, 0):
                raise
        finally:
            self._inside, self.rendezvous.span = "", me.local_world_size

    def _wait_for_all(self, what: str, prefix: str) -> None:
        me, store = self.membership, self.membership.store(prefix)
        me.wait_for(prefix, ENDED)
        failure = store.get(ENDED).decode()
        if failure:
            # The rank that failed is about to end the run with its own traceback, which says more than this
            # error. It is raised for a program that caught that one.
            threading.Event().wait(GRACE_SECONDS)
            rank, _, text = failure.partition(" ")
            raise ProcessRaisedException(f"rank {rank} failed in {what}: {text}", int(rank), os.getpid())


def install(membership: Membership, rendezvous: Rendezvous) -> Adopter:
    """Adopt ``spawn`` and ``start_processes`` of ``torch.multiprocessing`` in this process."""
    adopter = Adopter(membership, rendezvous)
    native = spawn_module.start_processes

    def start_processes(
        fn: Callable[..., object],
        args: Sequence[Any] = (),
        nprocs: int = 1,
        join: bool = True,
        daemon: bool = False,
        start_method: str = "spawn",
    ) -> ProcessContext | None:
        if membership.world_size == 1 and nprocs > 1:
            with without_torchrun_variables():
                return native(fn, args, nprocs, join, daemon, start_method)  # type: ignore[no-any-return]
        adopter.run("mp.spawn", nprocs, lambda index: fn(index, *args), args)
        return None if join else ProcessContext([], [])  # all have ended, and well

    adopted = membership.in_rank(native, start_processes)
    spawn_module.start_processes = mp.start_processes = adopted  # type: ignore[attr-defined]  # its spawn calls it
    return adopter


def without_torchrun_variables() -> contextlib.AbstractContextManager[None]:
    """Start children inside that are no ranks of this run, and must not take themselves for one."""
    elastic = (name for name in os.environ if name.startswith("TORCHELASTIC_"))
    return _environment(dict.fromkeys((*TORCHRUN_VARIABLES, *elastic)))


@contextlib.contextmanager
def _environment(variables: Mapping[str, str | None]) -> Iterator[None]:
    """Have these variables inside, and those that are None not; then as they were."""
    before = {name: os.environ.pop(name, None) for name in variables}
    os.environ.update({name: value for name, value in variables.items() if value is not None})
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


# ---------------------------------------------------------------- what its processes would share

_COLLECTED = 64 << 20
"""Bytes: a larger tensor in shared memory is a data set, which is only read."""
_SHARED = (
    *(managers.BaseProxy, queues.Queue, queues.SimpleQueue),
    *(synchronize.Barrier, synchronize.Condition, synchronize.Event, SynchronizedBase),
)
_INSTEAD = (
    "of which each rank would have its own. Use torch.distributed: all_gather_object() to collect results, barrier() to wait "
    "for each other, all_reduce() to count; what rank 0's function puts into a list or dict of args is there afterwards."
)


def _refused(arg: Any) -> tuple[str, str] | None:
    """Say what an argument is, and what to do instead, that processes would share."""
    name = type(arg).__name__
    if isinstance(arg, _SHARED):
        return f"a {name} of multiprocessing", _INSTEAD
    if isinstance(arg, torch.Tensor) and not arg.is_cuda and arg.is_shared() and arg.nbytes <= _COLLECTED:
        return f"a {name} in shared memory", _INSTEAD
    # Hogwild
    if isinstance(arg, torch.nn.Module) and any(p.is_shared() for p in arg.parameters() if not p.is_cuda):
        return f"a model in shared memory, a {name}", (
            "which its processes would train together, and ranks cannot. Drop share_memory() and wrap the model in "
            "DistributedDataParallel."
        )
    return None
