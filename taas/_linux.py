"""The Linux calls the write rule needs, by ctypes: plumbing only, no policy.

Each function is one system call (or one /proc file) with Python types. A refusal is an ``OSError``
whose text says which call, on what, and what usually causes that refusal.

Sources: man pages unshare(2), mount(2), mount_setattr(2), user_namespaces(7), capabilities(7),
landlock(7), prctl(2). The numbers below are from the kernel's uapi headers; calls newer than 2019
have the same number on every architecture.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

CLONE_NEWNS = 0x00020000
CLONE_NEWUSER = 0x10000000

MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC = 0x1, 0x2, 0x4, 0x8
MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE = 0x20, 0x1000, 0x4000, 0x40000
MS_NOATIME, MS_NODIRATIME, MS_RELATIME = 0x400, 0x800, 0x200000

_NR_MOUNT_SETATTR = 442
_NR_LANDLOCK_CREATE, _NR_LANDLOCK_ADD, _NR_LANDLOCK_RESTRICT = 444, 445, 446
_AT_FDCWD, _AT_RECURSIVE = -100, 0x8000
_MOUNT_ATTR_RDONLY = 0x1

_PR_SET_PDEATHSIG, _PR_GET_PDEATHSIG, _PR_CAPBSET_DROP, _PR_SET_NO_NEW_PRIVS, _PR_CAP_AMBIENT = (
    1,
    2,
    24,
    38,
    47,
)
_PR_CAP_AMBIENT_CLEAR_ALL = 4
_CAPABILITY_VERSION_3 = 0x20080522

# capabilities(7), by number
CAP_DAC_READ_SEARCH, CAP_SYS_MODULE, CAP_SYS_RAWIO, CAP_SYS_PTRACE, CAP_SYS_ADMIN = 2, 16, 17, 19, 21
CAP_MKNOD, CAP_BPF, CAP_CHECKPOINT_RESTORE = 27, 39, 40

_libc = ctypes.CDLL(None, use_errno=True)

_ADVICE = {
    ("unshare", errno.EPERM): "this user may not make namespaces: a container's seccomp profile, AppArmor "
    "(kernel.apparmor_restrict_unprivileged_userns) or kernel.unprivileged_userns_clone=0 refuses them",
    ("unshare", errno.EINVAL): "the process has more than one thread, or the kernel has no such namespace",
    ("unshare", errno.ENOSPC): "user.max_user_namespaces is used up, or 0",
    ("unshare", errno.ENOSYS): "the kernel has no namespaces",
    (
        "mount",
        errno.EPERM,
    ): "mounting is refused here: a container without CAP_SYS_ADMIN, AppArmor or seccomp",
    ("mount", errno.EACCES): "mounting is refused here by a security module",
    ("mount", errno.EINVAL): "the path is no mount point, or a locked mount lies beneath it",
    ("mount_setattr", errno.ENOSYS): "the kernel is older than 5.12",
    ("mount_setattr", errno.EPERM): "mounts cannot be changed here: seccomp or a security module refuses it",
    ("landlock", errno.ENOSYS): "the kernel is older than 5.13 or built without Landlock",
    ("landlock", errno.EOPNOTSUPP): "Landlock is built in but switched off at boot (lsm= lacks 'landlock')",
    ("landlock", errno.EPERM): "no_new_privs is not set and the process lacks CAP_SYS_ADMIN",
    ("landlock", errno.E2BIG): "sixteen Landlock rulesets are in force already",
    ("write", errno.EPERM): "the kernel refuses this id map: the parent namespace forbids it",
}


def _check(result: int, call: str, subject: str) -> int:
    if result >= 0:
        return result
    code = ctypes.get_errno()
    cause = _ADVICE.get((call.split("_", 1)[0] if call.startswith("landlock") else call, code))
    text = f"{call}({subject}): {os.strerror(code)}" + (f" ({cause})" if cause else "")
    raise OSError(code, text)


# namespaces and mounts -----------------------------------------------------------------------------


def unshare(flags: int) -> None:
    """Move this process into new namespaces; with CLONE_NEWUSER it must have one thread."""
    _check(_libc.unshare(flags), "unshare", f"{flags:#x}")


def map_own_ids(uid: int, gid: int) -> None:
    """In a new user namespace: keep this user's own ids, and no others."""
    for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
        try:
            Path(f"/proc/self/{name}").write_text(text)
        except OSError as error:
            cause = _ADVICE.get(("write", error.errno or 0), "")
            raise OSError(
                error.errno, f"write(/proc/self/{name}): {error.strerror} {cause}".rstrip()
            ) from error


