"""How torch's entry points are replaced: in place, under their own names, each in one line of a table."""

from __future__ import annotations

import functools
import inspect
import sys
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

import torch.distributed  # noqa: F401 - _DISTRIBUTED lists its modules

Arguments = dict[str, Any]


def replace(owner: Any, name: str, new: Any) -> None:
    """Put ``new`` in the place of ``owner.name``; pickles go on finding it by the name of what it replaces."""
    old = getattr(owner, name, None)
    pass_over(new)
    if inspect.isfunction(new) and callable(old):
        functools.update_wrapper(new, old)
        new.__name__ = name
        if inspect.ismodule(owner):
            new.__module__, new.__qualname__ = owner.__name__, name
        else:
            new.__module__, new.__qualname__ = owner.__module__, f"{owner.__qualname__}.{name}"
    setattr(owner, name, new)


def replace_all(owner: Any, table: Mapping[str, Any]) -> None:
    """Replace every name of a table, also one that this version of torch does not have."""
    for name, new in table.items():
        replace(owner, name, new)


def rewrite_calls(owner: Any, name: str, rewrite: Callable[[Arguments], None]) -> None:
    """Let a function or method be called with arguments that ``rewrite`` has changed; it gets those given, by name."""
    original = getattr(owner, name)
    signature = inspect.signature(original)

    @functools.wraps(original)
    def rewritten(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        rewrite(bound.arguments)
        return original(*bound.args, **bound.kwargs)

    replace_everywhere(owner, name, rewritten)


def replace_everywhere(owner: Any, name: str, new: Any) -> None:
    """Replace a function also in the modules of torch.distributed that took it by ``from … import``."""
    old = getattr(owner, name)
    pass_over(new)
    setattr(owner, name, new)
    if inspect.ismodule(owner):
        for module in _DISTRIBUTED:
            if vars(module).get(name) is old:
                setattr(module, name, new)


def stand_in(name: str, real: type, make: Callable[..., Any], module: str = "torch") -> type:
    """A class of torch that cannot be patched in place: calls of it ``make`` objects, and it recognises real ones."""

    class Meta(type):
        def __call__(cls, *args: Any, **kwargs: Any) -> Any:
            return make(*args, **kwargs)

        def __instancecheck__(cls, instance: object) -> bool:
            return isinstance(instance, real)

        def __subclasscheck__(cls, subclass: type) -> bool:
            return issubclass(subclass, real)

    return Meta(name, (), {"__module__": module, "__doc__": real.__doc__})


def always(value: Any) -> Callable[..., Any]:
    """A function that gives one answer, whatever it is asked."""

    def answer(*args: Any, **kwargs: Any) -> Any:
        return value

    return answer


# ---------------------------------------------------------------- warnings name the program's line
#
# Functions of the rehearsal stand between the program and torch. A warning with ``stacklevel=2`` passes over frames of
# importlib, which Python knows by the name of their file. What C code warns of is attributed to the frame that called it.

_HERE = str(Path(__file__).parent)
_AS_IMPORTLIB = " (passed over as importlib._bootstrap is)"
_show: Callable[[warnings.WarningMessage], None] = warnings._showwarnmsg  # type: ignore[attr-defined]


def pass_over(function: Any) -> None:
    """Let warnings of what a Python function calls pass over it; anything else is left as it is."""
    if inspect.isfunction(function) and not function.__code__.co_filename.endswith(_AS_IMPORTLIB):
        code = function.__code__
        function.__code__ = code.replace(co_filename=code.co_filename + _AS_IMPORTLIB)


def _show_for_the_program(message: warnings.WarningMessage) -> None:
    """Warn of what is attributed to the rehearsal for the first frame that is not, by the filters and the registry there."""
    frame: FrameType | None = sys._getframe(1) if message.filename.startswith(_HERE) else None
    while frame is not None and frame.f_code.co_filename.startswith(_HERE):
        frame = frame.f_back
    if frame is None:
        _show(message)
        return
    place, known = frame.f_globals.get("__name__"), frame.f_globals.setdefault("__warningregistry__", {})
    code = frame.f_code
    warnings.warn_explicit(message.message, message.category, code.co_filename, frame.f_lineno, place, known)


def install() -> None:
    """Attribute what C code called by the rehearsal warns of to the program."""
    warnings._showwarnmsg = _show_for_the_program  # type: ignore[attr-defined]


# at import, so before the fork: looking through sys.modules in a fork copies the pages of all modules
_DISTRIBUTED = [module for path, module in sys.modules.items() if path.startswith("torch.distributed")]
