"""What ranks have as under torchrun: its environment variables, and a store for their rendezvous.

The agent of a run's first VM opens the store.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import signal
import socket
import tempfile
from collections.abc import Iterable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgspec
import psutil

from taas.agent.forkserver import fork
from taas.base.linux import remove_tree
from taas.engines.gpus import present_gpus
from taas.protocol import deadlines
from taas.protocol.framing import LOOPBACK, StoreAddress
from taas.protocol.ranks import RankOrder, Staged

_INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


def _interface_of(host: str) -> str | None:
    """Return the name of the network interface with an address; None if there is none."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(address.address.partition("%")[0] == host for address in addresses):
            return str(name)
    return None


def _visible(order: RankOrder, own: str) -> Iterable[str]:
    """Return the GPUs that a rank sees; its own comes first, if its program uses the first."""
    own_first = order.cell.own_gpu_first
    return sorted(order.gpus, key=lambda gpu: gpu != own) if own_first else order.gpus


def rank_environ(order: RankOrder, staged: Staged, local_rank: int) -> dict[str, str]:
    """Return torchrun's variables (https://docs.pytorch.org/docs/stable/elastic/run.html)."""
    rank, store = order.first_rank + local_rank, order.store
    environ = {
        "RANK": rank,
        "LOCAL_RANK": local_rank,
        "WORLD_SIZE": order.cell.spec.world_size,
        "LOCAL_WORLD_SIZE": order.local_world_size,
        "GROUP_RANK": order.group_rank,
        "GROUP_WORLD_SIZE": order.cell.spec.vms,
        "ROLE_NAME": "default",
        "ROLE_RANK": rank,
        "ROLE_WORLD_SIZE": order.cell.spec.world_size,
        "MASTER_ADDR": store.host,
        "MASTER_PORT": store.port,
        "TORCHELASTIC_RUN_ID": order.run,
        "TORCHELASTIC_RESTART_COUNT": order.restart_count,
        "TORCHELASTIC_MAX_RESTARTS": order.cell.spec.max_restarts,
        "TORCHELASTIC_USE_AGENT_STORE": not store.folder,
        "TORCHELASTIC_ERROR_FILE": Path(staged.output) / str(rank) / "error.json",
    }
    if order.gpus:
        environ["CUDA_VISIBLE_DEVICES"] = ",".join(_visible(order, order.gpus[local_rank]))
    elif present_gpus():  # a rehearsal, or a CPU instance type, on a machine that has GPUs
        environ["CUDA_VISIBLE_DEVICES"] = ""
    # on loopback, no other machine can reach anything of the run
    interface = "lo" if store.host == LOOPBACK else _interface_of(order.host)
    if interface is not None:
        environ |= {name: interface for name in _INTERFACES if name not in staged.environ}
    if order.local_world_size > 1 and "OMP_NUM_THREADS" not in staged.environ:
        environ["OMP_NUM_THREADS"] = 1
    return {name: str(value) for name, value in environ.items()}


class RunStore:
    """The store of a run, until :meth:`close`; ranks find it at ``address``.

    On one machine the store is a folder that only this user can enter, with a file for each process
    group. Programs need a ``MASTER_PORT`` nevertheless, and a command that the cell starts
    (``!python train.py``) opens its own store at that port; the port is reserved by a socket that
    does not listen. On several machines the store is a TCPStore that listens only on the first VM's
    own address: taas passes it a socket, as otherwise it would listen on all addresses. A dedicated
    process serves the TCPStore. It is forked from the forkserver, since the agent does not import
    torch, and rank 0 may exit before the others.

    Raises:
        OSError: the store cannot be opened.
    """

    def __init__(self, wanted: StoreAddress, world_size: int, scratch: Path) -> None:
        self._reserved = None
        self._server: Any = None
        self._folder = ""
        if wanted.host == LOOPBACK:
            self._folder = tempfile.mkdtemp(prefix="store-", dir=scratch)
            self._reserved = socket.socket()
            # a TCPStore sets it, too
            self._reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._reserved.bind((wanted.host, 0))
            port = self._reserved.getsockname()[1]
        else:
            self._server, port = _start_server(wanted.host, world_size)
        self.address = msgspec.structs.replace(wanted, port=port, folder=self._folder)

    def close(self) -> None:
        """Close the store, after all ranks are gone."""
        if self._server is not None:
            self._server.kill()
            self._server.join()
            self._server.close()
            self._server = None
        if self._reserved is not None:
            self._reserved.close()
            remove_tree(self._folder)


def _start_server(host: str, world_size: int) -> tuple[Any, int]:
    """Fork a process that serves a TCPStore; return the process and the port."""
    ours, its = multiprocessing.Pipe(duplex=False)
    with its:
        process = fork(_serve, its, host, world_size)
    with ours, contextlib.suppress(EOFError):
        if ours.poll(deadlines.STORE_OPENS):
            port: int = ours.recv()
            return process, port
    process.kill()
    process.join()
    process.close()
    raise OSError(f"the store of the run could not be opened on {host}; the agent's log says why")


def _serve(agent: Connection, host: str, world_size: int) -> None:
    from torch.distributed import TCPStore

    from taas.rank.lifeline import tie_to_agent

    tie_to_agent()
    listener = socket.create_server((host, 0), backlog=1024)
    port = listener.getsockname()[1]
    store = TCPStore(
        host,
        port,
        world_size,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(minutes=30),
        master_listen_fd=listener.detach(),
        use_libuv=False,  # with libuv, torch 2.7 does not accept a socket
    )
    agent.send(port)
    agent.close()
    while store is not None:
        signal.pause()