def mount(source: str | None, target: str, flags: int) -> None:
    """Bind, remount or change propagation: the call without a filesystem type."""
    source_bytes = None if source is None else os.fsencode(source)
    _check(_libc.mount(source_bytes, os.fsencode(target), None, ctypes.c_ulong(flags), None), "mount", target)


class _MountAttr(ctypes.Structure):
    _fields_ = (
        ("attr_set", ctypes.c_uint64),
        ("attr_clr", ctypes.c_uint64),
        ("propagation", ctypes.c_uint64),
        ("userns_fd", ctypes.c_uint64),
    )


def mount_readonly(target: str) -> None:
    """Make the mount at ``target`` and every mount beneath it read-only, in one step (Linux >= 5.12)."""
    attr = _MountAttr(attr_set=_MOUNT_ATTR_RDONLY)
    result = _libc.syscall(
        _NR_MOUNT_SETATTR,
        _AT_FDCWD,
        os.fsencode(target),
        _AT_RECURSIVE,
        ctypes.byref(attr),
        ctypes.sizeof(attr),
    )
    _check(result, "mount_setattr", target)


class Mount(NamedTuple):
    """One line of /proc/self/mountinfo."""

    device: str  # "major:minor" of the filesystem
    root: str  # which directory of the filesystem is mounted
    point: str  # where
    options: frozenset[str]


def mounts() -> list[Mount]:
    """The mounts this process sees, in the kernel's order (proc_pid_mountinfo(5))."""
    found = []
    for line in Path("/proc/self/mountinfo").read_bytes().splitlines():
        fields = line.split(b" ")
        root, point = (os.fsdecode(_unescape(field)) for field in fields[3:5])
        found.append(Mount(fields[2].decode(), root, point, frozenset(fields[5].decode().split(","))))
    return found


def _unescape(field: bytes) -> bytes:
    """Undo mountinfo's octal escapes of blank, tab, newline and backslash."""
    if b"\\" not in field:
        return field
    for code in (b"\\040", b"\\011", b"\\012", b"\\134"):
        field = field.replace(code, bytes([int(code[1:], 8)]))
    return field


_REMOUNT_FLAGS = {
    "nosuid": MS_NOSUID,
    "nodev": MS_NODEV,
    "noexec": MS_NOEXEC,
    "noatime": MS_NOATIME,
    "nodiratime": MS_NODIRATIME,
    "relatime": MS_RELATIME,
}


def remount_readonly(entry: Mount) -> None:
    """Make one mount read-only and keep its other flags: what kernels before 5.12 can do."""
    kept = sum(flag for name, flag in _REMOUNT_FLAGS.items() if name in entry.options)
    mount(None, entry.point, MS_REMOUNT | MS_BIND | MS_RDONLY | kept)


# files ---------------------------------------------------------------------------------------------

_RENAME_EXCHANGE = 2


def exchange(directory: int, one: bytes, other: bytes) -> None:
    """Let two names of an open directory change places, in one step (renameat2(2))."""
    result = _libc.renameat2(directory, one, directory, other, _RENAME_EXCHANGE)
    _check(result, "renameat2", f"{os.fsdecode(one)}, {os.fsdecode(other)}")


# privileges ----------------------------------------------------------------------------------------


class _CapHeader(ctypes.Structure):
    _fields_ = (("version", ctypes.c_uint32), ("pid", ctypes.c_int))


class _CapData(ctypes.Structure):
    _fields_ = (
        ("effective", ctypes.c_uint32),
        ("permitted", ctypes.c_uint32),
        ("inheritable", ctypes.c_uint32),
    )


