"""Warnings name the program's line, not the rehearsal's, whose functions stand between a program and torch.

``warnings.warn(…, stacklevel=2)`` passes over frames of importlib, which it knows by their file: ``passed_over`` lets
functions be taken for such. What C code warns of is attributed to the very frame that called it: if that is one of the
rehearsal's, it is warned of again for the first frame that is not, by the filters and the registry there.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any, TypeVar

_Function = TypeVar("_Function", bound=Callable[..., Any])
_HERE = str(Path(__file__).parent)
_show: Callable[[warnings.WarningMessage], None] = warnings._showwarnmsg  # type: ignore[attr-defined]


def passed_over(function: _Function) -> _Function:
    """Let warnings of what a Python function calls pass over it."""
    code: Any = function.__code__
    function.__code__ = code.replace(
        co_filename=f"{code.co_filename} (passed over as importlib._bootstrap is)"
    )
    return function


def _show_for_the_program(message: warnings.WarningMessage) -> None:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_HERE):
        frame = frame.f_back
    if frame is None or not message.filename.startswith(_HERE):
        _show(message)
        return
    warnings.warn_explicit(
        message.message,
        message.category,
        frame.f_code.co_filename,
        frame.f_lineno,
        frame.f_globals.get("__name__"),
        frame.f_globals.setdefault("__warningregistry__", {}),
    )


def install(modules: Iterable[ModuleType]) -> None:
    """Attribute what is warned of in these modules to their callers; they keep no note of what they have shown."""
    for module in modules:
        vars(module)["__warningregistry__"] = None
    warnings._showwarnmsg = _show_for_the_program  # type: ignore[attr-defined]
