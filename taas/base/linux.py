"""Linux system calls that Python's library lacks, by ctypes: plumbing only, no policy.

If a call is refused, the ``OSError`` contains the call, its subject and the usual cause of that
refusal. Sources: man pages unshare(2), mount(2), mount_setattr(2), user_namespaces(7),
capabilities(7), prctl(2), timer_create(2), mallopt(3). The numbers below are from the kernel's uapi
headers; calls newer than 2019 have the same number on every architecture.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import re
import shutil
import signal
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

CLONE_NEWNS = 0x00020000
CLONE_NEWUSER = 0x10000000

MS_RDONLY, MS_NODEV, MS_REMOUNT = 0x1, 0x4, 0x20
MS_BIND, MS_REC, MS_PRIVATE = 0x1000, 0x4000, 0x40000

_NR_MOUNT_SETATTR = 442
_AT_FDCWD, _AT_RECURSIVE = -100, 0x8000
_MOUNT_ATTR_RDONLY, _MOUNT_ATTR_NODEV = 0x1, 0x4

_PR_SET_PDEATHSIG, _PR_GET_PDEATHSIG, _PR_CAPBSET_DROP, _PR_SET_NO_NEW_PRIVS = 1, 2, 24, 38
_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL = 47, 4
_CAPABILITY_VERSION_3 = 0x20080522

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_MMAP_MAX = -1, -3, -4

CAP_DAC_READ_SEARCH, CAP_SYS_MODULE, CAP_SYS_RAWIO = 2, 16, 17
CAP_SYS_PTRACE, CAP_SYS_ADMIN = 19, 21
CAP_MKNOD, CAP_BPF, CAP_CHECKPOINT_RESTORE = 27, 39, 40

libc = ctypes.CDLL(None, use_errno=True)

_NO_NAMESPACES = (
    "this user may not make namespaces: a container's seccomp profile, AppArmor"
    " (kernel.apparmor_restrict_unprivileged_userns), kernel.unprivileged_userns_clone=0 or a"
    " chroot refuses them"
)
_NO_MOUNTS = "mounting is refused here: no CAP_SYS_ADMIN (a container), AppArmor or seccomp"
_NO_LANDLOCK = "Landlock is built in but switched off at boot (lsm= lacks 'landlock')"
_ADVICE = {
    ("unshare", errno.EPERM): _NO_NAMESPACES,
    ("mount", errno.EPERM): _NO_MOUNTS,
    ("mount_setattr", errno.ENOSYS): "the kernel is older than 5.12",
    ("landlock", errno.ENOSYS): "the kernel is older than 5.13 or built without Landlock",
    ("landlock", errno.EOPNOTSUPP): _NO_LANDLOCK,
}


def check(result: int, call: str, subject: str) -> int:
    """Return the result of a call; raise an OSError if the call was refused."""
    if result >= 0:
        return result
    code = ctypes.get_errno()
    cause = _ADVICE.get((call.split("_", 1)[0] if call.startswith("landlock") else call, code))
    text = f"{call}({subject}): {os.strerror(code)}" + (f" ({cause})" if cause else "")
    raise OSError(code, text)


# namespaces and mounts ----------------------------------------------------------------------------


def unshare(flags: int) -> None:
    """Move this process into new namespaces; with CLONE_NEWUSER it must have a single thread."""
    check(libc.unshare(flags), "unshare", f"{flags:#x}")


def map_own_ids(uid: int, gid: int) -> None:
    """Map this user's own ids, and no others, into the new user namespace of this process."""
    for name, text in (
        ("setgroups", "deny"),
        ("uid_map", f"{uid} {uid} 1"),
        ("gid_map", f"{gid} {gid} 1"),
    ):
        Path(f"/proc/self/{name}").write_text(text)


_user_namespace: int | None = None
"""A descriptor of the user namespace for all processes that are forked from this one."""


