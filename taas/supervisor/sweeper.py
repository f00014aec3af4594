"""The supervisor's parent: it waits, and ends what the supervisor leaves behind, however that ended.

The system kills taas along a chain when kernel or supervisor die (rank/lifeline.py). What a cell started besides, in
sessions of its own, hangs on nothing; it stays below this process, which is a child subreaper. So this one imports
nothing, holds nothing, and does nothing before. It is nobody's child: a kernel ends its children when it is shut down.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import signal
import time
from pathlib import Path

from taas import _linux
from taas.wire.short_folder import PREFIX, make_short_folder
from taas.wire.stopped import Process, below, let_go_on, process

NAME = "taas-sweeper"
SOCKET, CONNECTION = "supervisor", "connection"
"""In the folder, where the supervisor listens, and a link to the file by which clients find it; that has a key, and goes
with the folder."""
_PR_SET_CHILD_SUBREAPER = 36
_REST_SECONDS = 2.0
_STOPPED_SECONDS = 6.0
"""So long it may be stopped itself."""
_GRACE_SECONDS = 2.0
"""So long may what the supervisor left end by itself: a Ray driver gives its VMs back, semaphores are removed."""
_SWEEP_SECONDS = 6.0


def leave_a_sweeper() -> Path:
    """Go on as a child of a sweeper; returns the folder that it removes in the end.

    Raises:
        OSError: no such folder can be made.
    """
    if os.fork():
        os._exit(0)
    os.setsid()
    _linux.prctl(_PR_SET_CHILD_SUBREAPER, 1)
    folder = Path(make_short_folder())
    supervisor = os.fork()
    if supervisor:
        _sweep_after(supervisor, folder)
    os.setsid()
    return folder


def hold_folder(folder: Path) -> None:
    """Show that the supervisor of this folder lives, for as long as it does; tmpfiles.d(5) leaves the folder alone, too."""
    fcntl.flock(os.open(folder, os.O_RDONLY | os.O_CLOEXEC), fcntl.LOCK_SH)


def remove_folders_left(beside: Path) -> None:
    """Remove folders of supervisors whose sweepers were lost with them; a supervisor holds its own before it listens there."""
    for socket in beside.parent.glob(f"{PREFIX}*/{SOCKET}"):
        with contextlib.suppress(OSError):  # another user's, or somebody was faster
            fd = os.open(socket.parent, os.O_RDONLY | os.O_CLOEXEC)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                _remove(socket.parent)
            finally:
                os.close(fd)


def _remove(folder: Path) -> None:
    with contextlib.suppress(OSError):
        if folder.lstat().st_uid == os.geteuid():  # another user's link would have this one remove any file
            (folder / CONNECTION).readlink().unlink()
    shutil.rmtree(folder, ignore_errors=True)


def _sweep_after(supervisor: int, folder: Path) -> None:
    try:
        Path("/proc/self/comm").write_text(NAME)
        signal.pthread_sigmask(
            signal.SIG_BLOCK, {signal.SIGCHLD, signal.SIGINT, signal.SIGTERM, signal.SIGHUP}
        )
        _close_descriptors()
        _await_end(supervisor)
        _end_descendants()
    finally:
        _remove(folder)
        os._exit(0)


def _close_descriptors() -> None:
    """Let go of the pipes to the kernel: it reads one of them to the end where a supervisor does not start."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(nothing, fd)
    os.closerange(3, 256)


def _await_end(supervisor: int) -> None:
    while os.waitid(os.P_PID, supervisor, os.WEXITED | os.WNOHANG) is None:
        _linux.kill_in(_STOPPED_SECONDS)
        signal.sigtimedwait({signal.SIGCHLD}, _REST_SECONDS)
        if (now := process(supervisor)) is not None:
            let_go_on([now])
    _linux.kill_in(_GRACE_SECONDS + _SWEEP_SECONDS)


def _end_descendants() -> None:
    """Wait for them, then SIGKILL them, again until there are none: who loses its parent is handed on to this process."""
    patient_until = time.monotonic() + _GRACE_SECONDS
    refused: set[int] = set()
    while True:
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        left = [one for one in below(os.getpid()) if one.pid not in refused]
        if not left:
            return
        if time.monotonic() > patient_until:
            refused.update(one.pid for one in left if not _killed(one))
        signal.sigtimedwait({signal.SIGCHLD}, 0.05)


def _killed(one: Process) -> bool:
    """SIGKILL a process, but not multiprocessing's resource tracker, which is at its last work.

    Returns:
        Whether that was done: what a cell started by sudo is another user's.
    """
    if one.state == "Z":
        return True
    try:
        if b"multiprocessing.resource_tracker" in Path(f"/proc/{one.pid}/cmdline").read_bytes():
            return False
        os.kill(one.pid, signal.SIGKILL)
    except PermissionError:
        return False
    except (FileNotFoundError, ProcessLookupError):
        pass
    return True
