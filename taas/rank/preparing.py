"""A process becomes a rank, at its first order, and takes in the names of each cell.

The order is part of the design: the write rule while the process has one thread, the rehearsal before a library but
torch is imported, the names before the shell.
"""

from __future__ import annotations

import functools
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from taas import adopt, capture, project_sync, rehearsal
from taas.project_sync import late_files
from taas.rank import children
from taas.rank.shell import RankShell
from taas.rank_storage import Guard, Policy, guard, scratch_of
from taas.runs.stacks import answer_requests
from taas.wire.ranks import RankOrder, RankStart


@dataclass
class Prepared:
    """This process, from its first order to its last.

    Attributes:
        shell: where its cells run.
        wall: the one around the project.
        device: where CUDA tensors of the notebook land; ``cuda``: on the device they had; None: in host memory.
        environ: the notebook's, as it was last.
        project: where it is on this VM.
        arrival: the names of the last cell as they arrived.
    """

    shell: RankShell
    wall: Guard
    device: str | None
    environ: dict[str, str]
    project: Path
    arrival: Any = None

    def take_in(self, start: RankStart, payload: int) -> None:
        """Make ready for a cell: its variables, loaders and names, of which ``payload`` is a descriptor."""
        order, staged = start.order, start.staged
        self._take_environ(staged.environ)
        os.environ.update(start.environ)
        if order.continues:
            self._enter_directory(Path(order.cell.directory), staged.project)
        self.wall.begin_run(scratch_of(Path(staged.scratch), start.rank), staged.since_ns)
        late_files.use(staged.late, staged.project, staged.replica)
        adopt.begin_run(order.store)
        if order.delivery is not None:
            from taas.delivery import loader

            loader.connect(order.delivery, start.rank, order.host)
        self.arrival = capture.arrive(payload, self.shell.user_ns, device=self.device, before=self.arrival)
        self.shell.execution_count = order.cell.execution_count
        self.arrival.dress(self.shell)
        answer_requests(Path(staged.output) / str(start.rank), self.arrival.cell_numbers)
        if start.rank == 0:
            self.arrival.mark()

    def _take_environ(self, environ: dict[str, str]) -> None:
        """Take over what the notebook has changed of its environment since the last cell."""
        for name in self.environ.keys() - environ.keys():
            os.environ.pop(name, None)
        os.environ.update(environ.items() - self.environ.items())
        self.environ = environ

    def _enter_directory(self, there: Path, project: str) -> None:
        """Go where the notebook is, if this VM has that directory."""
        if there.is_relative_to(project):
            there = self.project / there.relative_to(project)
        if there.is_dir():
            os.chdir(there)

    def sizes(self) -> dict[str, int]:
        """Return the memory that this process holds, as a `RankKept` has it."""
        torch = sys.modules["torch"]
        gpu = torch.cuda.memory_reserved() if self.device is not None and torch.cuda.is_initialized() else 0
        return {"host_bytes": psutil.Process().memory_full_info().uss, "gpu_bytes": gpu}


def become_rank(start: RankStart, shell: RankShell, payload: int) -> Prepared:
    """Make this process what the contract says a rank is, but for the names."""
    order, rank, local_rank, staged = start.order, start.rank, start.local_rank, start.staged
    capture.check_versions(capture.peek(payload))
    if not hasattr(shell, "kernel") or rank not in order.cell.spec.shown_ranks():
        sys.modules.pop("ipykernel.zmqshell", None)  # its bars are text: nobody would see widgets
    os.environ.update(start.environ)
    project = project_sync.entered(staged.replica, staged.project, functools.partial(_tell, start))
    wall = _enter_storage(start, project)
    _enter_project(start, project)
    device = _enter_device(order, local_rank)
    membership = adopt.Membership(
        rank=rank,
        world_size=order.cell.spec.world_size,
        local_rank=local_rank,
        local_world_size=order.local_world_size,
        address=order.store,
        rehearsed=bool(order.rehearsed),
        notice=lambda text: print(f"taas: {text}"),  # noqa: T201  the cell shows it
        project=Path(project),
    )
    adopt.install(membership, order.cell.spec.backend)
    children.install(membership)
    return Prepared(shell, wall, device, staged.environ, Path(project))


def _tell(start: RankStart, text: str) -> None:
    """Show a line in the cell, once for all ranks."""
    if start.rank == 0:
        print(f"taas: VM {start.order.vm}: {text}")  # noqa: T201


def _enter_storage(start: RankStart, project: str) -> Guard:
    """Raise the wall around the project; this process has one thread, and has what it needs of others."""
    order, staged = start.order, start.staged
    scratch = scratch_of(Path(staged.scratch), start.rank)
    scratch.mkdir(mode=0o700, parents=True, exist_ok=True)
    sockets = "" if order.delivery is None else order.delivery.folder
    ours = [staged.output, order.store.folder, sockets, staged.late]
    if order.cell.spec.keep:  # later runs have other folders beside these
        ours = [str(Path(path).parent) for path in ours if path]
    return guard(
        Policy(
            project=project,
            rank=start.rank,
            mode=order.cell.spec.rank_writes,
            shared=order.cell.spec.shared,
            scratch=str(scratch),
            since_ns=staged.since_ns,
            writable=tuple(path for path in ours if path),
        )
    )


def _enter_project(start: RankStart, project: str) -> None:
    """Stand where the notebook stands, with the arguments that a script would have."""
    os.chdir(project)
    if sys.path[:1] != [project]:
        sys.path.insert(0, project)
    sys.argv = ["<cell>"]
    for spelling in ("--local_rank", "--local-rank"):
        if spelling in start.order.cell.text:
            sys.argv = ["<cell>", f"{spelling}={start.local_rank}"]
            break


def _enter_device(order: RankOrder, local_rank: int) -> str | None:
    """Select this rank's device and its share of the processor; returns where CUDA tensors of the notebook land."""
    import torch

    if "OMP_NUM_THREADS" in os.environ:
        _limit_threads(int(os.environ["OMP_NUM_THREADS"]))
    if order.rehearsed:
        rehearsal.install(local_rank, order.rehearsed)
        return None
    if not order.gpus:
        return None
    if order.local_world_size == 1:
        return "cuda"
    own = order.gpus[local_rank]
    torch.cuda._lazy_call(functools.partial(_select_device, own))
    return f"cuda:{os.environ['CUDA_VISIBLE_DEVICES'].split(',').index(own)}"


def _select_device(own: str) -> None:
    """Select this rank's device at the first use of CUDA: children may use it as well, and a program hide the others."""
    import torch

    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    if own in visible[: torch.cuda.device_count()]:
        torch.cuda.set_device(visible.index(own))


def _limit_threads(count: int) -> None:
    """Do what OMP_NUM_THREADS would do: the libraries read it at import, which was before the fork."""
    import torch

    from taas.rank.preloaded import THREAD_POOLS

    torch.set_num_threads(count)
    THREAD_POOLS.limit(limits=count)