def share_user_namespace() -> None:
    """Make one user namespace for all children that will mount (:func:`own_mounts`), if needed.

    Processes in different user namespaces may not inspect each other by pidfd_getfd(2),
    process_vm_readv(2) or /proc/PID (ptrace(2)). If the namespace cannot be made here, or cannot be
    entered, each child makes its own namespace, and reports the reason if it cannot.
    """
    global _user_namespace
    if has_capability(CAP_SYS_ADMIN):
        return
    uid, gid = os.geteuid(), os.getegid()
    child = os.fork()
    if child == 0:
        with contextlib.suppress(OSError):
            unshare(CLONE_NEWUSER)
            map_own_ids(uid, gid)
            # until the parent has opened the namespace, so that it lasts
            os.kill(os.getpid(), signal.SIGSTOP)
        os._exit(0)
    if os.WIFSTOPPED(os.waitpid(child, os.WUNTRACED)[1]):
        _user_namespace = os.open(f"/proc/{child}/ns/user", os.O_RDONLY | os.O_CLOEXEC)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def _enter_user_namespace() -> None:
    """Enter the user namespace that was made for this process, or else a new one."""
    uid, gid = os.geteuid(), os.getegid()
    if _user_namespace is None or libc.setns(_user_namespace, CLONE_NEWUSER) < 0:
        unshare(CLONE_NEWUSER)
        map_own_ids(uid, gid)


def mount(source: str | None, target: str, flags: int) -> None:
    """Bind or remount a mount, or change its propagation, without a file system type."""
    source_bytes = None if source is None else os.fsencode(source)
    check(
        libc.mount(source_bytes, os.fsencode(target), None, ctypes.c_ulong(flags), None),
        "mount",
        target,
    )


class _MountAttr(ctypes.Structure):
    _fields_ = tuple(
        (name, ctypes.c_uint64) for name in ("attr_set", "attr_clr", "propagation", "userns_fd")
    )


def mount_readonly(target: str) -> None:
    """Make the mount at ``target`` and all mounts below it read-only at once (Linux >= 5.12)."""
    _set_mount_attribute(target, _MOUNT_ATTR_RDONLY, _AT_RECURSIVE)


def close_device(path: str) -> None:
    """Make the device at a path unusable in this mount namespace: opening it fails with EACCES.

    The device node is bind-mounted on itself with the option nodev. A process that may not mount
    cannot undo that.
    """
    mount(path, path, MS_BIND)
    try:
        _set_mount_attribute(path, _MOUNT_ATTR_NODEV)
    except OSError as error:
        if error.errno != errno.ENOSYS:
            raise
        mount(None, path, MS_REMOUNT | MS_BIND | MS_NODEV)


def _set_mount_attribute(target: str, attribute: int, flags: int = 0) -> None:
    attr = _MountAttr(attr_set=attribute)
    path, size = os.fsencode(target), ctypes.sizeof(attr)
    result = libc.syscall(_NR_MOUNT_SETATTR, _AT_FDCWD, path, flags, ctypes.byref(attr), size)
    check(result, "mount_setattr", target)


class Mount(NamedTuple):
    """A mount: its mount point and its options."""

    point: str
    options: frozenset[str]


def mounts() -> list[Mount]:
    """Return the mounts that this process sees, in the kernel's order.

    This reads fields 5 (which has octal escapes) and 6 of proc_pid_mountinfo(5).
    """
    lines = (line.split(b" ") for line in Path("/proc/self/mountinfo").read_bytes().splitlines())
    return [
        Mount(
            os.fsdecode(
                re.sub(rb"\\([0-7]{3})", lambda found: bytes([int(found[1], 8)]), fields[4])
            ),
            frozenset(fields[5].decode().split(",")),
        )
        for fields in lines
    ]


@contextlib.contextmanager
def still_seen(places: Iterable[str]) -> Iterator[None]:
    """Mount these directories again after the body has mounted something over them."""
    with contextlib.ExitStack() as stack:
        # These descriptors are opened before the body, so they lead to the directories that it
        # hides.
        before = {place: os.open(place, os.O_PATH | os.O_CLOEXEC) for place in places}
        for descriptor in before.values():
            stack.callback(os.close, descriptor)
        yield
        for place, descriptor in before.items():
            mount(f"/proc/self/fd/{descriptor}", place, MS_BIND | MS_REC)


_REMOUNT_FLAGS = {
    "nosuid": 0x2,
    "nodev": 0x4,
    "noexec": 0x8,
    "noatime": 0x400,
    "nodiratime": 0x800,
    "relatime": 0x200000,
}


