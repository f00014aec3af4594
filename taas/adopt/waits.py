"""Finds out where a rank waits for other ranks, and aborts such waits.

While the main thread waits in gloo or in a store, no Python signal handler runs, and none of
torch's own aborts ends that wait. But another thread can remove the object of the wait. The wait
then fails at once, and a pending KeyboardInterrupt is raised instead of torch's error. The other
ranks' collectives of the same group fail, too.

* gloo waits on TCP sockets, which fail when they are shut down. They are the sockets that appear
  while torch creates a group. The listening one stays, because gloo ends the process if it fails.
* NCCL has its own abort (below) for finished communicators. A group's first collective creates the
  communicator, together with all ranks. If one of them never comes, the others wait there on TCP
  sockets; this is the most common wait of all.
* A store on one machine is a file that each wait opens again and again. It is replaced by a link
  to itself, which cannot be opened.
* A store on several machines is a TCP connection of this rank.

A group that is created afterwards has another store, and works.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import re
import socket
import stat
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from taas.adopt import own_gpu
from taas.protocol.framing import StoreAddress


@dataclass(frozen=True)
class TcpSocket:
    """A TCP socket of this process."""

    fd: int
    peer_port: int | None  # None for a listening socket


class Waits:
    """The objects on which this rank may wait in C code."""

    def __init__(self) -> None:
        self._there: set[int] = set()
        """Inodes of the sockets that this process had before it became a rank."""
        self._of_groups: set[int] = set()
        """Inodes of the connected sockets that appeared while a group was created."""
        self._before: set[int] | None = None
        """Inodes of the sockets that existed before the group that is being created."""

    def install(self) -> None:
        """Record the sockets of all groups that are created from now on."""
        module: Any = dist.distributed_c10d
        native = module._new_process_group_helper
        self._there = set(_tcp_sockets())

        def make(*args: Any, **kwargs: Any) -> Any:
            outer, before = self._before, set(_tcp_sockets())
            self._before = before if outer is None else outer
            try:
                return native(*args, **kwargs)
            finally:
                self._of_groups |= set(_tcp_sockets()) - before
                self._before = outer

        module._new_process_group_helper = make

    def break_off(self, store: StoreAddress, files: Iterable[Path]) -> None:
        """Make every wait of this rank fail, including those in the store's files.

        Called by a thread that does not wait itself. NCCL comes first: if a communicator's sockets
        fail before it is aborted, NCCL treats that as a network error, and torch's watchdog may
        end the process.
        """
        backends = nccl_backends()
        abort_nccl(backends)
        sockets = _tcp_sockets()
        for inode in self._to_shut(sockets, store):
            _shut(sockets[inode])
        if backends:
            for inode in self._of_nccl(sockets):
                _shut(sockets[inode])
        for path in files:
            loop = path.with_name(f".{os.getpid()}-{path.name}")
            with contextlib.suppress(OSError):
                loop.symlink_to(path.name)
                loop.replace(path)

    def _to_shut(self, sockets: Mapping[int, TcpSocket], store: StoreAddress) -> list[int]:
        """Choose the connected sockets of groups, and of a store on another machine.

        A group that is being created counts, too.
        """
        before = self._before
        chosen = []
        for inode, found in sockets.items():
            of_group = inode in self._of_groups or (before is not None and inode not in before)
            of_store = not store.folder and found.peer_port == store.port
            if found.peer_port is not None and (of_group or of_store):
                chosen.append(inode)
        return chosen

    def _of_nccl(self, sockets: Mapping[int, TcpSocket]) -> list[int]:
        """Choose NCCL's own sockets, by exclusion.

        They belong to C code (not to a socket object of Python), were opened since this process
        became a rank, and are in no epoll set: NCCL polls each in turn, while gloo, event loops,
        zmq and gRPC use epoll sets. Connections of C clients (databases, storage) are chosen as
        well; the next call opens them again.
        """
        elsewhere = _waited_for_by_epoll() | _of_python()
        return [
            inode
            for inode, found in sockets.items()
            if inode not in self._there and found.fd not in elsewhere
        ]


def _tcp_sockets() -> dict[int, TcpSocket]:
    """Return this process's TCP sockets that listen or are connected, by inode."""
    found = {}
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # closed meanwhile, or neither listening nor connected
            status = entry.stat()
            if stat.S_ISSOCK(status.st_mode):
                with socket.socket(fileno=os.dup(int(entry.name))) as ours:
                    if ours.family not in (socket.AF_INET, socket.AF_INET6):
                        continue
                    listens = ours.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
                    port = None if listens else ours.getpeername()[1]
                    found[status.st_ino] = TcpSocket(int(entry.name), port)
    return found


