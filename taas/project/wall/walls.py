"""The mechanisms that keep a rank from writing to the project (*walls*), the strongest first.

* A private mount namespace in which the project is mounted read-only. It applies to every call of
  every program that the rank starts (EROFS), and reads are live. The rank cannot undo it:
  mounting, entering another process's namespace through /proc, opening by file handle and creating
  a device need capabilities that the rank has given up, and the existing block devices are closed.
  An ordinary user gets the right to mount from a user namespace, and gives up all its capabilities
  afterwards.
* Landlock, if namespaces are refused.
* None, if the kernel offers neither: the diversion of Python's own calls guards against accidents,
  and the cell's output says so.

Each function sets up one mechanism for this single-threaded process, and all that it will start,
and returns a description. ``verdicts`` tries each mechanism in a separate process (``python -m
taas.project.wall.walls MECHANISM PROJECT``).
"""

# Plain strings: a Path removes "..", which the kernel follows.
# ruff: noqa: PTH208

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path, PurePath

from taas.base import linux
from taas.project.wall.boundary import Boundary, draw, resolve_beneath

NO_WALL = "diversion"
"""The name of the mechanism for ranks without write protection."""
LIMITS = {
    "landlock": (
        (
            "mode, owner, times and extended attributes of project files can be changed by programs"
            " other than Python"
        ),
        "nothing can be made, renamed or removed directly in the project's parent directories",
        "as root: the disk itself can be written, by its block device in /dev",
        (
            "as an ordinary user: sudo and other set-user-ID programs do not work in ranks other"
            " than 0"
        ),
    ),
    NO_WALL: (
        (
            "only what Python's own functions write is held back: C and C++ libraries (h5py,"
            " SQLite, safetensors, torch.jit.save), shells and other programs can write the"
            " project, and so do Python's calls with dir_fd= and those that make links"
        ),
    ),
}

# ---------------------------------------------------------------- the mount namespace

# Root keeps the capabilities that it has in an ordinary container, except these: with any of them
# a process could bypass the read-only mount.
_WAYS_ROUND = (
    linux.CAP_SYS_ADMIN,  # mount, umount, setns
    linux.CAP_SYS_PTRACE,  # /proc/<pid>/root and memory of processes outside
    linux.CAP_DAC_READ_SEARCH,  # open_by_handle_at through another mount
    linux.CAP_SYS_MODULE,
    linux.CAP_SYS_RAWIO,
    linux.CAP_MKNOD,  # the disk itself
    linux.CAP_BPF,
    linux.CAP_CHECKPOINT_RESTORE,
)


def _raise_mount(boundary: Boundary) -> str:
    """Mount the project read-only in a namespace of this process.

    If that is refused, the process may be in a new namespace afterwards, which restricts nothing.
    """
    project = boundary.project
    with linux.own_mounts(_WAYS_ROUND) as as_root:
        with linux.still_seen(boundary.open):
            linux.mount(project, project, linux.MS_BIND | linux.MS_REC)
            if project == "/":
                # Absolute paths begin at this process's root, which is below the new mount; ".." of
                # the root leads to the mount.
                os.chdir("/..")
                os.chroot(".")
            try:
                linux.mount_readonly(project)
            except OSError as error:
                if error.errno != errno.ENOSYS:
                    raise
                for entry in linux.mounts():
                    if resolve_beneath(entry.point, project) is not None:
                        linux.remount_readonly(entry)
        # They are closed in the /dev that the rank sees; if /dev is in the project, it is mounted
        # last.
        for device in _writable_disks():
            linux.close_device(device)
    if not os.statvfs(project).f_flag & os.ST_RDONLY:
        raise OSError(errno.EPERM, f"{project} is still writable after it was mounted read-only")
    return "as root" if as_root else "through a user namespace"


def _writable_disks() -> list[str]:
    """Return the block devices in /dev that this user may write: root, and the group ``disk``.

    A write to the device of the project's disk bypasses mounts and file systems.
    """
    found, folders = [], ["/dev"]
    while folders:
        with contextlib.suppress(OSError), os.scandir(folders.pop()) as entries:
            for entry in entries:
                try:
                    mode = entry.stat(follow_symlinks=False).st_mode
                except OSError:  # it is gone; the entries after it may still exist
                    continue
                if stat.S_ISDIR(mode):
                    folders.append(entry.path)
                elif stat.S_ISBLK(mode) and os.access(entry.path, os.W_OK):
                    found.append(entry.path)
    return found


# ---------------------------------------------------------------- Landlock
#
# Landlock only grants access. To deny one folder, everything else is granted: each entry of each
# of the project's parent directories. Hence its limits: entries that are added directly to a
# parent later cannot be written, and Landlock has no rights for metadata. Source: landlock(7).

