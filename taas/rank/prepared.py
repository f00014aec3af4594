"""A process becomes a rank once, and is prepared for each cell: environment, project, variables."""

from __future__ import annotations

import functools
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from taas import adopt, capture, rehearsal
from taas.project import sync
from taas.project.sync import files_on_demand
from taas.protocol.ranks import RankOrder, RankStart
from taas.rank import children
from taas.rank.shell import RankShell
from taas.rank_storage import Guard, guard, scratch_of
from taas.runs.stacks import answer_requests


@dataclass
class Prepared:
    """This process, from its first job to its last.

    Attributes:
        device: where CUDA tensors of the notebook are placed; ``cuda``: on the device that they
            were on; None: in host memory.
        environ: the notebook's environment variables in the last job.
        project: the path of the project on this VM.
        arrival: the variables of the last cell as they arrived.
    """

    shell: RankShell
    wall: Guard
    device: str | None
    environ: dict[str, str]
    project: Path
    arrival: Any = None

    def take_in(self, start: RankStart, payload: int) -> None:
        """Prepare for a cell: environment, loaders, and variables from descriptor ``payload``."""
        order, staged = start.order, start.staged
        for name in self.environ.keys() - staged.environ.keys():
            os.environ.pop(name, None)
        os.environ.update(staged.environ.items() - self.environ.items())
        self.environ = staged.environ
        os.environ.update(start.environ)
        if order.continues:
            there = Path(order.cell.directory)
            if there.is_relative_to(staged.project):
                there = self.project / there.relative_to(staged.project)
            if there.is_dir():  # if it exists on this VM
                os.chdir(there)
        self.wall.begin_run(scratch_of(Path(staged.scratch), start.rank), staged.since_ns)
        files_on_demand.use(staged.on_demand, staged.project, staged.replica)
        adopt.begin_run(order.store)
        if order.delivery is not None:
            from taas.delivery import loader

            loader.connect(order.delivery, start.rank, order.host)
        place = capture.Place(start.rank, order.cell.spec.world_size)
        self.arrival = capture.arrive(
            payload, self.shell.user_ns, device=self.device, before=self.arrival, place=place
        )
        self.shell.execution_count = order.cell.execution_count
        self.arrival.prepare_shell(self.shell)
        answer_requests(Path(staged.output) / str(start.rank), self.arrival.cell_numbers)
        if start.rank == 0:
            self.arrival.mark()

    def sizes(self) -> dict[str, int]:
        """Return the memory that this process holds while it waits, as fields of `RankKept`."""
        return {"host_bytes": own_memory(), "gpu_bytes": adopt.own_gpu.give_back_unused()}


def own_memory() -> int:
    """Return the bytes of memory that this process shares with no other process."""
    return int(psutil.Process().memory_full_info().uss)


def become_rank(start: RankStart, shell: RankShell, *, outlives_run: bool) -> Prepared:
    """Make this process a rank, without variables; ``outlives_run``: it also serves later runs."""
    order, local_rank, staged = start.order, start.local_rank, start.staged
    if not hasattr(shell, "kernel") or start.rank not in order.cell.spec.shown_ranks():
        sys.modules.pop("ipykernel.zmqshell", None)  # its bars are text: nobody would see widgets
    os.environ.update(start.environ)
    project = sync.enter_replica(staged.replica, staged.project, functools.partial(_tell, start))
    wall = _enter_storage(start, project, outlives_run=outlives_run)
    _enter_project(start, project)
    device = _enter_device(order, local_rank)
    membership = adopt.Membership(
        rank=start.rank,
        world_size=order.cell.spec.world_size,
        local_rank=local_rank,
        local_world_size=order.local_world_size,
        address=order.store,
        rehearsed=order.rehearsed,
        notice=lambda text: print(f"taas: {text}"),  # noqa: T201  the cell shows it
        project=Path(project),
    )
    adopt.install(membership, order.cell.spec.backend)
    children.install(membership)
    return Prepared(shell, wall, device, staged.environ, Path(project))


def _tell(start: RankStart, text: str) -> None:
    if start.rank == 0:
        print(f"taas: VM {start.order.vm}: {text}")  # noqa: T201


def _enter_storage(start: RankStart, project: str, *, outlives_run: bool) -> Guard:
    """Set up the write protection of the project while this process has one thread."""
    order, staged = start.order, start.staged
    scratch = scratch_of(Path(staged.scratch), start.rank)
    scratch.mkdir(mode=0o700, parents=True, exist_ok=True)
    sockets = "" if order.delivery is None else order.delivery.folder
    ours = [staged.output, order.store.folder, sockets, staged.on_demand]
    if outlives_run:  # later runs have other folders next to these
        ours = [str(Path(path).parent) for path in ours if path]
    return guard(
        project=project,
        rank=start.rank,
        scratch=scratch,
        mode=order.cell.spec.rank_writes,
        shared=order.cell.spec.shared,
        since_ns=staged.since_ns,
        writable=tuple(path for path in ours if path),
    )


def _enter_project(start: RankStart, project: str) -> None:
    """Enter the notebook's directory, and set the arguments that a script would have."""
    os.chdir(project)
    if sys.path[:1] != [project]:
        sys.path.insert(0, project)
    option = start.order.cell.local_rank_option
    sys.argv = ["<cell>", *([f"{option}={start.local_rank}"] if option else [])]


def _enter_device(order: RankOrder, local_rank: int) -> str | None:
    """Select this rank's device and threads.

    Return where the notebook's CUDA tensors are placed.
    """
    import torch

    if threads := os.environ.get("OMP_NUM_THREADS"):  # read at import, which was before the fork
        from taas.rank.preloaded import THREAD_POOLS

        torch.set_num_threads(int(threads))
        THREAD_POOLS.limit(limits=int(threads))
    if order.rehearsed:
        rehearsal.install(local_rank, order.rehearsed)
        return None
    if not order.gpus:
        return None
    if order.local_world_size == 1:
        adopt.own_gpu.install()
        return "cuda"
    own = order.gpus[local_rank]
    adopt.own_gpu.install(own)
    return f"cuda:{os.environ['CUDA_VISIBLE_DEVICES'].split(',').index(own)}"
