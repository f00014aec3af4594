"""Adopts launchers of processes: their functions run in the existing ranks.

A program written for one process per GPU starts these processes itself. In N ranks that would be N
times N processes. Here the ranks are the processes: each runs ``fn(local_rank, *args)`` and then
waits, like the parent, until all have run it. A run with one rank, which sees all GPUs of its
instance type, starts real children.

Two differences from real children cannot be hidden: ``args`` are not copied, so that ``fn`` may
change them; and a spawn that doesn't train (a pool that prepares data) looks like one that does.
Arguments that processes would share (a queue, a tensor in shared memory, an event) are rejected
with an error that names the argument. ``multiprocessing.Process``, ``Pool`` and DataLoader workers
are not changed. A launcher that is started as a command (``!torchrun``) cannot be detected here; a
rehearsal rejects it.

Lightning finds its ranks through torchrun's environment, and only needs the number of VMs; its
strategies that fork (``ddp_notebook``, ``ddp_spawn``) are kept from forking. rich's live displays
become IPython displays.
"""

from __future__ import annotations

import contextlib
import inspect
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

from taas.adopt.rendezvous import Membership, Rendezvous, close_default_group
from taas.base.import_hooks import after_import
from taas.base.wording import text_of
from taas.errors import CannotAdopt

# the package's attribute of this name is the function
spawn_module: Any = sys.modules["torch.multiprocessing.spawn"]

GRACE_SECONDS = 5.0
ENDED = "all-ended"
TORCHRUN_VARIABLES = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
)
FORKING_LIGHTNING = (
    "lightning.pytorch.strategies.launchers.multiprocessing",
    "lightning.fabric.strategies.launchers.multiprocessing",
    "pytorch_lightning.strategies.launchers.multiprocessing",
    "lightning_fabric.strategies.launchers.multiprocessing",
)


def install(membership: Membership, rendezvous: Rendezvous) -> None:
    """Adopt ``torch.multiprocessing``'s launchers now, those of other libraries on their import."""
    adopter = Adopter(membership, rendezvous)
    spawn_module.start_processes = mp.start_processes = _start_processes(membership, adopter)
    after_import("rich.live", _adopt_rich)
    if membership.world_size == 1:
        return
    after_import(
        "torch.distributed.launcher.api", lambda module: _refuse_elastic(module, membership)
    )
    for name in FORKING_LIGHTNING:
        after_import(name, lambda module: _adopt_lightning(module, membership))
    after_import(
        "accelerate.launchers", lambda module: _adopt_accelerate(module, membership, adopter)
    )
    if membership.nodes > 1:
        # Trainer and Fabric take their defaults from these
        for variable in ("PL_TRAINER_NUM_NODES", "LT_NUM_NODES"):
            os.environ.setdefault(variable, str(membership.nodes))


def _start_processes(membership: Membership, adopter: Adopter) -> Callable[..., Any]:
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
            with _without_torchrun_variables():
                context: ProcessContext | None = native(
                    fn, args, nprocs, join, daemon, start_method
                )
            return context
        adopter.run("mp.spawn", nprocs, lambda index: fn(index, *args), args)
        return None if join else ProcessContext([], [])  # all have ended without an error

    return membership.in_rank(native, start_processes)


def _refuse_elastic(module: Any, membership: Membership) -> None:
    native = module.launch_agent

    def launch_agent(*args: Any, **kwargs: Any) -> Any:
        raise CannotAdopt(
            "torchrun (torch.distributed.launcher) was called in a rank: each of the"
            f" {membership.world_size} ranks of this run would start processes of its own. The"
            " ranks are there already: call the training function itself."
        )

    module.launch_agent = membership.in_rank(native, launch_agent)


def _adopt_accelerate(module: Any, membership: Membership, adopter: Adopter) -> None:
    native = module.notebook_launcher
    signature = inspect.signature(native)

    def launch(*args: Any, **kwargs: Any) -> None:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        given = bound.arguments
        os.environ["ACCELERATE_MIXED_PRECISION"] = str(given["mixed_precision"]).lower()
        asked, function = given["num_processes"], given["function"]
        processes = membership.local_world_size if asked is None else asked
        adopter.run(
            "notebook_launcher", processes, lambda _: function(*given["args"]), given["args"]
        )

    module.notebook_launcher = membership.in_rank(native, launch)


