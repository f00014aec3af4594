"""Another user of the machine, as a process of his: he tries every socket and file of a run.

The doors are told to him, since a user who may not look into others' processes would try those of
all runs here.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import re
import socket
import stat
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import pytest
from storage_ranks import fork, join

NOBODY = 65534
MANY = 1500
"""Connections: more than a process may have open, as most systems are set up."""
GARBAGE = os.urandom(1 << 16)
_LISTENS = 0x10000

only_as_root = pytest.mark.skipif(
    os.geteuid() != 0, reason="only root can be another user for a while"
)


class Bomb:
    """Unpickling it leaves a trace."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (str(self.trace),)


@dataclass
class Doors:
    """What processes listen on, and the private files among their folders."""

    unix: list[str] = field(default_factory=list)
    tcp: list[tuple[str, int]] = field(default_factory=list)


def doors(processes: Iterable[psutil.Process]) -> Doors:
    """Return what these processes listen on.

    A name in the abstract namespace begins with a zero byte.
    """
    listening = {}
    for line in Path("/proc/net/unix").read_text().splitlines()[1:]:
        _, _, _, flags, _, _, inode, *path = line.split()
        if int(flags, 16) & _LISTENS:
            listening[inode] = re.sub("^@", "\0", path[0]) if path else ""
    found = Doors()
    for process in processes:
        for fd in Path(f"/proc/{process.pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                inode = str(fd.readlink()).removeprefix("socket:[").removesuffix("]")
                if inode in listening:
                    found.unix.append(listening[inode])
        for connection in process.net_connections("tcp"):
            if connection.status == psutil.CONN_LISTEN:
                found.tcp.append((connection.laddr.ip, connection.laddr.port))
    found.unix, found.tcp = sorted(set(found.unix)), sorted(set(found.tcp))
    return found


def private(path: str, top: Path) -> bool:
    """Return whether only an owner can enter one of the folders of a path below ``top``."""
    modes = [parent.stat().st_mode for parent in Path(path).parents if top in parent.parents]
    return any(not mode & (stat.S_IRWXG | stat.S_IRWXO) for mode in modes)


def as_other_user(deed: Callable[[], Any]) -> Any:
    """Do something in a process of another user; returns what it returned, as JSON knows it."""

    def other() -> Any:
        become_other_user()
        return deed()

    return join(fork(other))


def become_other_user() -> None:
    """Let this process be another user's, for good."""
    os.setgroups([])
    os.setresgid(NOBODY, NOBODY, NOBODY)
    os.setresuid(NOBODY, NOBODY, NOBODY)


def try_all(found: Doors, trace: Path) -> dict[str, list[str]]:
    """Come in by every door: connect often and stay, send rubbish and pickles, read files.

    Returns:
        What he came into, by way; all lists are empty where nothing of it is open to him.
    """
    bomb = pickle.dumps(Bomb(trace))
    entered: dict[str, list[str]] = {"unix": [], "tcp": [], "stores": [], "files": []}
    held = []
    for family, addresses in ((socket.AF_UNIX, found.unix), (socket.AF_INET, found.tcp)):
        for address in addresses:
            for _ in range(MANY // max(1, len(addresses))):
                client = socket.socket(family)
                client.setblocking(False)
                try:
                    client.connect(address)
                except BlockingIOError:
                    pass
                except OSError:
                    client.close()
                    break
                held.append(client)
                with contextlib.suppress(OSError):
                    client.send(bomb + GARBAGE)
                entered["unix" if family == socket.AF_UNIX else "tcp"].append(str(address))
    for host, port in found.tcp:
        entered["stores"] += _plant(host, port, bomb)
    for folder in {Path(path).parent for path in found.unix if not path.startswith("\0")}:
        with contextlib.suppress(OSError):
            entered["files"] += [str(path) for path in folder.iterdir()]
    return entered


def _plant(host: str, port: int, bomb: bytes) -> list[str]:
    """Put pickles where ranks of an adopted ``mp.spawn`` would look for results."""
    from torch.distributed import TCPStore

    try:
        store = TCPStore(host, port, is_master=False, timeout=timedelta(seconds=3))
        for rank in range(2):
            store.set(f"taas/0/spawn/1/results/{rank}/0", bomb)
            store.set(f"taas/0/spawn/1/results/{rank}", "1")
    except RuntimeError:  # it is no store
        return []
    return [f"{host}:{port}"]


# --------------------------------------------------------- traps in TMPDIR, for who tidies up there


_DEPTH = 3000


def _nest(folder: Path) -> None:
    """Make folders below one another that no path can name, with ``supervisor`` on top."""
    folder.mkdir(mode=0o777)
    os.chdir(folder)
    for name in ("supervisor", *["d"] * (_DEPTH - 1)):
        os.mkdir(name)  # noqa: PTH102  relative to where this process stands
        os.chdir(name)


def _look_like_one(folder: Path) -> None:
    folder.mkdir(mode=0o777)
    (folder / "supervisor").touch()


def _listen_there(folder: Path) -> None:
    socket.socket(socket.AF_UNIX).bind(str(folder))


def _lock_up(folder: Path) -> None:
    _look_like_one(folder)
    folder.chmod(0)


def _lead_away(folder: Path) -> None:
    folder.symlink_to(folder.parent / "of-the-user")


TRAPS: dict[str, Callable[[Path], object]] = {
    "3,000 nested folders": _nest,
    "a FIFO": os.mkfifo,
    "a folder that looks like one": _look_like_one,
    "a folder that nobody may enter": _lock_up,
    "a socket": _listen_there,
    "a link to a folder of the user": _lead_away,
}
"""What another user may put at a path in TMPDIR that looks like a supervisor's folder."""


def swap(folder: Path, until_closed: int) -> None:
    """Swap a folder that looks like a supervisor's for a FIFO and back, until a pipe is closed."""
    _look_like_one(folder)
    fifo, aside = folder.with_name("fifo"), folder.with_name("aside")
    os.mkfifo(fifo)
    os.set_blocking(until_closed, False)
    while True:
        folder.rename(aside)
        fifo.rename(folder)
        folder.rename(fifo)
        aside.rename(folder)
        try:
            if not os.read(until_closed, 1):
                return
        except BlockingIOError:
            continue
