"""What this machine lets a test do beyond running programs, found by trying it once.

Who needs more is skipped.

The one place that knows: a container without privileges, a chroot, an ordinary user and a machine
that refuses user namespaces differ in nothing but these.
"""

from __future__ import annotations

import contextlib
import functools
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@functools.cache
def no_mounts() -> str:
    """Why nothing can be mounted in a namespace of one's own; empty where it can."""
    return _refused("unshare", "--mount", "mount", "-t", "tmpfs", "none", "/dev/shm")


@functools.cache
def no_user_namespaces() -> str:
    """Why there are no user namespaces; empty where there are."""
    return _refused("unshare", "--user", "--map-root-user", "true")


@functools.cache
def no_other_users() -> str:
    """Why this process cannot become another user; empty where it can."""
    return _refused("setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "true")


@functools.cache
def no_network() -> str:
    """Why there can be no network between namespaces; empty where there can."""
    return (
        _refused("unshare", "--net", "--mount", "--pid", "--fork", "true")
        or _refused("ip", "-V")
        or _refused("nsenter", "-V")
    )


def _refused(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return f"there is no {command[0]}"
    return done.stderr.strip() or f"{command[0]} failed" if done.returncode else ""


def _unless(why_not: str, need: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(bool(why_not), reason=f"{need}: {why_not}")


needs_mounts = _unless(no_mounts(), "mounts file systems in a namespace of its own")


@contextmanager
def small_disk(folder: Path, options: str) -> Iterator[None]:
    """Let a folder be a file system of its own, of a size, for who ``needs_mounts``."""
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "small", str(folder)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


needs_user_namespaces = _unless(no_user_namespaces(), "makes a user namespace")


# ---------------------------------------------------------------- numbers of processes


@functools.cache
def no_pids_controller() -> str:
    """Why the number of processes in a control group cannot be limited; empty where it can."""
    try:
        with _control_group("probe") as group:
            (group / "pids.max").write_text("max")
    except OSError as error:
        return str(error)
    return ""


@contextmanager
def _control_group(name: str) -> Iterator[Path]:
    """Make a control group; in version 1 the controller has a tree of its own."""
    tree = Path("/sys/fs/cgroup")
    if (tree / "pids").is_dir():
        tree /= "pids"
    group = tree / f"taas-test-{name}-{os.getpid()}"
    group.mkdir()
    try:
        yield group
    finally:
        group.rmdir()


needs_pids_controller = _unless(no_pids_controller(), "limits processes by a control group")


@contextmanager
def few_processes(pid: int, more: int) -> Iterator[None]:
    """Let a process have only so many more children and threads, with what descends from them."""
    with _control_group(str(pid)) as group:
        (group / "cgroup.procs").write_text(str(pid))
        there = int((group / "pids.current").read_text())
        (group / "pids.max").write_text(str(there + more))
        try:
            yield
        finally:
            (group / "pids.max").write_text("max")
            for one in (group / "cgroup.procs").read_text().split():
                with contextlib.suppress(ProcessLookupError):
                    (group.parent / "cgroup.procs").write_text(one)
