"""Warnings report the user's line: frames of taas in place of a library's are skipped.

``warnings.warn(…, stacklevel=2)`` in a library function, or a warning from C code, reports the
caller. That is taas if a function of taas replaces the library's (``rehearsal``, ``adopt``,
``project.wall``). Such a warning is issued again for the line that called taas, so that the user's
filters, and Python's rule that one line warns once, apply to that line.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from types import FrameType
from typing import Any

from taas.base import own_code

_Show = Callable[[warnings.WarningMessage], None]


def install() -> None:
    """Let warnings of this process and its forked children report lines outside taas.

    Called once.
    """
    module: Any = warnings
    module._showwarnmsg = _passing_over(module._showwarnmsg)


def _passing_over(native: _Show) -> _Show:
    def show(message: warnings.WarningMessage) -> None:
        ours = (
            _named_frame(message.filename) if message.filename.startswith(own_code.FOLDER) else None
        )
        caller = ours
        while caller is not None and caller.f_code.co_filename.startswith(own_code.FOLDER):
            caller = caller.f_back
        if ours is None or caller is None:  # no other code has called it
            native(message)
            return
        # Forget that a line of taas has warned, so that the user's next line warns, too.
        ours.f_globals.get("__warningregistry__", {}).clear()
        told = (str(message.message), message.category)
        warnings.onceregistry.pop(told, None)  # type: ignore[attr-defined]
        names = caller.f_globals
        warnings.warn_explicit(
            message.message,
            message.category,
            caller.f_code.co_filename,
            caller.f_lineno,
            names.get("__name__", "<unknown>"),
            names.setdefault("__warningregistry__", {}),
            None,
            message.source,
        )

    return show


def _named_frame(file: str) -> FrameType | None:
    """Return the innermost active frame of a file."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_code.co_filename != file:
        frame = frame.f_back
    return frame
