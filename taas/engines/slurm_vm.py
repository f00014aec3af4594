"""``python -m taas.engines.slurm_vm``: a node of a Slurm job, as a task of ``srun`` that keeps the node's agent.

It reads where its driver is from standard input, tells it what the node has, is told the agent's configuration, and says
how the agent ended. It ends with its agent, and has it end when the driver is gone.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import sys
from collections.abc import Mapping
from functools import partial
from multiprocessing.connection import wait
from typing import Any
from urllib.parse import urlsplit

import msgspec
import zmq

from taas.delivery.config import read_line
from taas.engines import AgentConfig
from taas.engines.local import LocalMachine, visible_gpus
from taas.engines.versions import versions
from taas.wire import deadlines
from taas.wire.curve import SupervisorLink, make_dealer, set_heartbeat
from taas.wire.framing import Alive, Leave, Message, MessageReader, pack
from taas.wire.poll_loop import PollLoop
from taas.wire.short_folder import make_short_folder

_SLURMS_OWN = ("SLURM_", "SLURMD_", "SRUN_", "PMI_", "PMIX_")
"""Libraries take ranks with such variables for tasks of srun; a rank is none."""


class NodeThere(Message, frozen=True):
    """A node of a job is there, and has no agent yet.

    Attributes:
        task: its number in the job.
        node: its name.
        host: the address under which the others reach it.
        gpus: its GPUs that the job has, as CUDA_VISIBLE_DEVICES names them.
        versions: as :func:`taas.engines.versions.versions` says.
    """

    task: int
    node: str
    host: str
    gpus: tuple[str, ...]
    versions: dict[str, str]


class StartAgent(Message, frozen=True):
    """Start the agent: its configuration, without what only its node knows, and the GPUs that it may use."""

    config: AgentConfig
    gpus: tuple[str, ...]


class AgentGone(Message, frozen=True):
    """The agent has ended; ``how`` in words."""

    how: str


def address_towards(host: str) -> str:
    """Return the address that this machine has on its way to another one.

    Raises:
        OSError: there is no way to it.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as way:
        way.connect((host, 9))  # nothing is sent
        return str(way.getsockname()[0])


class _Node:
    """This node, until its agent has ended."""

    def __init__(self, words: Mapping[str, str]) -> None:
        self._context = zmq.Context()
        self._socket = make_dealer(
            self._context, words["server_key"], words["public_key"], words["secret_key"]
        )
        set_heartbeat(self._socket)
        self._link = SupervisorLink(self._socket, words["endpoint"])
        self._host = str(urlsplit(words["endpoint"]).hostname)
        self._socket.connect(words["endpoint"])
        self._loop = PollLoop()
        self._read = MessageReader(StartAgent | Leave | Alive)
        self._agent: LocalMachine | None = None
        self._over = False
        self._scratch = make_short_folder()
        self.why = ""

    def serve(self, task: int, name: str) -> None:
        """Keep the agent until it, or the driver, is gone."""
        self._loop.on(self._socket, self._hear)
        self._loop.on(self._link.source, self._look)
        self._say(
            NodeThere(
                task=task,
                node=name,
                host=address_towards(self._host),
                gpus=visible_gpus(),
                versions=versions(),
            )
        )
        while not self._over:
            self._loop.step(self._link.wait())
            self._look()
        if self._agent is not None:
            self._agent.end()
            wait([self._agent.fileno()], deadlines.END_AGENT)
            self._say(AgentGone(how=self._agent.how_it_ended()))
            self._agent.reap()
        shutil.rmtree(self._scratch, ignore_errors=True)  # of one that was killed
        self._link.close()
        self._socket.close(linger=1000)
        self._context.term()

    def _say(self, message: Message) -> None:
        self._socket.send(pack(message))

    def _hear(self) -> None:
        while self._socket.poll(0):
            message: Any = self._read(self._socket.recv())
            if isinstance(message, Leave):
                self._over = True
            elif isinstance(message, StartAgent):
                self._start(message)

    def _start(self, order: StartAgent) -> None:
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(order.gpus)
        there = {"scratch": self._scratch, "environ": dict(os.environ)}
        self._agent = LocalMachine(msgspec.structs.replace(order.config, **there))
        self._loop.on(self._agent.fileno(), partial(setattr, self, "_over", True))

    def _look(self) -> None:
        if not self._over and (why := self._link.gone()):
            self._over, self.why = True, "" if self._agent else why


def main() -> None:
    """Read where the driver is, and serve it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Slurm sends it to all processes of a job that it ends: this one tells how its agent took it
    signal.signal(signal.SIGTERM, lambda *_: None)
    node = _Node(json.loads(read_line(sys.stdin.fileno())))
    task, name = int(os.environ["SLURM_PROCID"]), os.environ["SLURMD_NODENAME"]
    for variable in list(os.environ):
        if variable.startswith(_SLURMS_OWN) and variable != "SLURM_JOB_ID":  # an epilog may look for that
            del os.environ[variable]
    node.serve(task, name)
    if node.why:
        sys.exit(node.why)


if __name__ == "__main__":
    main()
