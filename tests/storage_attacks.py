"""Every way we know to write a project from a rank that may not.

Here are the table, and the process that runs it.

``python tests/storage_attacks.py MECHANISM MODE UID`` forks one process per attack, each on a
project of its own, raises the wall in it, attacks, and prints one JSON object: attack -> [outcome,
what changed in the project].
"""

# The point is to make each of these calls.
# ruff: noqa: PTH104, PTH108, PTH123, PTH208, PTH211, SIM115

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import mmap
import os
import shutil
import signal
import stat
import struct
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
import torch.utils.data

from taas import rank_storage
from taas.errors import StorageDenied

libc = ctypes.CDLL(None, use_errno=True)
DENIED = {
    errno.EROFS,
    errno.EACCES,
    errno.EPERM,
    errno.EXDEV,
    errno.EBADF,
    errno.EBUSY,
    errno.EINVAL,
}


@dataclass
class Scene:
    """One project, and what the process has open in it."""

    base: Path
    project: Path
    outside: Path
    read_fd: int = -1
    dir_fd: int = -1


@dataclass(frozen=True)
class Attack:
    """One way to write.

    Attributes:
        run: the attempt; returns when it was diverted, raises when it was denied.
        discard: what becomes of it under ``--rank-writes discard``; under ``deny`` every attack is
            denied.
        passes: the mechanisms it gets past, as their documented limits say.
        kernel: needs a wall of the kernel: it attacks the wall itself, or would harm this machine
            without.
    """

    name: str
    run: Callable[[Scene], None]
    discard: str = "diverted"
    passes: frozenset[str] = field(default_factory=frozenset)
    kernel: bool = False


ATTACKS: list[Attack] = []


def attack(discard="diverted", passes=(), kernel=False):
    def register(function):
        ATTACKS.append(Attack(function.__name__, function, discard, frozenset(passes), kernel))
        return function

    return register


def denied_by(code):
    raise OSError(code, os.strerror(code))


def check(result):
    if result < 0:
        denied_by(ctypes.get_errno())
    return result


def shell(scene, command):
    done = subprocess.run(
        ["/bin/sh", "-c", command], cwd=scene.project, capture_output=True, text=True
    )
    if done.returncode:
        raise OSError(errno.EROFS, done.stderr)


# opening ------------------------------------------------------------------------------------------


@attack()
def open_for_writing(s):
    with open(s.project / "file", "w") as f:
        f.write("new")
    assert open(s.project / "file").read() == "new"


@attack()
def link_route(s):
    os.symlink(s.project, s.outside / "way")
    open(s.outside / "way" / "file", "w").close()


@attack()
def proc_fd_route(s):
    open(f"/proc/self/fd/{s.read_fd}", "w").close()


# names --------------------------------------------------------------------------------------------


@attack()
def remove_file(s):
    os.unlink(s.project / "file")
    assert "file" not in os.listdir(s.project)


@attack()
def rename_within(s):
    os.rename(s.project / "file", s.project / "other")
    assert (s.project / "other").read_text() == "content"
    assert not (s.project / "file").exists()


@attack(discard="denied")
def rename_out(s):
    os.rename(s.project / "file", s.outside / "taken")
    assert (s.outside / "taken").read_text() == "content"


@attack(discard="denied", passes={"diversion"})
def soft_link(s):
    os.symlink("file", s.project / "latest")


# content and metadata -----------------------------------------------------------------------------


@attack(discard="denied", passes={"diversion"})
def truncate(s):
    os.truncate(s.project / "file", 3)


@attack(discard="denied", passes={"diversion", "landlock"})
def change_mode_by_descriptor(s):
    os.fchmod(s.read_fd, 0o600)


@attack(discard="denied", passes={"diversion"})
def create_at_dirfd(s):
    os.close(os.open("made", os.O_WRONLY | os.O_CREAT, 0o600, dir_fd=s.dir_fd))


# libraries ----------------------------------------------------------------------------------------