def remount_readonly(entry: Mount) -> None:
    """Make one mount read-only and keep its other flags, as kernels before 5.12 can do."""
    kept = sum(flag for name, flag in _REMOUNT_FLAGS.items() if name in entry.options)
    mount(None, entry.point, MS_REMOUNT | MS_BIND | MS_RDONLY | kept)


# files --------------------------------------------------------------------------------------------


def remove_tree(folder: str | os.PathLike[str]) -> None:
    """Remove a folder of taas and everything in it, as far as that is possible.

    Tidying up must not raise. Before Python 3.13, ``rmtree`` is recursive in the depth of the tree,
    and a cell may have made thousands of levels.
    """
    with contextlib.suppress(RecursionError):
        shutil.rmtree(folder, ignore_errors=True)


def is_being_written(fd: int) -> bool | None:
    """Return whether a process has a file open or mapped for writing; None if unknown.

    The system grants a read lease (fcntl(2)) on a file only while no process has it open for
    writing. The lease is released at once; a process that opens the file in between neither notices
    it nor waits.
    """
    try:
        # The signal for a broken lease is SIGIO by default, which would end this process. SIGURG is
        # ignored by default.
        fcntl.fcntl(fd, fcntl.F_SETSIG, signal.SIGURG)
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_RDLCK)
    except OSError as error:
        return True if error.errno == errno.EAGAIN else None
    fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    return False


# processes ----------------------------------------------------------------------------------------


class Process(NamedTuple):
    """A process, from its line in /proc/PID/stat (proc_pid_stat(5)).

    ``born`` distinguishes it from a later process with the same id.
    """

    state: str
    born: int


