"""This rank's position in the run, the run's store, and one rendezvous for every program.

Programs bring their own rendezvous address: ``MASTER_PORT = "12355"``, ``tcp://localhost:23456``,
a shared file. Two runs on one machine would meet there, and a port that was free a moment ago may
be taken. In a rank, all of these addresses lead to the run's store instead, which the agent has
opened before the rank received its job (agent/torchrun.py).

torch's table of rendezvous handlers makes that possible. It is used by all calls of
``init_process_group``, under whatever name it was imported, of ``init_device_mesh`` and of RPC. A
call with a store that the program passes in does not use it, and is not changed. Each group has
its own keys, which are counted separately for each size, so that a group may be destroyed and
created again, and groups of fewer ranks don't change the count of the others.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, quote, urlparse

import torch.distributed as dist
from torch.distributed import FileStore, PrefixStore, Store, TCPStore
from torch.distributed.constants import default_pg_timeout
from torch.utils.data.distributed import DistributedSampler

from taas.adopt.waits import Waits, abort_nccl, nccl_backends
from taas.base.wording import text_of
from taas.errors import CannotAdopt, HeaderError
from taas.header.arguments import BACKENDS
from taas.protocol.framing import StoreAddress
from taas.rehearsal.patches import Arguments, rewrite_calls

Meeting = tuple[Store, int, int]
Handler = Callable[..., Iterator[Meeting]]

SCHEMES = ("env", "tcp", "file")
CONNECT_TIMEOUT = timedelta(seconds=60)
REMAKE_SECONDS = 600.0  # for kept ranks of all VMs to receive the variables of their next cell
FOREVER = float("inf")
SHORTEST_PAUSE, LONGEST_PAUSE = 0.001, 0.05
DESTROY_SECONDS = 10.0
_OF_A_GROUP = ("timeout", "device_id")
"""Arguments of ``init_process_group`` that are also passed on to a group that replaces the
first.
"""
PART_SECONDS = 2.0
YOUNG_SECONDS = 10.0  # after a rendezvous, until all ranks have connected


@dataclass
class Membership:
    """This process's position in the run, and its access to the run's store.

    Children that it forks (DataLoader workers) are not members. They inherit every patch, but there
    the patches call the original functions.
    """

    rank: int  # global
    world_size: int  # ranks of the run
    local_rank: int  # on this VM
    local_world_size: int  # ranks on this VM; the same on every VM
    address: StoreAddress  # address of the run's store
    rehearsed: int  # how many GPUs its VM has in a run without any; 0 with GPUs
    notice: Callable[[str], None]  # shows one line to the user; called on rank 0 only
    project: Path  # the notebook's directory tree; only rank 0 writes it
    pid: int = field(default_factory=os.getpid)
    waits: Waits = field(default_factory=Waits)
    _client: TCPStore | None = None
    _files: dict[str, FileStore] = field(default_factory=dict)
    _told: set[str] = field(default_factory=set)
    _numbers: Counter[str] = field(default_factory=Counter)

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for a child that starts afresh, without notices and connections."""
        return {**self.__dict__, "notice": None, "waits": Waits(), "_client": None, "_files": {}}

    @property
    def active(self) -> bool:
        """Return whether this is the rank itself, and not a child that it has forked."""
        return os.getpid() == self.pid

    @property
    def node(self) -> int:
        """Return the number of this VM in the run."""
        return self.rank // self.local_world_size

    @property
    def nodes(self) -> int:
        """Return the number of VMs of the run."""
        return self.world_size // self.local_world_size

    def in_rank(self, native: Callable[..., Any], ours: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that is ``ours`` in the rank itself, and ``native`` in its children.

        It has the native function's name, so that a notebook into which it is imported gets its
        own function back.
        """

        @functools.wraps(native)
        def function(*args: Any, **kwargs: Any) -> Any:
            return (ours if self.active else native)(*args, **kwargs)

        return function

    def tell(self, text: str) -> None:
        """Show ``text`` to the user, once in this run and from rank 0 alone."""
        if self.rank == 0 and text not in self._told:
            self._told.add(text)
            self.notice(text)

    def begin_run(self, address: StoreAddress) -> bool:
        """Join the next run of kept ranks.

        Return whether that run has another store, as after a failure.
        """
        self._told.clear()
        if address == self.address:
            return False
        self.leave_store()
        self.address = address
        self._numbers.clear()
        return True

    def next_prefix(self, what: str) -> str:
        """Return a prefix for the store that counts uses.

        Each rank's n-th use meets the n-th use of the other ranks.
        """
        self._numbers[what] += 1
        return f"{what}/{self._numbers[what]}"

    def store(self, prefix: str) -> Store:
        """Return the run's store, with keys under ``prefix``.

        On one machine each prefix has its own file, so that groups do not wait for each other's
        locks. On several, all share one connection, as torch's own groups do: each new connection
        would query the name service for the other end, which takes seconds if that service is
        slow. There, keys contain the restart count, because the store may outlive a restart.
        """
        if self.address.folder:
            if prefix not in self._files:
                self._files[prefix] = FileStore(str(self._file(prefix)))
                self._files[prefix].set_timeout(CONNECT_TIMEOUT)
            return self._files[prefix]
        if self._client is None:
            self._client = TCPStore(
                self.address.host, self.address.port, is_master=False, timeout=CONNECT_TIMEOUT
            )
        return PrefixStore(
            f"taas/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}/{prefix}", self._client
        )

    def _file(self, prefix: str) -> Path:
        return Path(self.address.folder, quote(prefix, safe=""))

    def leave_store(self) -> list[Path]:
        """Drop the open store, so that it is opened again; return its files."""
        files = [self._file(prefix) for prefix in self._files]
        self._client = None
        self._files.clear()
        return files

    def wait_for(self, prefix: str, key: str, seconds: float = FOREVER) -> bool:
        """Wait until ``key`` is set under ``prefix``; return False if it isn't after ``seconds``.

        This polls: the store's own wait is C++ code that no interrupt of the cell reaches, and that
        blocks the connection.
        """
        store, until, pause = self.store(prefix), time.monotonic() + seconds, SHORTEST_PAUSE
        while not store.check([key]):
            if time.monotonic() >= until:
                return False
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)
        return True


def in_time(seconds: float, close: Callable[[], object]) -> None:
    """Close something in a thread, as that may wait forever; stop waiting after ``seconds``."""
    closer = threading.Thread(target=close, name="taas-closes", daemon=True)
    closer.start()
    closer.join(seconds)


class Rendezvous:
    """Serves every rendezvous of this rank from the run's store."""

    def __init__(self, membership: Membership) -> None:
        self.membership = membership
        self.span = membership.local_world_size
        """How many ranks of each VM take part: all, except inside an ``mp.spawn`` of fewer
        processes.
        """
        self.translated = False
        """Whether the program numbered the last group's ranks on one VM only, in a run of
        several.
        """
        self._last = "", 0
        self._met = 0.0
        self._parted = ""
        self._asked_for: Arguments = {}

    def note(self, arguments: Arguments) -> None:
        """Record the arguments of the default group, so that it can be created again."""
        if self.membership.active and not dist.is_initialized():
            self._asked_for = {name: arguments[name] for name in _OF_A_GROUP if name in arguments}

    def meet(self, url: str) -> Meeting:
        """Return store, rank and world size for one process group.

        Raises:
            CannotAdopt: the program wants more processes than the run has ranks, or two ranks ask
                for the same rank number.
        """
        me = self.membership
        rank, size = self._rank_and_size(*self._ask(url))
        if size > me.world_size or not 0 <= rank < size:
            raise CannotAdopt(
                f"init_process_group was asked for rank {rank} of {size}, but this run has"
                f" {me.world_size} rank(s). Leave rank and world_size out, or start the cell with"
                f" --gpus {max(size, rank + 1)}."
            )
        name = me.next_prefix(f"group/{size}")
        if size == 1 < me.world_size:
            name += f"/of-rank-{me.rank}"
            me.tell(
                f"init_process_group(world_size=1) in a run of {me.world_size} ranks: each rank"
                " trains alone. Leave rank and world_size out to train together."
            )
        store = me.store(name)
        if store.add(f"claimed/{rank}", 1) > 1:
            raise CannotAdopt(
                f"Two ranks of this run called init_process_group as rank {rank} of {size}. Leave"
                " rank and world_size out, or take them from os.environ['RANK'] and"
                " os.environ['WORLD_SIZE']."
            )
        self._last, self._met = (name, size), time.monotonic()
        return store, rank, size

    def leave(self, group: Any) -> None:
        """Let all ranks finish connecting before a group is destroyed."""
        whole = group is None or group is dist.group.WORLD
        if whole and self.membership.active and time.monotonic() - self._met < YOUNG_SECONDS:
            self.part()

    def part(self, *, alone: bool = False) -> None:
        """Unless ``alone``, wait a moment until the other ranks have connected to the last group.

        A rank that leaves right after ``init_process_group`` returned would cut off those that are
        still connecting.
        """
        name, size = self._last
        if name == self._parted or not dist.is_initialized():
            return
        self._parted = name
        if alone:
            return
        # the store is gone, and with it the ranks to wait for
        with contextlib.suppress(dist.DistError):
            store = self.membership.store(name)
            if store.add("parting", 1) == size:
                store.set("parted", "")
            self.membership.wait_for(name, "parted", PART_SECONDS)

    def remake_group(self) -> None:
        """Create the default group again, if the end of the last cell aborted it.

        This happens only if every rank had one.
        """
        me, backend = self.membership, dist.get_backend() if dist.is_initialized() else ""
        self._last, self._parted = ("", 0), ""
        abort_nccl(nccl_backends())
        close_default_group()
        store = me.store("backends")
        store.set(str(me.rank), backend)
        seconds = REMAKE_SECONDS
        for rank in range(me.world_size):
            if not me.wait_for("backends", str(rank), seconds):
                raise RuntimeError(
                    f"rank {rank} did not come within {seconds:.0f} s to make the process group"
                    " anew that the end of the last cell broke off: type %taas release, and run"
                    " the cell again in new ranks"
                )
        backends = {store.get(str(rank)).decode() for rank in range(me.world_size)}
        if backends == {""}:
            return
        if "" in backends:
            me.tell(
                "the process group is gone, for not every rank had one when the last cell ended"
            )
            return
        dist.init_process_group(backend, **self._asked_for)
        me.tell(
            "the end of the last cell broke the process group off, and it was made anew: make"
            " groups of your own, and wrappers such as DDP, again"
        )

    def explain(self, error: BaseException) -> str | None:
        """Explain a store's timeout: list the ranks that have not joined the last group."""
        name, size = self._last
        if not (name and isinstance(error, RuntimeError) and "timeout" in text_of(error).lower()):
            return None
        try:
            store = self.membership.store(name)
            missing = [rank for rank in range(size) if not store.check([f"claimed/{rank}"])]
        except dist.DistError:  # the store is gone, or waits on it were aborted
            return None
        names = ", ".join(map(str, missing))
        return f"rank(s) {names} had not come to this process group of {size}" if missing else None

    def _ask(self, url: str) -> tuple[int, int]:
        """Return rank and world size from the program's call, or otherwise from the environment."""
        me, query = self.membership, parse_qs(urlparse(url).query)
        rank = query.get("rank", [os.environ.get("RANK", str(me.rank))])[0]
        size = query.get("world_size", [os.environ.get("WORLD_SIZE", str(me.world_size))])[0]
        return int(rank), int(size)

    def _rank_and_size(self, rank: int, size: int) -> tuple[int, int]:
        """Return the rank and size in the run for a program that counts one machine only.

        With ``nprocs=torch.cuda.device_count()`` on two VMs, ranks 0 to 7 exist twice. If the
        numbers continue from VM to VM, the program trains on both.
        """
        me = self.membership
        self.translated = me.nodes > 1 and (rank, size) == (me.local_rank, self.span)
        if not self.translated:
            return rank, size
        me.tell(
            f"The program numbers the ranks of one machine (0 to {size - 1}); on {me.nodes} VMs its"
            f" process group, and its DistributedSampler, have {size * me.nodes} ranks."
        )
        return me.node * self.span + me.local_rank, size * me.nodes


def install(membership: Membership) -> Rendezvous:
    """Direct every rendezvous of this process to the run's store."""
    rendezvous = Rendezvous(membership)
    # The package's attribute of this name is the function.
    handlers: dict[str, Handler] = sys.modules["torch.distributed.rendezvous"]._rendezvous_handlers
    for scheme in SCHEMES:
        handlers[scheme] = _handler(rendezvous, handlers[scheme])
    rewrite_calls(dist, "init_process_group", rendezvous.note)
    rewrite_calls(
        dist, "destroy_process_group", lambda arguments: rendezvous.leave(arguments.get("group"))
    )
    if membership.nodes > 1:
        _number_samplers_through(rendezvous)
    return rendezvous


def _handler(rendezvous: Rendezvous, native: Handler) -> Handler:
    def handler(
        url: str, timeout: timedelta = default_pg_timeout, **kwargs: Any
    ) -> Iterator[Meeting]:
        if rendezvous.membership.active:
            yield rendezvous.meet(url)
        else:
            _leave_run(rendezvous.membership, url)
            yield from native(url, timeout=timeout, **kwargs)

    return handler


def _leave_run(membership: Membership, url: str) -> None:
    """Let a child of the rank meet its siblings at the program's own rendezvous address.

    No agent serves a store there.

    Raises:
        CannotAdopt: every rank of the run would start such children, whose groups were not
            intended.
    """
    parts = urlparse(url)
    port = os.environ.get("MASTER_PORT") if parts.scheme == "env" else parts.port
    if parts.scheme == "file" or str(port) == str(membership.address.port):
        return
    if membership.world_size > 1:
        raise CannotAdopt(
            f"init_process_group was called in a process that rank {membership.rank} started itself"
            f" (multiprocessing.Process). Each of the {membership.world_size} ranks starts such"
            " processes, in place of being one. Start them with torch.multiprocessing.spawn"
            " (mp.spawn), which uses the ranks that are there, or call the function itself with"
            " int(os.environ['RANK'])."
        )
    os.environ.pop("TORCHELASTIC_USE_AGENT_STORE", None)


def _number_samplers_through(rendezvous: Rendezvous) -> None:
    """Let samplers use the numbers of a group that continues over the VMs.

    Otherwise both VMs would train on the same half of the data.
    """
    native = DistributedSampler.__init__

    def init(
        self: Any,
        dataset: Any,
        num_replicas: Any = None,
        rank: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        me = rendezvous.membership
        numbered_through = rendezvous.translated and me.active and dist.is_initialized()
        if numbered_through and (num_replicas, rank) == (rendezvous.span, me.local_rank):
            num_replicas, rank = dist.get_world_size(), dist.get_rank()
        native(self, dataset, num_replicas, rank, *args, **kwargs)

    DistributedSampler.__init__ = init  # type: ignore[method-assign]


def close_default_group() -> None:
    """Destroy a process group that the program left open, in bounded time.

    gloo's threads abort a process that exits while a group exists. NCCL may wait in its destructor
    for work that will never end.
    """
    if dist.is_initialized():
        in_time(DESTROY_SECONDS, dist.destroy_process_group)


def choose_backend(backend: str) -> None:
    """Use this backend for all groups (``--backend``), overriding the backend in the cell.

    It is a name, or one name for each device such as ``cpu:gloo,cuda:nccl``. In a rehearsal the
    rewritten call is rehearsed, so that ``nccl`` still becomes ``gloo``.

    Raises:
        HeaderError: this torch was built without it.
    """
    names = [part.rpartition(":")[2] for part in backend.split(",")]
    built = [name for name in BACKENDS if getattr(dist, f"is_{name}_available")()]
    if missing := set(names).difference(built):
        raise HeaderError(
            f"--backend {backend}: this torch has no {missing.pop()}; it was built with"
            f" {', '.join(built)}"
        )

    def choose(arguments: Arguments, *, always: bool) -> None:
        if always or arguments.get("backend") is not None:
            arguments["backend"] = backend
            if "nccl" not in names:
                arguments.pop("device_id", None)
                arguments.pop("pg_options", None)

    rewrite_calls(dist, "init_process_group", partial(choose, always=True))
    rewrite_calls(dist, "new_group", partial(choose, always=False))