def has_capability(number: int) -> bool:
    """Whether the capability is in this process's effective set."""
    header, data = _CapHeader(_CAPABILITY_VERSION_3, 0), (_CapData * 2)()
    _check(_libc.capget(ctypes.byref(header), data), "capget", "self")
    return bool(data[number // 32].effective >> (number % 32) & 1)


def drop_capabilities(numbers: Iterable[int] | None) -> None:
    """Give up capabilities for good, in this process and whatever it executes.

    Args:
        numbers: which ones; None means all of them.
    """
    last = _last_capability()
    numbers = range(last + 1) if numbers is None else [number for number in numbers if number <= last]
    header, data = _CapHeader(_CAPABILITY_VERSION_3, 0), (_CapData * 2)()
    _check(_libc.capget(ctypes.byref(header), data), "capget", "self")
    prctl(_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL)
    for number in numbers:
        # A process without CAP_SETPCAP cannot shrink its bounding set; its permitted set is what counts then.
        with contextlib.suppress(PermissionError):
            prctl(_PR_CAPBSET_DROP, number)
        mask = 0xFFFFFFFF ^ (1 << number % 32)
        word = data[number // 32]
        word.effective &= mask
        word.permitted &= mask
        word.inheritable &= mask
    _check(_libc.capset(ctypes.byref(header), data), "capset", "self")


def _last_capability() -> int:
    try:
        return int(Path("/proc/sys/kernel/cap_last_cap").read_text())
    except OSError:
        return CAP_CHECKPOINT_RESTORE


def prctl(option: int, argument: int = 0) -> int:
    """Change an attribute of this process that takes one integer."""
    zero = ctypes.c_ulong(0)
    result = _libc.prctl(option, ctypes.c_ulong(argument), zero, zero, zero)
    return _check(result, "prctl", f"{option}, {argument}")


def set_no_new_privs() -> None:
    """Give up set-user-ID programs such as sudo; what Landlock asks of an ordinary user."""
    prctl(_PR_SET_NO_NEW_PRIVS, 1)


def parent_death_signal() -> int:
    """The signal this process gets when its parent thread ends; 0 is none."""
    number = ctypes.c_int()
    _check(_libc.prctl(_PR_GET_PDEATHSIG, ctypes.byref(number), 0, 0, 0), "prctl", "PR_GET_PDEATHSIG")
    return number.value


def set_parent_death_signal(number: int) -> None:
    """Ask for a signal when the parent thread ends."""
    prctl(_PR_SET_PDEATHSIG, number)


# Landlock ------------------------------------------------------------------------------------------

LANDLOCK_WRITE_FILE, LANDLOCK_TRUNCATE = 1 << 1, 1 << 14
_LANDLOCK_REMOVE_AND_MAKE = sum(1 << bit for bit in range(4, 13))  # remove dir/file, make char … sym
_LANDLOCK_REFER = 1 << 13


class _PathBeneath(ctypes.Structure):
    _pack_ = 1
    _layout_ = "ms"
    _fields_ = (("allowed_access", ctypes.c_uint64), ("parent_fd", ctypes.c_int32))


def landlock_abi() -> int:
    """Version of the kernel's Landlock (>= 1).

    Raises:
        OSError: the kernel has none; the text says why.
    """
    return _check(_libc.syscall(_NR_LANDLOCK_CREATE, None, 0, 1), "landlock_create_ruleset", "version")


def landlock_write_rights(abi: int) -> int:
    """Every right to change files or directories that this version knows."""
    rights = LANDLOCK_WRITE_FILE | _LANDLOCK_REMOVE_AND_MAKE
    rights |= _LANDLOCK_REFER if abi >= 2 else 0
    return rights | (LANDLOCK_TRUNCATE if abi >= 3 else 0)


def landlock_ruleset(handled: int) -> int:
    """A descriptor of a new ruleset that denies ``handled`` wherever it is not granted."""
    attr = ctypes.c_uint64(handled)
    number = _libc.syscall(_NR_LANDLOCK_CREATE, ctypes.byref(attr), 8, 0)
    return _check(number, "landlock_create_ruleset", f"{handled:#x}")


def landlock_grant(ruleset: int, path_fd: int, rights: int) -> None:
    """Grant ``rights`` on the file, or beneath the directory, that ``path_fd`` names."""
    rule = _PathBeneath(rights, path_fd)
    _check(
        _libc.syscall(_NR_LANDLOCK_ADD, ruleset, 1, ctypes.byref(rule), 0),
        "landlock_add_rule",
        f"fd {path_fd}",
    )


def landlock_restrict(ruleset: int) -> None:
    """Put the ruleset in force for this thread and all it starts, for good."""
    _check(_libc.syscall(_NR_LANDLOCK_RESTRICT, ruleset, 0), "landlock_restrict_self", "ruleset")