def process(pid: int) -> Process | None:
    """Return the process with this id, or None.

    Raises:
        OSError: no file descriptor is left to read its status.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return Process(fields[0], int(fields[19]))


def set_priority(pid: int, niceness: int) -> None:
    """Set the priority of each thread of a process: on Linux each has its own (nice(2)).

    Raises:
        PermissionError: this user may not raise the priority.
    """
    for thread in Path(f"/proc/{pid}/task").glob("*"):
        with contextlib.suppress(ProcessLookupError):  # the thread has ended
            os.setpriority(os.PRIO_PROCESS, int(thread.name), niceness)


# privileges ---------------------------------------------------------------------------------------


class _CapHeader(ctypes.Structure):
    _fields_ = (("version", ctypes.c_uint32), ("pid", ctypes.c_int))


class _CapData(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_uint32) for name in ("effective", "permitted", "inheritable"))


def has_capability(number: int) -> bool:
    """Return whether the capability is in this process's effective set."""
    header, data = _CapHeader(_CAPABILITY_VERSION_3, 0), (_CapData * 2)()
    check(libc.capget(ctypes.byref(header), data), "capget", "self")
    return bool(data[number // 32].effective >> (number % 32) & 1)


def drop_capabilities(numbers: Iterable[int] | None) -> None:
    """Give up some capabilities, or all, for good, in this process and programs it executes."""
    header, data = _CapHeader(_CAPABILITY_VERSION_3, 0), (_CapData * 2)()
    check(libc.capget(ctypes.byref(header), data), "capget", "self")
    prctl(_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL)
    for number in range(64) if numbers is None else numbers:
        # A process without CAP_SETPCAP cannot shrink its bounding set; then only its permitted set
        # matters. The capability may also be unknown to this kernel.
        with contextlib.suppress(OSError):
            prctl(_PR_CAPBSET_DROP, number)
        mask = 0xFFFFFFFF ^ (1 << number % 32)
        word = data[number // 32]
        word.effective &= mask
        word.permitted &= mask
        word.inheritable &= mask
    check(libc.capset(ctypes.byref(header), data), "capset", "self")


def prctl(option: int, argument: int = 0) -> int:
    """Change an attribute of this process that takes one integer argument."""
    result = libc.prctl(option, *map(ctypes.c_ulong, (argument, 0, 0, 0)))
    return check(result, "prctl", f"{option}, {argument}")


def keep_freed_memory(kept: int, map_from: int | None = None) -> None:
    """Make malloc keep this many freed bytes at the top of a heap.

    Fresh pages cost more than the work that is done in them. Blocks of at least ``map_from`` bytes
    (32 MiB at most) are mapped and released individually; None: no block is.
    """
    libc.mallopt(_M_TRIM_THRESHOLD, kept)
    if map_from is None:
        libc.mallopt(_M_MMAP_MAX, 0)
    else:
        libc.mallopt(_M_MMAP_THRESHOLD, map_from)


def set_no_new_privs() -> None:
    """Give up set-user-ID programs such as sudo, as Landlock requires of an ordinary user."""
    prctl(_PR_SET_NO_NEW_PRIVS, 1)


def parent_death_signal() -> int:
    """Return the signal that this process gets when its parent thread ends; 0 if none."""
    number = ctypes.c_int()
    check(libc.prctl(_PR_GET_PDEATHSIG, ctypes.byref(number), 0, 0, 0), "prctl", "PR_GET_PDEATHSIG")
    return number.value


class _Sigevent(ctypes.Structure):
    _fields_ = (
        ("value", ctypes.c_void_p),
        ("signo", ctypes.c_int),
        ("notify", ctypes.c_int),  # SIGEV_SIGNAL is 0
        ("room", ctypes.c_int * 12),
    )


class _Itimerspec(ctypes.Structure):
    _fields_ = (("interval", ctypes.c_long * 2), ("value", ctypes.c_long * 2))


_kill_timer: ctypes.c_void_p | None = None


def kill_in(seconds: float) -> None:
    """Let the system send SIGKILL to this process after ``seconds``, even if it is stopped.

    This uses timer_create(2). Another call postpones the signal. A child that is forked from this
    process does not have the timer.
    """
    global _kill_timer
    if _kill_timer is None:
        event, timer = _Sigevent(None, signal.SIGKILL, 0), ctypes.c_void_p()
        check(
            libc.timer_create(time.CLOCK_MONOTONIC, ctypes.byref(event), ctypes.byref(timer)),
            "timer",
            "",
        )
        _kill_timer = timer
    spec = _Itimerspec(value=(int(seconds), int(seconds % 1 * 1e9)))
    check(libc.timer_settime(_kill_timer, 0, ctypes.byref(spec), None), "timer", f"{seconds} s")


_PYTHONS_OWN = (signal.SIGPIPE, signal.SIGXFSZ)
"""Signals that Python itself ignores."""


def begin_afresh() -> None:
    """Undo inherited state with which this process cannot work.

    This concerns blocked and ignored signals, and a working directory that may be removed. For
    example, if SIGCHLD were blocked, a forkserver would never notice that a child has ended. SIGHUP
    stays ignored, if ``nohup`` has ignored it.
    """
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    for number in signal.valid_signals() - {signal.SIGHUP, *_PYTHONS_OWN}:
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
    os.chdir("/")


def set_parent_death_signal(number: int) -> None:
    """Request a signal that is sent when the parent thread ends."""
    prctl(_PR_SET_PDEATHSIG, number)


@contextlib.contextmanager
def own_mounts(give_up: Sequence[int]) -> Iterator[bool]:
    """Enter a new mount namespace; yield whether this process is root.

    In the body the process may mount; afterwards it may not. It must have a single thread. Root may
    mount, and loses the capabilities ``give_up`` at the end. An ordinary user gets all capabilities
    through a user namespace, and loses them all at the end, even if the body fails.

    Raises:
        OSError: the system refuses this; the message contains the cause. The process may be in a
            separate namespace then.
    """
    signal = parent_death_signal()
    as_root = has_capability(CAP_SYS_ADMIN)
    if as_root:
        unshare(CLONE_NEWNS)
    else:
        _enter_user_namespace()
    try:
        if not as_root:
            unshare(CLONE_NEWNS)
        mount(None, "/", MS_REC | MS_PRIVATE)
        yield as_root
    finally:
        if give_up or not as_root:
            drop_capabilities(give_up if as_root else None)
        if parent_death_signal() != signal:
            set_parent_death_signal(signal)  # the kernel clears it when credentials change
