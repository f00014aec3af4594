"""A rank from its first instruction to its last.

The order is part of the design: the ties to the agent before anything can hang, the write rule while the
process has one thread, the rehearsal before a library but torch is imported, the names before the shell.
"""

from __future__ import annotations

import atexit
import os
import sys
import time
import traceback
import warnings
from dataclasses import dataclass
from multiprocessing.connection import Client, Connection
from pathlib import Path
from typing import Any, NoReturn

import msgspec

from taas import adopt
from taas.messages.ranks import (
    CellStarted,
    PagesCopied,
    RankEnded,
    RankHears,
    RankOrder,
    RankStart,
    SpareStart,
)
from taas.messages.wire import Memory, Reader, pack
from taas.rank import copied_pages, process_names
from taas.rank.before_order import Readied, make_ready, wait_for_order
from taas.rank.error_text import fitting_lines, text_of
from taas.rank.lifeline import tie_to_agent
from taas.rank.stacks import answer_requests
from taas.rank.streams import Outlet
from taas.rank_storage import Guard, Policy, guard, scratch_of

_read_ahead = Reader(SpareStart)
_read_start = Reader(RankHears)
_read_dismissal = Reader(RankHears)


def main(control: str, prepared: bytes, ordered: bytes) -> NoReturn:
    """Run one rank; called by elastic's ``start_processes`` in a process forked from the forkserver.

    Args:
        control: name of the agent's socket in the abstract namespace.
        prepared: for a spare, the :class:`~taas.messages.ranks.SpareStart`; else empty.
        ordered: the :class:`~taas.messages.ranks.RankStart`; empty for a spare, which waits for it.
    """
    tie_to_agent()
    process_names.call(process_names.OWN if ordered else process_names.SPARE)
    agent: Connection = Client("\0" + control, "AF_UNIX")
    outlet = Outlet()
    readied = None
    if not ordered:
        ahead: SpareStart = _read_ahead(prepared)
        readied = make_ready(ahead.preparation, outlet)
        copied_pages.copy_ahead(ahead.pages)
        ordered = _wait_for_order(agent)
    start: RankStart = _read_start(ordered)
    order = start.order
    outlet.open(Path(order.log_dir) / str(start.rank))
    status = 1
    try:
        ended = _run(start, readied, agent, outlet)
        outlet.flush()
        agent.send_bytes(pack(_with_losses(ended, outlet)))
        status = 0 if ended.outcome == "done" else 1
        _leave_delivery(order)
        adopt.finish(failed=status != 0)  # gloo aborts now and then if the process leaves a group open
        if ended.answer is not None:  # the memory lives in this process until the agent holds it too
            _read_dismissal(agent.recv_bytes())
        _run_exit_functions()
        outlet.flush()
        if start.surveyed:
            agent.send_bytes(pack(PagesCopied(pages=copied_pages.copied())))
    except KeyboardInterrupt:  # a second interrupt, or one in the middle of leaving
        status = 130
    except EOFError:
        status = 1  # the agent went while it took the answer
    finally:
        # Threads of the cell must not hold the rank, nor half-destroyed process groups abort it.
        os._exit(status)


def _wait_for_order(agent: Connection) -> bytes:
    try:
        return wait_for_order(agent)
    except (EOFError, KeyboardInterrupt):  # nobody has a use for it
        os._exit(0)


@dataclass(frozen=True)
class _Prepared:
    """A rank before its cell: the names that arrived, the shell, and the wall around the project."""

    arrival: Any
    shell: Any
    wall: Guard


@dataclass
class _End:
    """What is known when the cell has ended, whichever way."""

    outcome: str
    error: BaseException | None = None
    lines: tuple[str, ...] = ()
    at: float = 0.0