def _waited_for_by_epoll() -> set[int]:
    """Return the descriptors that are in an epoll set of this process (proc(5), ``fdinfo``)."""
    found: set[int] = set()
    for entry in Path("/proc/self/fdinfo").iterdir():
        with contextlib.suppress(OSError):  # closed meanwhile
            found |= {
                int(number)
                for number in re.findall(r"^tfd:\s*(\d+)", entry.read_text(), re.MULTILINE)
            }
    return found


def _of_python() -> set[int]:
    """Return the descriptors of Python's socket objects."""
    # issubclass, because isinstance would call into proxy objects
    ours = [value for value in gc.get_objects() if issubclass(type(value), socket.socket)]
    return {value.fileno() for value in ours}


def _shut(found: TcpSocket) -> None:
    """Make waits on a socket fail; its owner still has to close it."""
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(found.fd)) as ours:
        ours.shutdown(socket.SHUT_RDWR)


# -------------------------------------------------------------- on GPUs, in every torch from 2.6
# on
#
# * ``ProcessGroupNCCL`` is ``nccl`` up to torch 2.14, and ``nccl-legacy`` since then. Its
#   ``abort()`` returns. Its watchdog may still end the process, when it sees the abort of another
#   rank before its own (``TORCH_NCCL_ASYNC_ERROR_HANDLING``).
# * ``ProcessGroupNCCL2`` is ``nccl`` from torch 2.15 on. Its ``abort()`` and ``shutdown()`` while
#   an operation waits, and its watchdog at a time-out, end the process with SIGABRT before any
#   ``finally`` (pytorch's pull requests 191948 and 192105). Ranks therefore get the old one under
#   the name ``nccl``, unless the notebook's environment has ``TORCH_DIST_USE_NCCL2``. A group of
#   the new kind is never aborted: a wait in it lasts until the rank is ended. torch reads the
#   variable when it registers the name, and never again. Therefore the variable is set around the
#   registration, in the forkserver or in the rank.
#
# These facts are from torch's sources and the strings in its library; tests/test_adopt_gpu.py
# needs GPUs.

ABORT_SECONDS = 10.0
_CHOICE_OF_NCCL = "TORCH_DIST_USE_NCCL2"


def register_backends() -> None:
    """Register torch's backends for process groups, so that ``nccl`` can be aborted.

    torch itself does this when a name is first used. The forkserver does it once for all ranks,
    because torch searches all installed packages, which takes 20 ms. If the environment selects an
    NCCL backend, that one is used.
    """
    register = getattr(dist.Backend, "_ensure_backend_registered", None)
    # Before torch 2.13 names need no registration, and "nccl" is the one that can be aborted.
    if register is None:
        return
    chosen_before = os.environ.get(_CHOICE_OF_NCCL)
    os.environ.setdefault(_CHOICE_OF_NCCL, "0")
    try:
        for name in (dist.Backend.GLOO, dist.Backend.NCCL):
            register(name)
    finally:
        if chosen_before is None:
            del os.environ[_CHOICE_OF_NCCL]  # ranks inherit the notebook's environment


def nccl_backends() -> list[Any]:
    """Return the NCCL backends of all of torch's groups in this process."""
    found: list[Any] = []
    for group in [*dist.distributed_c10d._world.pg_names]:
        # the group has no backend for GPUs, or this rank is not in it
        with contextlib.suppress(RuntimeError, AttributeError):
            found.append(group._get_backend(torch.device("cuda")))
    bare = [getattr(backend, "wrapped_pg", backend) for backend in found]
    return [
        *{id(backend): backend for backend in bare if "NCCL" in type(backend).__name__}.values()
    ]


def waits_on_gpus() -> bool:
    """Return whether this rank has groups in which it may wait on its GPU."""
    return bool(nccl_backends())


