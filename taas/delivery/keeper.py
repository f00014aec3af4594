"""A data VM's keeper: holds the registered loaders once, forks the workers, says how they end.

The data VM's agent calls ``main`` in a process forked from its forkserver, where torch is imported already.
Workers share the dataset's pages with the keeper, so a VM has one copy of it.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import mmap
import os
import signal
import sys
import time
import traceback
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import zmq

from taas.delivery.board import BOARD_BYTES, Board
from taas.delivery.config import WorkerConfig
from taas.delivery.encoding import install_collate
from taas.delivery.messages import Beat, Decoder, HostHello, Quit, ToWorker, WorkerLost, encode
from taas.delivery.parts import LoaderParts
from taas.delivery.payload import load_payload
from taas.delivery.transport import connect_control, new_context
from taas.delivery.worker import run_worker

__all__ = ["main"]

_BEAT = 0.5
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(slots=True)
class _Child:
    name: str
    number: int
    pid: int
    pidfd: int


class Keeper:
    """Forks ``processes`` workers and replaces those that die."""

    def __init__(self, config: WorkerConfig, loaders: list[tuple[str, LoaderParts]]) -> None:
        self._config, self._loaders = config, loaders
        self._serial = 0
        self._boards = mmap.mmap(-1, BOARD_BYTES * config.processes)
        self._children: dict[int, _Child] = {}
        self._context: Any = None
        self._control: Any = None

    def run(self) -> None:
        """Keep the workers until told to quit."""
        for number in range(self._config.processes):
            self._fork(number)
        self._context = new_context()
        self._control = connect_control(
            self._context, self._config.endpoint, self._config.keys, f"h{self._config.vm}"
        )
        self._control.send(encode(HostHello(os.getpid(), self._config.processes)))
        try:
            self._watch()
        finally:
            self._end_all()
            self._control.close()
            self._context.term()

    def _watch(self) -> None:
        poller = zmq.Poller()
        poller.register(self._control, zmq.POLLIN)
        for pidfd in self._children:
            poller.register(pidfd, zmq.POLLIN)
        decode = Decoder(ToWorker)
        next_beat = 0.0
        while True:
            for source, _ in poller.poll(int(_BEAT * 1000)):
                if source is self._control:
                    if isinstance(decode(self._control.recv()), Quit):
                        return
                else:
                    poller.unregister(source)
                    poller.register(self._replace(source), zmq.POLLIN)
            if time.monotonic() >= next_beat:
                next_beat = time.monotonic() + _BEAT
                self._control.send(encode(Beat([c.name for c in self._children.values() if _stopped(c.pid)])))

    def _fork(self, number: int) -> int:
        name = f"w{self._config.vm}.{self._serial}"
        self._serial += 1
        board = self._board(number)
        board.clear()
        parent = os.getpid()
        with warnings.catch_warnings():
            # The only other thread is zmq's, whose locks a child never takes: it makes a context of its own.
            warnings.simplefilter("ignore", DeprecationWarning)
            pid = os.fork()
        if pid == 0:
            self._become_worker(name, number, parent, board)
        pidfd = os.pidfd_open(pid)
        self._children[pidfd] = _Child(name, number, pid, pidfd)
        return pidfd

    def _board(self, number: int) -> Board:
        return Board(memoryview(self._boards)[number * BOARD_BYTES : (number + 1) * BOARD_BYTES])

    def _become_worker(self, name: str, number: int, parent: int, board: Board) -> None:
        status = 1
        try:
            _libc.prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
            if os.getppid() != parent:
                os._exit(0)
            Path("/proc/self/comm").write_text("taas-worker")
            worker = self._config.vm * self._config.processes + number
            run_worker(self._config, name, worker, self._loaders, board)
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            with contextlib.suppress(OSError, ValueError):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(status)

    def _replace(self, pidfd: int) -> int:
        """A worker ended: say what it was on, fork another."""
        child = self._children.pop(pidfd)
        os.close(pidfd)
        _, status = os.waitpid(child.pid, 0)
        board = self._board(child.number)
        self._control.send(encode(WorkerLost(child.name, board.attempt, _cause(status), board.ahead)))
        return self._fork(child.number)

    def _end_all(self) -> None:
        for child in self._children.values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(child.pid, signal.SIGKILL)
            os.waitpid(child.pid, 0)
            os.close(child.pidfd)
        self._children.clear()


def _cause(status: int) -> str:
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        name = signal.Signals(number).name
        return f"{name}: out of memory?" if number == signal.SIGKILL else name
    return f"exit code {os.WEXITSTATUS(status)}"


def _stopped(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] in ("T", "t")


def _tune_malloc() -> None:
    """Keep freed memory in the process: fresh pages from the system cost more than the copies into them."""
    with contextlib.suppress(AttributeError):
        _libc.mallopt(-4, 0)  # M_MMAP_MAX
        _libc.mallopt(-1, 1 << 30)  # M_TRIM_THRESHOLD


def main(config: WorkerConfig) -> None:
    """Keep one data VM until told to quit."""
    torch.set_num_threads(1)
    _tune_malloc()
    if config.cwd:
        os.chdir(config.cwd)
    sys.path[:0] = [path for path in config.sys_path if path not in sys.path]
    install_collate()
    try:
        loaders = load_payload(config.payload)["loaders"]
    except Exception:
        _report_failure(config, traceback.format_exc())
        return
    gc.collect()
    gc.freeze()  # a collection in a worker would write to, and so copy, every page it shares
    Keeper(config, loaders).run()


def _report_failure(config: WorkerConfig, text: str) -> None:
    context = new_context()
    control = connect_control(context, config.endpoint, config.keys, f"h{config.vm}")
    control.send(encode(HostHello(os.getpid(), 0, text)))
    control.close()
    context.term()