def _run(start: RankStart, readied: Readied | None, agent: Connection, outlet: Outlet) -> RankEnded:
    """Prepare the process, run the cell, and say how it ended."""
    order, rank = start.order, start.rank
    answer: Memory | None = None
    try:
        prepared = _prepare(start, readied or make_ready(order.preparation, outlet))
    except KeyboardInterrupt as error:
        end = _End("interrupted", error, (), time.time())
    except BaseException as error:
        lines = tuple("".join(traceback.format_exception(error)).splitlines())
        end = _End("raised", error, lines, time.time())
    else:
        agent.send_bytes(pack(CellStarted(rank=rank)))
        end, value = _run_cell(order, prepared)
        if end.outcome == "done" and order.gpus and not order.rehearsed:
            end = _wait_for_gpus(end)
        if end.outcome == "done" and rank == 0:
            end, answer = _pack_answer(end, prepared.arrival, value)
    return RankEnded(
        rank=rank,
        outcome=end.outcome,
        at=end.at,
        etype=type(end.error).__name__ if end.error is not None else "",
        message=text_of(end.error) if end.error is not None else "",
        traceback=fitting_lines(end.lines),
        answer=answer,
    )


def _with_losses(ended: RankEnded, outlet: Outlet) -> RankEnded:
    """Say what of the output was lost: the disk was full, and the rank went on."""
    lost = outlet.events.lost_bytes
    if not lost:
        return ended
    said = (
        f"{lost:,} bytes of the output of rank {ended.rank} were lost, because the disk of the run's folder is full. "
        "The run went on. `%taas history` shows where old runs are kept; remove some, or set JUPYTER_RUNTIME_DIR."
    )
    return msgspec.structs.replace(ended, notices=(*ended.notices, said))


def _prepare(start: RankStart, readied: Readied) -> _Prepared:
    """Make this process what the contract says a rank is."""
    from taas import capture

    order, rank, local_rank = start.order, start.rank, start.local_rank
    payload = order.payload.open()
    capture.check_versions(capture.peek(payload))
    os.environ.update(start.environ)
    order = _enter_replica(order, rank)
    wall = _enter_storage(order, rank)
    _enter_project(order, local_rank)
    device = _enter_device(order, local_rank)
    adopt.install(
        rank=rank,
        world_size=order.world_size,
        local_rank=local_rank,
        local_world_size=order.local_world_size,
        store_addr=order.store.host,
        store_port=order.store.port,
        rehearsed=bool(order.rehearsed),
        notice=lambda text: print(f"taas: {text}"),  # noqa: T201  the cell shows it
        project=Path(order.project),
        backend=order.spec.backend,
    )
    if order.delivery is not None:
        from taas.delivery import loader

        loader.connect(msgspec.structs.replace(order.delivery, rank=rank))
    arrival = capture.arrive(payload, readied.main.__dict__, device=device, answers=False)
    os.close(payload)
    shell = readied.shell
    shell.execution_count = order.execution_count
    arrival.dress(shell)
    answer_requests(Path(order.log_dir) / str(rank), shell.compile._filename_map)
    if rank == 0:
        arrival.mark()
    return _Prepared(arrival, shell, wall)


def _enter_replica(order: RankOrder, rank: int) -> RankOrder:
    """Let a copy of the project stand in its place, where this VM does not see the notebook's disk."""
    if not order.replica:
        return order
    from taas.travel import replica

    try:
        replica.enter(order.replica, order.project)
    except OSError as error:
        if rank == 0:
            print(  # noqa: T201  the cell shows it
                f"taas: absolute paths of the project do not hold on VM {order.vm}, relative ones do: {error}"
            )
        return msgspec.structs.replace(order, project=order.replica)
    return order


def _enter_storage(order: RankOrder, rank: int) -> Guard:
    """Raise the wall around the project; this process has one thread, and has what it needs of others."""
    scratch = scratch_of(Path(order.scratch), rank)
    scratch.mkdir(mode=0o700, parents=True, exist_ok=True)
    return guard(
        Policy(
            project=order.project,
            rank=rank,
            vm=order.vm,
            mode=order.spec.rank_writes,
            shared=order.spec.shared,
            scratch=str(scratch),
            writable=(order.log_dir,),
        )
    )


