"""Tracebacks lead from the cell to the user's code, without frames of taas between them.

There are frames of taas where it calls the user's code: it imports a module of the project that
the notebook has imported before (``import_hooks``), builds an object whose class has a
``__setstate__``, calls the function that was given to a launcher, or re-raises, in the rank,
an error that user code raised in a data worker. For errors of taas itself, and of a library that
taas called, all frames are shown: the user, or a developer of taas, may need to know where the
error came from.
"""

from __future__ import annotations

import traceback
from types import TracebackType

from taas.base import own_code
from taas.base.import_hooks import is_installed
from taas.delivery.failures import chain_of, entries_of, raise_remote

_DELIVERY = f"{own_code.FOLDER}delivery/"
_FROZEN = "<frozen "
"""Python omits the frames of its own import, unless frames of another loader are between them."""


def lines_of(error: BaseException) -> list[str]:
    """Return an error's traceback as Python formats it, without the frames of taas."""
    hide_machinery(error)
    return "".join(traceback.format_exception(error)).splitlines()


def users_lines_of(error: BaseException) -> list[str]:
    """Return the traceback of the user's error that caused an error of taas.

    Empty if there is none.
    """
    of_user = None
    for one, _ in chain_of(error):
        if _place_of_users_code(one, [*entries_of(one.__traceback__)]) >= 0:
            of_user = one
    return [] if of_user is None else lines_of(of_user)


def hide_machinery(error: BaseException | None) -> None:
    """Remove frames of taas from the tracebacks of an error and of the errors in its chain."""
    for one, _ in chain_of(error) if error is not None else ():
        entries = [*entries_of(one.__traceback__)]
        is_remote = any(entry.tb_frame.f_code is raise_remote.__code__ for entry in entries)
        users = _place_of_users_code(one, entries)
        shown = []
        for number, entry in enumerate(entries):
            file = _file_of(entry)
            hidden = number < users and file.startswith((own_code.FOLDER, _FROZEN))
            if not hidden and not (is_remote and file.startswith(_DELIVERY)):
                shown.append(entry)
        if len(shown) == len(entries):
            continue
        for entry, following in zip(shown, [*shown[1:], None], strict=True):
            entry.tb_next = following
        one.__traceback__ = shown[0] if shown else None


def _place_of_users_code(error: BaseException, entries: list[TracebackType]) -> int:
    """Return the index of the innermost frame of the user's code, or -1 if there is none.

    Code that does not compile has no frame: its index is that below the innermost frame.
    """
    if isinstance(error, SyntaxError) and error.filename and _is_users(error.filename):
        return len(entries)
    users = [number for number, entry in enumerate(entries) if _is_users(_file_of(entry))]
    return max(users, default=-1)


def _is_users(file: str) -> bool:
    """Whether code in a file is the user's: not part of taas or Python, and not installed."""
    return not file.startswith((own_code.FOLDER, _FROZEN)) and not is_installed(file)


def _file_of(entry: TracebackType) -> str:
    return entry.tb_frame.f_code.co_filename
