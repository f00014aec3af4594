"""The weakest wall: Python's audit hooks, where the kernel offers nothing.

It sees what Python itself opens and changes. C and C++ code and every other program write past it, so it
guards against accidents only; ``LIMITS`` says so to the user.
"""

# Plain strings: a Path folds "..", which the kernel follows, and these run on every call of a rank.
# ruff: noqa: PTH115, PTH118

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

from taas.storage.boundary import Boundary
from taas.storage.denial import Denial

__all__ = ["LIMITS", "lifted", "raise_wall"]

LIMITS = (
    "only Python code in the rank and its forked workers is held back: C and C++ libraries (h5py, safetensors, "
    "torch.jit.save), shells and other programs can write the project",
    "sqlite3.connect to a database in the project needs file:...?mode=ro",
)

_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND

# Event -> positions of (path, dir_fd) pairs it changes; dir_fd None where the event carries none. Python's
# audit event table: https://docs.python.org/3/library/audit_events.html
_CHANGES: dict[str, tuple[tuple[int, int | None], ...]] = {
    "os.mkdir": ((0, 2),),
    "os.rmdir": ((0, 1),),
    "os.remove": ((0, 1),),
    "os.rename": ((0, 2), (1, 3)),
    "os.link": ((0, 2), (1, 3)),
    "os.symlink": ((1, 2),),
    "os.truncate": ((0, None),),
    "os.chmod": ((0, 2),),
    "os.chown": ((0, 3),),
    "os.utime": ((0, 3),),
    "os.setxattr": ((0, None),),
    "os.removexattr": ((0, None),),
}


_lift = threading.local()


@contextlib.contextmanager
def lifted() -> Iterator[None]:
    """Let this thread's calls pass: for a call that names the project but opens a diverted file."""
    before = getattr(_lift, "on", False)
    _lift.on = True
    try:
        yield
    finally:
        _lift.on = before


def raise_wall(boundary: Boundary, denial: Denial) -> str:
    """Make this interpreter refuse to write the project; an audit hook cannot be taken away again."""

    def refuse(path: Any, dir_fd: int = -1) -> None:
        real = _real(path, dir_fd)
        if real is not None and boundary.relative(real) is not None:
            raise denial.error(real)

    sys.addaudithook(_hook(refuse))
    return "Python only"


def _hook(refuse: Callable[..., None]) -> Callable[[str, tuple[Any, ...]], None]:
    def hook(event: str, args: tuple[Any, ...]) -> None:
        if getattr(_lift, "on", False):
            return
        if event == "open":
            path, _, flags = args
            if isinstance(flags, int) and flags & _WRITES and not isinstance(path, int):
                refuse(path)
        elif event in _CHANGES:
            for position, dir_fd in _CHANGES[event]:
                refuse(args[position], -1 if dir_fd is None else args[dir_fd])
        elif event == "sqlite3.connect" and not _reads_only(args[0]):
            refuse(str(args[0]).removeprefix("file:").partition("?")[0])

    return hook


def _reads_only(database: Any) -> bool:
    text = os.fsdecode(database) if isinstance(database, str | bytes | os.PathLike) else ""
    return text in {"", ":memory:"} or ("?" in text and ("mode=ro" in text or "mode=memory" in text))


def _real(path: Any, dir_fd: int) -> str | None:
    if isinstance(path, int):
        return _descriptor(path)
    if not isinstance(path, str | bytes | os.PathLike):
        return None
    text = os.fsdecode(path)
    base = _descriptor(dir_fd) if dir_fd is not None and dir_fd >= 0 else None
    return os.path.realpath(os.path.join(base, text) if base else text)


def _descriptor(number: int) -> str | None:
    try:
        return os.readlink(f"/proc/self/fd/{number}")
    except OSError:
        return None