def _enter_project(order: RankOrder, local_rank: int) -> None:
    """Stand where the notebook stands, with the arguments that a script would have."""
    os.chdir(order.project)
    if sys.path[:1] != [order.project]:
        sys.path.insert(0, order.project)
    sys.argv = ["<cell>"]
    for spelling in ("--local_rank", "--local-rank"):
        if spelling in order.cell:
            sys.argv = ["<cell>", f"{spelling}={local_rank}"]
            break


def _enter_device(order: RankOrder, local_rank: int) -> str | None:
    """Select this rank's device and its share of the processor; returns where CUDA tensors of the notebook land."""
    import torch

    if "OMP_NUM_THREADS" in os.environ:
        _limit_threads(int(os.environ["OMP_NUM_THREADS"]))
    if order.rehearsed:
        from taas import rehearsal

        rehearsal.install(local_rank, order.rehearsed)
        return None
    if not order.gpus:
        return None
    if order.local_world_size > 1:
        torch.cuda.set_device(local_rank)
    return f"cuda:{local_rank}"


def _limit_threads(count: int) -> None:
    """Do what OMP_NUM_THREADS would do: the libraries read it at import, which was before the fork."""
    import torch

    from taas.rank.preloaded import THREAD_POOLS

    torch.set_num_threads(count)
    THREAD_POOLS.limit(limits=count)


def _run_cell(order: RankOrder, prepared: _Prepared) -> tuple[_End, Any]:
    """Run the cell; whatever it does to the process, say how it ended."""
    from taas import capture

    shell = prepared.shell
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="To exit: use", category=UserWarning)
        result = shell.run(order.cell)
    error = result.error_before_exec or result.error_in_exec
    at = time.time()
    if error is None or (isinstance(error, SystemExit) and error.code in (None, 0)):
        value = capture.NOTHING if result.result is None else result.result
        return _End("done", at=at), value
    if isinstance(error, SystemExit):
        return _End("exited", error, (), at), None
    if isinstance(error, KeyboardInterrupt):
        return _End("interrupted", error, shell.last_traceback, at), None
    why = _reason(error, prepared)
    if why is not None:
        error.args = (f"{text_of(error)}: {why}", *error.args[1:])
    return _End("raised", error, shell.last_traceback, at), None


def _wait_for_gpus(end: _End) -> _End:
    """Let the GPUs finish what the cell asked of them; what fails there after its last line is its failure, too."""
    from taas import capture

    try:
        capture.wait_for_devices()
    except KeyboardInterrupt as error:
        return _End("interrupted", error, (), time.time())
    except Exception as error:
        error.add_note(
            "It failed on the GPU when the cell's last line had returned. To see which line asked for it, restart the "
            "kernel, set os.environ['CUDA_LAUNCH_BLOCKING'] = '1' in the first cell, and run the cell again."
        )
        lines = tuple("".join(traceback.format_exception_only(error)).splitlines())
        return _End("raised", error, lines, time.time())
    return end


def _reason(error: BaseException, prepared: _Prepared) -> str | None:
    """What taas knows of an error that its user cannot know."""
    left_behind = prepared.arrival.left_behind
    if isinstance(error, NameError) and error.name in left_behind:
        return f"it stayed in the notebook, because {left_behind[error.name]}"
    return prepared.wall.explain(error)


def _pack_answer(end: _End, arrival: Any, value: Any) -> tuple[_End, Memory | None]:
    """Pack rank 0's names; a failure to do so is the run's failure, never silent."""
    try:
        fd = arrival.pack_answer(sys.modules["__main__"].__dict__, value)
    except BaseException as error:
        lines = tuple("".join(traceback.format_exception(error)).splitlines())
        return _End("raised", error, lines, time.time()), None
    return end, Memory(os.getpid(), fd, os.fstat(fd).st_size)


def _leave_delivery(order: RankOrder) -> None:
    if order.delivery is not None:
        from taas.delivery import loader

        loader.disconnect()


def _run_exit_functions() -> None:
    """Run what libraries registered for the exit of the process, such as loggers that flush."""
    atexit._run_exitfuncs()
