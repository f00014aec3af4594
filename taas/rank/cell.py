"""Run one cell in one rank, and report how it ended."""

from __future__ import annotations

import os
import pdb
import sys
import threading
import time
import traceback
from bdb import BdbQuit
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import msgspec

from taas import adopt, capture
from taas.base.wording import fitting_lines, text_of
from taas.capture.moves import collected
from taas.project.wall.walls import NO_WALL
from taas.protocol.framing import Memory
from taas.protocol.ranks import Cell, RankEnded, RankOrder, RankStage, RankStart
from taas.rank.agent_link import AgentLink, Keyboard
from taas.rank.outlet import Outlet
from taas.rank.prepared import Prepared
from taas.rank.users_traceback import lines_of
from taas.rank_storage import Guard

_LATE_SECONDS = 5.0
"""Threads that run for longer than this after the cell's last line are listed for the user."""
_WITHOUT_WALL = (
    "rank writes: this machine gives no wall (taas doctor says why), so of ranks other than 0 only"
    " what Python's own functions write was kept out of the project: C libraries and other programs"
    " could write it"
)


def run_cell(start: RankStart, rank: Prepared, link: AgentLink, outlet: Outlet) -> RankEnded:
    """Run the cell of a job and pack the variables it changed; return how it ended in this rank."""
    keyboard = Keyboard(start.rank, link, outlet.flush)
    link.begin_cell(partial(_last_word, start.rank, rank.arrival, link), keyboard.answer)
    ended, value = _run_to_end(start, rank, link)
    if not link.in_rank:
        _leave_as_child(ended, outlet)
    said: list[str] = []
    if start.rank == 0:
        ended = _pack_names(ended, rank.arrival, value)
    if start.order.cell.spec.collect:
        said += _pack_collected(start)
    outlet.flush()
    return with_notices(ended, [*said, *said_of_wall(rank.wall)])


def _leave_as_child(ended: RankEnded, outlet: Outlet) -> NoReturn:
    """End a process that the cell forked and that ran on to the cell's end: it is not the rank."""
    sys.stderr.write("\n".join(ended.traceback))
    outlet.flush()
    os._exit(0 if ended.outcome == "done" else 1)


def _run_to_end(start: RankStart, rank: Prepared, link: AgentLink) -> tuple[RankEnded, Any]:
    """Run the cell to its end, including its GPU work.

    Afterwards, no interrupt reaches this thread.
    """
    value: Any = None
    try:
        try:  # from here on the cell may be interrupted
            link.send(RankStage(stage="begun", rank=start.rank))
            ended, value = _run_code(start, rank, link)
        except KeyboardInterrupt as error:
            # the interrupt came before the cell's first line or after its last
            ended = failed(start.rank, error)
        link.last_word.end_cell()
    except KeyboardInterrupt:  # the interrupt came when the outcome was already known
        link.last_word.end_cell()
    return ended, value


def _run_code(start: RankStart, rank: Prepared, link: AgentLink) -> tuple[RankEnded, Any]:
    """Run the cell and report how it ended, whatever it does to the process."""
    shell = rank.shell
    result = shell.run(start.order.cell.text)
    error = result.error_before_exec or result.error_in_exec
    lines: Sequence[str] = shell.last_traceback
    if error is None or (isinstance(error, SystemExit) and error.code in (None, 0)):
        if not start.order.cell.spec.keep:
            wait_for_threads(start.rank)
        error, lines = _error_of_gpus(start.order), ()
    if error is None:
        value = capture.NOTHING if result.result is None else result.result
        return RankEnded(rank=start.rank, outcome="done", at=time.time()), value
    if not isinstance(error, Exception):
        shown = lines if isinstance(error, KeyboardInterrupt) else ()
        ended = failed(start.rank, error, shown)
        return msgspec.structs.replace(ended, line=_line_of(error, start.order.cell)), None
    lines = lines or "".join(traceback.format_exception_only(error)).splitlines()
    if start.order.cell.spec.post_mortem and not isinstance(error, BdbQuit):
        print("\n".join(lines))  # noqa: T201  the cell shows it
        pdb.post_mortem(error.__traceback__)
    ended = failed(start.rank, error, lines, _reason(error, rank))
    ended = msgspec.structs.replace(ended, line=_line_of(error, start.order.cell))
    # torch raises a RuntimeError for a collective that was aborted
    if link.broken_off and isinstance(error, RuntimeError):
        ended = msgspec.structs.replace(ended, outcome="interrupted")
    return ended, None


def _line_of(error: BaseException, cell: Cell) -> int:
    """Return the innermost line of the cell that an error comes from; 0 if it is not known."""
    file = f"<ipython-input-{cell.execution_count}-"
    if isinstance(error, SyntaxError) and (error.filename or "").startswith(file):
        return error.lineno or 0
    line, entry = 0, error.__traceback__
    while entry is not None:
        if entry.tb_frame.f_code.co_filename.startswith(file):
            line = entry.tb_lineno
        entry = entry.tb_next
    return line


def wait_for_threads(rank: int) -> None:
    """Wait for executors and non-daemon threads, as Python does at exit.

    Print a line if it takes long.

    Python's own way swallows an interrupt from Python 3.13 on.
    """
    late = threading.Timer(_LATE_SECONDS, _say_who_is_late, [rank])
    late.daemon = True
    late.start()
    try:
        for end_executors in reversed(threading._threading_atexits):  # type: ignore[attr-defined]
            end_executors()
        while waited_for := _threads():
            waited_for[0].join()
    finally:
        late.cancel()


