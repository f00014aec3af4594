"""Debuggers in a rank show the user's frames, but none of IPython or taas.

Every debugger for Python is a :class:`bdb.Bdb`: pdb, which ``breakpoint()`` opens, IPython's
debugger, and terminal debuggers of IDEs. That class is therefore patched to recognize the user's
frames. IPython runs each statement of a cell as a separate code object. Stepping past a statement
stops in the next one, and stepping past the last one ends the debugging.
"""

from __future__ import annotations

import bdb
import pdb
import sys
import threading
from types import FrameType, TracebackType
from typing import Any

from IPython.core.interactiveshell import InteractiveShell

_RUNS_CODE: Any = InteractiveShell.run_code.__code__
_MACHINERY = ("taas", "IPython")
_Stack = list[tuple[FrameType, int]]


def show_users_frames() -> None:
    """Let debuggers in this process show, and stop in, only the user's frames; called once."""
    get_stack, stop_here = bdb.Bdb.get_stack, bdb.Bdb.stop_here

    def get_users_stack(
        self: bdb.Bdb, frame: FrameType | None, traceback: TracebackType | None
    ) -> tuple[_Stack, int]:
        stack, at = get_stack(self, frame, traceback)
        inside = next((n for n, (one, _) in enumerate(stack) if one.f_code is _RUNS_CODE), -1) + 1
        numbers = [
            n for n in range(inside, len(stack)) if n == at or not _is_machinery(stack[n][0])
        ]
        if not numbers:
            return stack, at
        return [stack[n] for n in numbers], max(sum(n <= at for n in numbers) - 1, 0)

    def stop_in_users_frame(self: bdb.Bdb, frame: FrameType) -> bool:
        return _is_users(frame) and bool(stop_here(self, frame))

    patched: Any = bdb.Bdb
    patched.get_stack, patched.stop_here = get_users_stack, stop_in_users_frame
    _step_from_statement_to_statement(patched)
    _quit_without_a_question()


def _quit_without_a_question() -> None:
    """Let ``q`` end the cell, as in a notebook.

    From Python 3.14 on, pdb first asks whether it may kill the process, unless ``sys.ps1`` exists;
    a rank has none (rank/shell.py).
    """
    do_quit = pdb.Pdb.do_quit

    def quit_as_in_a_notebook(self: pdb.Pdb, arg: str) -> bool | None:
        if hasattr(sys, "ps1"):  # the program has set it
            return do_quit(self, arg)
        sys.ps1 = ""
        try:
            return do_quit(self, arg)
        finally:
            del sys.ps1

    patched: Any = pdb.Pdb
    patched.do_quit = patched.do_q = patched.do_exit = quit_as_in_a_notebook


def _step_from_statement_to_statement(patched: Any) -> None:
    """Let ``next`` go to the cell's next statement, as it goes to the next line of a script."""
    dispatch_call, dispatch_return = patched.dispatch_call, patched.dispatch_return

    def begin(self: Any, frame: FrameType, arg: Any) -> Any:
        if self.botframe is None or not _is_statement(frame):
            return dispatch_call(self, frame, arg)
        wanted = self.stop_here(frame) or self.break_anywhere(frame)
        return self.trace_dispatch if wanted else None

    def end(self: Any, frame: FrameType, arg: Any) -> Any:
        if not _is_statement(frame) or self.stopframe is not frame:
            return dispatch_return(self, frame, arg)
        self.set_step()
        return self.trace_dispatch

    patched.dispatch_call, patched.dispatch_return = begin, end


def leave_debuggers() -> None:
    """Stop tracing: the cell is over, and its debugger may be in the middle of a step."""
    if isinstance(getattr(sys.gettrace(), "__self__", None), bdb.Bdb):
        sys.settrace(None)


def _is_statement(frame: FrameType) -> bool:
    return (
        frame.f_back is not None and frame.f_back.f_code is _RUNS_CODE and not _is_machinery(frame)
    )


def _is_machinery(frame: FrameType) -> bool:
    return str(frame.f_globals.get("__name__")).partition(".")[0] in _MACHINERY


def _is_users(frame: FrameType) -> bool:
    """Whether a frame belongs to code that the cell runs; IPython has frames between statements."""
    if _is_machinery(frame):
        return False
    above: FrameType | None = frame
    while above is not None:
        called_by = above.f_back
        if called_by is not None and called_by.f_code is _RUNS_CODE:
            return above.f_globals.get("__name__") == "__main__"
        above = called_by
    return threading.current_thread() is not threading.main_thread()
