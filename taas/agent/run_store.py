"""A run's store, which the agent of its first VM opens: where its ranks find each other."""

from __future__ import annotations

import contextlib
import multiprocessing
import shutil
import signal
import socket
import tempfile
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgspec

from taas.agent.forkserver import fork
from taas.wire import deadlines
from taas.wire.framing import LOOPBACK, StoreAddress


class RunStore:
    """The store, until :meth:`close`.

    On one machine it is a folder that nobody else can enter, and in it a file for each group. Programs want a
    ``MASTER_PORT`` all the same, and a command that the cell starts (``!python train.py``) opens its own store there: the
    port is reserved, by a socket that does not listen. On several machines the store is a TCPStore, on the first VM's own
    address alone: without a socket of ours it would listen on all. It is served by a process of its own, forked from
    the forkserver: the agent has no torch, and rank 0 may leave before the others.

    Args:
        wanted: its host and its secret.
        world_size: ranks of the run.
        scratch: the agent's folder.

    Attributes:
        address: all of it, for the ranks.

    Raises:
        OSError: it cannot be opened.
    """

    def __init__(self, wanted: StoreAddress, world_size: int, scratch: Path) -> None:
        self._reserved = None
        self._server: Any = None
        self._folder = ""
        if wanted.host == LOOPBACK:
            self._folder = tempfile.mkdtemp(prefix="store-", dir=scratch)
            self._reserved = socket.socket()
            self._reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a TCPStore sets it, too
            self._reserved.bind((wanted.host, 0))
            port = self._reserved.getsockname()[1]
        else:
            self._server, port = _start_server(wanted.host, world_size)
        self.address = msgspec.structs.replace(wanted, port=port, folder=self._folder)

    def close(self) -> None:
        """Give it up; all ranks are gone."""
        if self._server is not None:
            self._server.kill()
            self._server.join()
            self._server.close()
            self._server = None
        if self._reserved is not None:
            self._reserved.close()
            shutil.rmtree(self._folder, ignore_errors=True)


def _start_server(host: str, world_size: int) -> tuple[Any, int]:
    """Fork a process that serves a TCPStore; returns it, and its port."""
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
        use_libuv=False,  # with it torch 2.7 takes no socket of ours
    )
    agent.send(port)
    agent.close()
    while store is not None:
        signal.pause()