def _adopt_lightning(module: Any, membership: Membership) -> None:
    launcher = module._MultiProcessingLauncher
    native = launcher.launch

    def launch(self: Any, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        strategy = self._strategy
        kwargs.pop("trainer", None)
        nodes = getattr(strategy, "num_nodes", membership.nodes)
        strategy.cluster_environment.validate_settings(
            num_devices=strategy.num_processes, num_nodes=nodes
        )
        return function(*args, **kwargs)

    launcher.launch = membership.in_rank(native, launch)


class Adopter:
    """Runs a program's function in the ranks, instead of in N new processes."""

    def __init__(self, membership: Membership, rendezvous: Rendezvous) -> None:
        self.membership = membership
        self.rendezvous = rendezvous
        self._inside = ""

    def run(
        self, what: str, processes: int, body: Callable[[int], object], args: Sequence[Any]
    ) -> None:
        """Call ``body(local_rank)`` in the first ``processes`` ranks of each VM.

        Return when all have ended.

        ``what`` is the launcher's name, for messages; ``args`` are the body's other arguments.

        Raises:
            CannotAdopt: more processes than ranks on a VM, one launcher inside another, or an
                argument that processes share.
            ProcessRaisedException: another rank's ``body`` failed (its own error is the one to
                read).
        """
        self._refuse(what, processes, args)
        prefix, had_group = self.membership.next_prefix("spawn"), dist.is_initialized()
        store, all_of_them = self.membership.store(prefix), processes * self.membership.nodes
        if self.membership.local_rank < processes:
            try:
                with self._as_process_of(what, processes):
                    body(self.membership.local_rank)
            except BaseException as error:
                store.set(
                    ENDED, f"{self.membership.rank} {type(error).__name__}: {text_of(error)}"[:2000]
                )
                raise
            if store.add("count", 1) == all_of_them:
                store.set(ENDED, "")
        # This waits as long as the training takes, without a limit. An interrupt of the cell ends
        # the wait, because it is Python code that waits. If a rank is lost, the agent ends the
        # run, and this rank with it.
        self.membership.wait_for(prefix, ENDED)
        if failure := store.get(ENDED).decode():
            # The rank that failed will end the run with its own traceback, which says more than
            # this error. This one is raised in case the program has caught that error.
            threading.Event().wait(GRACE_SECONDS)
            rank, _, text = failure.partition(" ")
            raise ProcessRaisedException(
                f"rank {rank} failed in {what}: {text}", int(rank), os.getpid()
            )
        if not had_group:  # in a real process, a group ends with the process
            close_default_group()

    def _refuse(self, what: str, processes: int, args: Sequence[Any]) -> None:
        me = self.membership
        for index, arg in enumerate(args if processes * me.nodes > 1 else ()):
            if _is_shared(arg):
                raise CannotAdopt(
                    f"{what} was given a {type(arg).__name__} that processes share (args[{index}]),"
                    " of which each rank would have its own. Use torch.distributed:"
                    " all_gather_object() to collect results, barrier() to wait for each other,"
                    " all_reduce() to count, DistributedDataParallel to train one model; what rank"
                    " 0's function puts into a list or dict of args is there afterwards."
                )
        if self._inside:
            raise CannotAdopt(
                f"{what} was called inside {self._inside}, which already runs in the ranks of this"
                " cell. Call one of them only."
            )
        if processes > me.local_world_size:
            raise CannotAdopt(
                f"{what} asks for {processes} processes on a machine, but this run has"
                f" {me.local_world_size} rank(s) on each, one per GPU. Ask for"
                f" torch.cuda.device_count() processes, or start the cell with --gpus {processes}."
            )

    @contextlib.contextmanager
    def _as_process_of(self, what: str, processes: int) -> Iterator[None]:
        """Act as one of ``processes`` on each VM; environment and process group have that size."""
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
        except SystemExit as leaving:  # a child may exit like this, and its parent continues
            if leaving.code not in (None, 0):
                raise
        finally:
            self._inside, self.rendezvous.span = "", me.local_world_size


def _without_torchrun_variables() -> contextlib.AbstractContextManager[None]:
    """Keep children that start inside from mistaking themselves for ranks."""
    elastic = (name for name in os.environ if name.startswith("TORCHELASTIC_"))
    return _environment(dict.fromkeys((*TORCHRUN_VARIABLES, *elastic)))


@contextlib.contextmanager
def _environment(variables: Mapping[str, str | None]) -> Iterator[None]:
    """Set these variables inside, and remove those that are None.

    Restore all of them afterwards.
    """
    before = {name: os.environ.pop(name, None) for name in variables}
    os.environ.update({name: value for name, value in variables.items() if value is not None})
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


# ------------------------------------------------------------ arguments that processes share

_COLLECTED = 64 << 20
"""A tensor in shared memory with more bytes than this counts as a data set that is only read."""
_SHARED = (
    *(managers.BaseProxy, queues.Queue, queues.SimpleQueue),
    *(synchronize.Barrier, synchronize.Condition, synchronize.Event, SynchronizedBase),
)


def _is_shared(arg: Any) -> bool:
    if isinstance(arg, torch.nn.Module):  # Hogwild
        return any(p.is_shared() for p in arg.parameters() if not p.is_cuda)
    if isinstance(arg, torch.Tensor):
        return not arg.is_cuda and arg.is_shared() and arg.nbytes <= _COLLECTED
    return isinstance(arg, _SHARED)


# ---------------------------------------------------------------- live displays
#
# This covers rich's progress bars, and so Lightning's ``RichProgressBar``. In a notebook rich
# draws them into a widget if ipywidgets is installed, and a widget needs the kernel that made it.
# Here each is one IPython display that is updated, which any front end shows.


def _adopt_rich(module: Any) -> None:
    live = module.Live
    native_refresh, native_stop = live.refresh, live.stop

    def is_ours(self: Any) -> bool:
        return self.console.is_jupyter and not getattr(self, "_nested", False)

    def refresh(self: Any) -> None:
        if not is_ours(self):
            native_refresh(self)
            return
        with self._lock:
            self._live_render.set_renderable(self.renderable)
            _show(self, self._live_render.renderable)

    def stop(self: Any) -> None:
        last = self.is_started and is_ours(self)
        if last:
            refresh(self)
        native_stop(self)
        if last and self.transient:
            _show(self, "")

    live.refresh, live.stop = refresh, stop


def _show(live: Any, renderable: Any) -> None:
    from IPython.display import display
    from rich.jupyter import _render_segments

    segments = list(live.console.render(renderable, live.console.options)) if renderable else []
    text = "".join(segment.text for segment in segments if not segment.control)
    bundle = {"text/plain": text, "text/html": _render_segments(segments)}
    if hasattr(live, "_taas_display"):
        live._taas_display.update(bundle, raw=True)
    else:
        live._taas_display = display(bundle, raw=True, display_id=True)