@attack()
def torch_save(s):
    torch.save({"w": torch.ones(3)}, s.project / "model.pt")
    assert torch.load(s.project / "model.pt")["w"].sum() == 3
    assert torch.load(s.project / "model.pt", mmap=True)["w"].sum() == 3


# other processes ----------------------------------------------------------------------------------


@attack(discard="denied", passes={"diversion"})
def shell_redirect(s):
    shell(s, "echo x >file")


class Writer(torch.utils.data.Dataset):
    def __init__(self, folder):
        self.folder = folder

    def __len__(self):
        return 2

    def __getitem__(self, index):
        (self.folder / f"cache{index}").write_text("x")
        return index


@attack()
def dataloader_worker(s):
    loader = torch.utils.data.DataLoader(
        Writer(s.project), num_workers=1, multiprocessing_context="fork", batch_size=None
    )
    assert list(loader) == [0, 1]
    assert (s.project / "cache1").read_text() == "x", "the rank sees what its worker diverted"


# C code -------------------------------------------------------------------------------------------


@attack(discard="denied", passes={"diversion"})
def c_creat(s):
    check(libc.creat(os.fsencode(s.project / "file"), 0o600))


@attack(discard="denied", passes={"diversion"})
def c_rename_exchange(s):
    at = -100
    one, other = os.fsencode(s.project / "file"), os.fsencode(s.project / "directory" / "inner")
    check(libc.renameat2(at, one, at, other, 2))


@attack(discard="denied", passes={"diversion"})
def c_io_uring(s):
    check(uring_open(os.fsencode(s.project / "made"), os.O_WRONLY | os.O_CREAT))


def uring_open(path, flags):
    """openat(2) as an io_uring request (io_uring(7)); returns its result with errno set."""
    params = ctypes.create_string_buffer(120)
    ring = libc.syscall(425, 1, params)
    if ring < 0:
        denied_by(errno.EPERM)  # the kernel offers no io_uring here: nothing to get round
    words = struct.unpack("30I", params)
    sq, cq = words[10:17], words[20:26]
    shared = mmap.mmap(ring, max(sq[6] + words[0] * 4, cq[5] + words[1] * 16), offset=0)
    entries = mmap.mmap(ring, words[0] * 64, offset=0x10000000)
    name = ctypes.create_string_buffer(path)
    entries[:64] = struct.pack(
        "<BBHiQQIIQ", 18, 0, 0, -100, 0, ctypes.addressof(name), 0o600, flags, 0
    ).ljust(64, b"\0")
    shared[sq[6] : sq[6] + 4] = struct.pack("I", 0)
    shared[sq[1] : sq[1] + 4] = struct.pack("I", 1)
    check(libc.syscall(426, ring, 1, 1, 1, None, 0))
    result = struct.unpack_from("<i", shared, cq[5] + 8)[0]
    ctypes.set_errno(max(-result, 0))
    return result


# the wall itself ----------------------------------------------------------------------------------


@attack(discard="denied", kernel=True)
def remount_writable(s):
    check(libc.mount(None, os.fsencode(s.project), None, ctypes.c_ulong(0x20 | 0x1000), None))
    check(libc.creat(os.fsencode(s.project / "file"), 0o600))


@attack(discard="denied", kernel=True)
def new_user_namespace_and_remount(s):
    libc.unshare(0x10000000 | 0x20000)
    libc.mount(None, os.fsencode(s.project), None, ctypes.c_ulong(0x20 | 0x1000), None)
    libc.umount2(os.fsencode(s.project), 2)
    check(libc.creat(os.fsencode(s.project / "file"), 0o600))


@attack(discard="denied", kernel=True)
def enter_parent_namespace(s):
    fd = check(libc.open(f"/proc/{os.getppid()}/ns/mnt".encode(), os.O_RDONLY))
    check(libc.setns(fd, 0))
    check(libc.creat(os.fsencode(s.project / "file"), 0o600))