def waits_at_full_speed(thread: int) -> bool:
    """Return whether a thread that uses the processor may wait for other ranks in NCCL.

    Another thread calls this.
    """
    return waits_on_gpus() and (gpu_is_busy() or is_in_a_collective(thread))


def abort_nccl(found: Iterable[Any]) -> None:
    """Abort these backends, so that all waits in them fail.

    Each abort has a separate thread, because it may wait for the abort of another rank, which may
    have begun with another group. After :data:`ABORT_SECONDS` the threads are abandoned.
    """
    threads = [
        threading.Thread(target=_abort, args=(backend,), name="taas-aborts", daemon=True)
        for backend in found
        if type(backend).__name__ == "ProcessGroupNCCL"
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(ABORT_SECONDS)


def _abort(backend: Any) -> None:
    with own_gpu.current():
        backend.abort()


def gpu_is_busy() -> bool:
    """Return whether a GPU has unfinished work; any thread may call this.

    If it has, a collective may be waiting, and the main thread waits for it in a busy loop. This
    checks the default stream of each device that the program uses, because that stream waits for
    the streams of collectives.
    """
    try:
        with own_gpu.current():
            return any(
                not torch.cuda.default_stream(number).query() for number in own_gpu.with_contexts()
            )
    except RuntimeError:  # the work has failed
        return True


@contextlib.contextmanager
def beside_gpu_work() -> Iterator[None]:
    """Keep copies from GPUs in this thread from waiting for earlier work, which may never end."""
    with contextlib.ExitStack() as stack:
        # outermost, so that at the end no other device stays selected
        stack.enter_context(own_gpu.current())
        for number in own_gpu.with_contexts():
            stack.enter_context(torch.cuda.stream(torch.cuda.Stream(number)))
        stack.enter_context(own_gpu.current())  # entering a stream selects the stream's device
        yield


_COLLECTIVES = (
    "torch/distributed/distributed_c10d.py",
    "torch/distributed/utils.py",
    "torch/distributed/_functional_collectives.py",
    "torch/nn/parallel/distributed.py",
)


def is_in_a_collective(thread: int) -> bool:
    """Return whether a thread runs torch's own code for collectives.

    Called by another thread. The first collective creates NCCL's communicator, and polls its
    sockets meanwhile: such a thread waits for other ranks while it uses the processor.
    """
    frame = sys._current_frames().get(thread)
    while frame is not None and "/torch/" in frame.f_code.co_filename:
        if frame.f_code.co_filename.endswith(_COLLECTIVES):
            return True
        frame = frame.f_back  # a line of torch/_ops.py calls an operator
    return False


# ---------------------------------------------------------------- the pending collective
#
# torch's flight recorder contains it
# (https://docs.pytorch.org/tutorials/unstable/flight_recorder_tutorial.html). It records gloo's
# collectives by default in newer releases, and NCCL's if ``TORCH_FR_BUFFER_SIZE`` or
# ``TORCH_NCCL_TRACE_BUFFER_SIZE`` is not 0. Otherwise the collective is unknown.


def pending_collective() -> str:
    """Return this rank's oldest collective that has begun and not ended, in words.

    Return an empty text if none is known. Any thread may call this.
    """
    recorder: Any = sys.modules.get("torch._C._distributed_c10d")
    dump = getattr(
        recorder, "_dump_nccl_trace_json" if waits_on_gpus() else "_dump_fr_trace_json", None
    )
    if dump is None:
        return ""
    try:
        entries = json.loads(dump(onlyActive=True)).get("entries", ())
        active = (
            entry for entry in entries if not entry["retired"] and entry["state"] != "completed"
        )
        return next((_in_words(entry) for entry in active), "")
    except Exception:  # torch does not document the format of the dump
        return ""


def _in_words(entry: dict[str, Any]) -> str:
    sizes = zip(entry["input_sizes"], entry["input_dtypes"], strict=False)
    of = ", ".join(f"{dtype}{size}" for size, dtype in sizes)
    group = entry["process_group"][-1]
    where = "" if group in ("", "default_pg") else f" of group {group}"
    operation = entry["profiling_name"].rpartition(":")[2]
    return f"{operation}{f' of {of}' if of else ''}, number {entry['collective_seq_id']}{where}"
