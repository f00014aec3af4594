"""``python -m taas.engines.slurm_vm``: a node of a Slurm job, as a task of ``srun`` that keeps the node's agent.

It reads where its driver is from standard input, tells it what the node has, is told the agent's configuration, and says
how the agent ended. It ends with its agent, and has it end when the driver is gone.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
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
from taas.engines.driven import VmReport
from taas.engines.local import LocalMachine, visible_gpus
from taas.engines.slurm import address_towards
from taas.engines.versions import versions
from taas.wire import deadlines
from taas.wire.curve import SupervisorLink, make_dealer, make_short_folder, set_heartbeat
from taas.wire.framing import Alive, Leave, Message, MessageReader, pack
from taas.wire.poll_loop import PollLoop

_SLURMS_OWN = ("SLURM_", "SLURMD_", "SRUN_", "PMI_", "PMIX_")
"""Libraries take ranks with such variables for tasks of srun; a rank is none."""


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
        self._read = MessageReader(AgentConfig | Leave | Alive)
        self._agent: LocalMachine | None = None
        self._over, self.why = False, ""
        self._scratch = make_short_folder()

    def serve(self, task: int, name: str) -> None:
        """Keep the agent until it, or the driver, is gone."""
        self._loop.on(self._socket, self._hear)
        self._loop.on(self._link.source, self._look)
        host = address_towards(self._host)
        self._say(VmReport(task, "there", "", host, name, visible_gpus(), versions()))
        while not self._over:
            self._loop.step(self._link.wait())
            self._look()
        if self._agent is not None:
            self._agent.end()
            wait([self._agent.fileno()], deadlines.END_AGENT)
            self._say(VmReport(task, "gone", self._agent.how_it_ended()))
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
            elif isinstance(message, AgentConfig):
                os.environ |= message.environ
                there = {"scratch": self._scratch, "environ": dict(os.environ)}
                self._agent = LocalMachine(msgspec.structs.replace(message, **there))
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