@attack(discard="denied", kernel=True)
def open_by_handle(s):
    handle = ctypes.create_string_buffer(8 + 128)
    struct.pack_into("I", handle, 0, 128)
    mount_id = ctypes.c_int()
    check(
        libc.name_to_handle_at(
            -100, os.fsencode(s.project / "file"), handle, ctypes.byref(mount_id), 0
        )
    )
    outside = check(libc.open(os.fsencode(s.outside), os.O_RDONLY))
    fd = check(libc.open_by_handle_at(outside, handle, os.O_WRONLY))
    check(libc.write(fd, b"x", 1))


# running it ---------------------------------------------------------------------------------------


def make_scene(uid):
    base = Path(tempfile.mkdtemp(prefix="taas-attack-", dir="/tmp"))  # any user reaches it
    base.chmod(0o755)
    project = base / "project"
    (project / "directory").mkdir(parents=True)
    (project / "empty").mkdir()
    (project / "file").write_text("content")
    (project / "directory" / "inner").write_text("inner")
    (base / "outside").mkdir()
    (base / "scratch").mkdir()
    if uid != os.getuid():
        for path in [base, *base.rglob("*")]:
            os.chown(path, uid, uid, follow_symlinks=False)
    return Scene(base, project, base / "outside")


def snapshot(root):
    """Bytes and metadata of a tree; reading changes none of it."""
    found = {}
    for path in [root, *sorted(root.rglob("*"))]:
        status = path.lstat()
        content = path.read_bytes() if stat.S_ISREG(status.st_mode) else b""
        attributes = {name: os.getxattr(path, name) for name in os.listxattr(path)}
        times = status.st_mtime_ns, status.st_ctime_ns
        found[str(path.relative_to(root))] = content, attributes, times, tuple(status)[:7]
    return found


def attempt(chosen, scene, mechanism, mode, uid):
    """In the forked process: become the user, raise the wall, attack."""
    if uid != os.getuid():
        os.setgroups([])
        os.setgid(uid)
        os.setuid(uid)
        libc.prctl(4, 1, 0, 0, 0)  # dumpable, as any process of an ordinary user
    os.chdir(scene.project)
    guard = rank_storage.guard(
        project=str(scene.project),
        rank=1,
        mode=mode,
        scratch=scene.base / "scratch",
        mechanisms=(mechanism,),
    )
    scene.read_fd = os.open("file", os.O_RDONLY)
    scene.dir_fd = os.open(".", os.O_RDONLY)
    try:
        chosen.run(scene)
    except StorageDenied:
        return "denied"
    except OSError as error:
        if isinstance(error, FileNotFoundError) or (
            error.errno is not None and error.errno not in DENIED
        ):
            return traceback.format_exc()
        return "denied"
    except (RuntimeError, AssertionError) as error:
        return "denied" if guard.explain(error) else traceback.format_exc()
    return "diverted"


def run_one(chosen, mechanism, mode, uid):
    scene = make_scene(uid)
    before = snapshot(scene.project)
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(read)
        os.setsid()
        signal.alarm(30)
        try:
            outcome = attempt(chosen, scene, mechanism, mode, uid)
        except BaseException:
            outcome = traceback.format_exc()
        os.write(write, outcome.encode()[:4000])
        os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        outcome = pipe.read().decode()
    _, status = os.waitpid(pid, 0)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)  # what it left when the alarm ended it
    if not outcome:
        outcome = f"ended with status {status}"
    after = snapshot(scene.project) if scene.project.exists() else {}
    changed = sorted(
        name for name in before.keys() | after.keys() if before.get(name) != after.get(name)
    )
    shutil.rmtree(scene.base)
    return outcome, changed


def main(mechanism, mode, uid):
    torch.set_num_threads(1)
    np.random.seed(0)  # imported lazily
    # The user may not be able to read this Python's files: what these import is there before the
    # fork.
    for warm in (torch_save, dataloader_worker):
        scene = make_scene(os.getuid())
        warm(scene)
        shutil.rmtree(scene.base)
    chosen = [one for one in ATTACKS if not (one.kernel and mechanism == "diversion")]
    print(json.dumps({one.name: run_one(one, mechanism, mode, int(uid)) for one in chosen}))


if __name__ == "__main__":
    main(*sys.argv[1:])
