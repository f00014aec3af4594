"""A thousand VMs of which there is nothing but their agents' voices.

The supervisor of benchmarks/scale.py takes them.

The agents connect by TCP with keys of their own, from a few processes. Each reports the ranks of
its VM, sends a line for each, and ends them as the cell says or as it is told.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import zmq

from taas.protocol.agents import AgentHears, AgentUp, EndJob, JobOver, OfJob, StartJob
from taas.protocol.chunks import Chunk, Taken
from taas.protocol.curve import make_dealer, set_heartbeat
from taas.protocol.engines import AgentConfig, Demand, EngineChoice
from taas.protocol.framing import Message, MessageReader, pack
from taas.protocol.ranks import RankEnded, RankOrder, RankStage
from taas.runs.events import EVENTS, pack_record

PER_PROCESS = 250


@dataclass
class Vm:
    """A VM of which there is nothing but its agent's voice."""

    number: int
    pid: int = 0
    waiting: str = ""
    ending: str = ""
    error: str = "RunLost"

    def __post_init__(self) -> None:
        self._gone, self._signal = os.pipe2(os.O_CLOEXEC)

    def fileno(self) -> int:
        return self._gone

    def want(self) -> None:
        """It was started at once."""

    def how_it_ended(self) -> str:
        return "lost"

    def end(self) -> None:
        """There is nothing to end: the agent was told to leave."""


class Engine:
    """Starts the agents, 250 in a process, the last one in a process of its own."""

    remote, here = True, "127.0.0.1"

    def __init__(self, choice: EngineChoice, listen: Callable[[str], str], scratch: Path) -> None:
        self._listen = listen
        self._processes: list[subprocess.Popen[bytes]] = []

    def start(self, demand: Demand, configs: Sequence[AgentConfig]) -> Sequence[Vm]:
        configs = [
            msgspec.structs.replace(config, endpoint=self._listen(self.here)) for config in configs
        ]
        last = len(configs) - 1
        for at in range(0, last, PER_PROCESS):
            self._spawn(configs[at : min(at + PER_PROCESS, last)])
        self._spawn(configs[last:])
        return [Vm(number) for number in range(len(configs))]

    def _spawn(self, configs: Sequence[AgentConfig]) -> None:
        with tempfile.TemporaryFile() as asked:  # the supervisor does not wait for them to read it
            asked.write(b"".join(msgspec.json.encode(config) + b"\n" for config in configs))
            asked.seek(0)
            self._processes.append(subprocess.Popen([sys.executable, __file__], stdin=asked))

    def fileno(self) -> int:
        return -1

    def step(self) -> None:
        """There is never anything to do."""

    def pids(self) -> list[int]:
        return [process.pid for process in self._processes]

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait()


class Agent:
    """What an agent says, with no process behind it."""

    def __init__(self, socket: zmq.Socket[bytes], config: AgentConfig) -> None:
        self._socket, self._ended = socket, False
        self._read = MessageReader(AgentHears)
        set_heartbeat(socket)
        socket.connect(config.endpoint)
        self._send(AgentUp(host="127.0.0.1"))

    def _send(self, message: Message) -> None:
        self._socket.send(pack(message))

    def _say(self, *said: object) -> None:
        for one in said:
            self._send(OfJob(run=self._order.run, job=self._order.job, said=one))

    def hear(self) -> None:
        while self._socket.poll(0):
            match self._read(self._socket.recv()):
                case StartJob() as order:
                    self._order, self._ended = order, False
                    self._begin(order.work)
                case OfJob(said=EndJob()):
                    self._end("interrupted")
                case OfJob(said=Chunk() as chunk):
                    self._say(Taken(len(chunk.data)))

    def _begin(self, work: RankOrder) -> None:
        if work.group_rank == 0:
            self._say(msgspec.structs.replace(work.store, port=1))
        self._ranks = range(work.first_rank, work.first_rank + work.local_world_size)
        for rank in self._ranks:
            text = f"rank {rank} is here\n".encode()
            record = pack_record(0, text, 0, 0)
            self._say(RankStage(stage="begun", rank=rank, at=time.time()))
            self._say(Chunk(of="output", rank=rank, file=EVENTS, data=record))
        if "print" in work.cell.text:
            self._end("done")
        elif "fail" in work.cell.text and work.group_rank == work.cell.spec.vms // 2:
            self._say(
                RankEnded(
                    rank=work.first_rank + 1,
                    outcome="raised",
                    at=time.time(),
                    etype="ValueError",
                    message="a batch is empty",
                )
            )
            self._ranks = [rank for rank in self._ranks if rank != work.first_rank + 1]

    def _end(self, outcome: str) -> None:
        if not self._ended:
            self._ended = True
            self._say(
                *(RankEnded(rank=rank, outcome=outcome, at=time.time()) for rank in self._ranks),
                JobOver(),
            )


def be_agents() -> None:
    """Speak for the agents whose configurations are on standard input, until killed."""
    context = zmq.Context()
    context.set(zmq.MAX_SOCKETS, 4096)
    poller, agents = zmq.Poller(), {}
    for line in sys.stdin.buffer:
        config = msgspec.json.decode(line, type=AgentConfig)
        socket = make_dealer(context, config.server_key, config.public_key, config.secret_key)
        agents[socket] = Agent(socket, config)
        poller.register(socket, zmq.POLLIN)
    while True:
        for socket, _ in poller.poll():
            agents[socket].hear()


if __name__ == "__main__":
    be_agents()