_NUMBERS = {"create_ruleset": 444, "add_rule": 445, "restrict_self": 446}
_VERSION, _PATH_BENEATH = 1, 1
_REMOVE_AND_MAKE = sum(1 << bit for bit in range(4, 13))
_WRITE_FILE, _REFER, _TRUNCATE = 1 << 1, 1 << 13, 1 << 14


class _PathBeneath(ctypes.Structure):
    _pack_ = 1
    _layout_ = "ms"
    _fields_ = (("allowed_access", ctypes.c_uint64), ("parent_fd", ctypes.c_int32))


def _call(name: str, *arguments: object) -> int:
    return linux.check(linux.libc.syscall(_NUMBERS[name], *arguments), f"landlock_{name}", "")


def _raise_landlock(boundary: Boundary) -> str:
    """Restrict this process, and all it will start, to writing outside the project.

    Return Landlock's version.
    """
    version = _call("create_ruleset", None, 0, _VERSION)
    rights = _WRITE_FILE | _REMOVE_AND_MAKE
    rights |= (_REFER if version >= 2 else 0) | (_TRUNCATE if version >= 3 else 0)
    ruleset = _call("create_ruleset", ctypes.byref(ctypes.c_uint64(rights)), 8, 0)
    try:
        for path in (*_free_entries(boundary.project), *boundary.open):
            _grant(ruleset, path, rights)
        if not linux.has_capability(linux.CAP_SYS_ADMIN):
            linux.set_no_new_privs()
        _call("restrict_self", ruleset, 0)
    finally:
        os.close(ruleset)
    return f"version {version}" + (
        "" if version >= 3 else ": truncation is not covered before version 3"
    )


def _free_entries(project: str) -> list[str]:
    """Return the entries of the project's parents that do not lead into it."""
    free, way = [], project
    for parent in map(str, PurePath(project).parents):
        with contextlib.suppress(PermissionError):  # entries that cannot be listed stay denied
            free += [e.path for e in os.scandir(parent) if e.path != way and not e.is_symlink()]
        way = parent
    return free


def _grant(ruleset: int, path: str, rights: int) -> None:
    try:
        descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return  # it was removed after it was listed, or this user may not open it
    try:
        if not stat.S_ISDIR(os.fstat(descriptor).st_mode):
            rights &= _WRITE_FILE | _TRUNCATE
        rule = _PathBeneath(rights, descriptor)
        _call("add_rule", ruleset, _PATH_BENEATH, ctypes.byref(rule), 0)
    finally:
        os.close(descriptor)


WALLS: dict[str, Callable[[Boundary], str]] = {
    "mount": _raise_mount,
    "landlock": _raise_landlock,
    NO_WALL: lambda _: "Python's own functions only",
}
"""The functions by mechanism. A mechanism that is refused raises an OSError with the reason."""

# --------------------------------------------------------------------- the mechanism of this
# machine

_SECONDS = 30


def verdicts(mechanisms: Sequence[str] = tuple(WALLS)) -> list[str]:
    """Return lines about the write protection of ranks here: limits, and stronger ones refused."""
    refused: list[str] = []
    for mechanism in mechanisms:
        with tempfile.TemporaryDirectory() as project:
            command = [sys.executable, "-m", "taas.project.wall.walls", mechanism, project]
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=_SECONDS, check=False
            )
        said = (
            done.stdout.strip() or done.stderr.strip() or f"status {done.returncode}"
        ).splitlines()[-1]
        if done.returncode == 0:
            limits = [f"  limit: {limit}" for limit in LIMITS.get(mechanism, ())]
            return [f"write rule: {mechanism} ({said})", *limits, *refused]
        refused.append(f"  {mechanism}: {said}")
    return [f"write rule: nothing of {', '.join(mechanisms)} works here", *refused]


def _main(mechanism: str, project: str) -> int:
    """Set up a mechanism, and try to write in spite of it, in Python and from a shell.

    The last line that it prints is the verdict.
    """
    try:
        how = WALLS[mechanism](draw(project, (), ()))
    except OSError as error:
        print(error.strerror or error)  # noqa: T201 the verdict
        return 1
    shell = subprocess.run(
        ["/bin/sh", "-c", ": >shell"], cwd=project, capture_output=True, check=False
    )
    with contextlib.suppress(OSError):
        Path(project, "python").touch()
    held = mechanism == NO_WALL or (shell.returncode != 0 and not os.listdir(project))
    print(how if held else "it was raised, but a write passed it")  # noqa: T201 the verdict
    return 0 if held else 1


if __name__ == "__main__":
    sys.exit(_main(*sys.argv[1:]))