def _threads() -> list[threading.Thread]:
    main = threading.main_thread()
    return [thread for thread in threading.enumerate() if not thread.daemon and thread is not main]


def _say_who_is_late(rank: int) -> None:
    if names := [thread.name for thread in _threads()]:
        print(  # noqa: T201  the cell shows it
            f"taas: rank {rank} has run the cell's last line, and waits for {len(names)} thread(s):"
            f" {', '.join(names)}"
        )


def _error_of_gpus(order: RankOrder) -> BaseException | None:
    """Wait for the GPUs; an error there after the cell's last line also fails the cell."""
    try:
        if order.gpus:
            capture.wait_for_devices()
    except KeyboardInterrupt as error:
        return error
    except Exception as error:
        error.add_note(
            "It failed on the GPU when the cell's last line had returned. To see which line asked"
            " for it, restart the kernel, set os.environ['CUDA_LAUNCH_BLOCKING'] = '1' in the first"
            " cell, and run the cell again."
        )
        return error
    return None


def _reason(error: BaseException, rank: Prepared) -> str | None:
    """Return an explanation that taas has for an error and its user cannot know."""
    left_behind = rank.arrival.left_behind
    if isinstance(error, BdbQuit):
        return "its debugger was quit"
    if isinstance(error, NameError) and error.name in left_behind:
        return f"it stayed in the notebook, because {left_behind[error.name]}"
    return rank.wall.explain(error) or adopt.explain(error)


def failed(
    number: int, error: BaseException, lines: Sequence[str] = (), reason: str | None = None
) -> RankEnded:
    """Report how a cell that raised ended, with its traceback and the explanation of taas."""
    outcome, text = "raised", text_of(error)
    if isinstance(error, (KeyboardInterrupt, SystemExit)):
        outcome = "exited" if isinstance(error, SystemExit) else "interrupted"
    return RankEnded(
        rank=number,
        outcome=outcome,
        at=time.time(),
        etype=type(error).__name__,
        message=text if reason is None else f"{text}{_joint(text)}{reason}",
        traceback=fitting_lines(lines),
    )


def _joint(text: str) -> str:
    """Return the separator between the text of an error and the explanation of taas."""
    return "" if not text else " " if text.endswith(".") else ": "


def _pack_names(ended: RankEnded, arrival: Any, value: Any, *, last: bool = True) -> RankEnded:
    """Pack rank 0's variables, in their current state if the cell has failed.

    If packing fails, the run fails with that error. If the run has already failed, the error is
    added as a notice. ``last`` tells whether this is the final version.
    """
    done = ended.outcome == "done"
    try:
        value = value if done else capture.NOTHING
        fd = capture.pack_answer(arrival, sys.modules["__main__"].__dict__, value, last=last)
    except BaseException as error:
        if done:
            return failed(ended.rank, error, lines_of(error))
        return with_notices(
            ended, [f"rank 0's names could not be packed: {type(error).__name__}: {error}"]
        )
    return msgspec.structs.replace(ended, answer=Memory(os.getpid(), fd, os.fstat(fd).st_size))


def _pack_collected(start: RankStart) -> list[str]:
    """Store the variables that the header collects from each rank.

    Return why that was impossible.
    """
    names, folder = sys.modules["__main__"].__dict__, Path(start.staged.output) / str(start.rank)
    try:
        collected.pack(start.order.cell.spec.collect, names, folder)
    except OSError as error:
        return [
            f"what rank {start.rank} was to give to taas.collected could not be written: {error}"
        ]
    return []


def said_of_wall(wall: Guard) -> tuple[str, ...]:
    """Return a notice for a rank other than 0 that has no write protection."""
    return (_WITHOUT_WALL,) if wall.denial is not None and wall.mechanism == NO_WALL else ()


def lost_output(ended: RankEnded, outlet: Outlet) -> list[str]:
    """Return a notice if output was lost because the disk was full."""
    lost = (
        f"{outlet.events.lost_bytes:,} bytes of the output of rank {ended.rank} were lost, because"
        " the disk of the run's folder is full. The run went on. `%taas history` shows where old"
        " runs are kept; remove some, or set JUPYTER_RUNTIME_DIR."
    )
    return [lost] if outlet.events.lost_bytes else []


def _last_word(number: int, arrival: Any, link: AgentLink, *, last: bool = True) -> RankEnded:
    """Report how a rank with a stuck main thread ended; unless ``last``, how it would end now."""
    # if this is another thread, the main thread sleeps in C code
    beside = threading.current_thread() is not threading.main_thread()
    ended = failed(number, KeyboardInterrupt())
    ended = msgspec.structs.replace(
        ended, asleep=beside or link.broken_off or _comes_from_collective()
    )
    if not last:
        ended = msgspec.structs.replace(ended, outcome="stood")
    with adopt.waits.beside_gpu_work():
        return _pack_names(ended, arrival, None, last=last) if number == 0 else ended


def _comes_from_collective() -> bool:
    """Whether this thread is currently handling an error that torch.distributed has raised."""
    traceback_of = sys.exc_info()[2]
    while traceback_of is not None:
        if "/torch/distributed/" in traceback_of.tb_frame.f_code.co_filename:
            return True
        traceback_of = traceback_of.tb_next
    return False


def with_notices(ended: RankEnded, said: Sequence[str]) -> RankEnded:
    """Add notices for the user."""
    return msgspec.structs.replace(ended, notices=(*ended.notices, *said))
