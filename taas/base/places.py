"""Private folders of taas on this machine, and marks of the processes that own files there.

Since the system reuses process ids, a mark consists of the id and the time of birth.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import socket
import time
from pathlib import Path

import msgspec
from jupyter_core.paths import jupyter_runtime_dir

from taas.base.linux import process
from taas.base.wording import shown_path, size_in_words
from taas.errors import EngineError

_ROOM = 1 << 18  # bytes of a run's record, sockets and first output, or of its semaphores
_FILES_OF_RUN, _FILES_OF_RANK = 16, 8  # maximum numbers of files and folders
# after this time, files of a process on another machine count as abandoned
_FORGOTTEN_SECONDS = 30 * 24 * 3600.0
_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 where the system makes semaphores


def runtime_folder(name: str) -> Path:
    """Return a private folder for connections, run records or locks; make it if it is missing."""
    folder = Path(jupyter_runtime_dir()) / "taas" / name
    folder.parent.parent.mkdir(parents=True, exist_ok=True)
    folder.parent.mkdir(mode=0o700, exist_ok=True)
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder


def write_private(path: Path, data: bytes | mmap.mmap) -> None:
    """Replace a file atomically by one that only this user can read.

    If there is an OSError, which names the file, the old file stays.
    """
    partial = path.with_suffix(".new")
    try:
        partial.touch(0o600)
        partial.write_bytes(data)
        partial.replace(path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise OSError(error.errno, error.strerror, str(path)) from None


def check_room(ranks: int, *, local: bool) -> None:
    """Check that there is space for a run's folder, and for semaphores of ranks on this machine.

    ``ranks`` is the number of ranks to come; each has its own files in the run's folder.

    Raises:
        EngineError: the message names the folder, what it lacks, and what to do.
    """
    root = Path(jupyter_runtime_dir()) / "taas"
    try:
        str(root).encode()
        runtime_folder("runs")
        lack = _lack(root, files=_FILES_OF_RUN + _FILES_OF_RANK * ranks)
    except UnicodeEncodeError:
        lack = "has a name that is not UTF-8"
    except OSError as error:
        lack = f"cannot be made: {error.strerror}"
    if lack:
        raise EngineError(
            f"{shown_path(root)}, where runs keep record and output, {lack}: nothing was started."
            " Make room there, or start Jupyter with JUPYTER_RUNTIME_DIR set to a folder that has"
            " some."
        )
    if local and (lack := _lack(_SHARED_MEMORY)):
        raise EngineError(
            f"{_SHARED_MEMORY}, where ranks and DataLoader workers share memory, {lack}: nothing"
            " was started. Remove what other programs left in it, or mount one with room (docker"
            " run --shm-size=8g)."
        )


def no_room(error: BaseException) -> str:
    """Return what to do about an error of a full disk; empty for other errors."""
    if getattr(error, "errno", None) not in (errno.ENOSPC, errno.EDQUOT):
        return ""
    return (
        "there is no room, or no inode (df -i), for the run's files. Make room there, or start"
        " Jupyter with JUPYTER_RUNTIME_DIR set to a folder that has some"
    )


def _lack(folder: Path, files: int = 1) -> str:
    if not folder.is_dir():
        return "is not there"
    disk = os.statvfs(folder)
    free = (disk.f_bavail if os.geteuid() else disk.f_bfree) * disk.f_frsize
    if disk.f_flag & os.ST_RDONLY or not os.access(folder, os.W_OK):
        return "is read-only"
    if free < _ROOM:
        return f"is full ({size_in_words(free)} left)"
    # some file systems make inodes when they are needed, and report 0 of 0
    if disk.f_files and disk.f_ffree < files:
        return f"is full (room for {disk.f_ffree} more files, and the run makes {files})"
    return ""


class ProcessMark(msgspec.Struct, frozen=True):
    """A process that cannot be confused with another one, even if the clock is set meanwhile.

    Attributes:
        born: the start time, in ticks since the system was booted.
        boot: the identity of this boot of the machine, and of the container.
        host: the machine's name; several machines may share a home directory.
    """

    pid: int
    born: float
    boot: str = ""
    host: str = ""

    @classmethod
    def of(cls, pid: int) -> ProcessMark:
        """Mark a living process; raise OSError if there is none."""
        found = process(pid)
        if found is None:
            raise ProcessLookupError(f"there is no process {pid}")
        return cls(pid, found.born, _boot(), socket.gethostname())

    @property
    def lives(self) -> bool:
        """Return whether the process is alive on this machine."""
        with contextlib.suppress(OSError):
            found = None if self.elsewhere else process(self.pid)
            alive = found is not None and found.born == self.born and found.state not in "ZX"
            return alive and self.boot == _boot()
        return False

    @property
    def elsewhere(self) -> bool:
        """Return whether it is on another machine or container, and so cannot be looked up here."""
        return self.host not in ("", socket.gethostname())

    def has_left(self, file: Path) -> bool:
        """Return whether the process is gone for good, and no longer uses a file that it wrote."""
        if self.elsewhere:
            return time.time() - file.stat().st_mtime > _FORGOTTEN_SECONDS
        return not self.lives


def _boot() -> str:
    """Return an identifier of this boot of the system and of this container.

    A container has its own process ids.
    """
    with contextlib.suppress(OSError):
        started = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{started} {Path('/proc/self/ns/pid').readlink()}"
    return ""
