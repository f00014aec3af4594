"""What this machine lets a test do beyond running programs, found by trying it once.

Who needs more is skipped.

The one place that knows: a container without privileges, a chroot, an ordinary user and a machine
that refuses user namespaces differ in nothing but these.
"""

from __future__ import annotations

import functools
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
